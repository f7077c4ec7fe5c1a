"""What leans on the insides of CPython and `multiprocessing`: the lowest layer.

At-fork hooks, the shield against asynchronous exceptions, waiters, event loops, exits of processes,
the fork server.  Used in programs, workers and fork servers alike.  Waiters block; the rest does
not.  Imports nothing of xpool.
"""
