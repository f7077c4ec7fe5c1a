"""Converts objects to messages and back.

The C pickler does this, with the reducers of `reducers`.  If it fails, dill's pickler pickles the
whole object again, so that shared references and cycles are kept.
"""

import copyreg
import io
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from itertools import repeat
from pickle import PickleBuffer, PicklingError
from threading import get_ident
from types import SimpleNamespace
from typing import Any

from xpool._memory.holds import Block
from xpool._memory.system import same_bytes
from xpool._pickling import Key, diagnose, frame, reducers
from xpool._pickling.frame import BY_PIPE, INLINE_BELOW, Layout
from xpool._pickling.reducers import REDUCERS, SHORT, watches
from xpool._python import at_fork
from xpool._python.hidden import forking, of_program
from xpool._python.interrupt import by_handler
from xpool.errors import XPoolError

_ATOMS = frozenset({int, float, str, bytes, bool, type(None)})
_LONG = frozenset({str, bytes})
_PLAIN = Layout(out_of_band=False)
_NAMED = _PLAIN._replace(named=True)
_COPY = Layout(target=-1)  # copies replace handles to tensors on devices
_INLINE = _COPY._replace(out_of_band=False)
_dumps: Callable[[Any, int], bytes] = pickle.dumps
_loads: Callable[[Any], Any] = pickle.loads


_dump = pickle.Pickler.dump


def reducer_override(pickler: Any, obj: Any) -> Any:
    """Reduce an object, or leave it to the pickler: both picklers call this first."""
    kind = type(obj)
    if watches and (watch := watches.get(get_ident())) is not None:
        watch(obj)
    if kind in forking or kind in copyreg.dispatch_table:
        reduce = of_program(kind)
        if reduce is not None:
            reduced = reduce(obj)
            if type(reduced) is not str or hasattr(obj, "__module__"):
                return reduced  # else a name for which `pickle` would search all modules
    reducer = REDUCERS.get(kind) or reducers.find(kind)
    return NotImplemented if reducer is None else reducer(pickler, obj)


class _FastPickler(reducers.Context, pickle.Pickler):
    """The C pickler, made for repeated use."""

    def __init__(self, layout: Layout, **options: Any) -> None:
        vars(self).update(options)
        self.layout = layout
        self.chunks: list[bytes] = []
        self.buffers: list[PickleBuffer] = []
        self.shared: dict[int, Block] = {}
        self.names: set[Key] = set()
        self.spaces: dict[int, Any] = {}
        file = SimpleNamespace(write=self.chunks.append)
        place = partial(_place, layout.out_of_band, self.buffers, self.shared)
        super().__init__(file, 5, buffer_callback=place)

    reducer_override = reducer_override


class _GroupPickler(_FastPickler):
    """Pickles globals of the program."""

    group: reducers.Group

    def __init__(self, layout: Layout, group: reducers.Group, **options: Any) -> None:
        if group.objects is not None:
            # The pickler calls it for every object, and goes on if it returns None.
            self.persistent_id = group.objects.append  # type: ignore[method-assign]
        super().__init__(layout, group=group, **options)

    def reducer_override(self, obj: Any) -> Any:
        name = self.group.named.get(id(obj))
        found = reducer_override(self, obj) if name is None else reducers.by_place(*name)
        return reducers.hashed(self, obj) if found is NotImplemented else found


def _place(
    out_of_band: bool, buffers: list[PickleBuffer], shared: dict[int, Block], buffer: PickleBuffer
) -> bool:
    """Take a buffer out of the pickle; return True to keep it in the pickle."""
    # A buffer that already is a block is sent by name, even if it is small.
    if id(buffer) not in shared and not (out_of_band and buffer.raw().nbytes >= INLINE_BELOW):
        return True
    buffers.append(buffer)
    return False


