"""Calls between the ranks of a world, and meetings, in which several ranks wait for each other.

A remote call raises the function's own error, with the remote traceback as its cause.  `RRef` is
torch's reference to a value in another process, with the same errors.

A meeting does not wait for ranks that are lost.  Each rank holds a call open to each other rank.
The called process answers it when it leaves.  If it dies, the call fails.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pickle import PicklingError
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.internal import deserialize, serialize
from torch.futures import Future

from xpool._pickling.by_value.names import goes_by_name
from xpool._python.failures import safe_repr
from xpool._python.waiters import Flag
from xpool.distributed._current import (
    DIED,
    LEFT,
    GroupError,
    GroupTimeout,
    PeerLost,
    Peers,
    connection_lost,
    current,
    first_line,
    the_world,
)
from xpool.distributed._rendezvous import check_timeout
from xpool.errors import OptionError, RemoteTraceback, ResultNotPicklable, TaskNotPicklable
from xpool.pickle import decode, dumps, encode_exception, loads

T = TypeVar("T")


class Raised:
    """The answer of a function that has raised an error."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def error(self) -> Exception:
        exc: BaseException = decode(self.data)
        if isinstance(exc, Exception):
            return exc
        # An error like `SystemExit` would end the caller's process or thread.
        error = GroupError(f"The function raised {exc!r}, which is meant to end a process.")
        error.__cause__ = exc.__cause__
        return error


def raised(exc: BaseException) -> Raised:
    """Return an exception as an answer.  Call this in the ``except`` block."""
    world = the_world()
    text = f"On {world.name!r} (rank {world.rank}):\n{''.join(traceback.format_exception(exc))}"
    return Raised(bytes(encode_exception(exc, text)))


def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function for another process.  Return a sendable form of its result or error."""
    try:
        value = func(*args, **kwargs)
        return sendable(getattr(func, "__qualname__", repr(func)), value)
    except BaseException as exc:  # `Raised.error` wraps `SystemExit` for the caller
        return raised(exc)


_PLAIN = (type(None), bool, int, float, str, bytes, Tensor)


def sendable(what: str, value: Any) -> Any:
    """Return a form of a result that torch can send.  ``what`` names the function or service.

    The result is pickled here, because if torch fails to pickle an answer, the caller gets a text
    that names neither the function nor the object.

    Raises:
        ResultNotPicklable: torch cannot pickle the result, and it cannot be sent by value.
    """
    value = portable(value)
    if type(value) in _PLAIN or isinstance(value, (_Pickled, _ByValue)):
        return value
    try:
        return _Pickled(value)
    except Exception:  # the object's own code can raise any error
        try:
            return _ByValue(value)
        except Exception as exc:
            reason = exc.__cause__ if isinstance(exc, TaskNotPicklable) else None
            raise ResultNotPicklable(reason or exc, f"{safe_repr(value, 500)} of {what}") from None


class _Pickled:
    """A result, with its tensors, that torch's pickler has pickled."""

    def __init__(self, value: Any) -> None:
        self._parts = serialize(value)

    def __reduce__(self) -> Any:
        return deserialize, self._parts


class _ByValue:
    """An object that torch's pickler cannot send, for example because it contains a lambda."""

    def __init__(self, thing: Any) -> None:
        self.data = dumps(thing)

    def __reduce__(self) -> Any:
        return loads, (self.data,)


def portable(func: Callable[..., Any]) -> Any:
    """Return a form of a function that torch's pickler can send."""
    return _ByValue(func) if isinstance(func, FunctionType) and not goes_by_name(func) else func


def _by_value(thing: Any) -> Any:
    # Only torch can send an RRef.
    return thing if hasattr(thing, "to_here") else _ByValue(thing)


