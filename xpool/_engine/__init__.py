"""The program's side of the workers: scheduler, worker processes, answers, restarts, threads.

Runs on the engine's thread and, under its lock, on the threads of callers.  Blocks only in
`Reactor.poll`.  Never runs users' code.  `jobs` is its pure part.  Imports `xpool._worker`'s
protocol and lower layers; never the pools.
"""