class Pickled:
    """A pickled object, from which messages are made."""

    __slots__ = ("buffers", "chunks", "names", "shared")

    def __init__(self, pickler: Any) -> None:
        self.chunks: list[bytes] = pickler.chunks
        self.buffers: list[PickleBuffer] = pickler.buffers
        self.names: set[Key] = pickler.names  # the globals of the program that the object uses
        self.shared: dict[int, Block] = pickler.shared

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.chunks)) + sum(one.raw().nbytes for one in self.buffers)

    def message(self, layout: Layout) -> bytes | memoryview:
        """Return a message with the object and its buffers.  Each byte is copied once."""
        return frame.pack(self.chunks, self.buffers, layout, self.shared)

    def lies_in(self, message: memoryview) -> bool:
        """Whether an earlier message from `message` has the same bytes as this object."""
        pickled, buffers = frame.unpack(message)
        own = [buffer.raw() for buffer in self.buffers]
        sizes = sum(map(len, self.chunks)), *(one.nbytes for one in own)
        if sizes != (len(pickled), *(one.nbytes for one in buffers)):
            return False
        at = 0
        for chunk in self.chunks:
            if not same_bytes(memoryview(chunk), pickled[at : at + len(chunk)]):
                return False
            at += len(chunk)
        return all(map(same_bytes, own, buffers))


# Idle picklers, because making one takes longer than pickling a small tuple.  They need no lock,
# because `list.pop` and `append` are atomic.  A pickler belongs to the thread that has popped it.
# If an object's __reduce__ pickles another object, a second pickler does that.
_at_rest: list[_FastPickler] = []


def encode_atoms(items: Sequence[Any]) -> list[bytes] | None:
    """Pickle many numbers or short texts at once.  Return None if an object has another type."""
    kinds = set(map(type, items))
    if not kinds <= _ATOMS:
        return None
    if kinds & _LONG and (kinds - _LONG or sum(map(len, items)) >= INLINE_BELOW):
        return None
    return list(map(_dumps, items, repeat(5)))


def encode(
    obj: Any,
    *,
    recurse: bool = False,
    home: bool = False,
    layout: Layout = BY_PIPE,
    told: frozenset[Key] = frozenset(),
) -> bytes | memoryview:
    """Pickle an object for another process, as a plain pickle or a message of `frame`.

    The caller must keep the result until the receiver has opened it, because it may hold blocks.

    Args:
        recurse: as in dill: a function pickled by value contains copies of the globals it uses.
        home: whether the receiver is the program, and this process its worker.  Then no definitions
            and globals are added, because the program has its own.
        layout: the options of the message.  Its ``out_of_band`` is true.
        told: the globals that the receiver has, from an earlier message.

    Raises:
        TaskNotPicklable: neither pickler can pickle the object.  ``__cause__`` says why.
        Exception: the error of an object's own ``__reduce__``, with a note that says where.
    """
    kind = type(obj)
    if kind in _ATOMS and (kind not in _LONG or len(obj) < INLINE_BELOW):
        return _dumps(obj, 5)
    write = SHORT.get(kind)
    if write is not None and layout.arena is None and of_program(kind) is None:
        short = write(obj, True)
        if short is not None:
            return short
    try:
        pickler = _at_rest.pop()  # belongs to this thread until it is put back
        pickler.layout = layout
    except IndexError:
        pickler = _FastPickler(layout)
    pickler.home, pickler.recurse = home, recurse
    try:
        _dump(pickler, obj)
    # A failed pickler is not put back, because it may be in the middle of an object.
    except BaseException as error:
        _forget(pickler)
        if not isinstance(error, Exception) or by_handler(error):
            raise
        result = _after(error, obj, layout=layout, home=home, recurse=recurse)
    else:
        # If tensors share memory, a second run writes the common memory only once.
        spans = pickler.tensors
        if spans is not None and spans.again:
            result = _finish(pickler, _run_fast, obj, layout=layout, home=home, recurse=recurse)
        else:
            message = _message(pickler, layout, home, told)
            # Cleared now, because they hold memory.
            pickler.buffers.clear()
            pickler.shared.clear()
            if sum(map(len, pickler.chunks)) < INLINE_BELOW:  # else it would keep too much memory
                pickler.tensors = None
                pickler.names.clear()
                pickler.spaces.clear()
                pickler.chunks.clear()
                pickler.clear_memo()
                # Appended last, because another thread may now use it.
                _at_rest.append(pickler)
            return message
    return _message(result, layout, home, told)


