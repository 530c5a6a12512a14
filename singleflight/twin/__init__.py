"""A twin of the load path: what each request's time to first token would be in stock, attach and park mode.

`model` is the specification in plain Python, `kernel` its numba twin.
Importing this package imports nothing heavy.
"""
