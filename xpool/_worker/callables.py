"""How a task calls the caller's function.  Tasks pay only for the features that they use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, partial
from operator import length_hint
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from xpool._python.failures import note_item, plain, short
from xpool._python.interrupt import frames_of
from xpool._worker.worker_context import current_worker
from xpool.errors import OptionError


class TaskFunction:
    """The caller's function, with what a worker does around its calls: the fields.

    A field that is not given has the value of the class, and is not pickled.  A function that needs
    no fields is sent as it is.

    Attributes:
        retry_on: after these exceptions, the worker reports that the task may run again.
        numbered: the argument is an item with its number, ``(number, item)``.
        starred: a numbered item holds the arguments of a call.
        tick: restarts the clock that times each item of a chunk.
        scope: the number of the call of `run_all` to which messages to and from peers belong.
        file: the path of the file that gets the output, and the format of the end of its name.
        group: makes the context in which all members of a group make this call.
        above_bar: the program's terminal shows the progress bar of this job.
        seed: from it and the item's number, the random generators are seeded for the call.
        states: the program's state that came with the function.  Later messages may have changed
            the worker's state, if the task runs again or was taken back from another worker.
    """

    retry_on: tuple[type[BaseException], ...] = ()
    numbered = starred = above_bar = False
    tick: Callable[[], object] | None = None
    scope: int | None = None
    file: tuple[str, str] | None = None
    group: Callable[[], AbstractContextManager[None]] | None = None
    seed: int | None = None
    states: Sequence[tuple[bytes, tuple[Any, ...]]] = ()

    def __init__(self, func: Callable[..., Any], **fields: Any) -> None:
        self.func = func
        vars(self).update(fields)

    def with_fields(self, **fields: Any) -> TaskFunction:
        """Return a copy with these fields, too."""
        return TaskFunction(**{k: v for k, v in vars(self).items() if k != "_direct"} | fields)

    @property
    def called(self) -> Callable[..., Any]:
        """What a task calls: this, or a faster function if few fields concern single calls."""
        direct = self._direct
        return self if direct is None else direct

    @cached_property
    def _direct(self) -> Callable[..., Any] | None:  # not `self`, which a cycle would keep alive
        if not _AROUND.isdisjoint(vars(self)):
            return None
        func, tick = self.func, self.tick
        if tick is None:
            return func

        def ticking(*args: Any) -> Any:
            tick()
            return func(*args)

        return ticking

    def __call__(self, *args: Any, **kwds: Any) -> Any:
        if self.tick is not None:
            self.tick()
        above_bar, output_to, seeded = _contexts()
        number, end, peers = None, "", None
        if self.numbered:
            ((number, item),) = args
            args = (*item,) if self.starred else (item,)
        if self.scope is not None:
            peers = current_worker().peers  # None without an arena: there are no messages
        if self.file is not None:
            end = self.file[1].format(number=number, worker=current_worker().index)
        with (
            _NOTHING if peers is None else peers.call(self.scope),
            _NOTHING if self.file is None else output_to(f"{self.file[0]}{end}.txt"),
            _NOTHING if self.group is None else self.group(),
            above_bar() if self.above_bar else _NOTHING,
            _NOTHING if self.seed is None else seeded(f"{self.seed}:{number}".encode()),
        ):
            return self.func(*args, **kwds)


_NOTHING = nullcontext()


@cache
def _contexts() -> tuple[Any, Any, Any]:
    """Return three functions for calls.  They are imported here, in a worker: the program needs
    none.
    """
    from xpool._worker import seeds, task_output

    return task_output.above_bar, task_output.output_to, seeds.seeded


_AROUND = frozenset({"scope", "file", "group", "above_bar", "seed"})


def task_function(func: Callable[..., Any], **fields: Any) -> TaskFunction:
    """Return a `TaskFunction` with these fields, and with the fields that ``func`` has already."""
    if type(func) is TaskFunction:
        return func.with_fields(**fields)
    return TaskFunction(func, **fields)


def one(func: Callable[[Any], Any], item: Any) -> Any:
    """Run a task that is one item of `map`."""
    try:
        return func(item)
    except Exception as exc:
        note_item(exc, _value(func, item))
        _advise_starmap(exc, _value(func, item))
        raise


def each(func: Callable[[Any], Any], chunk: Sequence[Any]) -> list[Any]:
    """Run a task that is a chunk of `map`."""
    items = iter(chunk)
    try:
        # `list(map(...))` would end without an error if func raises StopIteration.
        return [func(x) for x in items]
    except Exception as exc:
        _advise_starmap(exc, _note(exc, func, chunk, items))
        raise


def star(func: Callable[..., Any], args: Any) -> Any:
    """Run a task that is one item of `starmap`."""
    try:
        return func(*args)
    except Exception as exc:
        note_item(exc, args)
        _advise(exc, args)
        raise


def star_each(func: Callable[..., Any], chunk: Sequence[Any]) -> list[Any]:
    """Run a task that is a chunk of `starmap`."""
    items = iter(chunk)
    try:
        # `itertools.starmap` is 10 ns an item faster, but drops a StopIteration with its value.
        return [func(*args) for args in items]
    except Exception as exc:
        _advise(exc, _note(exc, func, chunk, items))
        raise


OF_MAPS = one, star, each, star_each
"""What the tasks of maps call: with the caller's function, and an item or a chunk.

