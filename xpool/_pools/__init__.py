"""The pools: `BasePool` with its hooks, the five pools, verbs, executor, journal, reports.

Runs in the program, on the threads of callers.  Verbs and results block.  Imports `xpool._engine`
and lower layers.
"""
