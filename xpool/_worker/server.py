"""The fork server: a process that imports the modules of workers, and forks workers on request.

A forked worker starts in milliseconds and shares the pages of torch.  The program itself, with its
threads and devices, is never forked.  `multiprocessing` has such a server, too.  This one has no
named socket, so only its parent can send requests.  A program can have one server for each set of
preloaded modules.  The server reports a death at once, with the exit status.

The parent sends requests over a SOCK_SEQPACKET pair.  A request is a byte with two to four
descriptors.  The descriptors are the worker's boot socket; a SOCK_SEQPACKET socket for its status;
and the current stdout and stderr, if bits 0 and 1 of the byte are set.  On the status socket the
server writes the worker's pid and later its wait status, each as 8 bytes, or the reason why it
cannot fork.  The worker uses this socket to say that it has begun, and to ask for the program's
resource tracker.  The server ends when the parent closes the other end of the pair; workers have
lifelines of their own.
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

from xpool._python import at_fork, descriptors, import_hooks
from xpool._python.exits import flush
from xpool._worker import entry

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""torch reads this variable when it is imported: whether to load the backends of packages such as
torch_tpu.  The server must not load them: they would read their variables, and those of the worker
are not known yet."""


_KNOWN = {
    "numpy", "numpy.random", "pytest", "torch", "xpool._pickling.tensors.arrays",
    "xpool._worker.loop",
}  # fmt: skip
"""If the server imports only these modules, the registered fork hooks have nothing to do."""

IDLE_SECONDS = 0.2
"""Seconds without a request or a death until the server imports the modules of ``later``."""


def main(fd: int, preload: list[str], later: list[str], nice: int) -> int:
    """Serve until the parent closes its end; in a forked worker, return the worker's exit code.

    ``preload`` is imported at once.  ``later`` is imported when there are no requests, so that a
    program does not wait for modules that its first tasks do not need.  ``nice`` is the niceness to
    set: this process has inherited that of the thread that started it.
    """
    _set_up(preload, nice)
    known = dict(os.environ)
    late = _find_backends() if "torch" in preload else None
    wake_r, wake_w = _wake_by_deaths()
    statuses: dict[int, int] = {}
    # A module of the user may have made a thread pool or a queue, whose fork hooks must run.
    fork = at_fork.fork_unused if _KNOWN.issuperset(preload) else os.fork
    # Do not use a selector, which a child would have to close.
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.register(wake_r, select.POLLIN)
    with descriptors.on(fd) as sock:
        rest = IDLE_SECONDS
        while True:
            events = poller.poll(rest * 1000 if later else None)
            if events:
                rest = IDLE_SECONDS
            else:
                _preload([later.pop(0)])
                rest = 0.0
            for ready, _ in events:
                if ready != fd:
                    # Drain first: a child that dies after this writes to the pipe again.
                    _drain(wake_r)
                    _reap(statuses)
                    continue
                request, fds, _ = descriptors.receive(sock, 1, 4)
                if not request:
                    return 0
                boot, status, *streams = fds
                _take_streams(request[0], streams)
                pid = None if _called_off(status) else _fork_or_refuse(fork, status)
                if pid is None:
                    os.close(boot)
                    os.close(status)
                    continue
                if pid == 0:
                    # Done first: this child has the server's pipe, so its signals would wake it.
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    # Close other workers' sockets, too: the parent sees the end of a worker when
                    # all copies are closed.
                    for other in (sock.detach(), wake_r, wake_w, *statuses.values()):
                        os.close(other)
                    return _child(boot, status, late, known)
                os.close(boot)
                statuses[pid] = status
                _tell(status, pid)


def _set_up(preload: list[str], nice: int) -> None:
    """Import, and make this process independent of the thread that started it."""
    entry.ignore_interrupts()  # first, since Ctrl-C may come during the imports
    if nice != os.getpriority(os.PRIO_PROCESS, 0):
        with contextlib.suppress(PermissionError):  # a lower niceness needs a privilege
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    autoload = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    _preload(preload)
    entry.set_environment({AUTOLOAD: autoload})
    _take_back()


def _take_back() -> None:
    """Reset signal handling and descriptors that the program or an imported module has changed.

    Workers inherit this state, so they need not set it.
    """
    entry.ignore_interrupts()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # also unblocks SIGCHLD, which reports deaths
    # Fill 0 to 2: otherwise the server's own descriptors get numbers that `_take_streams` replaces.
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open(2) gives the lowest free number


def _called_off(status: int) -> bool:
    """Whether the parent has cancelled the request, by shutting down the worker's socket."""
    poller = select.poll()
    poller.register(status, select.POLLIN)
    return bool(poller.poll(0))


