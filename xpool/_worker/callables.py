"""Wrappers of the caller's function.  Tasks pay only for the features that they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import length_hint
from types import FrameType
from typing import TYPE_CHECKING, Any

from xpool._python.item_notes import note_item, plain
from xpool._worker.seeds import seeded
from xpool._worker.worker_context import current_worker

if TYPE_CHECKING:
    from xpool._wire.outbox import Outbox


def one(func: Callable[[Any], Any], item: Any) -> Any:
    """Run a task that is one item of `map`."""
    try:
        return func(item)
    except Exception as exc:
        note_item(exc, _value(item))
        _advise_starmap(exc, item)
        raise


def each(func: Callable[[Any], Any], chunk: Sequence[Any]) -> list[Any]:
    """Run a task that is a chunk of `map`."""
    items = iter(chunk)
    try:
        # `list(map(...))` would end without an error if func raises StopIteration.
        return [func(x) for x in items]
    except Exception as exc:
        _advise_starmap(exc, _note(exc, chunk, items))
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
        _advise(exc, _note(exc, chunk, items))
        raise


def _note(exc: Exception, chunk: Sequence[Any], rest: Any) -> Any:
    """Note which item of a chunk has raised: the last item taken from the chunk; return it."""
    place = len(chunk) - length_hint(rest) - 1
    note_item(exc, _value(chunk[place]), place)
    return chunk[place]


def _advise(exc: Exception, args: Any) -> None:
    """Note how to call a function for items that `starmap` cannot unpack."""
    if type(exc) is TypeError and not hasattr(args, "__iter__"):
        exc.__dict__.setdefault("__notes__", []).append(
            "starmap calls func(*item). For items that are no tuples of arguments, use map."
        )


def _value(item: Any) -> Any:
    while type(item) is Item:
        item = item.value
    return item


def item_of(frame: FrameType | None) -> str:
    """Return a short text for the item of a map that a frame works on; "": it works on none.

    A signal handler calls this, so it runs no code of the program.
    """
    while frame is not None:
        code = frame.f_code
        if code is one.__code__:
            return plain(_value(frame.f_locals["item"]))
        if code is star.__code__:
            return plain(frame.f_locals["args"])
        if code in (each.__code__, star_each.__code__) and "items" in frame.f_locals:
            chunk = frame.f_locals["chunk"]
            place = len(chunk) - length_hint(frame.f_locals["items"]) - 1
            return f"{place + 1} of {len(chunk)}: {plain(_value(chunk[max(0, place)]))}"
        frame = frame.f_back
    return ""


def applied(
    func: Callable[..., Any], starred: bool, chunked: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function of a map's tasks, and its arguments before the item or chunk."""
    if chunked:
        return star_each if starred else each, (func,)
    return star if starred else one, (func,)


def with_context(
    context: Any, func: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a task's function and arguments such that the caller's function gets the context."""
    if func in (one, each, star, star_each):
        # The caller's function is the first argument.
        return func, (partial(args[0], context), *args[1:])
    return func, (context, *args)


class Item:
    """An item of a map with ``seed=`` or ``output="files"``, together with its number."""

    __slots__ = ("number", "value")

    def __init__(self, number: int, value: Any) -> None:
        self.number, self.value = number, value


class Seeded:
    """Seeds the random generators by the item's number before it calls a function.

    Afterwards it restores the generators to their state before the item.
    """

    __slots__ = ("_func", "_seed", "_starred")

    def __init__(self, func: Callable[..., Any], seed: int, starred: bool) -> None:
        self._func, self._seed, self._starred = func, seed, starred

    def __call__(self, *args: Any) -> Any:
        *prefix, item = args
        with seeded(f"{self._seed}:{item.number}".encode()):
            if self._starred:
                return self._func(*prefix, *item.value)
            return self._func(*prefix, item.value)


class InCall:
    """A function of `run_all`: its messages to and from peers belong to that call."""

    def __init__(self, func: Callable[..., Any], number: int) -> None:
        self._func, self._number = func, number

    def __call__(self, *args: Any) -> Any:
        peers = current_worker().peers
        # Without an arena the worker has no peers, so it has no messages.
        if peers is None:
            return self._func(*args)
        with peers.call(self._number):
            return self._func(*args)


def note_context(exc: BaseException) -> None:
    """Add to an exception that the function was called with a context."""
    if _is_of_the_call(exc):
        exc.__dict__.setdefault("__notes__", []).append(
            "A worker of this pool has a context: it calls func(context, *args). Give the function "
            "a first parameter for it."
        )


def _advise_starmap(exc: BaseException, item: Any) -> None:
    """Add to an exception that another verb unpacks tuples."""
    if type(_value(item)) is tuple and _is_of_the_call(exc) and "missing" in str(exc):
        exc.__dict__.setdefault("__notes__", []).append(
            "The item was passed as one argument; starmap passes the parts of a tuple."
        )


def _is_of_the_call(exc: BaseException) -> bool:
    """Say whether the function could not be called with its arguments."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return type(exc) is TypeError and where.startswith("xpool._worker.")


class Retried:
    """A function whose tasks are tried again when it raises one of the given exceptions.

    The caller makes it and sends it in place of the function, so the exception classes travel too.
    """

    __slots__ = ("func", "on")

    def __init__(self, func: Callable[..., Any], on: tuple[type[BaseException], ...]) -> None:
        self.func, self.on = func, on

    def __call__(self, *args: Any, **kwds: Any) -> Any:
        return self.func(*args, **kwds)

    @classmethod
    def around(cls, func: Any, wrap: Callable[[Any], Any]) -> Any:
        """Wrap a function; a `Retried` stays outermost, where the worker looks for it."""
        return cls(wrap(func.func), func.on) if type(func) is cls else wrap(func)


class Ticking:
    """Restarts the clock at each call of a function: it times each item of a chunk."""

    __slots__ = ("_box", "_func")

    def __init__(self, func: Callable[..., Any], box: Outbox) -> None:
        self._func, self._box = func, box

    def __call__(self, *args: Any) -> Any:
        self._box.tick()
        return self._func(*args)
