"""The lowest layer: all code that depends on the insides of CPython and `multiprocessing`.

It has at-fork and import hooks, the shield against asynchronous exceptions, waiters, event loops,
the exit of a process, the resource tracker and the fork server's start.  No other package uses
private names of the standard library, and `make cores` runs this package's tests on each Python.
Programs, workers and fork servers use it.  Only waiters block.  It imports nothing of xpool.
"""
