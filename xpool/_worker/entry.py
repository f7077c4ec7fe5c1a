"""The first code of a worker: bind the device, and only then import the rest.

Some packages start a device runtime when they are imported, and runtimes read their environment
once.  So this module imports nothing but the standard library's small change: it receives its
descriptors and its instructions, sets the environment, and then goes on to `xpool._worker.loop`.
A test holds what may be imported here.

How a worker comes by its descriptors, whatever started it: one end of a socket pair, over which
the parent has sent them.

====================  ======================================================================
tasks, read end       frames from the parent; ends when the parent is gone
answers, write end    frames to the parent
lifeline, read end    nothing is ever written; when its other end closes, the kernel kills us
outbox                the page of `xpool._wire.outbox`
control               where channels to peers are asked for, in pools that have them
logs                  a socket for log records and warnings (`xpool._worker.relay`)
arena                 the file of `xpool._memory.arena`, where there is one
====================  ======================================================================

A process that is to have several workers, each a thread, is sent as many such sockets instead.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

__all__ = [
    "CALLED_OFF",
    "CLOSE_ON_EXEC",
    "MOST",
    "ONE",
    "REFUSED",
    "SEVERAL",
    "TRACKER",
    "main",
    "set_environment",
]

ONE, SEVERAL = b"W", b"S"
"""What the descriptors in a boot socket are: one worker's, or several workers' boot sockets."""

TRACKER = b"T"
"""What a worker sends for the program's resource tracker; the parent sends it back, with that."""

REFUSED = b"E"
"""What the server says there when it cannot fork a worker, before the error's number in 2 bytes."""

CALLED_OFF = b"K"
"""What the parent sends there to the server while that has not forked the worker: it need not."""

MOST = 64
"""Workers that a process may have; one message can carry 253 descriptors."""

CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""For who receives descriptors: programs that a task starts must not have them."""

_HEAD = struct.Struct("<BxxxIQ")  # as in xpool._wire.wire, which is not to be imported yet


def main(
    boot: int,
    inherited: tuple[Any, tuple[Any, ...]] | None = None,
    *,
    late: Callable[[], None] | None = None,
    missing: Collection[str] = (),
    known: Mapping[str, str] | None = None,
) -> int:
    """Be a worker until told to stop; return the exit code.

    ``boot`` is the descriptor of the socket; ``inherited`` is (initializer, initargs) where
    these could not be sent and came the way the process was started; ``late`` is to be called
    when the device is bound; ``missing``: of what modules it is without, as a stand-in; ``known``:
    the variables of this process, if the caller knows them.
    """
    kind, fds = _receive(boot, MOST)
    # 7: the rows of the table above.
    channels = [_receive(fd, 7)[1] for fd in fds] if kind == SEVERAL else [fds]
    if not channels or any(len(channel) < 4 for channel in channels):
        return 0  # the parent was gone before it began
    # First of all: from here on, nothing that hangs outlives the parent.
    for channel in channels:
        die_with_parent(channel[2])
    orders = [_read_orders(channel[0]) for channel in channels]
    # One environment: contexts whose workers share a process have equal ones (`_pools/context`).
    _bind(orders[0], known)
    # Before the backends, the initializer and tasks, which may register callbacks.
    from xpool._python import exits

    exits.begin()
    if late is not None:
        late()
    if kind == SEVERAL:
        from xpool._worker import worker_threads

        code = worker_threads.run(orders, channels, inherited)
    else:
        from xpool._worker import loop

        code = loop.run(orders[0], channels[0], inherited, missing=missing)
    exits.run()
    return code


def _receive(sock: int, most: int) -> tuple[bytes, list[int]]:
    """Return the message in a socket and its descriptors; close the socket."""
    with socket.socket(fileno=sock) as boot:
        kind, fds, _, _ = socket.recv_fds(boot, 1, most, CLOSE_ON_EXEC)
    return kind, list(fds)


def _read_orders(tasks: int) -> dict[str, Any]:
    head = _read(tasks, _HEAD.size)
    # Plain data: nothing may be imported for it before `_bind` has set the environment.
    orders: dict[str, Any] = pickle.loads(_read(tasks, _HEAD.unpack(head)[2]))
    return orders


def ignore_interrupts() -> None:
    """Ctrl-C goes to the whole process group; what becomes of the workers the parent decides."""
    signal.signal(signal.SIGINT, _ignore)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: programs that a task starts would inherit that."""


def _read(fd: int, n: int) -> bytearray:
    data = bytearray(n)  # in place: the initializer's arguments may be large
    at = 0
    with memoryview(data) as view:
        while at < n:
            got = os.readv(fd, [view[at:]])
            if not got:
                raise SystemExit(0)  # the parent is gone
            at += got
    return data


def die_with_parent(fd: int) -> None:
    """Have this process killed when the other end of the pipe closes, whatever it is doing.

    Linux sends a signal of our choice when a pipe's other end closes: no thread is needed that
    might not get the interpreter, and a stopped process dies too.  Elsewhere a thread waits.
    """
    if sys.platform == "linux":
        import fcntl

        # fcntl(2).  O_ASYNC comes last, for it is what arms it; without F_SETSIG it sends SIGIO.
        # The owner is this process: children that a task forks have the descriptor, and live on.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        try:
            gone = os.read(fd, 1) == b""  # it may have closed before the signal was set up
        except BlockingIOError:
            gone = False
        if gone:
            os._exit(0)
    else:
        import threading

        def wait() -> None:
            os.read(fd, 1)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="xpool-lifeline", daemon=True).start()


def _bind(orders: dict[str, Any], known: Mapping[str, str] | None) -> None:
    """Make this process what the parent is now, and what its context says: environment, cores."""
    environ = orders["environ"]
    # To look at each takes a worker as long as anything here, to set all longer than a fork.
    if environ != known:
        for name in set(os.environ) - set(environ):
            del os.environ[name]
        for name, value in environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
    set_environment(orders["bind"])
    if orders["cpus"] and set(orders["cpus"]) != os.sched_getaffinity(0):
        try:
            os.sched_setaffinity(0, orders["cpus"])
        # EINVAL: none of them is online, and in the cpuset of this process (sched_setaffinity(2)).
        except OSError as exc:
            print(f"xpool: worker cannot run on cores {orders['cpus']}: {exc}", file=sys.stderr)
    _enter_folder(orders["cwd"], orders["pid"])
    sys.path[:] = orders["path"]
    sys.argv[:] = orders["argv"]


def _enter_folder(cwd: str | None, parent: int) -> None:
    """Go to the parent's folder; by its name, or, where that was removed, to what it still has."""
    for folder in (cwd, f"/proc/{parent}/cwd"):
        try:
            if folder is not None:
                os.chdir(folder)
                return
        except OSError as exc:
            reason = exc
    there = cwd or "the folder of its parent"
    print(f"xpool: worker cannot enter {there}: {reason}", file=sys.stderr)


def set_environment(env: Mapping[str, str | None]) -> None:
    """Change this process's variables as a worker context's ``env`` says: delete, then set.

    A value of None deletes; a name that ends in ``*`` stands for all that begin so.
    """
    for pattern, value in env.items():
        if value is None:
            found = [pattern] if pattern in os.environ else []
            if pattern.endswith("*"):
                found = [name for name in os.environ if name.startswith(pattern[:-1])]
            for name in found:
                del os.environ[name]
    # Not `update`, which asks the abstract classes what it was given, also where that is empty.
    for name, value in env.items():
        if value is not None:
            os.environ[name] = value
