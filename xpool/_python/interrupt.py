"""Signal handlers that raise wait until the books are in order.

Python calls a signal handler in the main thread, between any two instructions.  If the handler
raises (that of Ctrl-C does, and so does every time limit made with SIGALRM) while that thread is
just writing a task to a worker, what was written and what is noted as written would differ, and a
later `get` could wait for ever.  Locks do not help.

So a function that keeps books is `shielded`: while one runs in the main thread, each Python handler
of the usual signals is replaced by a `Deferred`, which calls it only where the program may be
interrupted, or else when it next comes to such a place.  Within a shielded function these are the
functions marked `interruptible`: those that wait, and those that run code of the program's.
Outside of shielded functions every handler is where the program has put it.

What this does not cover (handlers of other signals, `RecursionError`, `PyThreadState_SetAsyncExc`)
breaks the pool, with the name of the exception: see `cut_short`.
"""

from __future__ import annotations

import functools
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from xpool._python import at_fork

__all__ = [
    "Deferred",
    "by_handler",
    "cut_short",
    "deliver",
    "interruptible",
    "keeps_clear",
    "may_raise",
    "pending",
    "shielded",
    "uninterrupted",
]

F = TypeVar("F", bound=Callable[..., Any])

# Those that may come again at once last: when theirs is in its place, all others are.
_NAMES = (
    "SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGVTALRM", "SIGALRM",
)  # fmt: skip

_SIGNALS: tuple[int, ...] = tuple(int(getattr(signal, n)) for n in _NAMES if hasattr(signal, n))

_ALARMS = (signal.SIGALRM, signal.SIGVTALRM)

# The functions in C: those of `signal` make enums of all they touch, which takes 20 times as long.
_in_c: Any = importlib.import_module("_signal")
_get_handler: Callable[[int], Any] = _in_c.getsignal
_set_handler: Callable[[int, Any], Any] = _in_c.signal

# True: handlers wait where this runs; False: they do not.  By the `id` of the code, which lives as
# long as the program: to hash the code itself takes a microsecond for each frame.
_marks: dict[int, bool] = {}

_clear: list[Any] = []  # handlers that look for themselves whether they may raise

pending: list[Deferred] = []
"""Handlers to be called at the next place where they may raise.  Look before calling `deliver`."""


