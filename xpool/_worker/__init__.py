"""What runs in a worker process and in the fork server.

The loop of a worker blocks on its pipe and runs users' code.  `entry` imports little, since a
worker binds its device before anything heavy is imported.  Imports `xpool.pickle`, `xpool._wire`
and lower layers; never the engine or the pools.
"""
