"""The fork server: a process that has imported what workers need, and forks when asked.

A worker forked from it starts in milliseconds and shares the pages of torch, while the program
itself, with its threads and devices, is never forked.  `multiprocessing` has such a server too;
this one has no socket with a name (only its parent can ask), may be had once for each set of
preloaded modules, and tells of a death at once, with its exit status.

Its parent asks over a SOCK_SEQPACKET pair.  A request is two bytes with two to four descriptors:
the worker's boot socket; a SOCK_SEQPACKET, on which the server writes the worker's pid and later
its wait status, each as 8 bytes, or why it cannot fork, and the worker asks for the program's
resource tracker; and what are stdout and stderr now, as bits 0 and 1 of the second byte say.  When
the parent closes its end the server ends; its workers have lifelines of their own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

from xpool._python import at_fork, import_hooks
from xpool._python.exits import flush
from xpool._worker import entry

__all__ = ["main"]

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Read by torch when it is imported: whether to load the backends that packages such as torch_tpu
register.  Not here: they read their variables then, and the worker's are not known yet."""


_KNOWN = {
    "numpy", "numpy.random", "pytest", "torch", "xpool._pickling.tensors.arrays",
    "xpool._worker.loop",
}  # fmt: skip
"""Modules that leave what is registered for forks with nothing to do when they are imported."""

LATER = 0.2
"""Seconds without a request or a death until the server imports what can wait."""

PATIENCE = 64
"""Requests after which it imports one of these all the same: what it lacks, workers may import."""


def main(fd: int, preload: list[str], later: list[str], missing: list[str], nice: int) -> int:
    """Serve until the parent closes its end; a child that is forked returns its own exit code.

    ``preload`` is imported at once; ``later`` when nothing is asked for, so that a program does not
    wait for what its first tasks do not need.  ``missing`` another server is to have, which still
    imports it: the workers of this one stand in for its own.  ``nice`` is the niceness to have:
    this process has that of the thread that started it.

    The parent is told when ``preload`` is imported, by a message of one byte.
    """
    entry.ignore_interrupts()  # at once: Ctrl-C may come while it imports
    if nice != os.getpriority(os.PRIO_PROCESS, 0):
        with contextlib.suppress(PermissionError):  # to be less nice takes a right
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    autoload = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    _preload(preload)
    entry.set_environment({AUTOLOAD: autoload})
    _take_back()
    known = dict(os.environ)
    late = _find_backends() if "torch" in preload else None
    wake_r, wake_w = _wake_by_deaths()
    statuses: dict[int, int] = {}
    # A module of the user's may have made a pool of threads, or a queue.
    fork = at_fork.fork_unused if _KNOWN.issuperset(preload) else os.fork
    # Not a selector: of that a child would have much to close.
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.register(wake_r, select.POLLIN)
    with socket.socket(fileno=fd) as sock:
        with contextlib.suppress(ConnectionError):  # the parent is gone; what is read next says so
            sock.send(b"R")
        rest = LATER
        asked = 0
        while True:
            events = poller.poll(rest * 1000 if later else None)
            if events:
                rest = LATER
            else:  # one by one: whoever asks meanwhile waits for one of them at most
                _preload([later.pop(0)])
                rest = 0.0
            for ready, _ in events:
                if ready != fd:
                    # In this order: a child that dies in between writes again.
                    _drain(wake_r)
                    _reap(statuses)
                    continue
                try:
                    request, fds, _, _ = socket.recv_fds(sock, 2, 4, entry.CLOSE_ON_EXEC)
                except ConnectionResetError:
                    return 0  # the parent has not read that this server is ready
                if not request:
                    return 0
                boot, status, *streams = fds
                asked += 1
                if later and asked % PATIENCE == 0:
                    _preload([later.pop(0)])
                _take_streams(request[1], streams)
                pid = None if _called_off(status) else _fork_or_refuse(fork, status)
                if pid is None:
                    os.close(boot)
                    os.close(status)
                    continue
                if pid == 0:
                    # First: a signal to this child would wake the server, whose pipe it has.
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    # Of other workers, too: the parent sees an end when all copies are closed.
                    for other in (sock.detach(), wake_r, wake_w, *statuses.values()):
                        os.close(other)
                    return _child(boot, status, late, missing, known)
                os.close(boot)
                statuses[pid] = status
                _tell(status, pid)


def _take_back() -> None:
    """Set what the program, or a module that was imported, may have set otherwise.

    It is as a worker is to have it, which has nothing to set then.
    """
    entry.ignore_interrupts()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # SIGCHLD too, which tells of deaths
    # Else a descriptor of the server's would get such a number, which `_take_streams` takes.
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open(2) gives the lowest free number


