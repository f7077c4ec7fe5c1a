"""`current_worker()`: tells the code of a task which worker runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from xpool._pickling.by_value import main
from xpool._python.import_hooks import child_prepares, is_initializing
from xpool._python.worker_local import WorkerLocal
from xpool.errors import OptionError, WorkerDied


class WorkerInfo:
    """The worker that runs the current task.

    ``index`` counts from 0; a replacement process has the index of the one that it replaces.
    ``context`` is this worker's context in a `CtxPool`, else None.  ``host`` is the name of its
    host in a pool over several hosts, else it is empty.
    """

    index: int
    pool: str
    context: Any
    peers: Any
    host: str

    # Not a dataclass: the imports of `dataclasses` take as long as a third of this package's.
    def __init__(
        self, index: int, pool: str, context: Any = None, peers: Any = None, host: str = ""
    ) -> None:
        self.__dict__.update(index=index, pool=pool, context=context, peers=peers, host=host)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set: only the pool sets it")

    def __repr__(self) -> str:
        return f"WorkerInfo(index={self.index!r}, pool={self.pool!r}, context={self.context!r})"

    def send(self, peer: int, obj: Any, timeout: float | None = None) -> None:
        """Send an object to the worker with index ``peer``, which receives it with `recv`.

        Only for workers of a `P2PPool`.  `send` waits for the receiver only while 256 MiB of
        tensors, or as many packets as a socket takes (some hundred), are on their way to it.
        Tensors and arrays are copied once, into memory that the receiver uses in place; with
        ``is_copy_tensor=False`` tensors are shared.

        Raises:
            PeerLost: the peer has died; the next `send` is to the worker that replaces it.
            multiprocessing.TimeoutError: the object was not sent, since the channel had no room, or
                there was no peer, within ``timeout`` seconds (None: no limit).
            TaskNotPicklable: the object cannot be pickled or shared.
            OptionError (a `ValueError`): ``peer`` is not the index of another worker.
            OSError: no descriptor is left for a channel to the peer.
        """
        self._channels().send(peer, obj, timeout)

    def recv(self, peer: int, timeout: float | None = None) -> Any:
        """Return the next object that the worker with index ``peer`` has sent to this worker.

        Raises:
            PeerLost: the peer has died, and its earlier messages have been received, or are lost
                with it; the next `recv` is from the worker that replaces it.
            multiprocessing.TimeoutError: no message arrived within ``timeout`` seconds (None: no
                limit).
            OptionError, OSError: as for `send`.
            Exception: the error of unpickling the message, which is lost.
        """
        return self._channels().recv(peer, timeout)

    def _channels(self) -> Any:
        if self.peers is None:
            raise OptionError(
                f"workers of {self.pool} cannot send messages to each other: this needs a P2PPool "
                "on Linux, and shared memory (no limit on addresses, ulimit -v)"
            )
        return self.peers

    @property
    def device(self) -> Any:
        """The device of this worker's context, to which the worker is bound; or None."""
        return getattr(self.context, "device", None)


_here: WorkerLocal[WorkerInfo] = WorkerLocal()


def enter(info: WorkerInfo, *, thread: bool = False) -> None:
    """Make ``info`` the worker of this process, or of this thread if the process has several.

    ``thread``: always of this thread, because the process is not a worker (a thread pool).
    """
    _here.set(info, thread=thread)


def leave() -> None:
    """Forget the worker of this thread, which no longer serves a pool."""
    _here.set(None, thread=True)


def current_worker() -> WorkerInfo:
    """Return the worker that runs the calling task.

    Raises:
        RuntimeError: the caller is not inside a task of an xpool pool; or workers are threads, and
            the caller is in a thread that a task has started.
    """
    info = _here.get()
    if info is None:
        raise RuntimeError(
            "current_worker() was called outside a task; it is for functions that a pool runs, in "
            "the thread in which it runs them"
        )
    return info


def exit_code(exc: SystemExit) -> int:
    """Return the exit code of a process that ends by ``exc``."""
    # As in CPython (handle_system_exit in Python/pythonrun.c); wait(2) reports 8 bits of the code.
    return exc.code & 0xFF if isinstance(exc.code, int) else int(exc.code is not None)


def exited(exc: SystemExit, func: Callable[..., Any]) -> WorkerDied:
    """Return the error of a task that called `sys.exit`, as if its worker had ended."""
    try:
        index = current_worker().index
    except RuntimeError:
        index = -1
    return WorkerDied(os.getpid(), exit_code(exc), index, getattr(func, "__qualname__", repr(func)))


def imported_by_worker() -> str | None:
    """Return the module that this thread imports, if this process is a worker; None: it imports
    none.

    A child of `multiprocessing` imports the program's script.
    """
    if child_prepares():
        return "the program's main module"
    if not main.is_replica:
        return None
    frame: FrameType | None = sys._getframe(1)
    # Stop at the frame where the worker begins: after a fork, the parent's frames lie below it.
    while frame is not None and frame.f_globals.get("__name__") != "xpool._worker.entry":
        if frame.f_code.co_name == "<module>":
            facts = frame.f_globals
            if is_initializing(facts):
                return f"module {facts.get('__name__')}"
        frame = frame.f_back
    return None
