"""`SharedList` and `SharedDict`: objects that all processes read from the same memory.

Each object is pickled alone, one after the other, into an anonymous file, which every process maps.
After the objects, the file has tables: where each object begins, and for a dict its hash table.
"""

from __future__ import annotations

import os
import pickle
import weakref
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, repeat
from typing import Any, SupportsIndex, TypeVar, overload

from xpool._memory.anonymous_files import File
from xpool._pickling import Key
from xpool._pickling.by_value.names import ATOMS
from xpool._pickling.diagnose import say_where
from xpool._pickling.frame import ALIGN, PLAIN
from xpool._pickling.pickler import encode_alone
from xpool._pickling.reducers import Context, in_place, register
from xpool._python.interrupt import by_handler
from xpool.errors import TaskNotPicklable, XPoolError
from xpool.pickle import decode

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S", bound="_Shared")

_MARK = 16
"""Random bytes at the beginning of a file, by which a file of another host is noticed."""

_AT_ONCE = 4096  # items that are pickled in one step
_PIECE = 1 << 20  # bytes of one write
_TOKEN = 64  # bytes of a block that only keeps a file


class _Store:
    """Pickled objects in a file.

    ``tables`` returns the tables that follow the objects, when these are written.
    """

    def __init__(self, items: Iterable[Any], tables: Any = tuple) -> None:
        self.mark = os.urandom(_MARK)
        self.names: set[Key] = set()
        starts, sizes = array("Q"), array("Q")

        def content() -> Iterator[bytes]:
            yield self.mark
            yield from self._pieces(items, starts)
            for table in (starts, *tables()):
                sizes.append(len(table))
                yield table.tobytes()

        self.file = File(content(), "xpool-shared-data")
        self.sizes = tuple(sizes)
        self.end = starts[-1]
        self._map()

    @classmethod
    def received(
        cls, file: File, mark: bytes, end: int, sizes: tuple[int, ...], names: set[Key]
    ) -> _Store:
        self = cls.__new__(cls)
        self.file, self.mark, self.end, self.sizes, self.names = file, mark, end, sizes, names
        self._map()
        return self

    @property
    def facts(self) -> tuple[Any, ...]:
        return self.file, self.mark, self.end, self.sizes, self.names

    def _map(self) -> None:
        self._view = view = self.file.pages()
        if view[:_MARK] != self.mark:
            raise XPoolError(
                "a SharedList or SharedDict can be opened only on the host where it was made; send "
                "its items, or make one on each host"
            )
        self.nbytes = len(view)
        words, at = view[self.end :].cast("Q"), 0
        tables = []
        for size in self.sizes:
            tables.append(words[at : at + size])
            at += size
        self._starts, *self.tables = tables

    def __len__(self) -> int:
        return self.sizes[0] - 1

    def load(self, i: int) -> Any:
        starts = self._starts
        return decode(self._view[starts[i] : starts[i + 1]])

    def _pieces(self, items: Iterable[Any], starts: array[int]) -> Iterator[bytes]:
        """Yield the bytes of all items, and note where each begins and where the last ends."""
        at = _MARK
        source = iter(items)
        while some := list(islice(source, _AT_ONCE)):
            if not ATOMS.issuperset(map(type, some)):
                piece = bytearray()
                for n, item in enumerate(some):
                    message = self._encode(item, len(starts))
                    if message[0] != PLAIN:  # the item's arrays are used in place
                        piece += bytes(-(at + len(piece)) % ALIGN)
                    starts.append(at + len(piece))
                    piece += message
                    if len(piece) >= _PIECE:
                        yield bytes(piece)
                        at += len(piece)
                        piece.clear()
                    some[n] = None  # may be large
                yield bytes(piece)
                at += len(piece)
            else:
                messages = list(map(pickle.dumps, some, repeat(5)))
                starts.extend(accumulate(map(len, messages[:-1]), initial=at))
                yield (joined := b"".join(messages))
                at += len(joined)
        yield bytes(-at % 8)  # the tables are aligned
        starts.append(at + -at % 8)

    def _encode(self, item: Any, number: int) -> bytes:
        try:
            message, names = encode_alone(item)
        except Exception as error:
            if not by_handler(error):
                say_where(error, lambda path: f" at {path or 'the object itself'} of item {number}")
            raise
        self.names |= names
        return message


class _Shared:
    _store: _Store

    def _keep(self, store: _Store) -> None:
        self._store = store
        _open[store.mark] = self

    @property
    def nbytes(self) -> int:
        """The size of the memory in bytes."""
        return self._store.nbytes

    def __repr__(self) -> str:
        size = len(self)  # type: ignore[arg-type]
        return f"<{type(self).__name__} of {size:,} items, {self.nbytes:,} bytes>"

    def __copy__(self: S) -> S:
        return self  # a `SharedList` does not change

    def __deepcopy__(self: S, memo: Any) -> S:
        return self

    def __reduce__(self) -> Any:
        return _opened, (None, type(self), *self._store.facts)


