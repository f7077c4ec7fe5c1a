"""The first code of a worker: it binds the device, and then imports the rest.

Some packages start a device runtime when they are imported, and a runtime reads its environment
once.  So this module imports only small parts of the standard library.  It receives descriptors and
instructions, sets the environment, and then runs `xpool._worker.loop`.  A test limits what this
module may import.

Every worker gets one end of a socket pair, over which the parent has sent its descriptors.  This is
the same for every way to start a worker.

====================  ======================================================================
tasks, read end       frames from the parent; ends when the parent has ended
answers, write end    frames to the parent
lifeline, read end    carries no data; when its other end closes, the kernel kills the worker
outbox                the page of `xpool._wire.outbox`
control               requests for channels to peers, in pools that have them
logs                  a socket for log records and warnings (`xpool._worker.worker_relay`)
arena                 the file of `xpool._memory.arena`, if the pool has one
====================  ======================================================================

A process whose workers are threads gets one such socket for each worker.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from xpool._python import descriptors

ONE, SEVERAL = b"W", b"S"
"""The kind of descriptors in a boot socket: those of one worker, or boot sockets of several."""

BEGUN = b"B"
"""A forked worker sends this first, since it may run tasks before the server has told its pid."""

TRACKER = b"T"
"""A worker sends this to ask for the program's resource tracker; the parent's reply is the same
byte, with the tracker's descriptor."""

REFUSED = b"E"
"""The server sends this when it cannot fork a worker, followed by the errno in 2 bytes."""

MOST_WORKERS = 64
"""Most workers of a process; one message can carry 253 descriptors."""

_HEAD = struct.Struct("<BxxxIQ")  # a copy of xpool._wire.wire.TO_WORKER: too early to import that


def main(
    boot: int,
    inherited: tuple[Any, tuple[Any, ...]] | None = None,
    *,
    late: Callable[[], None] | None = None,
    known: Mapping[str, str] | None = None,
) -> int:
    """Run a worker until it is told to stop; return the exit code.

    ``boot`` is the descriptor of the socket.  ``inherited`` is (initializer, initargs), if these
    cannot be sent and the process inherited them.  ``late`` is called when the device is bound.
    ``known`` are the environment variables of this process, if the caller knows them.
    """
    kind, fds = _receive(boot, MOST_WORKERS)
    # A worker has at most 7 descriptors, the rows of the table above.
    channels = [_receive(fd, 7)[1] for fd in fds] if kind == SEVERAL else [fds]
    if not channels or any(len(channel) < 4 for channel in channels):
        return 0  # the parent ended before this worker began
    # This comes first: from here on, the process ends when its parent does, even if it hangs.
    for channel in channels:
        die_with_parent(channel[2])
    configs = [_read_config(channel[0]) for channel in channels]
    # Workers that share a process have equal environments in their contexts (`_pools/ctx_pools`).
    _bind(configs[0], known)
    # Done before backends, the initializer and tasks, which may register callbacks.
    from xpool._python import exits

    exits.begin()
    if late is not None:
        late()
    if kind == SEVERAL:
        from xpool._worker import worker_threads

        code = worker_threads.run(configs, channels, inherited)
    else:
        from xpool._worker import loop

        code = loop.run(configs[0], channels[0], inherited)
    exits.run()
    return code


def _receive(sock: int, most: int) -> tuple[bytes, list[int]]:
    """Return the message in a socket and its descriptors; close the socket."""
    with descriptors.on(sock) as boot:
        kind, fds, _ = descriptors.receive(boot, 1, most)
    return kind, fds


def _read_config(tasks: int) -> dict[str, Any]:
    head = _read(tasks, _HEAD.size)
    # The configuration has only built-in types, because nothing may be imported before `_bind` sets
    # the environment.
    return pickle.loads(_read(tasks, _HEAD.unpack(head)[2]))  # type: ignore[no-any-return]


def drop_handlers() -> None:
    """Let go of the program's signal handlers, which this process, a fork of it, has.

    A signal to the worker would run the program's cleanup here, and stop its event loop, because
    Python writes the signal into the loop's wakeup descriptor.
    """
    signal.set_wakeup_fd(-1)
    for timer in signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF:
        signal.setitimer(timer, 0)  # a profiler's hook may have set it in this fork
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C, which goes to the whole process group; the parent decides to end workers."""
    signal.signal(signal.SIGINT, ignore)


def ignore(signum: int, frame: FrameType | None) -> None:
    """Ignore the signal.  SIG_IGN is not used: programs that a task starts would inherit it."""


def _read(fd: int, n: int) -> bytearray:
    data = bytearray(n)  # read in place, since the initializer's arguments may be large
    at = 0
    with memoryview(data) as view:
        while at < n:
            got = os.readv(fd, [view[at:]])
            if not got:
                raise SystemExit(0)  # the parent has ended
            at += got
    return data


def die_with_parent(fd: int) -> None:
    """Arrange that this process is killed when the other end of the pipe closes.

    Linux can send any signal when a pipe's other end closes.  This needs no thread, which might not
    get the interpreter, and kills a stopped process, too.  On other systems a thread waits.
    """
    if sys.platform == "linux":
        # See fcntl(2).  O_ASYNC comes last, since it enables the signal.  Without F_SETSIG the
        # signal would be SIGIO.  It goes to the owner, this process, and not to children that a
        # task forks, which inherit the descriptor.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        try:
            gone = os.read(fd, 1) == b""  # closed before the signal was enabled
        except BlockingIOError:
            gone = False
        if gone:
            os._exit(0)
    else:

        def wait() -> None:
            os.read(fd, 1)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="xpool-lifeline", daemon=True).start()


def _bind(config: dict[str, Any], known: Mapping[str, str] | None) -> None:
    """Take over the parent's current state (environment, folder, paths), then apply the context."""
    environ = config["environ"]
    # Usually they are equal: setting all variables would take longer than a fork.
    if environ != known:
        for name in set(os.environ) - set(environ):
            del os.environ[name]
        for name, value in environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
    set_environment(config["bind"])
    if config["cpus"] and set(config["cpus"]) != os.sched_getaffinity(0):
        try:
            os.sched_setaffinity(0, config["cpus"])
        # EINVAL: none of these cores is online and in this process's cpuset (sched_setaffinity(2)).
        except OSError as exc:
            print(f"xpool: worker cannot run on cores {config['cpus']}: {exc}", file=sys.stderr)
    _enter_folder(config["cwd"], config["parent"][1])
    if config["path"] is not None:
        sys.path[:] = config["path"]
    sys.argv[:] = config["argv"]


def _enter_folder(cwd: str | None, parent: int) -> None:
    """Change to the parent's folder by name; if it was removed, use the parent's open folder."""
    for folder in (cwd, f"/proc/{parent}/cwd"):
        try:
            if folder is not None:
                os.chdir(folder)
                return
        except OSError as exc:
            reason = exc
    there = cwd or "the folder of its parent"
    print(f"xpool: worker cannot change its directory to {there}: {reason}", file=sys.stderr)


def set_environment(env: Mapping[str, str | None]) -> None:
    """Change this process's variables by a worker context's ``env``: first delete, then set.

    A value of None deletes the variable.  A name that ends in ``*`` means all with that prefix.
    """
    for pattern, value in env.items():
        if value is None:
            found = [pattern] if pattern in os.environ else []
            if pattern.endswith("*"):
                found = [name for name in os.environ if name.startswith(pattern[:-1])]
            for name in found:
                del os.environ[name]
    # `update` would do slow checks by abstract classes, even for an empty mapping.
    for name, value in env.items():
        if value is not None:
            os.environ[name] = value