def _forget(pickler: Any) -> None:
    """Release the shared memory of a failed pickler now.

    The frames of the error may keep the pickler alive until the garbage collector runs.
    """
    pickler.buffers.clear()
    pickler.shared.clear()
    pickler.clear_memo()


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Load a message of `encode` or a pickle of `dumps`.

    Arrays and tensors are writable.  If ``data`` is writable, large ones use its memory and keep it
    alive.  If it is `bytes`, they are copied.

    Raises:
        EOFError: the message is empty.
    """
    if not data:
        raise EOFError("an empty message")
    if data[0] == frame.PLAIN:
        return _loads(data)
    pickled, buffers = frame.unpack(data)
    return pickle.loads(pickled, buffers=buffers)


def dumps(obj: Any, recurse: bool = False, copy_tensor: bool = True) -> bytes:
    """Pickle an object for `loads` or `pickle.loads`.

    Lambdas, local functions and local classes are pickled by value.

    Args:
        recurse: as in dill: a function pickled by value contains copies of the globals it uses.
        copy_tensor: if false, storages of CPU tensors are moved to torch's shared memory (a file in
            /dev/shm), and the pickle contains the file's name.  A process of this user can load
            such a pickle once, even after this process has ended: see docs/tensors.md.

    Raises:
        TaskNotPicklable: neither pickler can pickle the object.  ``__cause__`` says why.
        Exception: the error of an object's own ``__reduce__``, with a note that says where.
    """
    write = SHORT.get(type(obj))
    if write is not None and copy_tensor:
        short = write(obj, False)
        if short is not None:
            return short
    layout = _PLAIN if copy_tensor else _NAMED
    message = _message(_pickle(obj, layout, recurse=recurse, follow=False), layout, False)
    assert isinstance(message, bytes)  # this layout has no buffers beside the pickle
    return message


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Load a pickle of `dumps` or a message of `encode`."""
    return decode(data)


class Pickler:
    """Writes objects to a file, each as its own pickle.

    Args:
        file: an object with ``write(bytes)``.
        recurse: as in dill: a function pickled by value contains copies of the globals it uses.
        copy_tensor: as in `dumps`.
    """

    def __init__(self, file: Any, recurse: bool = False, copy_tensor: bool = True) -> None:
        self._file, self._recurse, self._copy_tensor = file, recurse, copy_tensor

    def dump(self, obj: Any) -> None:
        """Write one object, which `pickle.load` can read.  Raises the errors of `dumps`."""
        self._file.write(dumps(obj, self._recurse, self._copy_tensor))

    def __repr__(self) -> str:
        return f"Pickler({self._file!r}, recurse={self._recurse}, copy_tensor={self._copy_tensor})"


# -- the two picklers -----------------------------------------------------------------------


def _pickle(obj: Any, layout: Layout, **options: Any) -> Pickled:
    """Pickle with the C pickler, or else with dill's."""
    try:
        fast = _run_fast(obj, layout, **options)
    except Exception as first:
        if by_handler(first):
            raise
        error = first
        if _is_disturbed(first) and "group" in options:
            try:
                return _undisturbed(obj, layout, **options)
            except Exception as second:
                if by_handler(second):
                    raise
                error = second
    else:
        return _finish(fast, _run_fast, obj, layout=layout, **options)
    try:
        return _after(error, obj, layout=layout, **options)
    finally:
        del error  # the traceback keeps this frame alive, and the data pickled so far


