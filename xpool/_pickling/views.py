"""Pickles a `memoryview` as a buffer of its elements."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any

from xpool._memory.buffers import array_type
from xpool._pickling.policy import INLINE_BELOW
from xpool._pickling.reducers import Context, builder, register


@register(memoryview)
def _reduce_memoryview(pickler: Context, view: memoryview) -> Any:
    if len(view.format.lstrip("@")) > 1 or not set(view.format) <= _CASTABLE:
        raise TypeError(
            f"cannot pickle a memoryview of format {view.format!r}; send the object that it "
            "shows, or view.tobytes()"
        )
    data: Any
    # A PickleBuffer must not get the memoryview itself (see `buffer_at`), and `from_buffer` of
    # ctypes accepts only writable memory.
    if view.nbytes < INLINE_BELOW or view.readonly or not view.c_contiguous:
        data = bytearray(view.tobytes())
    else:
        data = PickleBuffer(array_type(view.nbytes).from_buffer(view))
    return _memoryview, (data, view.format, view.shape, view.readonly)


@builder
def _memoryview(data: Any, kind: Any, shape: Any, readonly: bool) -> Any:
    flat = memoryview(data).cast("B")
    # `cast` refuses axes of length 0.
    view = flat.cast(kind, shape) if 0 not in shape else flat.cast(kind)
    return view.toreadonly() if readonly else view


_CASTABLE = frozenset("@cbB?hHiIlLqQnNefdP")  # characters of formats for memoryview.cast
