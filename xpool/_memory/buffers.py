"""Memory as buffers: new memory in large pages, and memory at an address.

What a large message costs most is the first touch of new memory: the kernel clears it page by
page.  In pages of 2 MiB, where the system grants them on request, that is several times faster.
"""

from __future__ import annotations

import mmap
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ctypes

__all__ = [
    "HUGE_PAGES_FROM", "address_of", "array_type", "buffer_at", "new_buffer", "same_bytes",
]  # fmt: skip

HUGE_PAGES_FROM = 4 * 1024 * 1024
"""Bytes from which large pages are worth a mapping of their own."""


def new_buffer(size: int) -> bytearray | mmap.mmap:
    """Return ``size`` bytes of writable memory, all zero; gone with the last view of it."""
    if size < HUGE_PAGES_FROM or sys.platform != "linux":
        return bytearray(size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        return memory  # a kernel without large pages: small ones do as well
    return memory


def address_of(mapping: mmap.mmap) -> int:
    """Return where a mapping begins."""
    import ctypes  # only here, and below: programs of small objects never need it

    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


@lru_cache(maxsize=256)  # making a type takes 20 us
def array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the type of objects of so many bytes."""
    import ctypes

    return ctypes.c_char * nbytes


def buffer_at(start: int, nbytes: int, owner: Any) -> ctypes.Array[ctypes.c_char]:
    """Return the ``nbytes`` bytes (> 0) from an address on; ``owner`` keeps them where they are.

    For `pickle.PickleBuffer`, which must never get a memoryview: where the garbage collector
    meets the two in a cycle, as in the traceback of an error that comes while something is
    pickled, CPython before 3.12.7 ends with a segmentation fault (its issue 77894).
    """
    # All that keeps the memory: `from_address` takes no reference.
    made = array_type(nbytes).from_address(start)
    made.owner = owner  # type: ignore[attr-defined]
    return made


_PART = 128 * 1024


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Whether two contiguous views of bytes, of the same length, are equal.

    By `memcmp`, 5 GB a second: a memoryview compares its items one by one, a bytearray does not.
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
