"""Transport of bytes between two processes: pipes, frames, packets, the outbox page.

Both sides of the process border use it.  The program's ends never block; the worker's ends do.
Imports `xpool._memory` and lower layers.
"""
