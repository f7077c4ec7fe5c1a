"""The errors of xpool, grouped by their cause.

::

    XPoolError
    |-- the caller ------------------------------------------------------------
    |   |-- PoolClosed          also ValueError    the pool accepts no more tasks
    |   |-- OptionError         also ValueError    an argument is invalid
    |   `-- DeviceError         also RuntimeError  a device is not available
    |-- the task ----------------------------------------------------------------
    |   |-- TaskNotPicklable    also PicklingError it cannot be sent to a worker
    |   |-- ResultNotPicklable  also MaybeEncodingError, PicklingError  its result cannot be sent
    |   |-- TaskTimeout         also TimeoutError, multiprocessing.TimeoutError
    |   `-- TaskCancelled
    |-- the worker --------------------------------------------------------------
    |   |-- WorkerDied          it ended while it ran the task
    |   |   |-- TensorLost      it ended, and a tensor on its device is lost
    |   |   `-- HostLost        its host is lost
    |   |-- PeerLost            it ended while another worker worked with it
    |   |-- WorkerStartFailed   it cannot be started: the pool has stopped
    |   `-- PoolBroken          workers die and finish no tasks: the pool has stopped
    `-- xpool ---------------------------------------------------------------------
        `-- InternalError       a bug in xpool, described in the message

Three kinds of exceptions are not among these:

* The exceptions of tasks: callers get them unchanged, with the worker's traceback as ``__cause__``
  (a `RemoteTraceback`).
* `TimeoutError`, of a `get`, `next` or `join` whose own ``timeout`` is over.
* `TaskStopped`, which xpool raises in a task to interrupt the task.

All errors can be pickled and then keep their attributes.  Each job gets its own instance, so that
two callers do not add their frames to the same traceback.
"""

from __future__ import annotations

import pickle
import signal
from importlib import import_module
from typing import TYPE_CHECKING, Any

from xpool._python import failures
from xpool._python.failures import TimeoutError, XPoolError

if TYPE_CHECKING:
    from xpool._python.pool_errors import RemoteTraceback as RemoteTraceback
    from xpool._python.pool_errors import ResultNotPicklable as ResultNotPicklable

__all__ = [
    "DeviceError",
    "HostLost",
    "InternalError",
    "OptionError",
    "PeerLost",
    "PoolBroken",
    "PoolClosed",
    "RemoteTraceback",
    "ResultNotPicklable",
    "TaskCancelled",
    "TaskNotPicklable",
    "TaskStopped",
    "TaskTimeout",
    "TensorLost",
    "TimeoutError",
    "WorkerDied",
    "WorkerStartFailed",
    "XPoolError",
    "exit_reason",
]


def exit_reason(exitcode: int | None) -> str:
    """Return a readable text for an exit code: ``-9`` is "killed by SIGKILL"."""
    if exitcode is None:
        return "exit code unknown"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"


def signal_of(exitcode: int | None) -> str | None:
    """Return the name of the signal that has ended a process; None: no signal has."""
    if exitcode is None or exitcode >= 0:
        return None
    return exit_reason(exitcode).removeprefix("killed by ")


class PoolClosed(XPoolError, ValueError):
    """The pool accepts no more tasks, because it was closed or terminated, or has failed.

    This is also a `ValueError`, as in `multiprocessing.pool`.
    """


class OptionError(XPoolError, ValueError):
    """An argument has an invalid value.  The text names the argument."""


class DeviceError(XPoolError, RuntimeError):
    """A device is missing or in use, or its framework is missing or does not fit torch.

    The text says what to do.
    """


class TaskNotPicklable(XPoolError, pickle.PicklingError):
    """The function or an argument cannot be sent to a worker.  ``__cause__`` is the reason."""

    parts: tuple[str, str, str, str] | None = None  # the object, its place, the reason, advice
    culprit: Any = None  # the object, until its place is known


START_OF_WORKER = "The start of the worker, with its initializer,"
"""The ``task`` of a `TaskTimeout` that says that a worker did not start in time."""


