"""Defers signal handlers that may raise while xpool updates its state.

Python calls a signal handler in the main thread, between any two instructions.  If the handler
raises (that of Ctrl-C does, and so does every time limit made with SIGALRM) while that thread
writes a task to a worker, the pool's record of what was written would be wrong, and a later `get`
could wait for ever.  Locks do not help.

So a function that updates such state is `shielded`: while one runs in the main thread, each Python
handler of the usual signals is replaced by a `Deferred`.  It calls the handler at once where the
handler may raise, and otherwise when the thread next reaches such a place.  Within a shielded
function, these places are the functions marked `interruptible`: they wait, or run code of the
program.  Outside shielded functions, the program's own handlers are in place.

An exception that this does not cover (a handler of another signal, `RecursionError`,
`PyThreadState_SetAsyncExc`) breaks the pool with an error that names it: see `cut_short`.
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

F = TypeVar("F", bound=Callable[..., Any])

# Signals that may arrive again at once are last: when their handler is set, all others are.
_NAMES = (
    "SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGVTALRM", "SIGALRM",
)  # fmt: skip

_SIGNALS: tuple[int, ...] = tuple(int(getattr(signal, n)) for n in _NAMES if hasattr(signal, n))

_ALARMS = (signal.SIGALRM, signal.SIGVTALRM)

# The functions in C: those of `signal` convert to enums, which takes 20 times as long.
_in_c: Any = importlib.import_module("_signal")
_get_handler: Callable[[int], Any] = _in_c.getsignal
_set_handler: Callable[[int, Any], Any] = _in_c.signal

# True: handlers wait while this function runs; False: they do not.  The keys are ids of code
# objects, which live as long as the program: hashing the code takes a microsecond for each frame.
_marks: dict[int, bool] = {}

_clear: list[Any] = []  # handlers that call `may_raise` themselves

pending: list[Deferred] = []
"""Handlers to be called at the next place where they may raise.  Check it before `deliver`."""


class Deferred:
    """Replaces a signal handler, and defers its call while a shielded function runs."""

    __slots__ = ("handler", "signum")

    def __init__(self, signum: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.signum, self.handler = signum, handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        # This function is marked too, so that signals faster than this check do not pile up.
        if may_raise(frame):
            self._call(signum, frame)
        elif self not in pending:  # once, as the system counts pending signals
            pending.append(self)

    def _call(self, signum: int, frame: FrameType | None) -> None:
        self.handler(signum, frame)

    def __repr__(self) -> str:
        return f"<xpool defers {self.handler!r}>"


_marks[id(Deferred.__call__.__code__)] = True
_marks[id(Deferred._call.__code__)] = False


class _Shield:
    """What replaces the program's handlers.  Used by the main thread only."""

    __slots__ = ("first", "found", "main", "plan")

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        # The first one that was set; a check of its signal tells whether the shield is up.
        self.first: Deferred | None = None
        # The program's handlers at the last call, and their replacements.
        self.found: list[Any] = []
        self.plan: tuple[Deferred, ...] = ()


_shield = _Shield()


def uninterrupted(func: F) -> F:
    """Mark a finalizer, in which handlers that call `may_raise` wait; costs nothing per call."""
    _marks[id(func.__code__)] = True
    return func


