"""Defers signal handlers that may raise while xpool updates its state.

Python calls a signal handler in the main thread, between any two instructions.  The handlers of
Ctrl-C and of time limits made with SIGALRM raise.  If one raises while the thread writes a task to
a worker, the pool's record is wrong, and a later `get` could wait for ever.  Locks do not help.

So a function that updates such state is `shielded`.  While one runs in the main thread, a
`Deferred` replaces each Python handler of the usual signals.  If the handler may raise at the
present place, the `Deferred` calls it at once.  If not, it is called when the thread next reaches
such a place.  Within a shielded function, these places are the functions marked `interruptible`,
which wait or run code of the program.  Outside, the program's own handlers are installed.

Three kinds of exceptions are not deferred: those of other signals' handlers, `RecursionError`, and
those by `PyThreadState_SetAsyncExc`.  They break the pool with an error that names them: see
`cut_short`.
"""

from __future__ import annotations

import _thread
import functools
import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar, cast

from xpool._python import at_fork

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Signals that may arrive repeatedly are last: their handlers are replaced first and restored last,
# so that they cannot raise while the others' are replaced or restored.
_NAMES = "SIGINT SIGTERM SIGHUP SIGUSR1 SIGUSR2 SIGCHLD SIGVTALRM SIGALRM"
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES.split())

# The functions of `signal` also convert to enums, which makes them 20 times slower.
_in_c: Any = importlib.import_module("_signal")
_get_handler: Callable[[int], Any] = _in_c.getsignal
_set_handler: Callable[[int, Any], Any] = _in_c.signal

# Whether handlers are deferred while a function runs, by the id of its code object.  The code
# objects are never freed.  To hash one would take a microsecond for each frame.
_marks: dict[int, bool] = {}

_clear: list[Any] = []  # handlers that call `may_raise` themselves

pending: list[Deferred] = []
"""The deferred handlers.  `deliver` calls them; its callers check first that this is not empty."""


