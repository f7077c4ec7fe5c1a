"""How a worker's process is started: through xpool's fork server, or by `multiprocessing`.

A launcher gets the child's end of a socket pair, and returns a handle.  The worker receives
everything else through this socket.  A handle has the process's pid, its exit code, and a
descriptor to wait on.  It says whether the process has ended, and sends signals to it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from xpool._python import at_fork, descriptors, starting
from xpool._python.import_hooks import imports_awaited
from xpool._python.interrupt import deliver, interruptible, pending, until_interrupted
from xpool._python.starting import aside, spare_in_children
from xpool._worker import entry
from xpool.errors import OptionError, XPoolError, exit_reason

_CREDENTIALS = struct.Struct("iII")
"""`struct ucred` of unix(7): pid, uid, gid."""


class Forked:
    """A child of the fork server, watched through the socket on which the server reports.

    The server and the child have the other end, so the socket closes when both have ended.  The
    kernel adds the sender's pid to each packet: only the server may send reports, and the child may
    send only `entry.BEGUN` and `entry.TRACKER`.

    Attributes:
        sentinel: a descriptor that becomes readable when `ended` has something to read.
        problem: why no process was started: an `OSError` if the system refused it.
        exitcode: as `multiprocessing.Process.exitcode`, when it has ended; None: unknown.
    """

    def __init__(
        self, status: int, live: set[int], why_no_fork: Callable[[], Exception | None]
    ) -> None:
        self.sentinel = status
        self._live, self._why_no_fork = live, why_no_fork
        self.problem: Exception | None = None
        self._called_off = False
        self.exitcode: int | None = None
        self._pid: int | None = None
        self._ended = False
        self._server: int | None = None  # the process that has sent the pid
        self._protocol_error: ValueError | None = None
        # Non-blocking: `ended` is called with the engine's lock held.
        os.set_blocking(status, False)

    @property
    def pid(self) -> int | None:
        """The process id; None while it is unknown."""
        if self._pid is None:
            self._read()
        return self._pid

    def _read(self) -> None:
        while not self._ended:
            try:
                data, sender = self._receive()
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # an answer of ours was not read; earlier packets can be read now
            if sender is None:
                self._ended = True  # the server ended first, so it cannot report the status
                if self._pid is None and not self._called_off and self.problem is None:
                    self.problem = self._why_no_fork()
            elif data[:1] == entry.REFUSED and self._pid is None and len(data) == 3:
                number = int.from_bytes(data[1:], "little")
                self.problem = OSError(number, f"fork() was refused: {os.strerror(number)}")
            elif data == entry.BEGUN and self._pid in (None, sender):
                self._pid = sender
            elif data == entry.TRACKER:
                self._lend_tracker()
            elif len(data) != 8 or not self._is_server(sender):
                self._protocol_error = ValueError(
                    f"process {sender} wrote {len(data)} bytes to the socket of the fork server"
                )
            elif self._server is None:
                self._server = sender
                self._pid = self._pid or int.from_bytes(data, "little", signed=True)
            else:
                self.exitcode = int.from_bytes(data, "little", signed=True)
                self._ended = True

    def _is_server(self, sender: int) -> bool:
        return sender == self._server if self._server is not None else sender != self._pid

    def _receive(self) -> tuple[bytes, int | None]:
        """Receive a packet; return it and the pid of its sender, None at the end of the socket."""
        with descriptors.borrowed(self.sentinel, socket.SOCK_SEQPACKET) as sock:
            # One byte more than a report, to detect long packets.  The kernel drops descriptors.
            data, notes, _, _ = sock.recvmsg(9, socket.CMSG_SPACE(_CREDENTIALS.size))
        for level, kind, note in notes:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid: int = _CREDENTIALS.unpack(note)[0]
                return data, pid
        return data, None

    def _lend_tracker(self) -> None:
        # The engine's lock is held here, and the start of the tracker may wait.
        with descriptors.no_fork:
            status = descriptors.owned(os.dup(self.sentinel))
        if not aside(functools.partial(_send_tracker, status), "xpool-tracker"):
            _send_tracker(status, refused=True)

    def ended(self) -> bool:
        """Read from the sentinel without blocking; return whether the process has ended.

        Raises:
            ValueError: invalid data was read; raised once.
        """
        self._read()
        if self._protocol_error is not None:
            error, self._protocol_error = self._protocol_error, None
            raise error
        return self._ended

    def signal(self, signum: int) -> None:
        """Send the process a signal; do nothing if it has ended."""
        pid = self.pid
        self._read()
        if self._ended:
            return
        if pid is None:
            if signum == signal.SIGKILL:
                # The server may import for long before it sees this, so count the worker as ended.
                # If the server forks the worker meanwhile, the worker ends at its first line,
                # because its `BEGUN` fails.
                self._called_off = True
                with descriptors.borrowed(self.sentinel, socket.SOCK_SEQPACKET) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
            return
        # The pid may belong to another process by now.  The server reports a death before it reaps
        # the child.  So if no report has come, the pidfd refers to our worker.
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return  # ended; or no descriptor is free, and only the lifeline can end it
        try:
            self._read()
            if not self._ended:
                signal.pidfd_send_signal(fd, signum)
        except (ProcessLookupError, PermissionError):
            return  # ended, or runs as an earlier user: the lifeline ends it
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptors; the process has ended."""
        # Remove it before closing: another launch may get the same number at once.
        self._live.discard(self.sentinel)
        os.close(self.sentinel)


