"""Digests of plain values: the same in each run of a program."""

from __future__ import annotations

import hashlib
import marshal
import sys
from typing import Any

from xpool._pickling.by_value.names import ATOMS

PLAIN = ATOMS | {list, tuple, dict}

_OF_NUMPY = frozenset(
    {"_mmap", "filename", "offset", "mode"}  # of `numpy.memmap`
    | {"_mask", "_sharedmask", "_hardmask", "_fill_value", "_isfield", "_baseclass", "_optinfo"}
    | {"_basedict"}
)
"""Attributes of numpy's subclasses: their reducers give those that are values."""


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


def bare(obj: Any) -> tuple[Any, ...] | None:
    """Return the dtype, shape, device and bytes of a plain array or tensor; None: it is none.

    Its pickle would not do: its form depends on what the process has pickled before.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    content: Any = b""
    if numpy is not None and type(obj) is numpy.ndarray:
        if obj.dtype.hasobject:
            return None
        if obj.nbytes:
            content = numpy.ascontiguousarray(obj).reshape(-1).view(numpy.uint8)
        dtype = obj.dtype
        # The string of other dtypes, such as those with fields, says too little.
        if dtype.kind in "biufcmMSU" and dtype.type.__module__ == "numpy" and not dtype.metadata:
            dtype = dtype.str
        return dtype, obj.shape, "", content
    if torch is None or type(obj) is not torch.Tensor or obj.layout is not torch.strided:
        return None
    if obj.__dict__ or obj.requires_grad or obj.is_quantized or obj.is_nested or obj.is_meta:
        return None
    if any(getattr(obj, "names", ())):
        return None
    if obj.numel():
        plain = obj.detach().cpu().resolve_conj().resolve_neg()
        content = plain.reshape(-1).contiguous().view(torch.uint8).numpy()
    return str(obj.dtype), tuple(obj.shape), str(obj.device), content


def attributes_of_array(array: Any) -> dict[str, Any]:
    """Return the attributes that a program has given to an array of a subclass."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(array, numpy.ndarray):
        return {}
    found = getattr(array, "__dict__", {})
    return {name: value for name, value in found.items() if name not in _OF_NUMPY}
