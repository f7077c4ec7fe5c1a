"""What leans on the insides of CPython and `multiprocessing`: the lowest layer.

At-fork and import hooks, the shield against asynchronous exceptions, waiters, event loops, exits of
processes, the resource tracker, the fork server.  No other package uses private names of the
standard library; what is here is tried with each Python (`make cores`).  Used in programs, workers
and fork servers alike.  Waiters block; the rest does not.  Imports nothing of xpool.
"""