def _send_tracker(status: int, refused: bool = False) -> None:
    """Send the tracker's descriptor to a worker, or none, and close this end of the socket."""
    try:
        tracker = None
        if not refused:
            # If no process can be started here, perhaps the worker can start one.
            with contextlib.suppress(Exception):
                tracker = _resource_tracker().getfd()
        with descriptors.borrowed(status, socket.SOCK_SEQPACKET) as sock:
            socket.send_fds(sock, [entry.TRACKER], [] if tracker is None else [tracker])
    except OSError:
        return  # the worker has ended
    finally:
        descriptors.close(status)


def _resource_tracker() -> Any:
    from multiprocessing import resource_tracker  # late: most programs never need it

    return resource_tracker


class Launcher(Protocol):
    """A way to start processes."""

    inherits: bool
    """Whether the child inherits initializer and initargs, which need not be picklable then."""

    forks: bool
    """Whether workers are forks of the program, which lack its OpenMP threads."""

    def launch(
        self, boot: socket.socket, name: str, daemon: bool, inherited: Any
    ) -> Forked | Process:
        """Start a child that calls `xpool._worker.entry.main` with ``boot``; close this one."""


# -- the fork server -------------------------------------------------------------------------

PRELOAD = ("xpool._worker.loop",)
"""Modules that every server imports: the code of a worker."""

LATE_IMPORTS = (
    "traceback",
    "tokenize",
    "unicodedata",
    "xpool._python.pool_errors",
    "xpool._python.tracker",
    "random",
    *(["_sha2"] if sys.version_info >= (3, 13) else []),  # imported by the first `random.seed`
    "dill",
    "xpool._worker.peers",
    "xpool._pickling.tensors.device_memory",
    "xpool._pools.process",
    "xpool._pools.assembly",
)
"""Modules that a server imports when idle; a worker that needs one earlier imports it itself."""

_NUMPY = ("numpy", "numpy.random")
_ARRAYS = "xpool._pickling.tensors.arrays"  # also for tensors

_preloaded: set[str] = set()  # the arguments of `xpool.preload`

_LAST_IMPORT = 10.0
"""Seconds to wait for the end of a server that this process has no right to kill."""


def start_early(modules: Iterable[str]) -> None:
    """Start a server with these modules and those of earlier calls, in the background."""
    _preloaded.update(modules)
    if sys.platform == "linux":
        ForkServer.get(wanted_modules()).start()


def wanted_modules() -> tuple[str, ...]:
    """Return the modules that the server imports, by what the program has imported so far.

    These are torch, or else numpy (torch imports numpy), and pytest, which each worker of a test
    module would import otherwise.  After `xpool.preload`, which has started a server already, only
    torch is added to its arguments.
    """
    wanted = set(_preloaded)
    if "torch" in sys.modules:
        wanted.add("torch")
    if not _preloaded:
        wanted.update({"pytest"} & sys.modules.keys())
        if "torch" not in wanted:
            wanted.update({"numpy"} & sys.modules.keys())
    return tuple(sorted(wanted))


def _with_numpy(modules: tuple[str, ...]) -> list[str]:
    """Add numpy if it is installed, and xpool's module for arrays, to modules that need them."""
    if not needs_arrays(modules):
        return list(modules)
    installed = importlib.util.find_spec("numpy") is not None
    return [*(_NUMPY if installed else ()), *modules, _ARRAYS]


def needs_arrays(modules: Iterable[str]) -> bool:
    return not {"numpy", "torch"}.isdisjoint(modules)


def import_for_arrays() -> None:
    """Import the module that sends arrays and tensors, if the program has numpy or torch.

    Done early: later, no descriptor may be free for the import.  Forks of the program inherit it.
    """
    if needs_arrays(sys.modules):
        importlib.import_module(_ARRAYS)


