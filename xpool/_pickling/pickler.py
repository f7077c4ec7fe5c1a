"""Objects to messages and back.

The C pickler does the work, with the reducers of `reducers`.  When it gives up, the whole
object is pickled again by dill's pickler, so that shared references and cycles survive.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from pickle import PickleBuffer, PicklingError
from typing import Any

from xpool._memory.arena import Block
from xpool._memory.buffers import same_bytes
from xpool._pickling import diagnose, fallback, frame, reducers
from xpool._pickling.fastpath import SHORT
from xpool._pickling.policy import (
    BY_PIPE,
    INLINE_BELOW,
    Layout,
    Placement,
    in_block,
    placement,
)
from xpool._python.interrupt import by_handler
from xpool.errors import XPoolError

__all__ = ["Pickler", "decode", "dumps", "encode", "encode_atoms", "loads"]

_ATOMS = frozenset({int, float, str, bytes, bool, type(None)})
_LONG = frozenset({str, bytes})
_PLAIN = Layout(out_of_band=False)
_NAMED = _PLAIN._replace(named=True)
_MAIN = b"__main__"

_dumps: Callable[[Any, int], bytes] = pickle.dumps
_loads: Callable[[Any], Any] = pickle.loads


class _Sink:
    """The file of a pickler: ``write`` is a list's append."""

    __slots__ = ("write",)


_dump = pickle.Pickler.dump


class _FastPickler(pickle.Pickler):
    """The C pickler, made to be used again and again."""

    recurse = False
    blob = False
    follow = True

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.chunks: list[bytes] = []
        self.buffers: list[PickleBuffer] = []
        self.shared: dict[int, Block] = {}
        self.names: set[str] = set()
        self.spaces: dict[int, Any] = {}
        self.tensors: Any = None
        sink = _Sink()
        sink.write = self.chunks.append  # type: ignore[attr-defined]
        callback = _placer(layout, self.buffers, self.shared)
        super().__init__(sink, 5, buffer_callback=callback)  # type: ignore[arg-type]

    reducer_override = reducers.reducer_override

    def dump(self, obj: Any) -> None:
        try:
            _dump(self, obj)
        except BaseException:
            _forget(self)
            raise


def _placer(
    layout: Layout, buffers: list[PickleBuffer], shared: dict[int, Block]
) -> Callable[[PickleBuffer], bool] | None:
    """What a pickler calls for each buffer: true keeps it in the pickle."""
    if layout.out_of_band or layout.arena is not None:
        return partial(_place, layout.out_of_band, buffers, shared)
    return None


def _place(
    out_of_band: bool, buffers: list[PickleBuffer], shared: dict[int, Block], buffer: PickleBuffer
) -> bool:
    # What is a block already goes by its name, however small it is.
    if id(buffer) not in shared and (
        not out_of_band or placement(buffer.raw().nbytes) is Placement.INLINE
    ):
        return True
    buffers.append(buffer)
    return False


class _Result:
    """One pickled object: what a message is made of."""

    __slots__ = ("buffers", "chunks", "names", "shared")

    def __init__(
        self,
        chunks: list[bytes],
        buffers: list[PickleBuffer],
        names: set[str],
        shared: dict[int, Block],
    ) -> None:
        self.chunks, self.buffers, self.names, self.shared = chunks, buffers, names, shared


# Picklers at rest.  Making one costs more than pickling a small tuple.  list.pop and append
# are atomic, so no lock: a pickler belongs to whoever popped it, and an object whose
# __reduce__ pickles something itself simply gets another one.
_at_rest: list[_FastPickler] = []


def encode_atoms(items: Sequence[Any]) -> list[bytes] | None:
    """Pickle each of many numbers or short texts, in one pass; None: others are among them."""
    kinds = set(map(type, items))
    if not kinds <= _ATOMS:
        return None
    if kinds & _LONG and (kinds - _LONG or sum(map(len, items)) >= INLINE_BELOW):
        return None
    return list(map(_dumps, items, repeat(5)))


