"""Shared memory: the arena, its blocks and their attachments, buffers for large values.

Used on both sides of the process border.  Never blocks: no lock is shared between processes.
Imports `xpool._python`.
"""