def _is_disturbed(error: Exception) -> bool:
    """Whether another thread has added or removed items while they were pickled."""
    return type(error) is RuntimeError and "during iteration" in str(error)


def _undisturbed(obj: Any, layout: Layout, **options: Any) -> Pickled:
    """Pickle globals of the program, in longer turns than threads have otherwise."""
    with _turns:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(0.1)
        try:
            left = 20
            while True:
                left -= 1
                try:
                    fast = _run_fast(obj, layout, **options)
                    return _finish(fast, _run_fast, obj, layout=layout, **options)
                except RuntimeError as error:
                    if not left or by_handler(error) or not _is_disturbed(error):
                        raise
        finally:
            sys.setswitchinterval(interval)


_turns = threading.RLock()
at_fork.renew(globals(), _turns=threading.RLock)


def _run_fast(obj: Any, layout: Layout, **options: Any) -> Any:
    kind: Any = _GroupPickler if "group" in options else _FastPickler
    return _dumped(kind(layout, **options), obj)


def _dumped(pickler: Any, obj: Any) -> Any:
    try:
        pickler.dump(obj)
    except BaseException:
        _forget(pickler)
        raise
    return pickler


def _finish(done: Any, run: Callable[..., Any], obj: Any, **options: Any) -> Pickled:
    """Run a pickler again if tensors share memory: the second run writes it only once."""
    if done.tensors is not None and done.tensors.again:
        done = run(obj, **{**options, "tensors": done.tensors.merged()})
    return Pickled(done)


def _after(error: Exception, obj: Any, **options: Any) -> Pickled:
    """Pickle with dill's pickler an object for which the C pickler has raised an error."""
    trial = partial(fails, in_group=options.get("group") is not None)
    # If a reducer of xpool has refused the object, or memory is short, dill would fail, too.
    if isinstance(error, (XPoolError, MemoryError)):
        diagnose.locate(error, obj)
        raise error
    # After other errors than these, dill cannot pickle the object either.
    usual = isinstance(error, (PicklingError, TypeError, AttributeError))
    if isinstance(error, reducers.Refused) or not usual:
        raise diagnose.refusal(obj, error, trial)
    try:
        return _finish(_run_dill(obj, **options), _run_dill, obj, **options)
    except (XPoolError, MemoryError) as second:
        diagnose.locate(second, obj)
        raise
    except Exception as second:
        if by_handler(second):
            raise
        without = isinstance(second, ImportError) and second.name == "dill"
        # A TypeError of the C pickler, or an object's own error, is more precise than dill's.
        if not (without or type(error) is TypeError or diagnose.foreign_frame(error)):
            error = second
    # Raised outside of the handler, so that an object's own exception keeps its context.
    raise diagnose.refusal(obj, error, trial, no_dill=without)


_IN_MEMORY = (io.BytesIO, io.StringIO)
_BUILT_IN = _ATOMS | {complex, bytearray, tuple, list, set, frozenset}


@lru_cache(None)
def _dill_pickler() -> Any:
    """Return the class of dill's picklers that first call the reducers of xpool.

    It gets all options as arguments, so it neither uses nor changes dill's global settings.

    Raises:
        ImportError: dill is not installed.
    """
    dill = import_module("dill")
    capsule = type(import_module("datetime").datetime_CAPI)  # the type has no public name

    class DillPickler(reducers.Context, dill.Pickler):  # type: ignore[misc, name-defined]
        def __init__(self, file: Any, recurse: bool, callback: Any) -> None:
            super().__init__(
                file, 5, buffer_callback=callback, byref=False, fmode=0, recurse=recurse
            )
            self.names: set[tuple[str, str]] = set()
            self.spaces: dict[int, Any] = {}

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind in _BUILT_IN:
                return NotImplemented
            if kind is dict:
                # For the globals of __main__, dill would write a name that only dill can load.
                return reducers.script.pickled_namespace(obj)
            name = None if self.group is None else self.group.named.get(id(obj))
            answer = reducer_override(self, obj) if name is None else reducers.by_place(*name)
            if answer is not NotImplemented or isinstance(obj, type):
                return answer
            # dill would pickle the address of a capsule, and the path of a file to open it again.
            if kind is capsule or (issubclass(kind, io.IOBase) and kind not in _IN_MEMORY):
                raise TypeError(f"cannot pickle {kind.__name__!r} object")
            if kind.__module__.partition(".")[0] == "numpy":
                # dill's own reducers would copy arrays into the pickle.
                return obj.__reduce_ex__(5)
            return NotImplemented

    return DillPickler