def encode(
    obj: Any, *, recurse: bool = False, main_globals: bool = True, layout: Layout = BY_PIPE
) -> bytes | memoryview:
    """Pickle an object for another process: a plain pickle, or a table of `frame`.

    What is returned must be kept until the receiver has opened it: it may hold blocks.

    Args:
        recurse: as in dill: a by-value function takes along copies of the globals it uses.
        main_globals: false for a message to the parent, which does not take globals of
            ``__main__`` from its workers: they are then not even looked for.
        layout: how to lay it out; their ``out_of_band`` is true.

    Raises:
        TaskNotPicklable: neither pickler can do it; ``__cause__`` says why.
        Exception: what an object's own ``__reduce__`` raised, with a note that says where.
    """
    kind = type(obj)
    if kind in _ATOMS and (kind not in _LONG or len(obj) < INLINE_BELOW):
        return _dumps(obj, 5)
    write = SHORT.get(kind)
    if write is not None and layout.arena is None:
        short = write(obj, True)
        if short is not None:
            return short
    if recurse:
        # `recurse` is a setting of the run: none of those at rest has it.
        result = _pickle(obj, layout, recurse)
    else:
        try:
            # Popped: it is this thread's alone until `_rest` puts it back.
            pickler = _at_rest.pop()
            pickler.layout = layout
        except IndexError:
            pickler = _FastPickler(layout)
        try:
            pickler.dump(obj)
        # It is not put back: it may be anywhere in the midst of an object.
        except Exception as error:
            if by_handler(error):
                raise
            result = _pickle(obj, layout, False, error)
        else:
            data = _at_once(pickler, main_globals)
            if data is not None:
                return data
            result = _finish(pickler, obj, layout, False)
    return _message(result, layout, main_globals)


def _at_once(pickler: _FastPickler, main_globals: bool) -> bytes | memoryview | None:
    """The message of a pickler that is done, if nothing is left to see to."""
    # Tensors that share memory: that is written in a second run, once for all of them.
    spans = pickler.tensors
    if spans is not None and spans.again:
        return None
    chunks, buffers, layout = pickler.chunks, pickler.buffers, pickler.layout
    data: bytes | memoryview
    data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    # Something may go by a name that the receiver does not have: `_finish` sees to it.
    if not reducers.script.importable() and _MAIN in data:
        return None
    if pickler.names:
        if main_globals and not reducers.script.quiet(pickler.names):
            parts = reducers.script.preface(pickler.names, chunks, buffers, pickler.shared, layout)
            if parts is not None:
                chunks, buffers = parts
                data = chunks[0]
        pickler.names.clear()
    small = len(data) < INLINE_BELOW
    if buffers or not (small or layout.lessor is None):
        data = frame.pack(chunks, buffers, layout, pickler.shared)
        # Now, and not with the next message: they hold memory.
        pickler.buffers.clear()
        pickler.shared.clear()
    if small:  # a pickler's memory of a larger message is not worth keeping
        _rest(pickler)
    return data


def _forget(pickler: Any) -> None:
    """Have a pickler that failed let go of shared memory at once.

    The frames of its error may hold each other, and it, until the collector runs.
    """
    pickler.buffers.clear()
    pickler.shared.clear()
    pickler.clear_memo()


def _rest(pickler: _FastPickler) -> None:
    if pickler.tensors is not None:
        pickler.tensors = None
    if pickler.spaces:
        pickler.spaces.clear()
    pickler.chunks.clear()
    pickler.clear_memo()
    # Last: from here on it may be another thread's.
    _at_rest.append(pickler)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Load what `encode` or `dumps` made.

    Arrays and tensors are writable.  Those that travelled beside the pickle use the memory
    of ``data`` in place when it is writable, and keep it alive; of `bytes`, a copy is made.
    """
    if not data:
        raise EOFError("an empty message")
    if data[0] == frame.PLAIN:
        return _loads(data)
    pickled, buffers = frame.unpack(data)
    return pickle.loads(pickled, buffers=buffers)


def dumps(obj: Any, recurse: bool = False, copy_tensor: bool = True) -> bytes:
    """Pickle an object; `loads`, and `pickle.loads` too, gives it back.

    Lambdas, local functions and classes go by value.

    Args:
        recurse: as in dill: a by-value function takes along copies of the globals it uses.
        copy_tensor: false: storages of CPU tensors move to shared memory of torch's (a file in
            /dev/shm), and its name is written.  Any process of this user on this machine can load
            such a pickle, once, also after this process has ended: see docs/tensors.md.

    Raises:
        TaskNotPicklable: neither pickler can do it; ``__cause__`` says why.
        Exception: what an object's own ``__reduce__`` raised, with a note that says where.
    """
    write = SHORT.get(type(obj))
    if write is not None and copy_tensor:
        short = write(obj, False)
        if short is not None:
            return short
    layout = _PLAIN if copy_tensor else _NAMED
    message = _message(_pickle(obj, layout, recurse, follow=False), layout, True)
    assert isinstance(message, bytes)  # nothing large lies beside it
    return message


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Load what `dumps` or `encode` made."""
    return decode(data)