def shielded(func: F) -> F:
    """Defer signal handlers while a function runs, except in interruptible parts.

    Costs 4 us in the main thread, and little in other threads or within another such function.
    """

    @functools.wraps(func)
    def whole(*args: Any, **kwds: Any) -> Any:
        # Python runs signal handlers in the main thread only.
        if get_ident() != _shield.main:
            return func(*args, **kwds)
        first = _shield.first
        # Compared with the handler in place: an interruptible part may have set another.
        if first is not None and _get_handler(first.signum) is first:
            return func(*args, **kwds)  # within another shielded function
        if pending:
            _drop_stale()
        # Handlers seldom change between calls, so the plan of the last call usually fits.
        found = [*map(_get_handler, _SIGNALS)]
        plan = _shield.plan if found == _shield.found else _make_plan(found)
        try:
            # Within the `try`: if a handler raises between these, `_lower` removes them.
            if plan:
                _shield.first = plan[0]
                for one in plan:
                    _set_handler(one.signum, one)
            return func(*args, **kwds)
        finally:
            try:
                if pending:
                    # Handlers that were deferred while this ran.
                    _deliver_outside(sys._getframe(1))
            finally:
                try:
                    _lower(plan, first)
                finally:
                    if pending:
                        # Handlers deferred since, before the program's handlers were back.
                        _deliver_outside(sys._getframe(1))

    # Not `whole`: when a handler raises there, the state is that of before or after the call.
    _marks[id(func.__code__)] = True
    return cast(F, whole)


def interruptible(func: F) -> F:
    """Mark a function that waits, or runs code of the program; costs nothing per call.

    Such a function begins with ``if pending: deliver()``.
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
    """Leave a handler in its place: it calls `may_raise` itself."""
    _clear.append(handler)


@interruptible
def deliver(frame: FrameType | None = None) -> None:
    """Call the deferred handlers; each may raise.  Does nothing in other threads."""
    if get_ident() != _shield.main:
        return
    frame = frame or sys._getframe(1)
    try:
        while pending:
            one = pending[0]
            del pending[0]  # not by a call, after which another handler could raise
            one.handler(one.signum, frame)
    finally:
        if pending:
            # A handler has raised: call the others nevertheless.
            deliver(frame)


def _deliver_outside(frame: FrameType) -> None:
    # The caller of the shielded function may be shielded too.
    if may_raise(frame):
        deliver(frame)


def _drop_stale() -> None:
    """Remove handlers that stayed when others raised three times within two microseconds."""
    # An alarm has already fired.
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
            if _get_handler(one.signum) is one:  # otherwise the program has set another
                _set_handler(one.signum, one.handler)
    except BaseException:  # raised by a handler that is back in place: restore the others
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
                continue  # of a shielded function that is running
            handler = handler.handler  # it stayed when two handlers raised within a microsecond
        if callable(handler) and not any(handler is one for one in _clear):
            plan.append(Deferred(signum, handler))
    # A plan that leaves out `Deferred`s is used for this call only.
    if not ours:
        _shield.found, _shield.plan = found, tuple(plan)
    return tuple(plan)


# -- exceptions --------------------------------------------------------------------------------


def by_handler(exc: BaseException) -> bool:
    """Whether a signal handler raised the exception, which then says nothing about the task."""
    handlers = map(_get_handler, _SIGNALS)
    codes = {getattr(getattr(h, "__func__", h), "__code__", None) for h in handlers}
    for frame in _frames(exc.__traceback__):
        if frame.f_code in _CALLING or frame.f_code in codes:
            return True
        # A handler that is no longer set: one of its arguments is the frame that it interrupted.
        back = frame.f_back
        for value in frame.f_locals.values():
            if back is not None and (
                value is back or (type(value) is tuple and any(one is back for one in value))
            ):
                return True
    return False


_CALLING = {Deferred._call.__code__, deliver.__code__}


def cut_short(exc: BaseException) -> bool:
    """Whether an exception ended a shielded function outside its interruptible parts."""
    marks = [_marks.get(id(frame.f_code)) for frame in _frames(exc.__traceback__)]
    # In an interruptible function, the exception is allowed.
    return False not in marks


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


# -- forks -------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    # The forking thread is the main thread now, and never returns from the shielded function.
    _shield.main = get_ident()
    # The signals were sent to the parent, which handles them.
    pending.clear()
    for signum in _SIGNALS:
        handler = _get_handler(signum)
        if type(handler) is Deferred:
            _set_handler(signum, handler.handler)


at_fork.at_fork(in_child=_after_fork_in_child)