class Deferred:
    """Replaces a signal handler, and defers its call while a shielded function runs."""

    __slots__ = ("handler", "signum")

    def __init__(self, signum: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.signum, self.handler = signum, handler

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        # This function is marked, too, so that fast signals do not nest without end.
        if _shield.forking is None and may_raise(frame):
            self._call(signum, frame)
        elif self not in pending:  # the system, too, keeps a pending signal only once
            pending.append(self)

    def _call(self, signum: int, frame: FrameType | None) -> None:
        self.handler(signum, frame)

    def __repr__(self) -> str:
        return f"<xpool defers {self.handler!r}>"


_marks[id(Deferred.__call__.__code__)] = True
_marks[id(Deferred._call.__code__)] = False


class _Shield:
    """The installed `Deferred`s.  Only the main thread uses it."""

    __slots__ = ("address", "forking", "found", "last", "main", "plan", "sigaction")

    def __init__(self) -> None:
        # During a fork in the main thread: the plan for it, and `last` before it.
        self.forking: tuple[tuple[Deferred, ...], Deferred | None] | None = None
        self.sigaction: Any = None  # the C library's, when it was needed
        self.address: int | None = None  # of Python's own C function for all signals
        self.main = threading.main_thread().ident
        # The one that is installed last.  While it handles its signal, a shielded function runs.
        self.last: Deferred | None = None
        # The program's handlers at the last call, and their replacements.
        self.found: list[Any] = []
        self.plan: tuple[Deferred, ...] = ()


_shield = _Shield()


def uninterrupted(func: F) -> F:
    """Mark a function in which handlers that call `may_raise` do not raise.  This costs nothing per
    call, and suits finalizers."""
    _marks[id(func.__code__)] = True
    return func


def shielded(func: F) -> F:
    """Defer signal handlers while a function runs, except in interruptible parts.

    A call costs 4 us in the main thread, and little in other threads or in another such function.
    """

    @functools.wraps(func)
    def whole(*args: Any, **kwds: Any) -> Any:
        if get_ident() != _shield.main:
            return func(*args, **kwds)  # Python runs signal handlers only in the main thread
        last = _shield.last
        # Compare with the present handler, because an interruptible part may have set another.
        if last is not None and _get_handler(last.signum) is last:
            return func(*args, **kwds)  # within another shielded function
        # Handlers seldom change between calls, so the plan of the last call usually fits.
        found = [*map(_get_handler, _SIGNALS)]
        plan = _shield.plan if found == _shield.found else _make_plan(found)
        try:
            # In the `try`, so that `_lower` removes them if a handler raises here.
            if plan:
                _shield.last = plan[0]
                for one in reversed(plan):
                    _set_handler(one.signum, one)
            return func(*args, **kwds)
        finally:
            try:
                if pending:
                    _deliver_outside(sys._getframe(1))
            finally:
                try:
                    _lower(plan, last)
                finally:
                    # More may have been deferred before `_lower` restored the program's handlers.
                    if pending:
                        _deliver_outside(sys._getframe(1))

    # `whole` needs no mark: a handler that raises there raises before or after the whole call.
    _marks[id(func.__code__)] = True
    return cast(F, whole)


def interruptible(func: F) -> F:
    """Mark a function that waits or runs code of the program.  This costs nothing per call.

    Such a function begins with ``if pending: deliver()``.
    """
    _marks[id(func.__code__)] = False
    return func


def until_interrupted(func: Callable[[], object]) -> Callable[[], None]:
    """Return a function for `atexit` that Ctrl-C ends early, and without a traceback.

    For functions that end other processes: these end with this process in any case.
    """

    def call() -> None:
        try:
            func()
        except KeyboardInterrupt:
            return

    return call


def may_raise(frame: FrameType | None) -> bool:
    """Whether a signal handler that interrupts this frame may raise."""
    if escapes is not None and frame is not None and escapes(frame):
        return False
    while frame is not None:
        mark = _marks.get(id(frame.f_code))
        if mark is not None:
            return not mark
        frame = frame.f_back
    return True


# If a handler raises in a frame of which this is true, a ``__exit__`` or `finally` of the frame is
# not run, and a lock stays taken.  None if this version of Python has no such places.
escapes: Callable[[FrameType], bool] | None = None

if sys.version_info < (3, 11):
    from opcode import opmap

    _RERAISE = opmap["RERAISE"]

    def escapes(frame: FrameType) -> bool:
        """Whether a frame has caught an exception, and has not begun to handle it."""
        at, trace = frame.f_lasti, sys.exc_info()[2]
        raised = trace is not None and trace.tb_frame is frame and trace.tb_lasti == at
        return raised or (at >= 0 and frame.f_code.co_code[at] == _RERAISE)

elif sys.version_info[:2] == (3, 14):
    from opcode import opmap  # takes almost a millisecond

    _ENTERING = opmap["LOAD_SPECIAL"], opmap["CALL"]

    def escapes(frame: FrameType) -> bool:
        """Whether a frame has just called ``__enter__`` for a `with`."""
        code, at = frame.f_code.co_code, frame.f_lasti
        return at > 1 and (code[at - 2], code[at]) == _ENTERING


def keeps_clear(handler: Any) -> None:
    """Never replace this handler, because it calls `may_raise` itself."""
    _clear.append(handler)


@interruptible
def deliver(frame: FrameType | None = None) -> None:
    """Call the deferred handlers, each of which may raise.  Do nothing in other threads."""
    if get_ident() != _shield.main:
        return
    frame = frame or sys._getframe(1)
    try:
        while pending:
            one = pending[0]
            del pending[0]  # after a call, such as `pop`, another handler could raise
            one.handler(one.signum, frame)
    finally:
        if pending:  # a handler has raised, so call the others
            deliver(frame)


@interruptible
def interruptibly(func: Callable[..., T], *args: Any) -> T:
    """Call a function that runs code of the program, in a shielded function."""
    if pending:
        deliver()
    return func(*args)


def _deliver_outside(frame: FrameType) -> None:
    # The caller of the shielded function may itself be shielded.
    if may_raise(frame):
        deliver(frame)


@uninterrupted
def _lower(plan: tuple[Deferred, ...], before: Deferred | None) -> None:
    _shield.last = before
    try:
        for one in plan:
            if _get_handler(one.signum) is not one:  # the program has set another
                continue
            _set_handler(one.signum, one.handler)
    except BaseException:  # a restored handler has raised: restore the others
        _lower(plan, before)
        raise


def _make_plan(found: list[Any]) -> tuple[Deferred, ...]:
    plan = []
    ours = False
    for signum, handler in zip(_SIGNALS, found):
        if type(handler) is Deferred:
            ours = True
            # Frame 2 is the caller of `whole`.
            if not may_raise(sys._getframe(2)):
                continue  # a running shielded function has installed it
            handler = handler.handler  # left over: two handlers have raised within a microsecond
        own = callable(handler) and not any(handler is one for one in _clear)
        if own and _is_pythons(signum, handler):
            plan.append(Deferred(signum, handler))
    # A plan with left-over or left-out `Deferred`s is used only for this call.  A program that has
    # Python as a library may set handlers of its own at any time.
    if not ours and sys.orig_argv:
        _shield.found, _shield.plan = found, tuple(plan)
    return tuple(plan)


def _is_pythons(signum: int, handler: Any) -> bool:
    """Whether Python calls the handler: C code may have set another since, as uWSGI does.

    If the program was started by Python and has not imported ctypes, it is assumed that no C code
    has done so: the import of ctypes takes 2 ms.
    """
    if sys.orig_argv and "ctypes" not in sys.modules:
        return True
    try:
        import ctypes
    except ImportError:  # this Python was built without it
        return True
    # The handler's address is the first word of `struct sigaction`, which has less than 512 bytes.
    found = (ctypes.c_void_p * 64)()
    if _shield.sigaction is None:
        _shield.sigaction = sigaction = ctypes.PyDLL(None).sigaction
        sigaction(signum, None, found)
        _set_handler(signum, handler)
        pythons = (ctypes.c_void_p * 64)()
        sigaction(signum, None, pythons)
        _shield.address = pythons[0]
        sigaction(signum, found, None)
    else:
        _shield.sigaction(signum, None, found)
    return bool(found[0] == _shield.address)


# -- exceptions --------------------------------------------------------------------------------


def pass_on(exc: BaseException) -> None:
    """Raise the exception that is being handled again if a signal handler raised it."""
    if by_handler(exc):
        raise


def by_handler(exc: BaseException) -> bool:
    """Whether a signal handler raised the exception, so that it says nothing about the task."""
    handlers = map(_get_handler, _SIGNALS)
    codes = {getattr(getattr(h, "__func__", h), "__code__", None) for h in handlers}
    frames = list(frames_of(exc))
    if any(frame.f_code in _CALLING or frame.f_code in codes for frame in frames):
        return True
    # Recognize a handler that is no longer set: an argument is the frame that it interrupted.  Not
    # in the first frame, which has caught `exc`: before Python 3.13, a frame keeps what `f_locals`
    # returns, so `exc` would be in a cycle with all frames that have called this one.
    for frame in frames[1:]:
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
    marks = [_marks.get(id(frame.f_code)) for frame in frames_of(exc)]
    return False not in marks  # False: an interruptible function, in which it may be raised


def frames_of(exc: BaseException) -> Iterator[FrameType]:
    """Yield the frames of an exception's traceback; the one that has raised comes last."""
    trace = exc.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


# -- forks -------------------------------------------------------------------------------------


def _guard(begins: bool) -> None:
    """Defer handlers during a fork: Python drops what is raised in the functions that a fork calls,
    and leaves out the rest of such a function.  A lock would stay taken."""
    if get_ident() != _shield.main:
        return
    if begins:
        last = _shield.last
        found = [*map(_get_handler, _SIGNALS)]
        # As in `shielded`: a running shielded function has deferred them already.
        within = last is not None and _get_handler(last.signum) is last
        plan = () if within else _shield.plan if found == _shield.found else _make_plan(found)
        _shield.forking = plan, last
        if plan:
            _shield.last = plan[0]
            for one in reversed(plan):
                _set_handler(one.signum, one)
    elif _shield.forking is not None:
        plan, last = _shield.forking
        if plan:
            _lower(plan, last)
        _shield.forking = None
        if pending and plan:
            # What a handler raises here would be dropped, too.
            _thread.start_new_thread(send_again, (*[one.signum for one in pending],))
            pending.clear()


def send_again(*signums: int) -> None:
    """Send the main thread these signals a moment later.  Runs in a thread of its own."""
    time.sleep(0.001)  # lets the main thread run on
    # Signals, not `interrupt_main`: they must also end a wait that the main thread has begun.
    for signum in signums:
        signal.pthread_kill(_shield.main or 0, signum)


_marks[id(_guard.__code__)] = _marks[id(at_fork.HOOK)] = True
at_fork.guards.append(_guard)


def _after_fork_in_child() -> None:
    # The forking thread is now the main thread, and never returns from the shielded function.
    _shield.main, _shield.forking = get_ident(), None
    pending.clear()  # these signals were sent to the parent, which handles them
    for signum in _SIGNALS:
        handler = _get_handler(signum)
        if type(handler) is Deferred:
            _set_handler(signum, handler.handler)


at_fork.at_fork(in_child=_after_fork_in_child)
