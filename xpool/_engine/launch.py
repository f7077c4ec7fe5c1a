"""How a worker's process is started: through xpool's fork server, or by `multiprocessing`.

A launcher is given one end of a socket pair for the child and returns a handle; everything else a
worker needs reaches it through that socket.  A handle answers four questions (pid, ended, exit
code, the descriptor to wait on) and takes one order (a signal).
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
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from xpool._engine.forked import Forked
from xpool._python import at_fork, server_process
from xpool._python.interrupt import deliver, interruptible, pending
from xpool._worker import entry
from xpool.errors import OptionError, XPoolError, exit_reason

__all__ = [
    "ForkServer",
    "Handle",
    "Launcher",
    "ProcessLauncher",
    "StandIns",
    "asked_for",
    "import_for_arrays",
    "needs_arrays",
    "start_early",
    "wanted_modules",
]


class Handle(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int | None:
        """Its process id, as soon as it is known."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when `ended` has news."""

    def ended(self) -> bool:
        """Say whether it has ended; reads what the sentinel has to tell, never blocks.

        Raises:
            ValueError: it has told nonsense, which is said once.
        """

    @property
    def exitcode(self) -> int | None:
        """As `multiprocessing.Process.exitcode`, when it has ended; None: not known."""

    @property
    def stepped_aside(self) -> bool:
        """Whether it has ended as a stand-in, whose first task is for the next one to run."""

    @property
    def problem(self) -> Exception | None:
        """Why there was no process, when it has ended: an `OSError`, if the system refused it."""

    def signal(self, signum: int) -> None:
        """Send it a signal; nothing happens when it has ended."""

    def close(self) -> None:
        """Let go of the descriptors; it has ended."""


class Launcher(Protocol):
    """A way to start processes."""

    inherits: bool
    """Whether the child gets objects by inheritance: initializer and initargs may be anything."""

    bare: bool
    """Whether the child is no `multiprocessing` process yet and must be made one."""

    forks: bool
    """Its workers are forks of the program, whose OpenMP threads they do not have."""

    def launch(self, boot: socket.socket, name: str, daemon: bool, inherited: Any) -> Handle:
        """Start a child that calls `xpool._worker.entry.main` with ``boot``; closes it here."""


# -- the fork server -------------------------------------------------------------------------

PRELOAD = ("xpool._worker.loop",)
"""What every server imports: a worker's own code."""

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
    "xpool._pickling.tensors.handles",
    "xpool._pools.process",
    "xpool._pools.assembly",
)
"""What it imports when the first workers run: these can do without it, or import it themselves."""

_NUMPY = ("numpy", "numpy.random")
_ARRAYS = "xpool._pickling.tensors.arrays"  # and tensors

_preloaded: set[str] = set()  # what `xpool.preload` was asked for

_LAST_IMPORT = 10.0
"""Seconds for a server that may not be killed to see that it is to end: it may be importing."""


def start_early(modules: Iterable[str]) -> None:
    """Start the server that has these modules and what was asked for before, in the background."""
    _preloaded.update(modules)
    if sys.platform == "linux":
        ForkServer.get(wanted_modules()).start()


def asked_for() -> bool:
    """Whether the program has asked for a server with certain modules."""
    return bool(_preloaded)


