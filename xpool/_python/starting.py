"""Starts threads, and the process of a fork server, with as little waiting as possible.

`PromptThread` starts without the wait with which CPython's `Thread.start` ends.  This module also
refuses programs in which threads are not those of the system, and keeps forked children of the
program from ending its processes.

The fork server gets the program's options of Python.  It reads its code from an anonymous file,
because other users can read a command line.  It is started by `os.posix_spawn`, which returns when
the process runs its program.  `subprocess` would wait for the end of a pipe until then.  If another
thread forks meanwhile, that child has a copy of the pipe's end, so the wait would last as long as
the child.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xpool._python.descriptors import new_file
from xpool._python.failures import XPoolError
from xpool._python.import_hooks import search_path
from xpool._python.interrupt import shielded

_REAL = "thread", "threading", "socket", "select", "os"
"""Modules that a pool needs as they are: its threads wait in the system for descriptors."""

_made: dict[threading.Thread, threading.Thread] = vars(threading)["_limbo"]
"""Threads that the system has made and that have not run yet; a forked child's are none."""


_ROOM = 1 << 20
"""Bytes of addresses that a new thread needs at most before it runs code of Python."""


def _wait_no_more(timeout: float | None = None) -> bool:
    return True


def print_error(thread: threading.Thread | None = None) -> None:
    """Give the handled exception to `threading.excepthook`, as a thread that it has ended."""
    args = *sys.exc_info(), thread or threading.current_thread()
    threading.excepthook(threading.ExceptHookArgs(args))