def send(
    start: Callable[[Any, tuple[Any, ...], dict[str, Any]], T],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> T:
    """Return ``start(func, args, kwargs)``.  If torch cannot pickle them, send them by value."""
    kwargs = kwargs or {}
    try:
        return start(portable(func), args, kwargs)
    except (AttributeError, TypeError, PicklingError):
        named = {name: _by_value(value) for name, value in kwargs.items()}
        values = tuple(map(_by_value, args))
        return start(_by_value(func), values, named)


def call(
    to: str,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: float = -1,
    *,
    what: str | None = None,
) -> Future[Any]:
    """Run ``func`` in the process named ``to``.  Return a future of its result or error.

    ``timeout`` is in seconds: 0 is no timeout, -1 the world's ``rpc_timeout``.  ``what`` names the
    call in error texts; None: the function's name.  The future raises `ResultNotPicklable` for a
    result that cannot be sent back.

    Raises:
        PeerLost: the process is known to be lost.
        TaskNotPicklable: the function or an argument cannot be sent.
    """
    the_world().peers.check(to)
    check_timeout("timeout", timeout)
    outer: Future[Any] = Future()

    def start(*parts: Any) -> Future[Any]:
        future: Future[Any] = rpc.rpc_async(to, run, args=parts, timeout=timeout)
        return future

    inner = send(start, func, args, kwargs)
    inner.add_done_callback(lambda done: settle(outer, done, to, what or func, timeout))
    return outer


def waited(future: Future[Any]) -> Any:
    """Return the result of a future, or raise its error.  Unlike in torch's wait, which handles no
    signals, Ctrl-C ends it."""
    done = Flag()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    return future.wait()


def settle(outer: Future[Any], done: Future[Any], to: str, what: Any, timeout: float) -> None:
    """Give ``outer`` the result or error of ``done``, a call of torch."""
    try:
        value = done.value()
    except Exception as exc:
        outer.set_exception(transport_error(exc, to, what, timeout))
        return
    if isinstance(value, Raised):
        try:
            outer.set_exception(value.error())
        except Exception as exc:  # the error cannot be unpickled here
            outer.set_exception(exc)
    else:
        outer.set_result(value)


def transport_error(exc: Exception, to: str, what: Any, timeout: float) -> Exception:
    """Return the error for a call to which torch got no answer."""
    text = first_line(exc)
    name = getattr(what, "__qualname__", None) or repr(what)
    if "ran for more than set timeout" in text:
        seconds = rpc.get_rpc_timeout() if timeout < 0 else timeout
        return GroupTimeout(
            f"{name} did not answer from {to!r} within {seconds:g} s. It may still be running "
            "there; give timeout= more seconds, or 0 for no limit."
        )
    if type(exc) is not RuntimeError:
        return exc  # the other process could not unpickle the call
    error: GroupError
    if connection_lost(exc):
        peers = the_world().peers
        # Record the loss now, because this call may fail before the held one of `watch`.
        peers.lose(to, DIED)
        error = PeerLost(f"{name} has no answer from {to!r}: {peers.describe(to)} ({text})")
        error.__cause__ = exc
        return error
    error = GroupError(f"{name} has no answer from {to!r}: {text}")
    error.__cause__ = RemoteTraceback(str(exc))
    return error


_COPIED = "On WorkerInfo("
"""Contained in the text of an error that torch has made from a remote function's error."""


class RRef:
    """A reference to a value in another process; `RpcGroup.remote` and its like return it.

    It has the methods and attributes of torch's ``RRef``, and can be sent to other processes.
    ``timeout`` is in seconds: -1 is the world's ``rpc_timeout``, 0 is no timeout.

    All calls raise:
        PeerLost: the process with the value has died.
        GroupTimeout: there was no answer within the timeout.
        ResultNotPicklable: the value, or the method's result, cannot be sent.
        Exception: the method's own error, unchanged. If the function that makes the value has
            raised an error, torch makes a new one with the remote traceback in its text. It has the
            same class if that class can be made from one text.
    """

    def __init__(self, rref: Any) -> None:
        self._rref = rref

    def to_here(self, timeout: float = -1) -> Any:
        """Fetch a copy of the value."""
        try:
            with self._explained("to_here", timeout):
                return self._rref.to_here(timeout)
        except GroupError as exc:
            if type(exc) is not GroupError:
                raise
        # Torch could not pickle the value.  `_value_of` sends it by value or names it in an error.
        owner = self._rref.owner_name()
        return waited(call(owner, _value_of, (self._rref,), None, timeout, what="to_here"))

    def rpc_sync(self, timeout: float = -1) -> Any:
        """Return an object that runs the value's methods in its process and returns the results."""
        return _Methods(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = -1) -> Any:
        """As `rpc_sync`, but the methods return futures of torch."""
        return _Methods(self, "rpc_async", timeout)

    def remote(self, timeout: float = -1) -> Any:
        """As `rpc_sync`, but the results stay there, and the methods return `RRef`s to them."""
        return _Methods(self, "remote", timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rref, name)

    def __reduce__(self) -> Any:
        return RRef, (self._rref,)

    def __repr__(self) -> str:
        return f"<RRef to a value in {self._rref.owner_name()!r}>"

    @contextmanager
    def _explained(self, what: str, timeout: float) -> Iterator[None]:
        check_timeout("timeout", timeout)
        try:
            yield
        except RuntimeError as exc:
            if _COPIED in str(exc):
                raise
            error = transport_error(exc, self._rref.owner_name(), what, timeout)
            if error is exc:  # `from exc` would make it its own cause
                raise
            raise error from exc


class _Methods:
    def __init__(self, rref: RRef, how: str, timeout: float) -> None:
        self._rref, self._how, self._timeout = rref, how, timeout

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        rref = self._rref._rref
        if self._how == "remote":
            with self._rref._explained(name, self._timeout):
                return RRef(getattr(rref.remote(self._timeout), name)(*args, **kwargs))
        future = call(rref.owner_name(), _invoke, (rref, name, args, kwargs), timeout=self._timeout)
        return future if self._how == "rpc_async" else waited(future)


def _value_of(rref: Any) -> Any:
    return sendable("a reference", rref.local_value())


def _invoke(rref: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    method = getattr(rref.local_value(), name)
    result = method(*args, **kwargs)
    if hasattr(method, "_wrapped_async_rpc_function"):  # set by `rpc.functions.async_execution`
        result = result.wait()
    return sendable(f"method {name}", result)


# -- meetings --------------------------------------------------------------------------------------

Farewell = tuple[dict[Any, int], dict[Any, Any]]
"""The message of a process to another before it leaves: the number of collectives that have
succeeded, by group, and the answers that the other has not acknowledged, by meeting.

Earlier messages use other connections, so they may arrive later than it, or never.
"""

FAREWELL_SECONDS = 5.0
"""Seconds for a call that only improves the error messages of others."""


def watch(peers: Peers, timeout: float) -> None:
    """Connect to all others, within ``timeout`` seconds each, and hold a call open to each."""
    others = [name for name in peers.names if name != peers.me]
    # Connected one after the other, because many connections at once would load the machine.
    for name in others:
        rpc.rpc_sync(name, bool, timeout=timeout)

    def ended(done: Future[str], name: str) -> None:
        try:
            # The value is LEFT, from `leave`.  It raises if the connection is lost.
            reason = done.value()
        except RuntimeError:
            reason = DIED
        peers.lose(name, reason)

    for name in others:
        # The call has no timeout: it lasts as long as both processes are in the world.
        held = rpc.rpc_async(name, _hold, timeout=0)
        held.add_done_callback(lambda done, name=name: ended(done, name))


def leave(
    peers: Peers, left: Future[str], farewell: Callable[[str], Farewell] | None = None
) -> None:
    """Send ``farewell(name)`` to each rank that is not lost; then answer the held calls."""
    there = peers.leave()
    # A rank uses only the first message that says that this rank is lost.  Only the farewell says
    # which collectives were completed.  So the farewell is sent before the held calls are answered.
    if farewell is not None:
        for name in there:
            try:
                # Wait for this call, because the answers below may be lost on the way.
                told = peers.me, *farewell(name)
                rpc.rpc_sync(name, _told, args=told, timeout=FAREWELL_SECONDS)
            except RuntimeError:
                pass  # the peer has left, or is slow and will notice the end of its pending call
    left.set_result(LEFT)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _hold() -> Future[str]:
    return the_world().left  # all calls have the same answer


def _told(name: str, completed: dict[Any, int], answers: dict[Any, Any]) -> None:
    world = current()  # None if the receiver has left as well
    if world is not None:
        world.meetings.deliver(name, answers)
        world.peers.lose(name, LEFT, completed)


_Answer = list[str] | Raised
"""The error of a meeting, or the names of the lost members (of a meeting of survivors)."""


@dataclass
class _Meeting:
    expected: tuple[str, ...]
    of_survivors: bool  # whether the meeting can end without the lost members
    arrived: dict[str, Future[Any]] = field(default_factory=dict)

    def missing(self, lost: Container[str] = ()) -> list[str]:
        return [name for name in self.expected if name not in self.arrived and name not in lost]

    def answer(self, value: Any) -> None:
        for future in self.arrived.values():
            future.set_result(value)


class Meetings:
    """The meetings in which this process is the host or a guest.

    One member of a meeting is its host.  A meeting ends when all members have arrived, or when one
    is lost.  A host that leaves right after a meeting may close a connection before the answer has
    been sent.  So it keeps each answer until the guest's next arrival acknowledges it.  When the
    host leaves, it sends the unacknowledged answers again.
    """

    def __init__(self) -> None:
        # Taken before the lock of `Peers`, never after it.  No thread sets a future while it holds
        # this lock: a host is also its own guest, so the future may call `settle` in this thread.
        self._lock = threading.Lock()
        # Guarded by _lock: in a host, its open meetings, and the unacknowledged answers by guest.
        self._open: dict[Any, _Meeting] = {}
        self._unacknowledged: dict[str, dict[Any, Any]] = {}
        # Guarded by _lock: in a guest, the awaited answers and those to acknowledge, by host.
        self._awaited: dict[str, dict[Any, Future[Any]]] = {}
        self._received: dict[str, list[Any]] = {}

    # -- in the host ----------------------------------------------------------------------------

    def arrive(
        self,
        key: Any,
        name: str,
        expected: tuple[str, ...],
        of_survivors: bool,
        received: list[Any],
    ) -> Future[Any]:
        """Record that ``name`` has arrived, and that it has the answers to the keys ``received``.

        Return a future of the answer to this arrival.
        """
        future: Future[Any] = Future()
        with self._lock:
            for earlier in received:
                self._unacknowledged.get(name, {}).pop(earlier, None)
            meeting = self._open.setdefault(key, _Meeting(expected, of_survivors))
            meeting.arrived[name] = future
            if meeting.expected != expected:
                text = (
                    f"{key[1]!r} is being made with the members {list(meeting.expected)}, and by "
                    f"{name!r} with {list(expected)}: give the same members, in the same order."
                )
                # All members that have arrived get the error, instead of waiting for a timeout.
                answer: _Answer | None = self._end(key, meeting, raised(OptionError(text)))
            else:
                answer = self._end_if_due(key, meeting)
        if answer is not None:
            meeting.answer(answer)
        return future

    def _end_if_due(self, key: Any, meeting: _Meeting) -> _Answer | None:
        """End a meeting if all members have arrived or are lost.  The caller holds the lock."""
        gone = the_world().peers.lost()
        lost = [one for one in meeting.expected if one in gone]
        if lost and not meeting.of_survivors:
            what = "; ".join(the_world().peers.describe(name) for name in lost)
            error = PeerLost(f"{key[0]} of {key[1]!r} cannot complete: {what}.")
            return self._end(key, meeting, raised(error))
        return None if meeting.missing(lost) else self._end(key, meeting, lost)

    def _end(self, key: Any, meeting: _Meeting, answer: _Answer) -> _Answer:
        # After this no other call finds the meeting, so it is answered once.
        del self._open[key]
        for name in meeting.arrived:
            self._unacknowledged.setdefault(name, {})[key] = answer
        return answer

    def answers(self, name: str) -> dict[Any, Any]:
        """Return the answers that ``name`` has not acknowledged."""
        with self._lock:
            return dict(self._unacknowledged.get(name, {}))

    def withdraw(self, key: Any, name: str) -> list[str]:
        """End a meeting, because ``name`` gives it up.  Return the members that did not arrive."""
        with self._lock:
            meeting = self._open.pop(key, None)
        if meeting is None:
            return []  # the meeting has ended, and the answer was late
        missing = meeting.missing()
        text = f"{name!r} gave up {key[0]} of {key[1]!r}: {', '.join(missing)} did not come."
        meeting.answer(raised(GroupTimeout(text)))
        return missing

    def lose(self, name: str) -> None:
        """End the meetings that need not, or cannot, wait for ``name``: this rank is lost."""
        with self._lock:
            # First a list, because `_end` changes `_open`.
            concerned = [(key, one) for key, one in self._open.items() if name in one.expected]
            answers = [(one, self._end_if_due(key, one)) for key, one in concerned]
        for meeting, answer in answers:
            if answer is not None:
                meeting.answer(answer)

    # -- in a guest -----------------------------------------------------------------------------

    def expect(self, host: str, key: Any) -> tuple[Future[Any], list[Any]]:
        """Return a future of the host's answer, and the keys of the answers to acknowledge."""
        future: Future[Any] = Future()
        with self._lock:
            self._awaited.setdefault(host, {})[key] = future
            return future, self._received.pop(host, [])

    def settle(self, host: str, key: Any, done: Future[Any], timeout: float) -> None:
        """Give the future of `expect` the host's answer, or the error of the call to the host."""
        with self._lock:
            future = self._awaited[host].pop(key, None)
            self._received.setdefault(host, []).append(key)
        if future is not None:  # else `deliver` has settled it already
            settle(future, done, host, meet, timeout)

    def deliver(self, host: str, answers: dict[Any, Any]) -> None:
        """Settle the futures whose answers are in a host's farewell."""
        with self._lock:
            awaited = self._awaited.get(host, {})
            found = [(awaited.pop(key), answers[key]) for key in answers if key in awaited]
        for future, answer in found:
            done: Future[Any] = Future()
            done.set_result(answer)
            settle(future, done, host, meet, 0)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _arrive(*arrival: Any) -> Future[Any]:
    return the_world().meetings.arrive(*arrival)


def _withdraw(key: Any, name: str) -> list[str]:
    missing: list[str] = the_world().meetings.withdraw(key, name)
    return missing


def meet(
    host: str,
    key: tuple[Any, ...],
    expected: tuple[str, ...],
    timeout: float = -1,
    *,
    of_survivors: bool = False,
) -> list[str]:
    """Wait until all of ``expected`` have called this; ``host`` is one of them.

    ``key`` consists of an operation, its object, and optionally a number that distinguishes
    meetings of the same kind.  A meeting of survivors does not wait for lost members, and returns
    their names.  All members get the same names.

    Raises:
        PeerLost: a member has died (in a meeting of survivors, the host).
        GroupTimeout: a member did not call this within ``timeout`` seconds (as in `call`).
        OptionError: other members have a different list of members.
    """
    world = the_world()
    world.peers.check(host)
    # Registered before the call, because an answer or a farewell may arrive at once.
    outer, received = world.meetings.expect(host, key)
    arrival = key, world.name, expected, of_survivors, received
    inner = rpc.rpc_async(host, _arrive, args=arrival, timeout=timeout)
    inner.add_done_callback(lambda done: world.meetings.settle(host, key, done, timeout))
    try:
        lost: list[str] = waited(outer)
        return lost
    except GroupTimeout:
        # The host ends the meeting for all, and returns the members that have not arrived.
        missing = waited(call(host, _withdraw, (key, world.name), timeout=FAREWELL_SECONDS))
        if not missing:
            raise  # all members arrived, but the answer was late
        seconds = rpc.get_rpc_timeout() if timeout < 0 else timeout
        raise GroupTimeout(
            f"{key[0]} of {key[1]!r}: {', '.join(missing)} did not come within {seconds:g} s. "
            f"All of {', '.join(expected)} have to call it."
        ) from None
