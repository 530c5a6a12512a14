"""The laboratory around the connector: engines that are counted, held and slowed, and calibration.

Nothing of it runs in a server.
"""
