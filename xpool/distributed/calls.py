"""One remote call: what the function raised comes back as it was, with the remote traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pickle import PicklingError
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.internal import deserialize, serialize
from torch.futures import Future

from xpool._pickling.by_value.names import goes_by_name
from xpool.distributed.current import the_world
from xpool.distributed.errors import GroupError, GroupTimeout, PeerLost
from xpool.distributed.faults import connection_lost, first_line
from xpool.distributed.peers import DIED
from xpool.distributed.rendezvous import check_timeout
from xpool.errors import RemoteTraceback, ResultNotPicklable, TaskNotPicklable
from xpool.pickle import decode, dumps, encode_exception, loads

T = TypeVar("T")


class Raised:
    """The answer of a function that raised."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def error(self) -> Exception:
        """The exception, with a `RemoteTraceback` as its cause."""
        exc: BaseException = decode(self.data)
        if isinstance(exc, Exception):
            return exc
        # Raised here it would end the caller's process or thread.
        error = GroupError(f"The function raised {exc!r}, which is meant to end a process.")
        error.__cause__ = exc.__cause__
        return error


def raised(exc: BaseException) -> Raised:
    """Make an exception an answer; for use in the ``except`` that caught it."""
    world = the_world()
    text = f"On {world.name!r} (rank {world.rank}):\n{''.join(traceback.format_exception(exc))}"
    return Raised(bytes(encode_exception(exc, text)))


def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function for another process, and return what torch can send: a result or `Raised`."""
    try:
        value = func(*args, **kwargs)
        return sendable(getattr(func, "__qualname__", repr(func)), value)
    except BaseException as exc:
        # SystemExit and the like too: `Raised.error` wraps them for the caller.
        return raised(exc)


_PLAIN = (type(None), bool, int, float, str, bytes, Tensor)


def sendable(what: str, value: Any) -> Any:
    """Return a form of a result that torch can send; ``what`` names the function or service.

    The result is pickled here, in the function's thread: where torch's own pickling of an answer
    fails, the caller gets a text without the function and the object.

    Raises:
        ResultNotPicklable: the result can be sent neither by torch nor by value.
    """
    value = portable(value)
    if type(value) in _PLAIN or isinstance(value, (_Pickled, _ByValue)):
        return value
    try:
        return _Pickled(value)
    except Exception:  # whatever the object's own code raises
        try:
            return _ByValue(value)
        except Exception as exc:
            reason = exc.__cause__ if isinstance(exc, TaskNotPicklable) else None
            raise ResultNotPicklable(reason or exc, f"{_short_repr(value)} of {what}") from None


def _short_repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as exc:
        text = f"<{type(value).__name__}, whose repr raised {exc!r}>"
    return text if len(text) <= 500 else f"{text[:500]}..."


class _Pickled:
    """A result that torch's pickler has pickled: the pickle, and the tensors beside it."""

    def __init__(self, value: Any) -> None:
        self._parts = serialize(value)

    def __reduce__(self) -> Any:
        return deserialize, self._parts


class _ByValue:
    """What torch's pickler cannot send: lambdas, local functions and classes, and what has them."""

    def __init__(self, thing: Any) -> None:
        self.data = dumps(thing)

    def __reduce__(self) -> Any:
        return loads, (self.data,)


def portable(func: Callable[..., Any]) -> Any:
    """Make a lambda or local function one that torch's pickler can send."""
    if isinstance(func, FunctionType) and not goes_by_name(func):
        return _ByValue(func)
    return func


def _by_value(thing: Any) -> Any:
    # A reference to a value can be sent by torch alone.
    return thing if hasattr(thing, "to_here") else _ByValue(thing)


def send(
    start: Callable[[Any, tuple[Any, ...], dict[str, Any]], T],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> T:
    """Return ``start(func, args, kwargs)``, with what torch cannot pickle sent by value.

    Raises:
        TaskNotPicklable: neither way can send it.
    """
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
    """Have ``func`` run in the process named ``to``; the future raises what it raised.

    ``timeout`` is in seconds, as torch has it: 0 is none, -1 is the world's ``rpc_timeout``.
    ``what`` names the call in errors; None takes the function's name.

    Raises:
        TaskNotPicklable: the function or an argument cannot be sent.

    The future raises `ResultNotPicklable` for a result that cannot be sent back.
    """
    # A rank that is known to be lost costs no call, and the error says what became of it.
    the_world().peers.check(to)
    check_timeout("timeout", timeout)
    outer: Future[Any] = Future()

    # torch takes this one object for the arguments of `run`; it pickles here, in the caller.
    def start(*parts: Any) -> Future[Any]:
        future: Future[Any] = rpc.rpc_async(to, run, args=parts, timeout=timeout)
        return future

    inner = send(start, func, args, kwargs)
    inner.add_done_callback(lambda done: settle(outer, done, to, what or func, timeout))
    return outer


def settle(outer: Future[Any], done: Future[Any], to: str, what: Any, timeout: float) -> None:
    """Pass on what a call of torch's has come to."""
    try:
        value = done.value()
    except Exception as exc:
        outer.set_exception(transport_error(exc, to, what, timeout))
        return
    if isinstance(value, Raised):
        try:
            outer.set_exception(value.error())
        except Exception as exc:  # it does not unpickle here
            outer.set_exception(exc)
    else:
        outer.set_result(value)


def transport_error(exc: Exception, to: str, what: Any, timeout: float) -> Exception:
    """Say what became of a call that got no answer."""
    text = first_line(exc)
    name = getattr(what, "__qualname__", None) or repr(what)
    if "ran for more than set timeout" in text:
        seconds = rpc.get_rpc_timeout() if timeout < 0 else timeout
        return GroupTimeout(
            f"{name} did not answer from {to!r} within {seconds:g} s. It may still be running "
            "there; give timeout= more seconds, or 0 for no limit."
        )
    if type(exc) is not RuntimeError:
        return exc  # torch's own, from unpickling on the other side
    error: GroupError
    if connection_lost(exc):
        peers = the_world().peers
        # This call may fail before the one that is held open there: it tells the others here.
        peers.lose(to, DIED)
        error = PeerLost(f"{name} has no answer from {to!r}: {peers.describe(to)} ({text})")
        error.__cause__ = exc
        return error
    error = GroupError(f"{name} has no answer from {to!r}: {text}")
    error.__cause__ = RemoteTraceback(str(exc))
    return error
