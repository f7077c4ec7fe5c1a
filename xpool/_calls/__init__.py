"""What a call takes and returns: checked options, results, iterators of results, the progress bar.

Runs in the program.  `get` and `next` block until a task has ended.  The layers above fill these
objects: engine, threads and hosts.  Imports `xpool._python` and `xpool.errors`.
"""
