"""Fresh memory for large messages, in large pages.

What a large message costs most is the first touch of fresh memory: the kernel clears it page by
page.  In pages of 2 MiB, where the system grants them on request, that is several times faster.
"""

from __future__ import annotations

import mmap
import sys

__all__ = ["LARGE", "fresh"]

LARGE = 4 * 1024 * 1024
"""Bytes from which large pages are worth a mapping of their own."""


def fresh(size: int) -> bytearray | mmap.mmap:
    """Return ``size`` bytes of writable memory, all zero; gone with the last view of it."""
    if size < LARGE or sys.platform != "linux":
        return bytearray(size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        return memory  # a kernel without large pages: small ones do as well
    return memory