class Pickler:
    """Writes pickles of objects to a file, each on its own.

    Args:
        file: has ``write(bytes)``.
        recurse: as in dill: a by-value function takes along copies of the globals it uses.
        copy_tensor: as of `dumps`.
    """

    def __init__(self, file: Any, recurse: bool = False, copy_tensor: bool = True) -> None:
        self._file, self._recurse, self._copy_tensor = file, recurse, copy_tensor

    def dump(self, obj: Any) -> None:
        """Write one object; `pickle.load` reads it."""
        self._file.write(dumps(obj, self._recurse, self._copy_tensor))

    def __repr__(self) -> str:
        return f"Pickler({self._file!r}, recurse={self._recurse}, copy_tensor={self._copy_tensor})"


# -- the two picklers -----------------------------------------------------------------------


def _pickle(
    obj: Any,
    layout: Layout,
    recurse: bool,
    error: Exception | None = None,
    *,
    blob: bool = False,
    follow: bool = True,
) -> _Result:
    """Pickle with the C pickler (unless that gave ``error`` already), else with dill's."""
    if error is None:
        fast = _FastPickler(layout)
        fast.recurse, fast.blob, fast.follow = recurse, blob, follow
        try:
            fast.dump(obj)
        except Exception as first:
            if by_handler(first):
                raise
            error = first
        else:
            return _finish(fast, obj, layout, blob)
    # Refused by a reducer of xpool's, or for want of memory: dill would do no better.
    if isinstance(error, (XPoolError, MemoryError)):
        raise error
    # Only these say that the C pickler cannot do something, which dill may.
    if not isinstance(error, (PicklingError, TypeError, AttributeError)):
        raise diagnose.refusal(obj, error, fails)
    try:
        return _by_dill(obj, layout, recurse, error, blob, follow)
    finally:
        del error  # it holds this frame, and what was pickled so far


def _finish(fast: _FastPickler, obj: Any, layout: Layout, blob: bool) -> _Result:
    spans = fast.tensors
    if spans is not None and spans.again:
        again = _FastPickler(layout)
        again.recurse, again.blob, again.tensors = fast.recurse, blob, spans.merged()
        again.dump(obj)
        fast = again
    # Large buffers are chunks of their own, and not always bytes: no name is in them.
    chunks = [chunk for chunk in fast.chunks if type(chunk) is bytes]
    if not reducers.script.importable() and any(_MAIN in chunk for chunk in chunks) and not blob:
        # Something went by its name in __main__, which the receiver does not have.
        error = PicklingError("an object is pickled by its name in __main__")
        return _by_dill(obj, layout, fast.recurse, error, blob, fast.follow)
    return _Result(fast.chunks, fast.buffers, fast.names, fast.shared)


def _by_dill(
    obj: Any, layout: Layout, recurse: bool, error: Exception, blob: bool, follow: bool = True
) -> _Result:
    spans = None
    while True:
        try:
            slow, result = _run_dill(obj, layout, recurse, blob, spans, follow)
        except (XPoolError, MemoryError):
            raise
        except Exception as second:
            if by_handler(second):
                raise
            without = isinstance(second, ImportError) and second.name == "dill"
            # The first error is about the culprit unless dill could do what it names.
            if not (without or type(error) is TypeError or diagnose.foreign_frame(error)):
                error = second
            break
        if slow.tensors is None or spans is not None or not slow.tensors.again:
            return result
        spans = slow.tensors.merged()
    # Out of the handler: an object's own exception keeps the context that it has.
    raise diagnose.refusal(obj, error, fails, no_dill=without)


