"""Pools whose workers are on many hosts: the driver's engine, the agents on the hosts.

The driver's half runs in the program.  Each agent runs in an actor on its host; `xpool.ray` places
the actors.
Imports `xpool._pools` and lower layers.
"""
