"""dill's pickler, for objects that the C pickler cannot pickle.

It gets all options as arguments, so it neither uses nor changes dill's global settings.  Like the C
pickler, it first calls the reducers of xpool.
"""

from __future__ import annotations

import io
from functools import lru_cache
from importlib import import_module
from typing import Any

from xpool._pickling import reducers

_PLAIN = frozenset({int, float, complex, bool, str, bytes, bytearray, type(None)})
_IN_MEMORY = (io.BytesIO, io.StringIO)
_CONTAINERS = frozenset({tuple, list, set, frozenset})


@lru_cache(None)
def pickler_class() -> Any:
    """Return the class of dill's picklers with the reducers of xpool.

    Raises:
        ImportError: dill is not installed.
    """
    dill = import_module("dill")
    capsule = type(import_module("datetime").datetime_CAPI)  # the type has no public name

    class DillPickler(dill.Pickler):  # type: ignore[misc, name-defined]
        def __init__(self, file: Any, recurse: bool, callback: Any) -> None:
            super().__init__(
                file, 5, buffer_callback=callback, byref=False, fmode=0, recurse=recurse
            )
            self.names: set[tuple[str, str]] = set()
            self.spaces: dict[int, Any] = {}

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind in _PLAIN or kind in _CONTAINERS:
                return NotImplemented
            if kind is dict:
                # For the globals of __main__, dill would write a name that only dill can load.
                return reducers.script.pickled_namespace(obj)
            # dill would pickle the address of a capsule, and the path of a file to open it again.
            if kind is capsule or (issubclass(kind, io.IOBase) and kind not in _IN_MEMORY):
                raise TypeError(f"cannot pickle {kind.__name__!r} object")
            answer = reducers.reducer_override(self, obj)
            if answer is not NotImplemented or isinstance(obj, type):
                return answer
            if kind.__module__.partition(".")[0] == "numpy":
                # dill's own reducers would copy arrays into the pickle.
                return obj.__reduce_ex__(5)
            return NotImplemented

    return DillPickler
