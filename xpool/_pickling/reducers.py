"""The table of reducers, and the attributes of a pickler that they use.

Both picklers (C and dill's) look for a reducer first.  It returns the same as a
``__reduce__`` method, or `NotImplemented` to leave the object to the pickler.

If an object is pickled by value and may be part of a cycle, it is rebuilt in two steps: first an
empty object is made, which the pickler memoizes, then a setter fills it.  So functions that call
each other, and classes whose methods use ``super()``, need no special case.
"""

from __future__ import annotations

import copyreg
import pickle
import struct
import sys
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from pickle import PickleBuffer
from types import CodeType, FunctionType
from typing import Any

from xpool._memory.holds import Block
from xpool._pickling import HEAP_TYPE, Key
from xpool._pickling.frame import Layout
from xpool._python import at_fork
from xpool._python import hidden as registered

NEW: Any = copyreg.__newobj__  # type: ignore[attr-defined]
"""Reducers return it to have ``cls.__new__(cls, *args)`` called."""


class Blob:
    """The state of a pickler that writes a class definition or, if ``is_mark``, a mark of it.

    A mark is only compared.  It has no code and no other by-value classes, so it is made fast.
    """

    def __init__(self, is_mark: bool = False) -> None:
        self.is_mark = is_mark
        self.codes: list[CodeType] = []  # code objects that a mark has left out
        self.versions: dict[Any, int] = {}  # versions of the classes written, by `ClassEntry`
        self.open: list[Any] = []  # functions that may use globals which they do not name


class Refused(TypeError):
    """A reducer has refused an object that no pickler can pickle.

    Attributes:
        culprit: the object.
    """

    def __init__(self, text: str, culprit: Any = None) -> None:
        super().__init__(text)
        self.culprit = culprit


class Group:
    """The state of a pickler that writes globals of the program.

    Args:
        own: by id, the globals among them; a random generator is the receiver's own there.
        named: by id, objects that are written by their names: the arguments of `of_module`.
        objects: gets all objects that are written; None: they are not wanted.
        maps: whether the receiver is on this machine.  Then an array in a file is written by the
            name of the file, and the receiver maps the file, too.
        checked: by id, classes whose definitions were found unchanged a moment ago, and these.
    """

    def __init__(
        self,
        own: dict[int, Key],
        named: dict[int, tuple[Any, ...]],
        objects: list[Any] | None = None,
        maps: bool = False,
        checked: dict[int, tuple[type, Any]] | None = None,
    ) -> None:
        self.own, self.named, self.objects, self.maps = own, named, objects, maps
        self.checked: dict[int, tuple[type, Any]] = {} if checked is None else checked
        self.mapped: list[Any] = []  # arrays that are written by the names of their files
        self.locks: list[Any] = []  # locks that the receiver replaces by new ones
        # By id, classes, and whether they have slots; None: `hashed` leaves their objects alone.
        self.hashed: dict[int, bool | None] = {}


class Context:
    """The state of one run of a pickler that the reducers use: the base of both picklers."""

    recurse = False  # whether functions are pickled with copies of the globals that they use
    blob: Blob | None = None  # None, unless a class definition is pickled
    group: Group | None = None  # None, unless globals of the program are pickled
    names: set[Key]  # globals of the program that the object uses
    follow = True  # whether `names` also gets those of objects that are pickled by name
    home = False  # whether the receiver is the program, and this process its worker
    spaces: dict[int, Any]  # globals that belong to no module, by id; at 0, places of objects
    tensors: Any = None  # the state of the reducers of tensors and arrays in this run
    layout: Layout
    shared: dict[int, Block]  # the block in which a PickleBuffer lies, by the buffer's id


def is_message(pickler: Context) -> bool:
    """Whether arguments or results are pickled, and not globals or definitions of the program."""
    return pickler.group is None and not pickler.blob


def in_place(pickler: Context, block: Block) -> PickleBuffer:
    """Return a block as a buffer that a message names and does not copy."""
    if block.number in block.arena.received:
        block.arena.share(block)
    buffer = PickleBuffer(block)  # type: ignore[arg-type]
    # The `id` stays unique, because the pickler keeps the buffer in a list.
    pickler.shared[id(buffer)] = block
    return buffer


