"""What this process has open: children and theirs, threads, descriptors, shared memory.

Linux only: it reads ``/proc`` and ``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xpool._python import error_imports
from xpool.testing.waiting import eventually, wait_gone

__all__ = [
    "LeakError", "Snapshot", "command", "descendants", "descriptors", "mark_this_run", "no_leaks",
    "servers",
]  # fmt: skip

MARK = "XPOOL_TEST_RUN"
"""Environment variable by which orphans of this run are known again."""

KEPT = ("xpool._worker.server", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""In the command line of processes that live as long as this one, on purpose, to make starting
the next pool cheap.  Their children are no exception."""

RAYS = (
    "ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "/ray/core/src/", "/ray/_private/",
    "/ray/dashboard/", "/ray/autoscaler/",
)  # fmt: skip
"""In the command line of what Ray starts when it likes, and keeps for the next actor."""

ARENA = "/memfd:xpool-arena"
"""The file of the arena: one for the program, made with its first pool and kept."""

SHM = "/dev/shm/"

_SELF = str(os.getpid())

_NUMBER = re.compile(r"(?<![0-9A-Za-z])[0-9]+(?![0-9A-Za-z])")


_servers: set[int] = set()
"""Kept servers that were seen at any time."""

_numbers: set[str] = {_SELF}
"""Of this process and of all that were seen below it."""

_strangers: set[str] = set()
"""Processes that are none of ours, so that looking again costs little."""


def _processes() -> set[str]:
    return set(filter(str.isdigit, os.listdir("/proc")))


def mark_this_run() -> None:
    """Put the mark into the environment that children will get."""
    os.environ[MARK] = f"{_SELF}-{uuid.uuid4().hex[:8]}"
    _strangers.update(_processes())


def _read(pid: str, name: str) -> bytes:
    try:
        return Path("/proc", pid, name).read_bytes()
    except OSError:
        return b""


def _parent(pid: str) -> str:
    # The name, in parentheses, may itself hold spaces and parentheses.
    # After the name come the state and the parent (proc_pid_stat(5)).
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return fields[1].decode() if fields else "0"


