"""Makes buffers of new memory in large pages, and of memory at an address.

The first touch of new memory is the largest cost of a large message, because the kernel clears the
memory page by page.  Pages of 2 MiB, which some systems allow, make this several times faster.
"""

from __future__ import annotations

import mmap
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ctypes

HUGE_PAGES_FROM = 4 * 1024 * 1024
"""Buffers of at least this many bytes get their own mapping, in large pages."""


def new_buffer(size: int) -> bytearray | mmap.mmap:
    """Return ``size`` zero bytes of writable memory.  It is freed with the last view of it."""
    if size < HUGE_PAGES_FROM or sys.platform != "linux":
        return bytearray(size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        pass  # the kernel has no large pages
    return memory


def address_of(mapping: mmap.mmap) -> int:
    import ctypes  # imported here, because programs with small objects never need it

    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


@lru_cache(maxsize=256)  # making a type takes 20 us
def array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    import ctypes

    return ctypes.c_char * nbytes


def buffer_at(start: int, nbytes: int, owner: Any) -> ctypes.Array[ctypes.c_char]:
    """Return a view of ``nbytes`` (> 0) bytes at an address, which keeps ``owner`` alive.

    `pickle.PickleBuffer` gets this view and never a memoryview: CPython before 3.12.7 crashes if
    the garbage collector finds a `PickleBuffer` and its memoryview in a cycle, such as the
    traceback of an error during pickling (CPython's issue 77894).
    """
    made = array_type(nbytes).from_address(start)
    made.owner = owner  # type: ignore[attr-defined]  # `from_address` keeps no reference
    return made


_PART = 128 * 1024


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Whether two contiguous views of bytes, of the same length, are equal.

    This compares 5 GB a second with the memcmp of `bytearray`.  A memoryview compares single items.
    """
    part = bytearray(min(_PART, one.nbytes))
    for at in range(0, one.nbytes, _PART):
        piece = one[at : at + _PART]
        if piece.nbytes < len(part):
            part = bytearray(piece.nbytes)
        part[:] = piece
        if part != other[at : at + _PART]:
            return False
    return True
