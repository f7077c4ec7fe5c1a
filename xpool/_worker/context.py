"""Who am I?  `current_worker()` for code that runs inside a task."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from xpool._pickling.by_value.main import is_replica
from xpool._python.import_hooks import child_prepares, is_initializing
from xpool._python.worker_local import WorkerLocal
from xpool.errors import OptionError

__all__ = ["WorkerInfo", "current_worker", "enter", "imported_by_worker", "leave"]


class WorkerInfo:
    """The worker that runs the current task.

    ``index`` counts from 0 and outlives the process: a replacement has the index of the one
    it replaces.  ``context`` is this worker's context (`CtxPool`), else None.  ``host`` is the name
    of the host that it is on, in a pool over several; else it is empty.
    """

    index: int
    pool: str
    context: Any
    peers: Any
    host: str

    # By hand: `dataclasses` imports what takes as long as a third of this package.
    def __init__(
        self, index: int, pool: str, context: Any = None, peers: Any = None, host: str = ""
    ) -> None:
        self.__dict__.update(index=index, pool=pool, context=context, peers=peers, host=host)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set: a worker is what its pool has made it")

    def __repr__(self) -> str:
        return f"WorkerInfo(index={self.index!r}, pool={self.pool!r}, context={self.context!r})"

    def send(self, peer: int, obj: Any, timeout: float | None = None) -> None:
        """Send an object to the worker with index ``peer``, for its `recv`.  In a `P2PPool`.

        Does not wait for the receiver, unless 256 MiB of tensors, or as many packets as a socket
        takes (some hundred), are on their way to it.  Tensors and arrays are copied once, into
        memory that the receiver uses in place; with ``is_copy_tensor=False`` tensors are shared.

        Raises:
            PeerLost: the peer has died; the next `send` is to the worker that replaces it.
            multiprocessing.TimeoutError: there was no room for it within ``timeout`` seconds (None:
                any time), or no peer to send it to; it was not sent.
            TaskNotPicklable: it cannot be pickled or shared.
            OptionError (a `ValueError`): there is no such peer.
            OSError: no descriptor is left for a channel to the peer.
        """
        self._channels().send(peer, obj, timeout)

    def recv(self, peer: int, timeout: float | None = None) -> Any:
        """Return the next object that the worker with index ``peer`` has sent to this one.

        Raises:
            PeerLost: the peer has died, and what it had sent before has been received, or is lost
                with it; the next `recv` is from the worker that replaces it.
            multiprocessing.TimeoutError: nothing came within ``timeout`` seconds (None: any time).
            OptionError, OSError: as `send`.
            Exception: what unpickling raised; the message is gone.
        """
        return self._channels().recv(peer, timeout)

    def _channels(self) -> Any:
        if self.peers is None:
            raise OptionError(
                f"workers of {self.pool} cannot send messages to each other: that takes a P2PPool, "
                "on Linux, and shared memory (no limit on addresses, ulimit -v)"
            )
        return self.peers

    @property
    def device(self) -> Any:
        """The device that this worker is bound to: its context's, or None."""
        return getattr(self.context, "device", None)


_here: WorkerLocal[WorkerInfo] = WorkerLocal()


def enter(info: WorkerInfo, *, thread: bool = False) -> None:
    """Make ``info`` the worker of this process, or where that has several, of this thread.

    ``thread``: of this thread, in a process that is no worker: a thread pool's.
    """
    _here.set(info, thread=thread)


def leave() -> None:
    """Forget the worker of this thread: it serves no pool any more."""
    _here.set(None, thread=True)


def current_worker() -> WorkerInfo:
    """Return the worker that runs the calling task.

    Raises:
        RuntimeError: the caller is not inside a task of an xpool pool; or in a thread that a task
            has started, where workers are threads themselves.
    """
    info = _here.get()
    if info is None:
        raise RuntimeError(
            "current_worker() was called outside a task; it is for functions that a pool runs, in "
            "the thread in which it runs them"
        )
    return info


def imported_by_worker() -> str | None:
    """Say what this thread is importing if this process is a worker; None: it imports nothing.

    That is the caller's script, run for its names, or any other module that a task needs.
    """
    if child_prepares():
        return "the program's main module"
    if not is_replica():
        return None
    frame: FrameType | None = sys._getframe(1)
    # Up to where the worker begins: the stack of a fork goes on with its parent's frames.
    while frame is not None and frame.f_globals.get("__name__") != "xpool._worker.entry":
        if frame.f_code.co_name == "<module>":
            facts = frame.f_globals
            if facts.get("_xpool_running"):
                return "the program's main module"
            if is_initializing(facts):
                return f"module {facts.get('__name__')}"
        frame = frame.f_back
    return None