class ForkServer:
    """The parent's end of a fork server.

    There is one for each set of preloaded modules and each identity of the program, because workers
    inherit their server's identity (`starting.credentials`).
    """

    inherits = False
    forks = False

    _servers: dict[Any, ForkServer] = {}  # by their `_key`
    # A thread that holds a server's `_sending` must not take `_lock`.  `_sending` is held while a
    # server starts or gets a request, so that no request comes in the middle of a restart.
    _lock = threading.Lock()  # guards `_servers`; each server's `_sending` guards its socket

    def __init__(self, preload: tuple[str, ...], who: tuple[object, ...]) -> None:
        self.preload = preload
        self._key = preload, who
        self._sending = threading.Lock()
        self._sock: socket.socket | None = None
        self._process: starting.ServerProcess | None = None
        self._live: set[int] = set()  # status sockets of its live workers

    @classmethod
    def get(cls, preload: tuple[str, ...]) -> ForkServer:
        """Return the server that has these modules; it starts with the first worker.

        Ends idle servers with other modules, because the program has imported more since then.
        """
        cls.stop_idle(preload)
        server = cls(preload, starting.credentials())
        with cls._lock:
            return cls._servers.setdefault(server._key, server)

    def _of_now(self) -> ForkServer:
        """Return this server, or the one for the program's current identity."""
        return self if self._key[1] == starting.credentials() else ForkServer.get(self.preload)

    def start(self) -> None:
        """Start the server, if it is not running, and do not wait for its imports."""
        server = self._of_now()
        with server._sending:
            server._start()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        # Close the socket of a dead server.
        self._stop()
        self._sock, theirs = descriptors.private_pair(socket.SOCK_SEQPACKET)
        modules = *PRELOAD, *_with_numpy(self.preload)
        # Close our copy of the server's end: otherwise a request would not fail after its death.
        with theirs:
            self._process = starting.start_server(theirs.fileno(), modules, LATE_IMPORTS)

    def launch(self, boot: socket.socket, name: str, daemon: bool, inherited: Any) -> Forked:
        if inherited is not None:
            raise OptionError("the fork server cannot pass objects on by inheritance")
        return self._of_now()._fork(boot)

    def _fork(self, boot: socket.socket) -> Forked:
        ours, theirs = descriptors.private_pair(socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with boot, self._sending:
                self._start()
                try:
                    self._ask(boot.fileno(), theirs.fileno())
                except (BrokenPipeError, ConnectionResetError):
                    self._stop()  # the server died meanwhile
                    self._start()
                    # A second death is noticed as one after the request is: no status arrives.
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        self._ask(boot.fileno(), theirs.fileno())
                status = ours.detach()
                self._live.add(status)  # before another thread finds this server idle
                process = self._process
        assert process is not None
        return Forked(status, self._live, functools.partial(self._why_no_fork, process))

    def _why_no_fork(self, process: starting.ServerProcess) -> Exception | None:
        """Return an error that says how the server ended before it forked.  Takes no lock."""
        # The kernel closes its sockets a moment before it reports the exit status.
        code = process.wait(1)
        if code is None:
            return None
        imports = ", ".join(self.preload)
        return XPoolError(
            f"the fork server ended before it had forked the worker, {exit_reason(code)}"
            f"{f'; it imports {imports} first' if imports else ''}. Look at its output on stderr. "
            f"Its program is {process.path}"
        )

    def _ask(self, boot: int, status: int) -> None:
        assert self._sock is not None
        streams = list(filter(starting.is_stream, (1, 2)))
        socket.send_fds(self._sock, [bytes([sum(streams)])], [boot, status, *streams])

    def _stop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):  # the program has closed all descriptors
                sock.close()
        if self._process is not None:
            # Kill it, since it may be importing.
            with contextlib.suppress(PermissionError):  # the server has an earlier identity
                self._process.kill()
            self._process.wait(_LAST_IMPORT)
            self._process = None

    @classmethod
    def stop_idle(cls, but: tuple[str, ...] | None = None) -> None:
        """End servers without workers, except the one with modules ``but``."""
        kept = None if but is None else (but, starting.credentials())
        with cls._lock:
            for other in list(cls._servers.values()):
                if other._key == kept:
                    continue
                # A server that another thread has just asked has an entry in `_live`: see `_fork`.
                with other._sending:
                    if not other._live:
                        other._stop()
                        del cls._servers[other._key]

    @classmethod
    def stop_all(cls) -> None:
        with cls._lock:
            for server in cls._servers.values():
                with server._sending:
                    server._stop()

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child: forget the parent's servers, whose sockets are closed here."""
        servers, cls._servers, cls._lock = cls._servers, {}, threading.Lock()
        for server in servers.values():
            if server._sock is not None:
                server._sock.detach()  # another file may get its number


at_fork.at_fork(in_child=ForkServer.forget_all)
atexit.register(
    until_interrupted(ForkServer.stop_idle)
)  # for programs without pools; others use `stop_all`


# -- multiprocessing's own ---------------------------------------------------------------------


