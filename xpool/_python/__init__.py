"""The lowest layer: what depends on the insides of CPython and `multiprocessing`.

At-fork and import hooks, the shield against asynchronous exceptions, waiters, event loops, the exit
of a process, the resource tracker, the fork server.  No other package uses private names of the
standard library, and `make cores` runs the tests of this one on each Python.  Programs, workers and
fork servers use it.  Waiters block; nothing else does.  Imports nothing of xpool.
"""
