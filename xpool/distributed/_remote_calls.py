"""Remote calls that raise the function's own error, with the remote traceback as its cause, and
`RRef`: torch's reference to a value in another process, with the same errors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from xpool.distributed._current import DIED, the_world
from xpool.distributed._group_errors import (
    GroupError,
    GroupTimeout,
    PeerLost,
    connection_lost,
    first_line,
)
from xpool.distributed._rendezvous import check_timeout
from xpool.errors import RemoteTraceback, ResultNotPicklable, TaskNotPicklable
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
    if isinstance(func, FunctionType) and not goes_by_name(func):
        return _ByValue(func)
    return func


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
        return call(owner, _value_of, (self._rref,), None, timeout, what="to_here").wait()

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
        return future if self._how == "rpc_async" else future.wait()


def _value_of(rref: Any) -> Any:
    return sendable("a reference", rref.local_value())


def _invoke(rref: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    method = getattr(rref.local_value(), name)
    result = method(*args, **kwargs)
    if hasattr(method, "_wrapped_async_rpc_function"):  # set by `rpc.functions.async_execution`
        result = result.wait()
    return sendable(f"method {name}", result)
