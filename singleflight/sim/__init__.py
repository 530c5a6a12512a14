"""The trace model: what share of cold block loads could single-flight remove, at which load window.

`model` is the specification in plain Python, `kernel` its numba twin.
Importing this package imports nothing heavy.
"""
