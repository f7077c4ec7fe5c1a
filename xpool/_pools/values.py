"""Digests of values: the same in each run of the program.

They depend on values, but not on addresses, or the order of sets.
"""

from __future__ import annotations

import itertools
import threading
import typing
import weakref
from collections.abc import Iterable, Iterator
from pickle import PickleBuffer
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import xpool.pickle  # noqa: F401  # registers the reducers
from xpool._pickling.by_value.broadcast import Broadcast
from xpool._pickling.by_value.by_token import KINDS
from xpool._pickling.by_value.names import ATOMS
from xpool._pickling.policy import Layout
from xpool._pickling.reducers import Blob, reducer_override
from xpool._pools.digests import (
    PLAIN,
    attributes_of_array,
    bare,
    hashed,
    is_plain,
    marshalled,
)
from xpool._pools.program import label_of, said, wrapped_by
from xpool._python.hidden import module_of
from xpool._python.interrupt import by_handler


class Unknown(Exception):
    """An object has no digest.

    Attributes:
        part: the part that it belongs to.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.part = ""


class _Context:
    """The attributes of a pickler that reducers use."""

    recurse = False
    follow = False

    def __init__(self) -> None:
        self.blob = Blob()  # the state of a lock does not count
        self.group = None
        self.home = False
        self.names: set[tuple[str, str]] = set()
        self.spaces: dict[int, Any] = {}
        self.tensors: Any = None
        self.layout = Layout(out_of_band=False)
        self.shared: dict[int, Any] = {}


class Values:
    """Digests of objects by what they consist of.

    A subclass says how functions, classes and modules count.
    """

    def __init__(self) -> None:
        self._memo: dict[int, bytes] = {}
        self._alive: list[Any] = []  # keeps the objects alive whose `id` is a key of `_memo`
        self._above: dict[int, int] = {}

    def _forget(self) -> None:
        # Values may change, and an `id` may be reused.
        self._memo.clear()
        self._alive.clear()
        self._above.clear()

    def _function(self, function: FunctionType) -> bytes:
        raise NotImplementedError

    def _class(self, cls: type) -> bytes:
        raise NotImplementedError

    def _module(self, module: ModuleType) -> bytes:
        raise NotImplementedError

    def _installed(self, module: Any) -> None:
        raise NotImplementedError

    def _value(self, obj: Any) -> bytes:
        """Return the digest of an object."""
        kind = type(obj)
        if kind in ATOMS:
            return hashed(marshalled(obj))
        known = self._memo.get(id(obj))
        if known is not None:
            return known
        if id(obj) in self._above:  # the object holds itself
            return hashed(b"above", str(len(self._above) - self._above[id(obj)]).encode())
        self._above[id(obj)] = len(self._above)
        try:
            digest = self._compound(kind, obj)
        except (Unknown, MemoryError):
            raise
        except RecursionError as exc:
            raise Unknown("something that is nested too deeply") from exc
        except Exception as exc:  # from the object's own methods
            if by_handler(exc):
                raise
            raise Unknown(f"a {label_of(kind)} ({exc})") from exc
        finally:
            del self._above[id(obj)]
        self._memo[id(obj)] = digest
        self._alive.append(obj)
        return digest

    def _values(self, name: bytes, objects: Iterable[Any]) -> bytes:
        return hashed(name, *map(self._value, objects))

    def _compound(self, kind: type, obj: Any) -> bytes:
        if kind in PLAIN:
            if is_plain(obj):
                return hashed(marshalled(obj))
            if kind is dict:
                return self._values(b"dict", itertools.chain.from_iterable(obj.items()))
            return self._values(kind.__name__.encode(), obj)
        if kind is set or kind is frozenset:
            return hashed(kind.__name__.encode(), *sorted(map(self._value, obj)))
        if kind is FunctionType:
            return self._function(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, ModuleType):
            return self._module(obj)
        if kind is CodeType:
            return self._values(b"code", said(obj))
        if kind is PickleBuffer:
            return hashed(b"buffer", obj.raw())
        if kind is bytearray:
            return hashed(b"bytearray", obj)
        if kind is BuiltinFunctionType and isinstance(obj.__self__, (ModuleType, type(None))):
            self._installed(obj.__module__)
            return hashed(b"builtin", f"{obj.__module__}.{obj.__qualname__}".encode())
        if kind is MethodType:
            return self._values(b"method", (obj.__func__, obj.__self__))
        if kind is Broadcast:  # by its content, since its reference differs in each run
            return hashed(b"broadcast", obj.content())
        if kind in _BY_TOKEN:  # its pickle has a token, which differs in each run
            about = [getattr(obj, name, None) for name in _ABOUT_TYPES]
            return self._values(b"type", (kind, *about))
        if isinstance(obj, _WITHOUT_VALUE):
            return self._values(b"one of", (kind,))
        wrapped = wrapped_by(obj)
        if wrapped is not None:
            return self._values(b"wrapper", (kind, wrapped))
        array = bare(obj)
        if array is not None:  # other arrays consist of bare ones, a class and attributes
            *about, content = array
            return hashed(b"array", self._value(kind), self._value(about), content)
        attributes = attributes_of_array(obj)  # numpy pickles a subclass without them
        reduced = self._reduced(obj)
        if isinstance(reduced, str):
            return self._values(b"name", (kind, module_of(obj, reduced), reduced))
        rest = [list(one) if isinstance(one, Iterator) else one for one in reduced[3:]]
        if attributes:
            rest.append(attributes)
        return self._values(b"reduced", (*reduced[:3], *rest))

    def _reduced(self, obj: Any) -> Any:
        found = reducer_override(_Context(), obj)
        if found is NotImplemented:
            found = obj.__reduce_ex__(5)
        if not isinstance(found, (str, tuple)):
            raise TypeError(f"its __reduce__ returned {type(found).__name__}")
        if found[0] is type(obj) and type(obj).__reduce__ in _OF_SETS:
            found = (found[0], (frozenset(found[1][0]),), *found[2:])  # it has a list in any order
        return found


_OF_SETS: tuple[Any, ...] = (set.__reduce__, frozenset.__reduce__)
_BY_TOKEN = frozenset({object, *(getattr(typing, name, None) for name in KINDS)})
_ABOUT_TYPES = ("__name__", "__bound__", "__constraints__", "__supertype__", "__value__")
_WITHOUT_VALUE: tuple[type, ...] = (
    weakref.ReferenceType,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    threading.local,
)
"""Classes of objects without a value of their own, or with another value in each thread."""
