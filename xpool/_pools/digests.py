"""Digests of plain values: the same in each run of a program."""

from __future__ import annotations

import hashlib
import marshal
import sys
from typing import Any

ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None), type(...)})
PLAIN = ATOMS | {list, tuple, dict}


def hashed(*parts: Any) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        # Include the length, so that the same bytes, divided differently, give another digest.
        digest.update(b"%d " % memoryview(part).nbytes)
        digest.update(part)
    return digest.digest()[:16]


def marshalled(obj: Any) -> bytes:
    # Version 0 has no references, so equal values give equal bytes.
    return marshal.dumps(obj, 0)


def is_plain(obj: Any) -> bool:
    """Whether an object consists of lists, tuples, dicts and atoms alone, at most 20 levels deep.

    It checks level by level, since a call for each of a million rows would take seconds.
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
        # If an object occurs twice, `marshal` would write it twice.
        if len(set(map(id, level))) < len(level):
            return False
    return False


def is_array(obj: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return not obj.dtype.hasobject
    return torch is not None and isinstance(obj, torch.Tensor)