class TaskTimeout(XPoolError, TimeoutError):
    """The task ran longer than its ``timeout=``.  It was stopped, except in a pool of threads.

    Attributes:
        seconds: the limit.
        worker: the index of the worker.
        pid: the process id of the worker; None: not known.
        task: the task, as text.
        stack: the task's stack at that time, as text, most recent call first; empty: not known.
        stopped: whether the task was stopped.  If not, it runs on in a thread of this process.
        host: the name of the worker's host; empty: this one.
    """

    def __init__(
        self,
        seconds: float,
        worker: int,
        pid: int | None,
        task: str,
        stack: str = "",
        stopped: bool = True,
        host: str = "",
    ) -> None:
        super().__init__(seconds, worker, pid, task, stack, stopped, host)
        self.seconds, self.worker, self.pid, self.task = seconds, worker, pid, task
        self.stack, self.stopped, self.host = stack, stopped, host

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._what()}>"

    def _what(self) -> str:
        return (
            f"{self.task} ran longer than its limit of {self.seconds:g} s in worker {self.worker}"
        )

    def __str__(self) -> str:
        where = (
            f"It was here (most recent call first):\n{self.stack}"
            if self.stack
            else "Where it was is not known: the worker did not answer a signal."
            if self.stopped
            else "It was in a function that is not written in Python."
        )
        end = (
            f"(pid {self.pid}){f' on host {self.host}' if self.host else ''} and was stopped"
            if self.stopped
            else "and runs on: a thread cannot be stopped, another has taken its place"
        )
        option = "initializer_timeout=" if self.task == START_OF_WORKER else "timeout="
        imports = (
            "It was importing a module; xpool.preload() imports modules before tasks begin. "
            if self.stopped and "<frozen importlib._bootstrap>" in self.stack
            else ""
        )
        return (
            f"{self._what()} {end}; give it a longer {option}, or find out why it takes so long. "
            f"{imports}{where}"
        )


class TaskCancelled(XPoolError):
    """The task was cancelled before it had a result."""


class TaskStopped(BaseException):
    """xpool raises this in a task to stop it, because its time is over or it was cancelled.

    ``finally`` and ``with`` blocks of the task run.  The caller never gets this exception.  Like
    `KeyboardInterrupt` it is not an `Exception`, so ``except Exception`` does not catch it.  If a
    task catches it and continues, its worker is killed a moment later.
    """


class WorkerDied(XPoolError):
    """The worker ended while it ran this task.

    Attributes:
        pid: the process id of the worker, or None.
        exitcode: as `multiprocessing.Process.exitcode`: negative for a signal; None: not known.
        worker: the index of the worker.
        task: the task, as text.
        killed: how many workers this task has killed, several with ``retries=``; 0: another cause.
        beside: if workers are threads of one process, how the other workers took part in its end,
            as text; or empty.
        host: the name of the worker's host; empty: this one.
    """

    def __init__(
        self,
        pid: int | None,
        exitcode: int | None,
        worker: int,
        task: str,
        killed: int = 1,
        beside: str = "",
        host: str = "",
    ) -> None:
        super().__init__(pid, exitcode, worker, task, killed, beside, host)
        self.pid, self.exitcode, self.worker, self.task = pid, exitcode, worker, task
        self.killed, self.beside, self.host = killed, beside, host

    @property
    def signal(self) -> str | None:
        """Name of the signal that ended the worker, or None."""
        return signal_of(self.exitcode)

    def __str__(self) -> str:
        reason = exit_reason(self.exitcode)
        hint = _HINTS.get(self.exitcode, "" if self.beside else _HINTS[0])
        where = f" on host {self.host}" if self.host else ""
        story = (
            f"Worker {self.worker} (pid {self.pid}){where} died, {reason}, while it ran "
            f"{self.task}. "
        )
        if self.killed > 1:
            advice = "" if self.beside else "; run it alone to see what it does"
            return (
                f"{story}{self.beside or hint} This task has killed {self.killed} workers, so the "
                f"task is at fault. It is not run again{advice}."
            )
        if self.beside:
            ours = not self.killed or self.beside.startswith(("The pool ended", "The kernel ended"))
            why = self.beside if ours else f"{hint} {self.beside}".strip()
            return f"{story}{why} Pass retries=n to have a task run again."
        return f"{story}{hint} Only this task is lost; pass retries=n to have it run again."


