"""`RRef`: torch's reference to what is in another process, with the errors of a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.futures import Future

from xpool.distributed.calls import transport_error
from xpool.distributed.rendezvous import check_timeout

__all__ = ["RRef"]

_COPIED = "On WorkerInfo("
"""Is in torch's copies of what a function has raised: no fault of the connection."""


class RRef:
    """A value in another process; what the methods of an `RpcGroup` return.

    It has the methods and attributes of torch's ``RRef``, and can be sent. ``timeout`` is in
    seconds, as torch documents it: -1 is the world's ``rpc_timeout``, 0 is none.

    All calls raise:
        PeerLost: the process with the value has died.
        GroupTimeout: there was no answer within the timeout.
        Exception: what the function or method raised, of its class where that takes one text:
            torch makes it anew, with the remote traceback in its message.
    """

    def __init__(self, rref: Any) -> None:
        self._rref = rref

    def to_here(self, timeout: float = -1) -> Any:
        """Fetch a copy of the value."""
        with self._explained("to_here", timeout):
            return self._rref.to_here(timeout)

    def rpc_sync(self, timeout: float = -1) -> Any:
        """Return a stand-in whose methods are called where the value is; they return results."""
        return _Methods(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = -1) -> Any:
        """As `rpc_sync`; the methods return futures."""
        return _Methods(self, "rpc_async", timeout)

    def remote(self, timeout: float = -1) -> Any:
        """As `rpc_sync`; the methods return an `RRef` to the result, which stays there."""
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
            # It was torch's own all along: no error is its own cause.
            if error is exc:
                raise
            raise error from exc


class _Methods:
    """What `RRef.rpc_sync`, `RRef.rpc_async` and `RRef.remote` return."""

    def __init__(self, rref: RRef, how: str, timeout: float) -> None:
        self._rref, self._how, self._timeout = rref, how, timeout

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._rref._explained(name, self._timeout):
            calls = getattr(self._rref._rref, self._how)(self._timeout)
            result = getattr(calls, name)(*args, **kwargs)
        if self._how == "remote":
            return RRef(result)
        return self._explained_future(name, result) if self._how == "rpc_async" else result

    def _explained_future(self, name: str, inner: Future[Any]) -> Future[Any]:
        outer: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            try:
                with self._rref._explained(name, self._timeout):
                    outer.set_result(done.value())
            except Exception as exc:
                outer.set_exception(exc)

        inner.add_done_callback(settle)
        return outer