class Deferred:
    """A signal handler that waits while books are kept."""

    __slots__ = ("handler", "signum")

    def __init__(self, signum: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.signum, self.handler = signum, handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        # Marked itself: signals that come faster than this can look do not pile up.
        if may_raise(frame):
            self._call(signum, frame)
        elif self not in pending:  # as the system counts signals that nobody has seen yet
            pending.append(self)

    def _call(self, signum: int, frame: FrameType | None) -> None:
        self.handler(signum, frame)

    def __repr__(self) -> str:
        return f"<xpool defers {self.handler!r}>"


_marks[id(Deferred.__call__.__code__)] = True
_marks[id(Deferred._call.__code__)] = False


class _Shield:
    """What is in place of the program's handlers.  The main thread's alone."""

    __slots__ = ("first", "found", "main", "plan")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        # The first that was put in place: looked at to know whether it still is.
        self.first: Deferred | None = None
        # Handlers as they were found last, and what is put in their places.
        self.found: list[Any] = []
        self.plan: tuple[Deferred, ...] = ()


_shield = _Shield()


def uninterrupted(func: F) -> F:
    """Mark a finalizer, for handlers that look whether they `may_raise`; costs nothing per call."""
    _marks[id(func.__code__)] = True
    return func


def shielded(func: F) -> F:
    """Make a function that no signal handler can cut short, except where it is interruptible.

    Costs 4 us in the main thread, nothing to speak of in others or within another such function.
    """

    @functools.wraps(func)
    def whole(*args: Any, **kwds: Any) -> Any:
        # Python runs signal handlers in the main thread only.
        if get_ident() != _shield.main:
            return func(*args, **kwds)
        first = _shield.first
        # Looked at in its place, where an interruptible part may have put a handler of its own.
        if first is not None and _get_handler(first.signum) is first:
            return func(*args, **kwds)  # within another
        if pending:
            _drop_stale()
        # Handlers seldom change between calls, so the plan of the last call mostly fits.
        found = [*map(_get_handler, _SIGNALS)]
        plan = _shield.plan if found == _shield.found else _make_plan(found)
        try:
            # Within the `try`: if a handler raises amid these, `_lower` takes them back.
            if plan:
                _shield.first = plan[0]
                for one in plan:
                    _set_handler(one.signum, one)
            return func(*args, **kwds)
        finally:
            try:
                if pending:
                    # What has waited while this ran.
                    _deliver_outside(sys._getframe(1))
            finally:
                try:
                    _lower(plan, first)
                finally:
                    if pending:
                        # What has come since, before the program's handlers were in their places.
                        _deliver_outside(sys._getframe(1))

    # Not what is around it: a handler that raises there finds the books as they were, or done.
    _marks[id(func.__code__)] = True
    return cast(F, whole)


def interruptible(func: F) -> F:
    """Mark a function that waits, or runs code of the program's; costs nothing per call.

    It begins with ``if pending: deliver()``.
    """
    _marks[id(func.__code__)] = False
    return func


def may_raise(frame: FrameType | None) -> bool:
    """Whether a signal handler that interrupts this frame may raise."""
    while frame is not None:
        mark = _marks.get(id(frame.f_code))
        if mark is not None:
            return not mark
        frame = frame.f_back
    return True


def keeps_clear(handler: Any) -> None:
    """Leave a handler in its place: it looks itself whether it `may_raise`."""
    _clear.append(handler)


@interruptible
def deliver(frame: FrameType | None = None) -> None:
    """Call the handlers that have waited; each may raise.  Nothing happens in other threads."""
    if get_ident() != _shield.main:
        return
    frame = frame or sys._getframe(1)
    try:
        while pending:
            one = pending[0]
            del pending[0]  # not by a call, after which another handler could cut this short
            one.handler(one.signum, frame)
    finally:
        if pending:
            # One has raised: the others are called all the same.
            deliver(frame)


def _deliver_outside(frame: FrameType) -> None:
    # The shielded function may itself have been called by one.
    if may_raise(frame):
        deliver(frame)


def _drop_stale() -> None:
    """See to what was left when handlers raised three times within a microsecond or two."""
    # An alarm is past, and has been heard of: one for the same time has raised.
    pending[:] = [
        one
        for one in pending
        if _get_handler(one.signum) is one.handler and one.signum not in _ALARMS
    ]


@uninterrupted
def _lower(plan: tuple[Deferred, ...], before: Deferred | None) -> None:
    _shield.first = before
    try:
        for one in plan:
            if _get_handler(one.signum) is one:  # else the program has put another there
                _set_handler(one.signum, one.handler)
    except BaseException:  # of one that is back in its place: now the others
        _lower(plan, before)
        raise


def _make_plan(found: list[Any]) -> tuple[Deferred, ...]:
    plan = []
    ours = False
    for signum, handler in zip(_SIGNALS, found):
        if type(handler) is Deferred:
            ours = True
            # The frame of the caller of `whole`.
            if not may_raise(sys._getframe(2)):
                continue  # of a shielded function that we are in
            handler = handler.handler  # it was left: two handlers raised within a microsecond
        if callable(handler) and not any(handler is one for one in _clear):
            plan.append(Deferred(signum, handler))
    # A plan that leaves out handlers of ours is good for this once.
    if not ours:
        _shield.found, _shield.plan = found, tuple(plan)
    return tuple(plan)


# -- exceptions --------------------------------------------------------------------------------


def by_handler(exc: BaseException) -> bool:
    """Whether a signal handler raised an exception: then it is not about what it came out of."""
    handlers = map(_get_handler, _SIGNALS)
    codes = {getattr(getattr(h, "__func__", h), "__code__", None) for h in handlers}
    for frame in _frames(exc.__traceback__):
        if frame.f_code in _CALLING or frame.f_code in codes:
            return True
        # One that is not in its place any more: it got the frame that it interrupted.
        back = frame.f_back
        for value in frame.f_locals.values():
            if back is not None and (
                value is back or (type(value) is tuple and any(one is back for one in value))
            ):
                return True
    return False


_CALLING = {Deferred._call.__code__, deliver.__code__}


def cut_short(exc: BaseException) -> bool:
    """Whether an exception came out of the midst of a shielded function, against all care."""
    marks = [_marks.get(id(frame.f_code)) for frame in _frames(exc.__traceback__)]
    # With an interruptible function among them, it came out where it may.
    return False not in marks


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


# -- forks -------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    # The thread that has forked is the main one now, and does not come back from what it was in.
    _shield.main = get_ident()
    # The signals came to the parent, which sees to them.
    pending.clear()
    for signum in _SIGNALS:
        handler = _get_handler(signum)
        if type(handler) is Deferred:
            _set_handler(signum, handler.handler)


at_fork.at_fork(in_child=_after_fork_in_child)