class TensorLost(WorkerDied):
    """The worker that held a tensor on its device has ended, so the tensor is lost.

    It has the attributes of `WorkerDied`.  ``task`` describes the tensor.
    """

    def __str__(self) -> str:
        return (
            f"{self.task} is lost: worker {self.worker} (pid {self.pid}), which held it, has "
            "ended. Make it again in the worker that is there now, or keep a copy: handle.cpu()."
        )


class HostLost(WorkerDied):
    """The host that had this task is lost, and may have run the task.

    It has the attributes of `WorkerDied` (``pid`` and ``exitcode`` are None), and ``reason``: the
    known facts about the loss, as text.  ``worker`` is -1 if any worker may have run the task.
    """

    def __init__(self, host: str, reason: str, task: str, worker: int = -1) -> None:
        super().__init__(None, None, worker, task, 0, "", host)
        self.args = (host, reason, task, worker)  # unpickling calls `__init__` with these
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"Host {self.host} is lost, and may have run {self.task}: {self.reason}. Pass "
            "retries=n to have it run again on another."
        )


class PeerLost(XPoolError):
    """A process with which this one works together has ended, so its messages will not arrive."""


_HINTS: dict[int | None, str] = {
    None: "Look for its last output on stderr.",
    0: "The task ended the process, as sys.exit and os._exit do (or closing all descriptors); "
    "raise an exception instead.",
    -signal.SIGKILL: "Often the kernel's out-of-memory killer (look in dmesg), or a kill -9.",
    -signal.SIGSEGV: "A native extension crashed; python -X faulthandler shows where.",
    -signal.SIGABRT: "A native library aborted; its reason is on stderr.",
    -signal.SIGBUS: "A file that the process maps was truncated by another process.",
    -signal.SIGTERM: "Another process has ended the worker.",
}


class WorkerStartFailed(XPoolError):
    """A worker could not be started in several attempts, so the pool has stopped.

    ``worker`` is its index, ``attempts`` their number, ``reason`` a text, and ``host`` the name of
    its host; empty: this one.  If the initializer raised an exception, this is the ``__cause__``.
    """

    def __init__(self, worker: int, attempts: int, reason: str, host: str = "") -> None:
        super().__init__(worker, attempts, reason, host)
        self.worker, self.attempts, self.reason, self.host = worker, attempts, reason, host

    def __str__(self) -> str:
        where = f" on host {self.host}" if self.host else ""
        return (
            f"Worker {self.worker}{where} could not be started in {self.attempts} attempts: "
            f"{self.reason}. The pool has stopped; fix the cause and make a new pool."
        )


class PoolBroken(XPoolError):
    """The pool has stopped, because workers died one after the other without finishing a task, or
    because an exception interrupted the pool's own bookkeeping.

    ``deaths`` workers died within ``seconds``.  ``last`` is a text about the last death (or, if
    ``deaths`` is 0, about the exception).
    """

    def __init__(self, deaths: int, seconds: float, last: str) -> None:
        super().__init__(deaths, seconds, last)
        self.deaths, self.seconds, self.last = deaths, seconds, last

    def __str__(self) -> str:
        if not self.deaths:
            return (
                f"{self.last}: this was raised while the pool updated its own state. The "
                "pool has stopped; fix the cause and make a new pool"
            )
        return (
            f"{self.deaths} workers died within {self.seconds:.1f} s, and none finished a task "
            f"meanwhile; the last death: {self.last}. The pool has stopped; fix the cause and make "
            "a new pool, or allow more with restart_budget=."
        )


class InternalError(XPoolError):
    """A bug in xpool, or in a hook of a subclass of `BasePool`.  The text describes it."""


def __getattr__(name: str) -> Any:
    if name in ("RemoteTraceback", "ResultNotPicklable"):
        # Imported on demand, because the import of `multiprocessing.pool`, which has their bases,
        # would add a tenth to the imports of a worker before its first task.
        failures.ready()
        value = globals()[name] = getattr(import_module("xpool._python.pool_errors"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
