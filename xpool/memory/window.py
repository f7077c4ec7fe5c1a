"""Memory at an address, as an object that offers it as a buffer."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

__all__ = ["window", "window_type"]


@lru_cache(maxsize=256)  # making a type takes 20 us
def window_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the type of objects of so many bytes."""
    return ctypes.c_char * nbytes


def window(start: int, nbytes: int, owner: Any) -> ctypes.Array[ctypes.c_char]:
    """Return the ``nbytes`` bytes (> 0) from an address on; ``owner`` keeps them where they are.

    For `pickle.PickleBuffer`, which must never get a memoryview: where the garbage collector
    meets the two in a cycle, as in the traceback of an error that comes while something is
    pickled, CPython before 3.12.7 ends with a segmentation fault (its issue 77894).
    """
    made = window_type(nbytes).from_address(start)
    made.owner = owner  # type: ignore[attr-defined]
    return made
