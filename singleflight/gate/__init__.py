"""Does single-flight pay here? From a trace and measured costs to a verdict file.

Importing this package imports nothing heavy: the connector reads verdicts inside a server.
"""
