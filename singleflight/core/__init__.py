"""The idea: the pending-block table and what it stands on.

Standard library only; no clock, no thread, no I/O.
"""