class PromptThread(threading.Thread):
    """A thread whose `start` returns when the system has made it.

    The usual `start` waits until the thread has run, so the interpreter lock goes to the thread and
    back.  Without memory it waits for ever: see `start`.  Until this thread has run, its `ident` is
    None.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._started: Any  # `start` waits for it; others only ask whether it is set
        self._started.wait = _wait_no_more

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the system refuses a thread, or has no addresses for its first frames, or
                the interpreter ends.
        """
        if sys.is_finalizing():  # before Python 3.12, such a thread never runs
            raise RuntimeError("can't create new thread at interpreter shutdown")
        # glibc keeps stacks of ended threads.  So it can make a thread where no address is free,
        # and the thread ends before its first line (RLIMIT_AS): then nobody learns of it.
        if sys.platform == "linux":
            try:
                mmap.mmap(-1, _ROOM, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
            except OSError as exc:
                raise RuntimeError(f"can't start new thread: {exc.strerror}") from exc
        super().start()

    def await_begin(self) -> None:
        """Wait until the thread has run, as the usual `start` does."""
        threading.Event.wait(self._started)

    def is_alive(self) -> bool:
        return self in _made or super().is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends, at most ``timeout`` seconds.

        `Thread.join` refuses a thread that has not run yet as one that was not started.
        """
        if self in _made:
            begun = time.monotonic()
            if not threading.Event.wait(self._started, timeout):
                return
            if timeout is not None:
                timeout -= time.monotonic() - begun
        super().join(timeout)


def aside(call: Callable[[], object], name: str) -> bool:
    """Have ``call()`` made by a thread of its own; return False if the system refuses a thread.

    For work that may wait, while the caller holds a lock.
    """
    try:
        PromptThread(target=call, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


def spare_in_children(process: Any) -> None:
    """Have forked children of this process leave a process of `multiprocessing` alone.

    A child has a copy of the list of processes that its parent has started.  When the child ends,
    `multiprocessing` would send SIGTERM to each daemon in this list.
    """
    process.is_spared = True
    # The last registered function is called first: before that of `multiprocessing.util`, which
    # was registered when the process's pipe was made.
    atexit.unregister(_spare)
    atexit.register(_spare)


def _spare() -> None:
    # Not a hook of forks, because C code may have forked.
    children: set[Any] = vars(sys.modules["multiprocessing.process"])["_children"]
    for one in [*children]:
        if hasattr(one, "is_spared") and one._parent_pid != os.getpid():
            children.discard(one)


def refuse_green_threads() -> None:
    """Raise an error if gevent or eventlet has replaced modules that pools need.

    A thread of the pool would then be a greenlet of the caller's thread, and would never run while
    the caller waits.

    Raises:
        XPoolError: such a library has patched them.
    """
    for library, module, name in (
        ("gevent", "gevent.monkey", "is_module_patched"),
        ("eventlet", "eventlet.patcher", "is_monkey_patched"),
    ):
        is_patched: Any = getattr(sys.modules.get(module), name, None)
        patched = [one for one in _REAL if is_patched(one)] if is_patched else []
        if patched:
            raise XPoolError(
                f"{library} has patched {', '.join(patched)} in this program, so a pool's threads "
                "could not wait; do not call its monkey patching in a program that makes pools, or "
                "make them in another process"
            )


# -- the process of a fork server ------------------------------------------------------------------

# Garbage collection is off during the imports: it would take milliseconds and find nothing.
_ORDER = (
    "import gc, sys; gc.disable(); sys.path[{keep}:] = {path!a}; "
    "from xpool._worker.server import main; "
    "os._exit(main({fd}, {imports}, {nice}))"
)

# The command closes descriptors that the program has left inheritable, but not those that `site`
# has opened in the new process.
_COMMAND = """\
import os  # xpool._worker.server
with os.fdopen({file}, "rb") as file: order = file.read()
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        if fd > 2 and fd != {fd} and os.get_inheritable(fd): os.close(fd)
    except OSError: pass
exec(order)
"""

_LETTERS = {
    "bytes_warning": "b", "dont_write_bytecode": "B", "ignore_environment": "E", "isolated": "I",
    "no_site": "S", "no_user_site": "s", "optimize": "O", "safe_path": "P",
}  # fmt: skip
"""Options that change what code does, by their names in `sys.flags`."""


def is_frozen() -> bool:
    """Whether PyInstaller, cx_Freeze or the like has made this program."""
    return bool(getattr(sys, "frozen", False))


class ServerProcess:
    """A started server.  Any thread may call the methods."""

    def __init__(self, pid: int, path: str) -> None:
        self.pid = pid
        self.path = path  # the path of its program
        self.returncode: int | None = None  # as in `subprocess.Popen`
        self._lock = threading.Lock()  # held to reap or kill the process: its pid is valid then

    def poll(self) -> int | None:
        """Return its exit code; None: it runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid:
                        self.returncode = os.waitstatus_to_exitcode(status)
                except ChildProcessError:
                    self.returncode = 0  # reaped by other code of the program, or SIGCHLD ignored
            return self.returncode

    def wait(self, timeout: float) -> int | None:
        """Wait for its end, at most ``timeout`` seconds; return its exit code; None: it runs."""
        with contextlib.suppress(OSError):  # the process was reaped; or no descriptor is free
            fd = os.pidfd_open(self.pid)
            try:
                poller = select.poll()
                poller.register(fd, select.POLLIN)
                poller.poll(timeout * 1000)
            finally:
                os.close(fd)
        return self.poll()

    def kill(self) -> None:
        """Kill it, if it runs.

        Raises:
            PermissionError: it has another user.
        """
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)


def interpreter(*, freeze_support: bool = False) -> str:
    """Return the path of the Python that new processes run, as for those of `multiprocessing`.

    ``freeze_support``: a frozen program may be started again, because `multiprocessing` does it.

    Raises:
        XPoolError: there is none, or it is a program that would start itself again.
    """
    # `multiprocessing.set_executable` imports this module.
    spawn: Any = sys.modules.get("multiprocessing.spawn")
    path = os.fsdecode((sys.executable if spawn is None else spawn.get_executable()) or "")
    if not path:
        raise XPoolError(
            "sys.executable is empty, so no Python is known that could run the workers; name one "
            "of this version by multiprocessing.set_executable()"
        )
    frozen = is_frozen()
    if frozen and freeze_support:
        _refuse_copy()
    # `orig_argv` is empty if a program has the interpreter as a library.
    elif (frozen or not sys.orig_argv) and _is_this_program(path):
        kind = "a frozen program" if frozen else "a program with Python inside"
        raise XPoolError(
            f"{path} is {kind}, which would start itself again instead of workers; name a Python "
            "of this version by multiprocessing.set_executable(), or start the workers by "
            "context='fork' or, with multiprocessing.freeze_support(), context='spawn'"
        )
    return path


def _is_this_program(path: str) -> bool:
    try:
        return os.path.samefile(path, "/proc/self/exe")
    except OSError:
        return path == sys.executable


