"""The trace simulator: what share of cold block loads could single-flight remove, at which load window.

`model` is the specification in plain Python, `kernel` its numba twin; `commands` is the command line.
Importing this package imports nothing heavy.
"""
