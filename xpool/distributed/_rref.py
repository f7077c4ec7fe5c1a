"""`RRef`: torch's reference to a value in another process, with the errors of a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from xpool.distributed._group_errors import GroupError
from xpool.distributed._remote_calls import call, sendable, transport_error
from xpool.distributed._rendezvous import check_timeout

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
