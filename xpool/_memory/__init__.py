"""Shared memory: the arena, its blocks and their attachments, buffers for large values.

Programs and workers use it.  It never blocks: processes share no lock.  It imports `xpool._python`.
"""