Reducer = Callable[[Any, Any], Any]


script: Any
"""Answers the picklers' questions about the program (`by_value.sent`)."""

everyone: set[Key] = set()
"""Keys of what every message of a pool brings, also one that uses nothing of the program."""

watches: dict[int, Callable[[Any], object]] = {}
"""By thread: a function that is called with each object that a pickler reduces there."""

own: Reducer | None = None
"""The reducer of objects of classes with a ``__reduce__``, ``__new__`` or ``__getattr__`` of their
own (`by_value.own_objects`)."""

hashed: Reducer
"""Reduces an object in a global if its class has a ``__hash__`` (`by_value.own_objects`)."""

PARAMETRIZE = "torch.nn.utils.parametrize"
"""The module that makes classes of modules with parametrizations, which refuse to be pickled."""

REDUCERS: dict[type, Reducer] = {}

# By module: the function that registers reducers when an object of the module is first pickled.
LAZY: dict[str, Callable[[], object]] = {}


def lazily(family: str, *modules: str) -> None:
    """Import ``family``, a module of reducers, when an object of ``modules`` is first pickled."""

    for name in modules:
        LAZY.setdefault(name, partial(import_module, family))


# Reducers that apply to subclasses, too, unless a nearer base has one.
FOR_SUBCLASSES: dict[type, Reducer] = {}


def set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    """Restore the attributes of an object, even if its class has ``__setstate__``."""
    obj.__dict__.update(attributes)


def of_module(module: str, name: str, kind: type | None = None) -> Any:
    """Return a global of a module.

    ``kind``: the class of an object without a state.  The program may have replaced the object that
    the module's import has made.  So if the receiver's object is of another class, a new one of
    this class is made.
    """
    if kind is None:
        return getattr(import_module(module), name)
    found = getattr(import_module(module), name, None)
    return found if type(found) is kind else object.__new__(kind)


def by_place(module: str, name: str, kind: type | None = None) -> Any:
    """Reduce a global to its name.  With ``kind``, the receiver's object loses its attributes: the
    program's has none, but a task or an earlier message may have set some."""
    if kind is None:
        return of_module, (module, name)
    return of_module, (module, name, kind), (), None, None, _clear


def _clear(obj: Any, _: object) -> None:
    getattr(obj, "__dict__", {}).clear()


class Instead:
    """Takes the place of an object whose reduction is known."""

    def __init__(self, *reduction: Any) -> None:
        self._reduction = reduction

    def __reduce__(self) -> Any:
        return self._reduction


def register(*types: type) -> Callable[[Reducer], Reducer]:
    """Make a function the reducer of these exact types."""

    def add(reducer: Reducer) -> Reducer:
        for one in types:
            REDUCERS[one] = reducer
        return reducer

    return add


# Held while a module's reducers are registered: a thread that needs one of them waits.  Also held
# during a fork, because the child would wait for ever for an import of another thread.
_finding = threading.RLock()


CYTHON: Any = "cython_function_or_method"
"""The key of the reducer of functions in Cython, and the name of their type."""


def find(kind: type) -> Reducer | None:
    """Return the reducer of a type that is not in `REDUCERS` itself; None: the pickler's own."""
    while True:
        # Another thread, or `load` in the last turn of this loop, may have registered it.
        # Modules in Cython share a type that no module names.
        reducer = REDUCERS.get(CYTHON if kind.__name__ == CYTHON else kind)
        if reducer is not None:
            return reducer
        answers = False  # whether objects answer other names, also `__setstate__`
        for base in kind.__mro__:
            answers = answers or "__getattr__" in base.__dict__
            reducer = FOR_SUBCLASSES.get(base)
            if reducer is not None:
                return reducer
            # The entry goes when all reducers of the module are registered.
            if base.__module__ in LAZY:
                _load(base.__module__)
                break
        else:
            has_own = kind not in copyreg.dispatch_table and (
                (kind.__flags__ & HEAP_TYPE and (_reduces(kind) or _is_bare(kind)))
                or (type(kind.__new__) is FunctionType and not _is_named_tuple(kind))
                or issubclass(kind, list)
                or kind.__module__ == PARAMETRIZE
                or (answers and not hasattr(kind, "__setstate__"))
            )
            return registered.of_multiprocessing(kind) or (own if has_own else None)


