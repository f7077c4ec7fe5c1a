"""Transport of bytes between two processes: pipes, frames, packets, the outbox page.

Programs and workers use this package.  The program's ends never block, but the worker's ends do.
It imports `xpool._memory` and lower layers.
"""