def _called_off(status: int) -> bool:
    """Whether the parent wants a worker no more that it has asked for."""
    poller = select.poll()
    poller.register(status, select.POLLIN)
    return bool(poller.poll(0))


def _fork_or_refuse(fork: Callable[[], int], status: int) -> int | None:
    """Fork; None: the system has no process now, and the parent decides when it asks again."""
    try:
        return fork()
    except OSError as exc:
        with contextlib.suppress(ConnectionError):  # the parent has lost interest
            os.write(status, entry.REFUSED + (exc.errno or 0).to_bytes(2, "little"))
        return None


def _preload(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        # SystemExit as well: a module that says so is for those that need it, not for the server.
        except BaseException as exc:
            # The worker that needs it will raise the same, where it can be attributed.
            _say(f"xpool: the fork server cannot preload {name}: {exc!r}")
    flush()  # or each worker would write what a module has printed
    gc.freeze()  # a collection in a worker does not touch, and so copy, the shared pages


def _say(text: str) -> None:
    # By number: a module may have put any object in the place of `sys.stderr`.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def _wake_by_deaths() -> tuple[int, int]:
    """Return the two ends of a pipe into which something is written when a child ends."""
    wake_r, wake_w = os.pipe()
    # `set_wakeup_fd` demands it of the writing end.  When the pipe is full, a wake-up is there.
    os.set_blocking(wake_r, False)
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _note)
    return wake_r, wake_w


def _note(signum: int, frame: object) -> None:
    """Let the wake-up descriptor do its work; the default would not write to it."""


def _find_backends() -> Callable[[], None] | None:
    """Return what loads the backends of torch that are installed; None: there are none."""
    from importlib import metadata

    backends = metadata.entry_points(group="torch.backends")
    return functools.partial(_load, backends) if backends else None


def _load(backends: Iterable[Any]) -> None:
    """Load what torch would have loaded while it was imported, were it not for `AUTOLOAD`."""
    if os.environ.get(AUTOLOAD, "1") == "1":
        for backend in backends:
            try:
                backend.load()()
            except BaseException as exc:
                _say(f"xpool: worker cannot load {backend.name}: {exc!r}")


def _take_streams(which: int, streams: list[int]) -> None:
    """Make stdout and stderr what they are in the parent now; what it has closed leads nowhere.

    Of the server itself, which has them to itself between two forks: so it also lets go of a file
    that the parent has replaced.  stdin leads nowhere, as in any worker of `multiprocessing`.
    """
    for fd in (1, 2):
        source = streams.pop(0) if which & fd else os.open(os.devnull, os.O_WRONLY)
        os.dup2(source, fd)
        os.close(source)


def _child(
    boot: int,
    status: int,
    late: Callable[[], None] | None,
    missing: list[str],
    known: dict[str, str],
) -> int:
    code = 1
    try:
        # The server collects nothing until all is imported (`_engine/launch`).
        gc.enable()
        # Descriptor 1 may be another file than when this object was made.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=os.isatty(1))
        _await_tracker(status)
        code = entry.main(boot, late=late, missing=missing, known=known)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Not back through the server's frames, nor its interpreter's end: torch's takes long.
        os._exit(code)


def _await_tracker(parent: int) -> None:
    """Have the program's resource tracker be this worker's, once it imports what that is in."""

    def borrow(module: Any) -> None:
        from xpool._python.tracker import Borrowed

        Borrowed.become(module, parent, ask)

    def ask(sock: socket.socket) -> int | None:
        try:
            sock.send(entry.TRACKER)
            _, fds, _, _ = socket.recv_fds(sock, 1, 1, entry.CLOSE_ON_EXEC)
        except ConnectionError:
            return None  # the parent has ended, and this process is about to
        return fds[0] if fds else None

    def before_fork() -> None:
        # A child gets the tracker, and not the socket: its end is that of this process.
        from xpool._python.tracker import ask_now

        ask_now()

    import_hooks.when_imported("multiprocessing.resource_tracker", borrow)
    at_fork.at_fork(before=before_fork)


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 512):
            continue
    except BlockingIOError:
        return


def _reap(statuses: dict[int, int]) -> None:
    while True:
        try:
            # Tell first and reap then: as long as the parent has not been told, the pid is ours.
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None:
            return
        # None: a process that a preloaded module has started.
        fd = statuses.pop(info.si_pid, None)
        if fd is not None:
            exited = info.si_code == os.CLD_EXITED
            _tell(fd, info.si_status if exited else -info.si_status)
            os.close(fd)
        os.waitpid(info.si_pid, 0)


def _tell(fd: int, number: int) -> None:
    try:
        os.write(fd, number.to_bytes(8, "little", signed=True))
    except ConnectionError:
        return  # the parent has lost interest in this worker
