"""How bytes pass between two processes: pipes, frames, packets, the outbox page.

Used on both sides of the process border.  The program's ends never block, the worker's always do.
Imports `xpool._memory` and lower layers.
"""