The place here is the *mode* of a map: 1 if an item has the arguments of a call, plus 2 for chunks.
"""


def _note(exc: Exception, func: Any, chunk: Sequence[Any], rest: Any) -> Any:
    """Note which item of a chunk has raised: the last item taken from the chunk; return it."""
    place = len(chunk) - length_hint(rest) - 1
    item = _value(func, chunk[place])
    note_item(exc, item, place)
    return item


def _advise(exc: Exception, args: Any) -> None:
    """Note how to call a function for items that `starmap` cannot unpack."""
    if type(exc) is TypeError and not hasattr(args, "__iter__"):
        exc.__dict__.setdefault("__notes__", []).append(
            "starmap calls func(*item). For items that are no tuples of arguments, use map."
        )


def _value(func: Any, item: Any) -> Any:
    """Return an item without its number."""
    return item[1] if type(func) is TaskFunction and func.numbered else item


def nothing(*_: object) -> None:
    """Do nothing: a task of this function has an effect by its arrival."""


class Ask:
    """The item of a task that asks a `Yielding` for a value.

    Attributes:
        number: of the item of the map.
        place: the number of the value, from 0 on; `NEXT`, or `CLOSE` to stop the generator.
        item: the item; None if ``place`` is `NEXT`.  In the worker, that of the generator.
        is_packed: the item is pickled.
    """

    __slots__ = ("is_packed", "item", "number", "place")

    def __init__(self, number: int, place: int, item: Any = None, is_packed: bool = False) -> None:
        self.number, self.place, self.item, self.is_packed = number, place, item, is_packed

    def __reduce__(self) -> Any:
        return Ask, (self.number, self.place, self.item, self.is_packed)

    def __repr__(self) -> str:
        # Errors and reports show it in place of the item.
        return f"{short(self.item)}, after {values(self.place)}"


NEXT, CLOSE = -1, -2


def values(n: int) -> str:
    return f"{n} value{'s'[: n != 1]}"


class _Generator:
    """A generator that this worker has begun; it is closed when nothing refers to this object."""

    __slots__ = ("given", "item", "iterator")

    def __init__(self, iterator: Iterator[Any], item: Any) -> None:
        self.iterator, self.item = iterator, item
        self.given = 0  # number of values that the generator has given

    def __del__(self) -> None:
        # Without a call, a generator in a reference cycle would run its `finally` much later.
        iterator = getattr(self, "iterator", None)  # None: the task was stopped in `__init__`
        if isinstance(iterator, GeneratorType):
            iterator.close()


class Yielding:
    """The function of an `imap` with ``yields=True``.  A call gives one value of a generator.

    A generator stays in its worker between two calls.  Two marks, which equal no other value, are
    the answers "it has ended" and "this worker does not have it".
    """

    def __init__(self, func: Callable[..., Any], key: bytes) -> None:
        self.func, self.key = func, key
        self.ended, self.missing = b"ended " + key, b"missing " + key
        self._begun: dict[int, _Generator] = {}  # by the number of the item
        self._closed = False

    def __reduce__(self) -> Any:
        return Yielding, (self.func, self.key)

    def __call__(self, *args: Any) -> Any:
        *before, ask = args
        # Taken out for the call: a generator that raises, or is stopped, has ended.
        one = self._begun.pop(ask.number, None)
        if ask.place == CLOSE:
            return self.ended
        if ask.place >= 0 and (one is None or one.given != ask.place):
            one = None  # closes the generator of an earlier try
            one = self._begin(before, ask)
        if one is None:
            return self.missing
        ask.item, ask.place = one.item, one.given
        try:
            value = next(one.iterator)
        except StopIteration:
            return self.ended
        one.given += 1
        self._begun[ask.number] = one
        if self._closed:  # in another thread, during this call
            self._begun.clear()
        return value

    def _begin(self, before: list[Any], ask: Ask) -> _Generator:
        """Call the function, and skip the values that an earlier try has given."""
        if ask.is_packed:
            from xpool.pickle import decode  # the program, which imports this module, has it late

            ask.item, ask.is_packed = decode(ask.item), False
        made = self.func(*before, ask.item)
        if not hasattr(made, "__iter__"):
            raise OptionError(
                "yields=True is for a function that returns a generator or another iterable, and "
                f"this one returned {short(made)}; leave yields= out"
            )
        one = _Generator(iter(made), ask.item)
        while one.given < ask.place and next(one.iterator, self) is not self:
            one.given += 1
        return one

    def close(self) -> None:
        """Close all generators, also those that a thread runs now, at their next value."""
        self._closed = True
        self._begun.clear()


def item_of(frame: FrameType | None) -> str:
    """Return a short text for the item of a map that a frame works on; "": it works on none.

    A signal handler calls this, so it runs no code of the program.
    """
    while frame is not None:
        code = frame.f_code
        if code is one.__code__:
            item = _value(frame.f_locals["func"], frame.f_locals["item"])
            return plain(item.item if type(item) is Ask else item)
        if code is star.__code__:
            return plain(frame.f_locals["args"])
        if code in (each.__code__, star_each.__code__) and "items" in frame.f_locals:
            chunk = frame.f_locals["chunk"]
            place = len(chunk) - length_hint(frame.f_locals["items"]) - 1
            text = plain(_value(frame.f_locals["func"], chunk[max(0, place)]))
            return f"{place + 1} of {len(chunk)}: {text}"
        frame = frame.f_back
    return ""


def has_state(func: Any) -> bool:
    """Whether a call may change what a function consists of: the object of a method, for example.

    Variables of enclosing functions do not count: like globals, they stay as a task has set them.
    """
    kind = type(func)
    if kind is TaskFunction:
        return has_state(func.func)
    if kind is partial:
        return any(map(has_state, (func.func, *func.args, *func.keywords.values())))
    if kind in (MethodType, BuiltinFunctionType):
        return has_state(func.__self__)
    return not (issubclass(kind, type) or kind in _WITHOUT_STATE or _is_global(func))


def _is_global(func: Any) -> bool:
    """Whether unpickling finds a function by its name, and so always the same (`numpy.sqrt`)."""
    get = object.__getattribute__  # a class may have a `__getattr__` that answers all names
    try:
        module, name = get(func, "__module__"), get(func, "__name__")
    except AttributeError:
        return False
    return getattr(sys.modules.get(str(module)), str(name), None) is func


_WITHOUT_STATE = frozenset(
    {FunctionType, ModuleType, MethodDescriptorType, Yielding}
    | {int, float, complex, bool, str, bytes, type(None)}
)


def bound(func: Callable[..., Any], context: Any) -> Callable[..., Any]:
    """Return the caller's function such that it gets the context."""
    if type(func) is TaskFunction:
        return func.with_fields(func=partial(func.func, context))
    return partial(func, context)


def with_context(
    context: Any, func: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a task's function and arguments such that the caller's function gets the context."""
    if any(func is of_map for of_map in OF_MAPS):
        # The caller's function is the first argument.
        return func, (bound(args[0], context), *args[1:])
    return func, (context, *args)


def note_context(exc: BaseException) -> None:
    """Add to an exception that the function was called with a context."""
    if _is_of_the_call(exc):
        exc.__dict__.setdefault("__notes__", []).append(
            "A worker of this pool has a context: it calls func(context, *args). Give the function "
            "a first parameter for it."
        )


def _advise_starmap(exc: BaseException, item: Any) -> None:
    """Add to an exception that another verb unpacks tuples."""
    if type(item) is tuple and _is_of_the_call(exc) and "missing" in str(exc):
        exc.__dict__.setdefault("__notes__", []).append(
            "The item was passed as one argument; starmap passes the parts of a tuple."
        )


def _is_of_the_call(exc: BaseException) -> bool:
    """Say whether the function could not be called with its arguments."""
    last = [*frames_of(exc)][-1:]
    where = last[0].f_globals.get("__name__", "") if last else ""
    return type(exc) is TypeError and where.startswith("xpool._worker.")
