"""The process of a fork server, and what it has in common with the program that starts it.

It runs with the program's options of Python.  Its order comes in a file without a name: what others
can read of a process, its command line, says only that it is such a server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from xpool._python.interrupt import shielded

__all__ = [
    "credentials",
    "interrupts_blocked",
    "is_open",
    "occupy_streams",
    "search_path",
    "start",
]

# No garbage is collected until all is imported: that finds nothing, and takes milliseconds.
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
    """Start a server that is asked on the descriptor ``fd``; ``imports`` are as its `main` has it.

    Raises:
        OSError: no process can be started.
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
                # By number: also where they were opened to be closed on exec.
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
    """Return what a process has from the one that started it and may not be able to change: its
    user, groups, umask and niceness."""
    with open("/proc/self/status", "rb") as file:
        facts = file.read().splitlines()
    names = b"Umask:", b"Uid:", b"Gid:", b"Groups:"
    return (*(fact for fact in facts if fact.startswith(names)), _niceness())


def _niceness() -> int:
    # The main thread's: Linux has one for each thread, and any may start a server.
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def search_path() -> list[str]:
    """Return what there is of text in `sys.path`; the interpreter passes by anything else."""
    return [str(one) for one in sys.path if isinstance(one, str)]


@shielded
def occupy_streams() -> None:
    """Have descriptors 0 to 2 lead nowhere where the program has closed them.

    Else a channel of the pool would get such a number, and what is printed would go into it.
    """
    # open(2) gives the lowest free number: the first that is above 2 ends this.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(fd)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start a process with SIGINT blocked, until it ignores that: Ctrl-C is the program's alone."""
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
