"""The arguments and results of calls: checked options, results, iterators, the progress bar.

This package runs in the program.  `get` and `next` block until a task has ended.  The layers above
(engine, threads and hosts) set the results.  It imports `xpool._python` and `xpool.errors`.
"""