def _run_dill(obj: Any, layout: Layout, **options: Any) -> Any:
    file, buffers, shared = io.BytesIO(), list[PickleBuffer](), dict[int, Block]()
    place = partial(_place, layout.out_of_band, buffers, shared)
    slow = _dill_pickler()(file, options.get("recurse", False), place)
    vars(slow).update(options, layout=layout, buffers=buffers, shared=shared)
    group = options.get("group")
    if group is not None and group.objects is not None:
        slow.persistent_id = group.objects.append  # as in `_GroupPickler`
    _dumped(slow, obj)
    slow.chunks = [file.getvalue()]
    return slow


def fails(obj: Any, in_group: bool = False) -> BaseException | None:
    """Return the error if neither pickler can pickle an object, else None.

    ``in_group``: as a global of the program, in which locks can be sent.
    """
    options = {"group": reducers.Group({}, {})} if in_group else {}
    try:
        _run_fast(obj, _PLAIN, **options)
    except Exception as error:
        if by_handler(error):
            raise
        try:
            _run_dill(obj, _PLAIN, **options)
        except Exception as second:
            if by_handler(second):
                raise
            return error if type(error) is TypeError else second
    return None


def _message(
    result: Any, layout: Layout, home: bool, told: frozenset[Key] = frozenset()
) -> bytes | memoryview:
    chunks, buffers = result.chunks, result.buffers
    book = layout.book or reducers.script.anyone
    preface = None if home else book.preface(result, layout, told)
    if preface is not None:
        chunks = [preface[0], chunks[0][2:], *chunks[1:]]  # without the opcode PROTO
        buffers = [*preface[1], *buffers]
    if buffers or (layout.lessor is not None and sum(map(len, chunks)) >= INLINE_BELOW):
        return frame.pack(chunks, buffers, layout, result.shared)
    return b"".join(chunks)


def encode_alone(obj: Any) -> tuple[bytes, set[Key]]:
    """Pickle an object for any process, as a message without blocks.

    Returns the pickle, and the names of the program's globals that it uses.  The pickle does not
    contain these globals.
    """
    result = _pickle(obj, _COPY)
    if result.buffers:
        return bytes(result.message(_COPY)), result.names
    return b"".join(result.chunks), result.names


def write_blob(obj: Any, recurse: bool, blob: reducers.Blob) -> tuple[bytes, set[Key]]:
    """Pickle a class's definition or a mark.  Return it with the names of the globals it uses."""
    # A handle to a tensor on a device would stay open if no process received it.
    layout = _INLINE if blob.is_mark else _PLAIN
    result = _pickle(obj, layout, recurse=recurse, blob=blob)
    return b"".join(result.chunks), result.names


def description() -> reducers.Context:
    """Return the state of a pickler for reducers whose results are not written."""
    return _FastPickler(_PLAIN, blob=reducers.Blob(), follow=False)


def write_global(value: Any) -> Pickled:
    return _pickle(value, _INLINE)


def write_group(value: Any, group: reducers.Group, out_of_band: bool) -> Pickled:
    """Pickle globals.  With ``out_of_band``, large buffers are not copied into the pickle."""
    return _pickle(value, _COPY if out_of_band else _INLINE, group=group)