def command(pid: int | str) -> str:
    """Return the command line of a process; a zombie has none."""
    return _read(str(pid), "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _ours() -> dict[str, str]:
    """Return the processes below this one, and those that once were, with their parents."""
    there = _processes()
    # Numbers come again, for other processes.
    _strangers.intersection_update(there)
    parents = {pid: _parent(pid) for pid in there - _strangers - {_SELF}}
    mark = f"{MARK}={os.environ.get(MARK, '-')}".encode()
    ours = {}
    for pid, parent in parents.items():
        up = parent
        # Up to the first that is not among them: this process, a stranger, or init.
        while up in parents:
            up = parents[up]
        environment = b"" if up == _SELF else _read(pid, "environ")
        if up == _SELF or mark in environment.split(b"\0"):
            ours[pid] = parent
        elif environment:
            # One without has ended, or is another user's: it is looked at again.
            _strangers.add(pid)
    _numbers.update(ours)
    return ours


def _kept(pid: str, parent: str) -> bool:
    # The children that a fork server forks show its command line; the server itself is ours.
    words = command(pid) if parent == _SELF else ""
    return any(name in words for name in KEPT)


def _rays(pid: str) -> bool:
    words = command(pid)
    return any(name in words for name in RAYS)


def descendants() -> set[int]:
    """Return the processes below this one and those that were, without the kept servers and
    without Ray's own: its actors count, and what they start."""
    ours = _ours()
    return {int(pid) for pid, parent in ours.items() if not (_kept(pid, parent) or _rays(pid))}


def servers() -> list[int]:
    """Return the kept server processes of this process."""
    found = [int(pid) for pid, parent in _ours().items() if _kept(pid, parent)]
    _servers.update(found)
    return found


def _shm_of(pid: str) -> set[int | str]:
    """Return what a process has open or mapped in /dev/shm: inodes, and names of files and folders.

    A semaphore is mapped under another name than it has; of what lies in a folder, the folder's
    name is here.
    """
    found = set[int | str]()
    for line in _read(pid, "maps").decode(errors="replace").splitlines():
        if SHM in line:
            found |= {int(line.split()[4]), _name_in_shm(line.partition(SHM)[2])}
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                to = os.readlink(entry.path)
                if to.startswith(SHM):
                    found |= {entry.stat().st_ino, _name_in_shm(to.removeprefix(SHM))}
    return found


def _name_in_shm(path: str) -> str:
    return path.partition("/")[0].removesuffix(" (deleted)")


def descriptors() -> dict[int, str]:
    """Return this process's open descriptors and what they lead to.

    Not those that xpool keeps for the whole process: of its shared memory, and one for the imports
    that a failed task needs.
    """
    found = {}
    kept = error_imports.kept_descriptor()
    for name in os.listdir("/proc/self/fd"):
        try:
            to = os.readlink(f"/proc/self/fd/{name}")
            if not to.startswith(ARENA) and int(name) != kept:
                found[int(name)] = to
        except OSError:
            continue  # the descriptor of this very listing
    return found


@dataclass
class Snapshot:
    """What there was at one moment."""

    processes: set[int]
    servers: list[int]
    threads: set[threading.Thread]
    fds: dict[int, str]
    shm: set[str]

    inside: bool = False
    """Whether this is about threads and descriptors of this process only."""
    outside: bool = False
    """Whether it is about processes and names in /dev/shm only."""

    @classmethod
    def take(cls, inside: bool = False, outside: bool = False) -> Snapshot:
        """Look now; only at this process itself, which takes a tenth of the time, if ``inside``.

        ``outside`` is the opposite: what lives on in this process is not waited for.
        """
        threads, fds = set(threading.enumerate()), descriptors()
        if inside:
            return cls(set(), list(_servers), threads, fds, set(), inside)
        shm = set(os.listdir(SHM))
        return cls(descendants(), servers(), threads, fds, shm, outside=outside)

    def more_fds(self) -> dict[int, str]:
        """Return descriptors opened since, if there are more than there were."""
        if self.outside:
            return {}
        now = descriptors()
        new = {fd: to for fd, to in now.items() if self.fds.get(fd) != to}
        # A server is started anew when the program has come to use more modules.
        # This process has an end of a socket to it, to those of multiprocessing of a pipe.
        for pid in set(servers()) - set(self.servers) if new else ():
            kind = "socket:" if KEPT[0] in command(pid) else "pipe:"
            end = next((fd for fd, to in new.items() if to.startswith(kind)), None)
            if end is not None:
                del new[end], now[end]
        return new if len(now) > len(self.fds) else {}

    def leaks(self, limit: float, ignore: str = "(?!)") -> list[str]:
        """Return what is left over, after everything had `limit` seconds to end.

        Threads whose names match `ignore` may stay.
        """
        end = time.monotonic() + limit
        new = [
            thread
            for thread in ([] if self.outside else threading.enumerate())
            if thread not in self.threads and not re.fullmatch(ignore, thread.name)
        ]
        processes = set() if self.inside else descendants() - self.processes
        # What is in circles may hold all of these.
        if new or processes or self.more_fds() or self._more_shm():
            gc.collect()

        def left() -> float:
            return max(0.0, end - time.monotonic())

        # A server that has just been started is known for one when its own program runs.
        stayed = wait_gone(processes, left())
        found = [
            f"process {pid}: {command(pid) or 'not waited for (zombie)'}"
            for pid in (sorted(descendants() & set(stayed)) if stayed else ())
        ]
        # A process that ended may still be waiting to be waited for.
        if processes and not found:
            try:
                eventually(lambda: not descendants() - self.processes, "zombies", left())
            except AssertionError:
                found += [f"process {pid}: zombie" for pid in descendants() - self.processes]
        for thread in new:
            thread.join(left())
            if thread.is_alive():
                found.append(f"thread {thread.name}")
        try:
            eventually(lambda: not self.more_fds(), "descriptors", left())
        except AssertionError:
            found += [f"descriptor {fd}: {to}" for fd, to in sorted(self.more_fds().items())]
        try:
            eventually(lambda: not self._more_shm(), "names in /dev/shm", left())
        except AssertionError:
            found += sorted(self._more_shm())
        return found

    def _more_shm(self) -> set[str]:
        """Return names in /dev/shm that are new and ours.

        A process of ours has them open or mapped; or their names have the number of one, as those
        of torch and joblib, and nobody may have them any more.
        """
        new = set() if self.inside else set(os.listdir(SHM)) - self.shm
        if not new:
            return new
        held = set[int | str]().union(*map(_shm_of, [_SELF, *_ours()]))
        found = set[str]()
        for name in new:
            with contextlib.suppress(FileNotFoundError):  # it was put away just now
                ours = name in held or os.stat(SHM + name).st_ino in held
                if ours or not _numbers.isdisjoint(_NUMBER.findall(name)):
                    found.add(SHM + name)
        return found


class LeakError(AssertionError):
    """Something was left over: the message lists what."""


@contextlib.contextmanager
def no_leaks(limit: float = 5.0, ignore: str = "(?!)") -> Iterator[None]:
    """Check that the block leaves nothing behind.

    Threads, processes (also those whose parent has ended, after `mark_this_run`), descriptors
    (sockets among them) and names in ``/dev/shm`` that were not there before have ``limit``
    seconds to go; threads whose whole name matches the pattern ``ignore`` may stay.  The fork
    servers that xpool and multiprocessing keep for the next pool are no leak.

    A name in ``/dev/shm`` counts when this process or one below it has it open or mapped, or when
    the name has the number of one (``torch_1234_...``).  Others may be of any program.

    Raises:
        LeakError (an `AssertionError`): what is left.  Not raised over an error of the block.
    """
    before = Snapshot.take()
    yield
    left = before.leaks(limit, ignore)
    if left:
        raise LeakError("left over:\n  " + "\n  ".join(left))