class ProcessLauncher:
    """Starts workers as processes of a `multiprocessing` context, by its documented API."""

    inherits = True

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self._method = context.get_start_method()
        self.forks = self._method == "fork"
        if self.forks:  # once, instead of in each worker
            for name in PRELOAD:
                importlib.import_module(name)
            # From Python 3.13 on the first seed imports its hash function.
            importlib.import_module("random").Random(b"")

    def launch(self, boot: socket.socket, name: str, daemon: bool, inherited: Any) -> Process:
        # Any Process takes a Connection as argument; the boot socket is sent through it.
        with descriptors.no_fork:
            ours, theirs = self._context.Pipe(duplex=True)
            descriptors.owned(ours.fileno())
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ()) if self.forks else None
        with boot, theirs:
            process: Any = self._context.Process(  # type: ignore[attr-defined]
                target=_enter_through, args=(theirs, inherited, mask), name=name, daemon=daemon
            )
            spare_in_children(process)
            try:
                with (
                    imports_awaited() if self.forks else contextlib.nullcontext(),
                    _without_script(inherited is None and not self.forks),
                ):
                    self._start(process)
                with descriptors.on_copy(ours.fileno()) as sock:
                    # Descriptors need at least one byte of data (unix(7)).
                    socket.send_fds(sock, [b"B"], [boot.fileno()])
            finally:
                descriptors.disown(ours.fileno())
                ours.close()
        return Process(process, own_child=self._method != "forkserver")

    def _start(self, process: Any) -> None:
        if self._method == "spawn":
            _resource_tracker().ensure_running()  # otherwise `start` does it, and unblocks SIGINT
        # A fork has the handlers of the program until `entry.drop_handlers`.
        with starting.blocked(_OF_HANDLERS if self.forks else [signal.SIGINT]):
            process.start()


@contextlib.contextmanager
def _without_script(without: bool) -> Iterator[None]:
    """Keep `multiprocessing` from running the script in processes that this thread starts.

    ``without`` is False if `multiprocessing` itself sends them objects (locks and queues in
    ``initargs``): the classes of these may be in the script.
    """
    if not without:
        yield
        return
    from multiprocessing import spawn

    prepare: Any = spawn.get_preparation_data
    thread = threading.get_ident()

    def prepared(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepare(name)
        if threading.get_ident() == thread:
            for key in "init_main_from_name", "init_main_from_path":
                data.pop(key, None)
        return data

    spawn.get_preparation_data = prepared
    try:
        yield
    finally:
        if spawn.get_preparation_data is prepared:
            spawn.get_preparation_data = prepare


@interruptible  # a fork's stack begins with frames of its parent, some of which are shielded
def _enter_through(connection: Any, inherited: Any, mask: Any) -> None:
    """Run a worker.  ``mask``: the signals to block, if this is a fork of the program."""
    if pending:
        deliver()
    with descriptors.on_copy(connection.fileno()) as sock:
        connection.close()
        _, fds, _ = descriptors.receive(sock, 1, 1)
    if mask is not None:
        entry.drop_handlers()
    entry.ignore_interrupts()
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # `fds` is empty if the parent ended before it sent them.
    if fds and (code := entry.main(fds[0], inherited)):
        sys.exit(code)


_OF_HANDLERS = signal.valid_signals() - {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
}  # fmt: skip
"""All signals but those of faults, which `faulthandler` reports."""


class Process:
    """A process of `multiprocessing`, with the interface of `Forked`."""

    def __init__(self, process: Any, *, own_child: bool) -> None:
        self._process = process
        self.problem: Exception | None = None
        self.pid: int | None = process.pid
        self._pidfd: int | None = None
        # The sentinel of multiprocessing is a pipe whose other end the child has.  A process that
        # another thread forks meanwhile inherits that end, and hides the child's death.
        if own_child and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # another thread has reaped the process
                self._pidfd = os.pidfd_open(process.pid)
        self.sentinel: int = process.sentinel if self._pidfd is None else self._pidfd
        self.exitcode: int | None = None

    def ended(self) -> bool:
        connection: Any = sys.modules["multiprocessing.connection"]  # which has made the pipe
        if not connection.wait([self.sentinel], 0):
            return False
        if self._pidfd is None:
            self._process.join(1)  # the sentinel closes a moment before the exit
        self.exitcode = self._process.exitcode
        return True

    def signal(self, signum: int) -> None:
        if not self.ended() and self.pid is not None:
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:
                return  # the process has ended, and the sentinel reports that
            except PermissionError:
                return  # the process has another user; the lifeline ends it

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        if self.exitcode is not None:  # else the program ignores SIGCHLD, so there is no status
            self._process.join()  # multiprocessing then forgets the process
        # Its descriptors are closed with its last reference.  `Process.close` would take its
        # parts away a moment too early, when a thread that starts a process may look at it.
        self._process = None


Handle = Forked | Process
"""A started process."""
