"""Digests of plain values: the same in each run of a program."""

from __future__ import annotations

import hashlib
import marshal
import sys
from typing import Any

__all__ = ["ATOMS", "PLAIN", "hashed", "is_array", "is_plain", "marshalled"]

ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None), type(...)})
PLAIN = ATOMS | {list, tuple, dict}


def hashed(*parts: Any) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        # With their lengths: the parts of two objects may be the same in a row.
        digest.update(b"%d " % memoryview(part).nbytes)
        digest.update(part)
    return digest.digest()[:16]


def marshalled(obj: Any) -> bytes:
    # Version 0 has no references, so equal values are equal bytes.
    return marshal.dumps(obj, 0)


def is_plain(obj: Any) -> bool:
    """Whether an object is made of lists, tuples, dicts and atoms alone, to a moderate depth.

    Level by level, since a table of a million rows takes seconds by a call for each.
    """
    level: list[Any] = [obj]
    for _ in range(20):
        inside: list[Any] = []
        for one in level:
            inside += one
            if type(one) is dict:
                inside += one.values()
        kinds = set(map(type, inside))
        if not kinds <= PLAIN:
            return False
        if kinds <= ATOMS:
            return True
        level = [one for one in inside if type(one) not in ATOMS]
        # What is in many places would be written in each of them.
        if len(set(map(id, level))) < len(level):
            return False
    return False


def is_array(obj: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return not obj.dtype.hasobject
    return torch is not None and isinstance(obj, torch.Tensor)