def _fork_or_refuse(fork: Callable[[], int], status: int) -> int | None:
    """Fork; None: the system refuses it now.  The parent decides when to ask again."""
    try:
        return fork()
    except OSError as exc:
        with contextlib.suppress(ConnectionError):  # the parent has closed its end
            os.write(status, entry.REFUSED + (exc.errno or 0).to_bytes(2, "little"))
        return None


def _preload(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        # Catch SystemExit, too: a module that exits must end workers that need it, not the server.
        except BaseException as exc:
            # A worker that needs the module will raise the same error, in the task that imports it.
            _say(f"xpool: the fork server cannot preload {name}: {exc!r}")
    flush()  # otherwise each worker would write a module's buffered output again
    gc.freeze()  # collections in workers do not touch the shared pages, which would copy them


def _say(text: str) -> None:
    # Use the number, since a module may have replaced `sys.stderr` by any object.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def _wake_by_deaths() -> tuple[int, int]:
    """Return the two ends of a pipe to which a byte is written when a child ends."""
    wake_r, wake_w = os.pipe()
    # `set_wakeup_fd` requires a non-blocking write end.  A full pipe wakes the server anyway.
    os.set_blocking(wake_r, False)
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    # Python writes to the descriptor only for signals with a handler.
    signal.signal(signal.SIGCHLD, entry.ignore)
    return wake_r, wake_w


def _find_backends() -> Callable[[], None] | None:
    """Return a function that loads the installed backends of torch; None: there are none."""
    from importlib import metadata

    backends = metadata.entry_points(group="torch.backends")
    return functools.partial(_load, backends) if backends else None


def _load(backends: Iterable[Any]) -> None:
    """Load the backends that torch would have loaded at its import without `AUTOLOAD`."""
    if os.environ.get(AUTOLOAD, "1") == "1":
        for backend in backends:
            try:
                backend.load()()
            except BaseException as exc:
                _say(f"xpool: worker cannot load {backend.name}: {exc!r}")


def _take_streams(which: int, streams: list[int]) -> None:
    """Set stdout and stderr to the parent's current ones; if it has closed one, to the null device.

    This changes the streams of the server itself, which it does not use between forks.  So the
    server does not keep a file open that the parent has replaced.  stdin is the null device, as in
    any worker of `multiprocessing`.
    """
    for fd in (1, 2):
        source = streams.pop(0) if which & fd else os.open(os.devnull, os.O_WRONLY)
        os.dup2(source, fd)
        os.close(source)


def _child(
    boot: int,
    status: int,
    late: Callable[[], None] | None,
    known: dict[str, str],
) -> int:
    try:
        os.write(status, entry.BEGUN)
    except ConnectionError:
        os._exit(0)  # the parent has called off the request meanwhile
    code = 1
    try:
        # Garbage collection is off in the server until all is imported (`_engine/launch`).
        gc.enable()
        # Descriptor 1 may lead to another file than when `sys.stdout` was made.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=os.isatty(1))
        _await_tracker(status)
        code = entry.main(boot, late=late, known=known)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # Exit here, without the server's frames and the interpreter's cleanup (slow with torch).
        os._exit(code)


def _await_tracker(parent: int) -> None:
    """Let this worker use the program's resource tracker, once it imports the tracker's module."""

    def borrow(module: Any) -> None:
        _tracker().Borrowed.become(module, parent, ask)

    def ask(sock: socket.socket) -> int | None:
        try:
            sock.send(entry.TRACKER)
            _, fds, _ = descriptors.receive(sock, 1, 1)
        except ConnectionError:
            return None  # the parent has ended, so this process will be killed
        return fds[0] if fds else None

    def before_fork() -> None:
        # A child inherits the tracker but must not use the socket, which is for this process.  The
        # import calls `borrow`, which needs the complete `tracker`, so `tracker` cannot import it.
        importlib.import_module("multiprocessing.resource_tracker")
        _tracker().ask_now()

    import_hooks.when_imported("multiprocessing.resource_tracker", borrow)
    at_fork.at_fork(before=before_fork)
    # A child's copy of the socket would hide this worker's end if the fork server is killed.
    descriptors.owned(parent)


def _tracker() -> Any:
    from xpool._python import tracker  # here, because few workers have one

    return tracker


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 512):
            continue
    except BlockingIOError:
        return


def _reap(statuses: dict[int, int]) -> None:
    while True:
        try:
            # Tell the parent before reaping: until it knows, no other process can have the pid.
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None:
            return
        # A process that a preloaded module has started has no status socket.
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
        return  # the parent has closed its end