def _load(module: str) -> None:
    """Register the reducers of a module, unless another thread has done so."""
    with _finding:
        load = LAZY.get(module)
        if load is not None:
            load()
            if LAZY.get(module) is load:  # `load` may have replaced the entry
                del LAZY[module]


def _reduces(kind: Any) -> bool:
    """Whether a class, or a type from which it is derived, has a way of its own to be pickled."""
    usual = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
    return not usual


def _is_bare(kind: Any) -> bool:
    """Whether its objects may be without attributes, as `UNSET = Unset()`."""
    return kind.__init__ is object.__init__ and not kind.__itemsize__


def _is_named_tuple(kind: type) -> bool:
    """Whether the class that defines ``__new__`` also tells `pickle` the arguments of it."""
    if issubclass(kind, tuple):
        for one in kind.__mro__:
            if "__new__" in one.__dict__:
                return "__getnewargs__" in one.__dict__
    return False


# The lambdas look up `_finding` at each fork, because `renew` replaces it in a child.
at_fork.at_fork(before=lambda: _finding.acquire(), in_parent=lambda: _finding.release())
at_fork.renew(globals(), _finding=threading.RLock)


# -- one small tensor or array, without a pickler --------------------------------------------------
#
# In many pools most messages are of this kind, and preparing a pickler takes longer than writing a
# few opcodes: a function, a buffer, and the function's other arguments.  The result is an ordinary
# pickle, which any unpickler can load.
#
# In messages between processes of one program, a number in `copyreg`'s table of extensions replaces
# the function's name, because looking up a name would be a third of the receiver's work.  A pickle
# of `dumps` contains the name: the process that loads it may not have imported this package.

SHORT: dict[type, Callable[[Any, bool], bytes | None]] = {}
"""The functions that pickle objects, by type.  If the second argument is true, the pickle contains
a number and not a name.  They return None for an object that is large or has more than elements."""

_NUMBERS = 0x78706F00  # the first number in `copyreg`'s table; other programs use small numbers

_FUNCTIONS = (
    ("xpool._pickling.tensors.dense", "_tensor"),
    ("xpool._pickling.tensors.arrays", "_array"),
)

# The receiver of a message with such a number imports the module, if it has not done so before.
for _number, (_module, _name) in enumerate(_FUNCTIONS, _NUMBERS):
    copyreg.add_extension(_module, f"extension{_name}", _number)


class Head:
    """The opcodes that precede the length of the buffer, for one of these functions."""

    __slots__ = ("by_name", "by_number")

    def __init__(self, function: Callable[..., Any]) -> None:
        module, name = function.__module__, function.__name__
        # The opcodes (Lib/pickle.py) are PROTO 5, the two names, STACK_GLOBAL and BYTEARRAY8.
        self.by_name = b"\x80\x05" + _text(module) + _text(name) + b"\x93\x96"
        # The extension has a second name, so that other picklers still write the first one.
        setattr(sys.modules[module], f"extension{name}", function)
        number = _NUMBERS + _FUNCTIONS.index((module, name))
        # The opcodes are PROTO 5, EXT4 and BYTEARRAY8.
        self.by_number = b"\x80\x05\x84" + struct.pack("<I", number) + b"\x96"

    def __call__(self, size: int, by_number: bool) -> bytes:
        """Return the opcodes that precede the ``size`` bytes of the buffer."""
        return (self.by_number if by_number else self.by_name) + _length(size)


_length = struct.Struct("<Q").pack


@lru_cache(4096)
def tail(*args: Any) -> bytes:
    """Return the opcodes after the buffer: one or two more (hashable) arguments, and the call."""
    # A pickle of protocol 2 begins with two bytes (PROTO) and ends with one (STOP).
    body = b"".join(pickle.dumps(one, 2)[2:-1] for one in args)
    # TUPLE2 or TUPLE3 (the tuple contains the buffer), REDUCE and STOP.
    return body + (b"\x86R." if len(args) == 1 else b"\x87R.")


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()  # SHORT_BINUNICODE: at most 255 bytes
