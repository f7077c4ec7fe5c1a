"""Starts the process of a fork server, with the program's options of Python.

The server reads its code from an anonymous file, because other users can read a command line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from xpool._python.interrupt import shielded

# Garbage collection is off during the imports: it would take milliseconds and find nothing.
_ORDER = (
    "import gc, sys; gc.disable(); sys.path[:] = {path!a}; "
    "from xpool._worker.server import main; "
    "os._exit(main({fd}, {imports}, {nice}))"
)

_COMMAND = """\
import os  # xpool._worker.server
with os.fdopen({fd}) as file: order = file.read()
exec(order)
"""

_LETTERS = {
    "bytes_warning": "b", "dont_write_bytecode": "B", "ignore_environment": "E", "isolated": "I",
    "no_site": "S", "no_user_site": "s", "optimize": "O", "safe_path": "P",
}  # fmt: skip
"""Options that change what code does, by their names in `sys.flags`."""


def start(fd: int, *imports: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a server that reads requests from the descriptor ``fd``.  Its `main` gets ``imports``.

    Raises:
        OSError: the process cannot be started.
    """
    lists = ", ".join(ascii(list(names)) for names in imports)
    order = _ORDER.format(path=search_path(), fd=fd, imports=lists, nice=_niceness())
    file = os.memfd_create("xpool-order")
    try:
        os.write(file, order.encode())
        os.lseek(file, 0, os.SEEK_SET)
        with interrupts_blocked():
            return subprocess.Popen(
                [sys.executable, *_options(), "-c", _COMMAND.format(fd=file)],
                pass_fds=[fd, file],
                stdin=subprocess.DEVNULL,
                # Given as numbers, so that Popen passes them on even if they have FD_CLOEXEC.
                stdout=1 if is_open(1) else subprocess.DEVNULL,
                stderr=2 if is_open(2) else subprocess.DEVNULL,
            )
    finally:
        os.close(file)


def _options() -> list[str]:
    """Return the options of this interpreter that change what code does."""
    given = {letter: getattr(sys.flags, name, 0) for name, letter in _LETTERS.items()}
    options = [f"-{letter * times}" for letter, times in given.items() if times]
    options += [f"-X{k}" if v is True else f"-X{k}={v}" for k, v in sys._xoptions.items()]
    return options + [f"-W{w}" for w in sys.warnoptions]


def credentials() -> tuple[object, ...]:
    """Return user, groups, umask and niceness, which a process inherits and often cannot change."""
    with open("/proc/self/status", "rb") as file:
        facts = file.read().splitlines()
    names = b"Umask:", b"Uid:", b"Gid:", b"Groups:"
    return (*(fact for fact in facts if fact.startswith(names)), _niceness())


def _niceness() -> int:
    # On Linux each thread has its own niceness.  The process id means that of the main thread.
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def search_path() -> list[str]:
    """Return the strings in `sys.path`.  The interpreter ignores other objects in it."""
    return [str(one) for one in sys.path if isinstance(one, str)]


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
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT while a process is started.  The process ignores SIGINT, then unblocks it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