def wanted_modules() -> tuple[str, ...]:
    """Return what the server of the program as it is now is to import.

    Of numpy and torch the largest, for torch brings numpy; pytest, since modules of tests import
    it, and else each worker would.  But who has asked for modules got a server before it was known
    what these would bring to the program, and so has named all.
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
    """Return the modules, what torch uses of numpy if that is installed, and our own for both."""
    if not needs_arrays(modules):
        return list(modules)
    installed = importlib.util.find_spec("numpy") is not None
    return [*(_NUMPY if installed else ()), *modules, _ARRAYS]


def needs_arrays(modules: Iterable[str]) -> bool:
    """Whether numpy or torch is among these: workers may stand in until a server has it."""
    return not {"numpy", "torch"}.isdisjoint(modules)


def import_for_arrays() -> None:
    """Import what arrays and tensors are sent with, if the program has any.

    When the first one is sent, no descriptor may be left for it; and a fork of the program that has
    it imports nothing.
    """
    if needs_arrays(sys.modules):
        importlib.import_module(_ARRAYS)


class ForkServer:
    """The parent's end of a fork server.

    There is one for each set of preloaded modules, and for each user that the program has been:
    workers have from their server what `server_process.credentials` lists.
    """

    inherits = False
    bare = True
    forks = False

    _servers: dict[Any, ForkServer] = {}  # by their `_key`
    # Taken before a server's `_sending`, never within it.  That is held while a server starts, and
    # while it is asked: two orders at once would mix with its restart.
    _lock = threading.Lock()  # guards `_servers`; each server's `_sending` its socket

    def __init__(self, preload: tuple[str, ...], stands_in: bool, who: tuple[object, ...]) -> None:
        self.preload = preload
        self._stands_in = stands_in  # for the one that imports these modules: it has none of them
        self._key = preload, who, stands_in
        self._ready = False  # it has said that its modules are imported
        self._sending = threading.Lock()
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._live: set[int] = set()  # pipes on which it is to report

    @classmethod
    def get(cls, preload: tuple[str, ...], *, stands_in: bool = False) -> ForkServer:
        """Return the server that has these modules; it starts with the first worker.

        ``stands_in``: the one whose workers do without them, until that has imported them.

        Servers with other modules that have no workers are ended: they were for the program as
        it was before it imported something.
        """
        cls.stop_idle(preload)
        server = cls(preload, stands_in, server_process.credentials())
        with cls._lock:
            return cls._servers.setdefault(server._key, server)

    def _of_now(self) -> ForkServer:
        """Return this server, or the one for whom the program has become since."""
        if self._key[1] == server_process.credentials():
            return self
        return ForkServer.get(self.preload, stands_in=self._stands_in)

    def start(self, *, complete: bool = True) -> None:
        """Start the server, if it is not running, and do not wait for its imports.

        ``complete``: False: its first workers may stand in for those that have all modules.
        """
        server = self._of_now()
        with server._sending:
            server._start(complete)

    def _start(self, complete: bool) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        # What a dead one has left: its socket.
        self._stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # At once: a child that another thread forks meanwhile closes it (`forget_all`).
        self._sock, self._ready = ours, False
        modules = _with_numpy(self.preload)
        imports: tuple[Sequence[str], ...]  # preload, soon, later, missing
        if self._stands_in:
            # A worker that needs another of them imports it: that takes less than to wait.
            imports = PRELOAD, (), (), ("torch",)
        elif complete:
            imports = (*PRELOAD, *modules), (), LATE_IMPORTS, ()
        else:
            imports = PRELOAD, modules, LATE_IMPORTS, self.preload
        # The server alone has its end from here on: else its death would not be seen by who asks.
        with theirs:
            self._process = server_process.start(theirs.fileno(), *imports)

    def ready(self) -> bool:
        """Whether it has imported its modules, and forks at once."""
        with self._sending:
            if not self._ready and self._sock is not None:
                try:
                    self._ready = self._sock.recv(1, socket.MSG_DONTWAIT) != b""
                except OSError:
                    return False  # not yet, or never: it has died
            return self._ready

    def launch(self, boot: socket.socket, name: str, daemon: bool, inherited: Any) -> Forked:
        if inherited is not None:
            raise OptionError("the fork server cannot pass objects on by inheritance")
        return self.fork(boot)

    def fork(self, boot: socket.socket, *, complete: bool = True) -> Forked:
        """Start a worker; ``complete``: False: it may lack numpy or torch."""
        return self._of_now()._fork(boot, complete)

    def _fork(self, boot: socket.socket, complete: bool) -> Forked:
        request = entry.COMPLETE if complete else entry.FORK
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with boot, self._sending:
                self._start(complete)
                try:
                    self._ask(request, boot.fileno(), theirs.fileno())
                except (BrokenPipeError, ConnectionResetError):
                    self._stop()  # it died since we looked; a second time is no accident
                    self._start(complete)
                    self._ask(request, boot.fileno(), theirs.fileno())
                status = ours.detach()
                self._live.add(status)  # before another thread may find this server idle
                process = self._process
        assert process is not None
        return Forked(status, self._live, functools.partial(self._why_no_fork, process))

    def _why_no_fork(self, process: subprocess.Popen[bytes]) -> Exception | None:
        """Say how a server has ended that has not forked a worker.  Takes no lock."""
        try:
            # The kernel closes its sockets a moment before it says how the process ended.
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            return None
        imports = ", ".join(self.preload)
        return XPoolError(
            f"the fork server ended before it had forked the worker, {exit_reason(code)}"
            f"{f'; it imports {imports} first' if imports else ''}. Look at its output on stderr"
        )

    def _ask(self, request: bytes, boot: int, status: int) -> None:
        assert self._sock is not None
        streams = list(filter(server_process.is_open, (1, 2)))
        socket.send_fds(self._sock, [request, bytes([sum(streams)])], [boot, status, *streams])

    def _stop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            # It may be importing, and has no workers that matter now.
            with contextlib.suppress(PermissionError):  # it is of who the program was before
                self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_IMPORT)
            self._process = None

    def stop_if_idle(self) -> None:
        """End it if it has no workers."""
        with self._sending:
            if not self._live:
                self._stop()

    @classmethod
    def stop_idle(cls, but: tuple[str, ...] | None = None) -> None:
        """End the servers that have no workers, but for one, and for who stands in for it."""
        kept = None if but is None else (but, server_process.credentials())
        with cls._lock:
            for other in [s for s in cls._servers.values() if s._key[:2] != kept]:
                # A server that another thread has just asked has a worker by now: see `launch`.
                with other._sending:
                    if not other._live:
                        other._stop()
                        del cls._servers[other._key]

    @classmethod
    def stop_all(cls) -> None:
        """End all servers: they end when their socket closes."""
        with cls._lock:
            for server in cls._servers.values():
                with server._sending:
                    server._stop()

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child: these servers are the parent's; let go of them."""
        servers, cls._servers, cls._lock = cls._servers, {}, threading.Lock()
        for server in servers.values():
            # Else the server would end with this child, and not with the parent.
            if server._sock is not None:
                server._sock.close()
            if server._process is not None:
                server._process.returncode = 0  # not ours to wait for


