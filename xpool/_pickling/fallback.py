"""dill's pickler, for what the C pickler cannot do.

It is told everything that it needs when it is made, so dill's global settings are neither
used nor changed.  The same reducers as in the C pickler come first.
"""

from __future__ import annotations

import copyreg
import io
from functools import lru_cache
from importlib import import_module
from pickle import PicklingError
from typing import Any

from xpool._pickling import reducers

__all__ = ["make_pickler"]

_PLAIN = frozenset({int, float, complex, bool, str, bytes, bytearray, type(None)})
_IN_MEMORY = (io.BytesIO, io.StringIO)
_CONTAINERS = frozenset({tuple, list, set, frozenset})
_MAIN_NAMES = ("__main__", "__mp_main__")


def make_pickler(file: Any, recurse: bool, callback: Any) -> Any:
    """A pickler of dill's with our reducers.

    Raises:
        ImportError: dill is not installed.
    """
    return _pickler_class()(file, recurse, callback)


@lru_cache(None)
def _pickler_class() -> Any:
    dill = import_module("dill")
    # The type of capsules, which has no public name.
    capsule = type(import_module("datetime").datetime_CAPI)

    class DillPickler(dill.Pickler):  # type: ignore[misc, name-defined]
        recurse = False
        blob = False
        follow = True
        tensors: Any = None

        def __init__(self, file: Any, recurse: bool, callback: Any) -> None:
            super().__init__(
                file, 5, buffer_callback=callback, byref=False, fmode=0, recurse=recurse
            )
            self.recurse = recurse
            self.names: set[str] = set()
            self.spaces: dict[int, Any] = {}

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind in _PLAIN or kind in _CONTAINERS:
                return NotImplemented
            if kind is dict:
                # dill writes a name for it that only its own unpickler knows.
                return reducers.script.pickled_namespace(obj)
            # dill would write a memory address, or open the file again over there.
            if kind is capsule or (issubclass(kind, io.IOBase) and kind not in _IN_MEMORY):
                raise TypeError(f"cannot pickle {kind.__name__!r} object")
            answer = reducers.reducer_override(self, obj)
            if answer is not NotImplemented or isinstance(obj, type):
                return answer
            if kind.__module__.partition(".")[0] == "numpy":
                # dill has ways of its own for these, which know nothing of buffers.
                reduce = copyreg.dispatch_table.get(kind)
                return obj.__reduce_ex__(5) if reduce is None else reduce(obj)
            return NotImplemented

        def save_global(self, obj: Any, name: str | None = None) -> None:
            module = getattr(obj, "__module__", None)
            if module in _MAIN_NAMES and not reducers.script.importable():
                raise PicklingError(
                    f"{obj!r} is pickled by its name in __main__, which the receiver does not have"
                )
            super().save_global(obj, name)

    return DillPickler
