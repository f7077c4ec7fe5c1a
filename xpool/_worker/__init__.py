"""The code of a worker process and of the fork server.

A worker's loop blocks on its pipe and runs users' code.  `entry` imports little, since a worker
binds its device before it imports large packages.  This package imports `xpool.pickle`,
`xpool._wire` and lower layers, never the engine or the pools.
"""