at_fork.at_fork(in_child=ForkServer.forget_all)
atexit.register(ForkServer.stop_idle)  # in a program that makes no pools; those stop all others


class StandIns:
    """Has workers at once in a program that has numpy or torch, from a server that has not.

    numpy is imported by that server itself, before it starts a complete worker or when it has
    nothing else to do.  torch takes seconds, so another server imports it meanwhile.  All workers
    are complete as soon as a server has the modules, or when a stand-in has stepped aside
    (`xpool._worker.provisional`).
    """

    inherits = False
    bare = True
    forks = False

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._server = ForkServer.get(modules)
        self._bare_server = ForkServer.get(modules, stands_in="torch" in modules)
        self._needed = False

    def start(self) -> None:
        """Start what will be asked first, and do not wait for its imports."""
        if self._server is self._bare_server or not self._server.ready():
            self._bare_server.start(complete=False)
        else:
            self._bare_server.stop_if_idle()

    def launch(self, boot: socket.socket, name: str, daemon: bool, inherited: Any) -> Handle:
        if self._needed or self._server.ready():
            # Not ready yet, perhaps: the order lies in its socket until it has imported.
            return self._server.launch(boot, name, daemon, inherited)
        handle = self._bare_server.fork(boot, complete=False)
        handle.tell = self._told
        return handle

    def _told(self, handle: Forked) -> None:
        """Start the server with torch: not before, when the stand-in needed the processor."""
        if handle.stepped_aside:
            self._needed = True
        with contextlib.suppress(OSError):  # no process can be started now; `launch` tries again
            self._server.start()


# -- multiprocessing's own ---------------------------------------------------------------------


class ProcessLauncher:
    """Starts workers as `Process` of a `multiprocessing` context, by documented means only."""

    inherits = True
    bare = False

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self._method = context.get_start_method()
        self.forks = self._method == "fork"
        if self.forks:  # once, instead of in each worker
            for name in PRELOAD:
                importlib.import_module(name)
            import random  # only here: most programs need it never

            random.Random(b"")  # from Python 3.13 on the first seed imports its hash function

    def launch(self, boot: socket.socket, name: str, daemon: bool, inherited: Any) -> Handle:
        # A Connection is what may be given to any Process; the boot socket travels through it.
        ours, theirs = self._context.Pipe(duplex=True)
        with boot, theirs:
            process: Any = self._context.Process(  # type: ignore[attr-defined]
                target=_enter_through, args=(theirs, inherited), name=name, daemon=daemon
            )
            with ours:
                self._start(process)
                with socket.socket(fileno=os.dup(ours.fileno())) as sock:
                    # Descriptors travel with a byte at least (unix(7)).
                    socket.send_fds(sock, [b"B"], [boot.fileno()])
        return _Process(process, own_child=self._method != "forkserver")

    def _start(self, process: Any) -> None:
        if self._method == "spawn":
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()  # else `start` does so, and unblocks SIGINT after it
        with server_process.interrupts_blocked():
            process.start()


@interruptible  # a fork's stack goes on with its parent's frames, some of them shielded
def _enter_through(connection: Any, inherited: Any) -> None:
    if pending:
        deliver()
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        connection.close()
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    entry.ignore_interrupts()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see `interrupts_blocked`
    # None where the parent has ended before it could send them.
    if fds and (code := entry.main(fds[0], inherited)):
        sys.exit(code)


class _Process:
    def __init__(self, process: Any, *, own_child: bool) -> None:
        self._process = process
        self.stepped_aside = False
        self.problem: Exception | None = None
        self.pid: int | None = process.pid
        self._pidfd: int | None = None
        # The sentinel of multiprocessing is a pipe, whose other end the child has.  A process that
        # another thread forks meanwhile has it, too: then the death of the child is not seen.
        if own_child and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # it has ended, and another thread has reaped it
                self._pidfd = os.pidfd_open(process.pid)
        self.sentinel: int = process.sentinel if self._pidfd is None else self._pidfd
        self.exitcode: int | None = None

    def ended(self) -> bool:
        from multiprocessing import connection  # only here: most programs need it never

        if not connection.wait([self.sentinel], 0):
            return False
        if self._pidfd is None:
            self._process.join(1)  # the sentinel closes a moment before the status can be had
        self.exitcode = self._process.exitcode
        return True

    def signal(self, signum: int) -> None:
        if not self.ended() and self.pid is not None:
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:
                return  # since we looked; its sentinel tells
            except PermissionError:
                return  # of who the program was before: the lifeline has to do

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
        if self.exitcode is not None:
            # Else the program ignores SIGCHLD and there is no status: multiprocessing thinks
            # that it still runs, and would refuse.
            self._process.close()