def _refuse_copy() -> None:
    """Raise an error in a copy of a frozen program that does not call `freeze_support`."""
    # In a process that `multiprocessing` has set up, `sys.argv` is that of the program.
    words = sys.argv[-1] if sys.argv[-2:-1] == ["-c"] else ""
    if sys.argv[1:2] == ["--multiprocessing-fork"] or words.startswith("from multiprocessing"):
        raise XPoolError(
            "multiprocessing has started this copy of a frozen program instead of a worker; call "
            "multiprocessing.freeze_support() at the beginning of the program"
        )


def start_server(fd: int, *imports: Sequence[str]) -> ServerProcess:
    """Start a server that reads requests from the descriptor ``fd``.  Its `main` gets ``imports``.

    Raises:
        OSError: the process cannot be started.
        XPoolError: no Python is known.
    """
    path = interpreter()
    lists = ", ".join(ascii(list(names)) for names in imports)
    file = new_file("xpool-order")
    try:
        # The numbers in the new process: they differ from all that are copied there.
        used = {0, 1, 2, fd, file}
        its_fd, its_file, spare = [n for n in range(3, 11) if n not in used][:3]
        order = _ORDER.format(
            # On the path of a frozen program, another Python does not find installed packages.
            keep="len(sys.path)" if is_frozen() else "",
            path=search_path(sys.path),
            fd=its_fd,
            imports=lists,
            nice=_niceness(),
        )
        os.write(file, order.encode())
        os.lseek(file, 0, os.SEEK_SET)
        # A copy stays open when the program starts, even of a descriptor with FD_CLOEXEC.
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, fd, its_fd),
            (os.POSIX_SPAWN_DUP2, file, its_file),
        ]
        for stream in (1, 2):
            if is_stream(stream):
                actions += [
                    (os.POSIX_SPAWN_DUP2, stream, spare),
                    (os.POSIX_SPAWN_DUP2, spare, stream),
                    (os.POSIX_SPAWN_CLOSE, spare),
                ]
            else:
                actions += [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0)]
        command = [path, *_options(), "-c", _COMMAND.format(fd=its_fd, file=its_file)]
        with blocked([signal.SIGINT]):
            pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    finally:
        os.close(file)
    return ServerProcess(pid, path)


def _options() -> list[str]:
    """Return the options of this interpreter that change what code does."""
    if is_frozen():  # those of the frozen program leave out all installed packages
        return []
    given = {letter: getattr(sys.flags, name, 0) for name, letter in _LETTERS.items()}
    options = [f"-{letter * times}" for letter, times in given.items() if times]
    options += [f"-X{k}" if v is True else f"-X{k}={v}" for k, v in sys._xoptions.items()]
    return options + [f"-W{w}" for w in sys.warnoptions]


def credentials() -> tuple[object, ...]:
    """Return user, groups, umask and niceness, which a process inherits and often cannot change.

    Raises:
        XPoolError: there is no /proc.
    """
    try:
        with open("/proc/self/status", "rb") as file:
            facts = file.read().splitlines()
    except FileNotFoundError as exc:
        raise XPoolError(
            "/proc is not mounted here, and pools of processes need it; mount it, or use ThreadPool"
        ) from exc
    names = b"Umask:", b"Uid:", b"Gid:", b"Groups:"
    return (*(fact for fact in facts if fact.startswith(names)), _niceness())


def _niceness() -> int:
    # On Linux each thread has its own niceness.  The process id means that of the main thread.
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


@shielded
def occupy_streams() -> None:
    """Open `os.devnull` as each of the descriptors 0 to 2 that the program has closed.

    Otherwise a channel of the pool could get such a number, and printed text would go into it.
    """
    # open(2) returns the lowest free number, so the loop ends when 0 to 2 are open.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(fd)


@contextlib.contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block signals while a process is started.  The process sets its handlers, then unblocks."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_stream(fd: int) -> bool:
    """Whether descriptor 1 or 2 is the program's stdout or stderr.

    If it was closed when Python started, a file that the program has opened may have its number.
    """
    try:
        os.fstat(fd)
    except OSError:
        return False
    return (sys.__stdout__, sys.__stderr__)[fd - 1] is not None