class SharedList(_Shared, Sequence[T]):
    """A list that is pickled once into memory which all processes read.

    Workers, loaders and other processes get it as an argument, as a global or as an attribute of a
    dataset, and map the same memory.  An item is unpickled each time that it is read.  So the
    memory of a process does not grow with the number of items, and a change of an item that was
    read is not seen by others, nor by a later read.

    Arrays and tensors of 64 KiB and more are views of the memory: a process that writes to one gets
    pages of its own, which its later reads show.

    The process that makes the list must keep it as long as others open it.  A message of a pool
    keeps it until the task has ended.

    Args:
        items: an iterable, which is read once.

    Raises:
        TaskNotPicklable: an item cannot be pickled; the text names it.
        OSError: there is no memory or no descriptor left.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._keep(_Store(items))

    def __len__(self) -> int:
        return len(self._store)

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        """Return an item, or a plain list of items for a slice."""
        size = len(self)
        if isinstance(index, slice):
            return [self._store.load(i) for i in range(*index.indices(size))]
        try:
            i: int = index.__index__()
        except AttributeError:
            raise TypeError(f"indices are integers or slices, not {type(index).__name__}") from None
        if not -size <= i < size:
            raise IndexError(f"index {i} is out of range for {size} items")
        return self._store.load(i % size)

    def __iter__(self) -> Iterator[T]:
        return map(self._store.load, range(len(self)))


class SharedDict(_Shared, Mapping[K, V]):
    """A dict that is pickled once into memory which all processes read, as `SharedList`.

    A look-up reads a table of hashes, and unpickles the keys with this hash and one value.

    Args:
        items: a mapping, or pairs.  Keys are str, bytes, numbers, None, and tuples of these.

    Raises:
        TypeError: a key is of another type.
        TaskNotPicklable: a value cannot be pickled; the text names it.
        OSError: there is no memory or no descriptor left.
    """

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        pairs = items if isinstance(items, dict) else dict(items)
        hashes = list(map(_hash, pairs))
        order = sorted(range(len(hashes)), key=hashes.__getitem__)

        def tables() -> tuple[array[int], array[int]]:
            return array("Q", map(hashes.__getitem__, order)), array("Q", order)

        def content() -> Iterator[Any]:
            yield from pairs
            yield from pairs.values()

        self._keep(_Store(content(), tables))

    def __len__(self) -> int:
        return len(self._store) // 2

    def _find(self, key: Any) -> int | None:
        store, wanted = self._store, _hash(key)
        hashes, order = store.tables
        at = bisect_left(hashes, wanted)
        while at < len(hashes) and hashes[at] == wanted:
            if store.load(order[at]) == key:
                return int(order[at])
            at += 1
        return None

    def __getitem__(self, key: K) -> V:
        found = self._find(key)
        if found is None:
            raise KeyError(key)
        value: V = self._store.load(len(self) + found)
        return value

    def __contains__(self, key: object) -> bool:
        try:
            return self._find(key) is not None
        except TypeError:
            hash(key)  # raises for what no dict can have as a key
            return False

    def __iter__(self) -> Iterator[K]:
        return map(self._store.load, range(len(self)))


def _hash(key: Any) -> int:
    """Return a hash that is the same in all processes, and for equal keys."""
    return zlib.crc32(_bytes_of(key))


def _bytes_of(key: Any) -> bytes:
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if key is None:
        return b"n"
    if isinstance(key, float) and not key.is_integer():
        return b"f" + repr(float(key)).encode()
    if isinstance(key, float) or hasattr(key, "__index__"):
        return b"i" + b"%x" % int(key)  # Python limits the length of decimal numbers
    if isinstance(key, tuple):
        parts = list(map(_bytes_of, key))
        return b"t" + b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    raise TypeError(
        "keys of a SharedDict are str, bytes, numbers, None, and tuples of these, not "
        f"{type(key).__name__}"
    )


_open: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
"""The lists and dicts that this process has, by their marks."""


@register(SharedList, SharedDict)
def _reduce(pickler: Context, obj: SharedList[Any] | SharedDict[Any, Any]) -> Any:
    store, layout = obj._store, pickler.layout
    if not pickler.home:
        pickler.names |= store.names
    elif store.file.is_here:
        raise TaskNotPicklable(
            f"{obj!r} was made in this worker, which does not keep it; make it in the program, or "
            "return its items"
        )
    token = None
    if layout.pool is not None and layout.lessor is not None:
        token = layout.lessor(_TOKEN)
    if token is None:
        return obj.__reduce__()
    token.former = store.file  # so the message keeps the file
    return _opened, (in_place(pickler, token), type(obj), *store.facts)


def _opened(
    token: Any, kind: type, file: File, mark: bytes, end: int, sizes: Any, names: set[Key]
) -> Any:
    found: Any = _open.get(mark)
    if found is None:
        found = object.__new__(kind)
        found._keep(_Store.received(file, mark, end, sizes, names))
    return found