def _run_dill(
    obj: Any, layout: Layout, recurse: bool, blob: bool, spans: Any, follow: bool = True
) -> tuple[Any, _Result]:
    file, buffers = io.BytesIO(), list[PickleBuffer]()
    shared = dict[int, Block]()
    slow = fallback.make_pickler(file, recurse, _placer(layout, buffers, shared))
    slow.blob, slow.tensors, slow.layout, slow.shared = blob, spans, layout, shared
    slow.follow = follow
    try:
        slow.dump(obj)
    except BaseException:
        slow.buffers = buffers
        _forget(slow)
        raise
    return slow, _Result([file.getvalue()], buffers, slow.names, shared)


def fails(obj: Any) -> BaseException | None:
    """Return the error when neither pickler can do an object: for `diagnose`."""
    try:
        _FastPickler(_PLAIN).dump(obj)
    except Exception as error:
        if by_handler(error):
            raise
        try:
            _run_dill(obj, _PLAIN, False, False, None)
        except Exception as second:
            if by_handler(second):
                raise
            return error if type(error) is TypeError else second
    return None


def _message(result: _Result, layout: Layout, main_globals: bool) -> bytes | memoryview:
    chunks, buffers = result.chunks, result.buffers
    if result.names and main_globals:
        parts = reducers.script.preface(result.names, chunks, buffers, result.shared, layout)
        chunks, buffers = parts or (chunks, buffers)
    if buffers or (layout.lessor is not None and in_block(sum(map(len, chunks)))):
        return frame.pack(chunks, buffers, layout, result.shared)
    return b"".join(chunks)


def write_blob(cls: type, recurse: bool) -> tuple[bytes, set[str]]:
    """Pickle a class's definition; also the names of the globals that it uses."""
    result = _pickle(cls, _PLAIN, recurse, blob=True)
    return b"".join(result.chunks), result.names


class Written:
    """A pickled global, and the names of the globals that it uses."""

    __slots__ = ("_buffers", "_shared", "chunks", "names", "nbytes")

    def __init__(self, result: _Result) -> None:
        self.chunks, self.names = result.chunks, result.names
        self._buffers, self._shared = result.buffers, result.shared
        self.nbytes = sum(map(len, self.chunks))
        self.nbytes += sum(buffer.raw().nbytes for buffer in self._buffers)

    def message(self, layout: Layout) -> bytes | memoryview:
        """Return it with its large buffers, laid out so; each byte is copied once."""
        return frame.pack(self.chunks, self._buffers, layout, self._shared)

    def lies_in(self, message: memoryview) -> bool:
        """Whether a message that `message` has made holds the same bytes."""
        pickled, buffers = frame.unpack(message)
        own = [buffer.raw() for buffer in self._buffers]
        sizes = sum(map(len, self.chunks)), *(one.nbytes for one in own)
        if sizes != (len(pickled), *(one.nbytes for one in buffers)):
            return False
        at = 0
        for chunk in self.chunks:
            if not same_bytes(memoryview(chunk), pickled[at : at + len(chunk)]):
                return False
            at += len(chunk)
        return all(map(same_bytes, own, buffers))


def write_global(value: Any, out_of_band: bool) -> Written:
    """Pickle a global; ``out_of_band``: large buffers are not copied, but for `Written.message`."""
    if not out_of_band:
        return Written(_pickle(value, _PLAIN, False))
    try:
        pickler = _at_rest.pop()
        pickler.layout = _COPY
    except IndexError:
        pickler = _FastPickler(_COPY)
    try:
        pickler.dump(value)
    except Exception as error:
        if by_handler(error):
            raise
        return Written(_pickle(value, _COPY, False, error))
    written = Written(_finish(pickler, value, _COPY, False))
    if pickler.tensors is None and written.chunks is pickler.chunks and not pickler.buffers:
        written.chunks = [b"".join(pickler.chunks)]
        # Those of the pickler will be those of whatever it pickles next, in any thread.
        written._buffers, written._shared = [], {}
        # `written` has the old set.
        if pickler.names:
            pickler.names = set()
        _rest(pickler)
    return written


_COPY = Layout(target=-1)  # handles to tensors on devices are replaced by copies
