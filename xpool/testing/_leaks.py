"""Finds leaks of this process: descendants, threads, descriptors and shared memory.

This works only on Linux, because it reads ``/proc`` and ``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from xpool._python import failures
from xpool.testing._test_tasks import eventually, wait_gone

__all__ = [
    "LeakError", "Snapshot", "command", "descendants", "descriptors", "mark_this_run", "no_leaks",
    "servers",
]  # fmt: skip

T = TypeVar("T")

MARK = "XPOOL_TEST_RUN"
"""The environment variable that marks the processes of this run, so that orphans are recognized."""

KEPT = ("xpool._worker.server", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Parts of the command lines of servers that live as long as this process, so that the next pool
starts fast.  They are not leaks, but their children are."""

RAYS = (
    "ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "/ray/core/src/", "/ray/_private/",
    "/ray/dashboard/", "/ray/autoscaler/",
)  # fmt: skip
"""Parts of the command lines of Ray's own processes, which Ray may start at any time and keep."""

ARENA = "/memfd:xpool-arena"
"""The file of the arena, which the program makes with its first pool and keeps."""

SHM = "/dev/shm/"

CUDAS = "cuda.shm."
"""The start of the names of CUDA's own files, which a process opens when it first shares memory."""

COUNTERS = 80_000
"""The size of torch's file of counters for shared GPU memory (10,000 of 8 bytes), kept likewise."""

_SELF = str(os.getpid())

_NUMBER = re.compile(r"(?<![0-9A-Za-z])[0-9]+(?![0-9A-Za-z])")


_servers: set[int] = set()
"""Process ids of the kept servers that were seen at any time."""

_numbers: set[str] = {_SELF}
"""Process ids of this process and of all descendants that were seen."""

_strangers: set[str] = set()
"""Process ids of unrelated processes, kept to make the next search cheap."""


def _processes() -> set[str]:
    return set(filter(str.isdigit, os.listdir("/proc")))


def mark_this_run() -> None:
    """Set the mark in the environment, which children inherit."""
    os.environ[MARK] = f"{_SELF}-{uuid.uuid4().hex[:8]}"
    _strangers.update(_processes())


def _read(pid: str, name: str) -> bytes:
    try:
        return Path("/proc", pid, name).read_bytes()
    except OSError:
        return b""


def _parent(pid: str) -> str:
    # The process's name, in parentheses, may contain spaces and parentheses.  The state and the
    # parent follow it (proc_pid_stat(5)).
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return fields[1].decode() if fields else "0"


def command(pid: int | str) -> str:
    """Return the command line of a process, which is empty for a zombie."""
    return _read(str(pid), "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _ours() -> dict[str, str]:
    """Return the current and the orphaned descendants of this process, with their parents."""
    there = _processes()
    # The system uses the ids of ended processes again.
    _strangers.intersection_update(there)
    parents = {pid: _parent(pid) for pid in there - _strangers - {_SELF}}
    mark = f"{MARK}={os.environ.get(MARK, '-')}".encode()
    ours = {}
    for pid, parent in parents.items():
        up = parent
        # Find the ancestor that is not in `parents`: this process, an unrelated one, or init.
        while up in parents:
            up = parents[up]
        environment = b"" if up == _SELF else _read(pid, "environ")
        if up == _SELF or mark in environment.split(b"\0"):
            ours[pid] = parent
        elif environment:
            # If the environment is empty (ended, or another user's), the process is checked again.
            _strangers.add(pid)
    _numbers.update(ours)
    return ours


def _kept(pid: str, parent: str) -> bool:
    # The children of a fork server have its command line, too, but only the server is our child.
    words = command(pid) if parent == _SELF else ""
    return any(name in words for name in KEPT)


def _rays(pid: str) -> bool:
    words = command(pid)
    return any(name in words for name in RAYS)


def descendants() -> set[int]:
    """Return the current and orphaned descendants, without kept servers and Ray's own processes.

    They include Ray's actors and the processes that these start.
    """
    ours = _ours()
    return {int(pid) for pid, parent in ours.items() if not (_kept(pid, parent) or _rays(pid))}


def servers() -> list[int]:
    found = [int(pid) for pid, parent in _ours().items() if _kept(pid, parent)]
    _servers.update(found)
    return found


def _shm_of(pid: str) -> set[int | str]:
    """Return inodes and names in /dev/shm that a process has open or mapped.

    Inodes are needed, because a semaphore is mapped under another name.  If a file is in a folder,
    the name is that of the folder.
    """
    found = set[int | str]()
    for line in _read(pid, "maps").decode(errors="replace").splitlines():
        if SHM in line:
            found |= {int(line.split()[4]), _name_in_shm(line.partition(SHM)[2])}
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                to = os.readlink(entry.path)
                if to.startswith(SHM):
                    found |= {entry.stat().st_ino, _name_in_shm(to.removeprefix(SHM))}
    return found


def _name_in_shm(path: str) -> str:
    return path.partition("/")[0].removesuffix(" (deleted)")


def descriptors() -> dict[int, str]:
    """Return the open descriptors of this process and their targets.

    Descriptors that are kept until the process ends are left out: those of the shared memory, of
    CUDA and of libffi (its own file), and one that is reserved for imports after a failed task.
    """
    found = {}
    kept = failures._spare
    cudas = ("/dev/nvidia", "anon_inode:[eventfd]") if _has_started_cuda() else ()
    ignored = (ARENA, SHM + CUDAS, *cudas)
    for name in os.listdir("/proc/self/fd"):
        try:
            to = os.readlink(f"/proc/self/fd/{name}")
            if not (to.startswith(ignored) or "/libffi.so" in to or int(name) == kept):
                found[int(name)] = to
        except OSError:
            continue  # the descriptor that `listdir` used, which is closed now
    return found


@dataclass
class Snapshot:
    """The processes, threads, descriptors and shared memory at one moment."""

    processes: set[int]
    servers: list[int]
    threads: set[threading.Thread]
    fds: dict[int, str]
    shm: set[str]

    inside: bool = False
    """Whether the snapshot covers only threads and descriptors of this process."""
    outside: bool = False
    """Whether the snapshot covers only processes and names in /dev/shm."""

    @classmethod
    def take(cls, inside: bool = False, outside: bool = False) -> Snapshot:
        """Take a snapshot.

        With ``inside`` it covers only threads and descriptors of this process, which takes a tenth
        of the time.  With ``outside``, `leaks` does not wait for these.
        """
        threads, fds = set(threading.enumerate()), descriptors()
        if inside:
            return cls(set(), list(_servers), threads, fds, set(), inside)
        shm = set(os.listdir(SHM))
        return cls(descendants(), servers(), threads, fds, shm, outside=outside)

    def more_fds(self) -> dict[int, str]:
        """Return the descriptors opened since the snapshot if the number of open ones has grown."""
        if self.outside:
            return {}
        now, new = self._fds()
        arena = sys.modules.get("xpool._memory.arena")
        if new and arena is not None:
            # An arena keeps a pipe for each forked process until it is used after the end of that
            # process.
            for one in list(arena.Arena._known.values()):
                one.statistics()
            now, new = self._fds()
        # xpool starts a new server when the program uses more modules.  Leave out the descriptor
        # for each new server: a socket for xpool's server, a pipe for those of multiprocessing.
        for pid in set(servers()) - set(self.servers) if new else ():
            kind = "socket:" if KEPT[0] in command(pid) else "pipe:"
            end = next((fd for fd, to in new.items() if to.startswith(kind)), None)
            if end is not None:
                del new[end], now[end]
        return new if len(now) > len(self.fds) else {}

    def _fds(self) -> tuple[dict[int, str], dict[int, str]]:
        """Return all open descriptors, and those opened since the snapshot."""
        now = descriptors()
        return now, {fd: to for fd, to in now.items() if self.fds.get(fd) != to}

    def leaks(self, limit: float, ignore: str = "(?!)") -> list[str]:
        """Return the leaks since the snapshot that still exist after ``limit`` seconds.

        Threads whose whole names match the pattern ``ignore`` may stay.
        """
        end = time.monotonic() + limit
        new = [
            thread
            for thread in ([] if self.outside else threading.enumerate())
            if thread not in self.threads and not re.fullmatch(ignore, thread.name)
        ]
        processes = set() if self.inside else descendants() - self.processes
        # Reference cycles may keep all of these alive.
        if new or processes or self.more_fds() or self._more_shm():
            gc.collect()

        def left() -> float:
            return max(0.0, end - time.monotonic())

        # `descendants` is called again, because it recognizes a server only by its command line.
        stayed = wait_gone(processes, left())
        found = [
            f"process {pid}: {command(pid) or 'not waited for (zombie)'}"
            for pid in (sorted(descendants() & set(stayed)) if stayed else ())
        ]
        # A process that has ended is a zombie until its parent waits for it.
        if processes and not found:
            zombies = _staying(lambda: descendants() - self.processes, left())
            found += [f"process {pid}: zombie" for pid in zombies]
        for thread in new:
            thread.join(left())
            if thread.is_alive():
                found.append(f"thread {thread.name}")
        fds = _staying(lambda: self.more_fds().items(), left())
        found += [f"descriptor {fd}: {to}" for fd, to in fds]
        return found + _staying(self._more_shm, left())

    def _more_shm(self) -> set[str]:
        """Return new names in /dev/shm that belong to this process or its descendants.

        Such a name is open or mapped in one of these processes, or contains the id of one.  Names
        of torch and joblib contain the id.
        """
        new = set() if self.inside else set(os.listdir(SHM)) - self.shm
        if not new:
            return new
        held = set[int | str]().union(*map(_shm_of, [_SELF, *_ours()]))
        found = set[str]()
        for name in new:
            with contextlib.suppress(FileNotFoundError):  # the file has just been removed
                about = os.stat(SHM + name)
                if name.startswith(CUDAS) or _counts_gpu_memory(name, about.st_size):
                    continue
                ours = name in held or about.st_ino in held
                if ours or not _numbers.isdisjoint(_NUMBER.findall(name)):
                    found.add(SHM + name)
        return found


def _counts_gpu_memory(name: str, size: int) -> bool:
    return size == COUNTERS and name.startswith("torch_") and _has_started_cuda()


def _has_started_cuda() -> bool:
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return hasattr(cuda, "is_initialized") and bool(cuda.is_initialized())


def _staying(look: Callable[[], Iterable[T]], limit: float) -> list[T]:
    """Wait until ``look()`` returns nothing.  After ``limit`` seconds, return the rest, sorted."""
    try:
        eventually(lambda: not look(), "nothing is left", limit)
        return []
    except AssertionError:
        return sorted(look())  # type: ignore[type-var]


class LeakError(AssertionError):
    """The block of `no_leaks` has left something behind.  The text lists it."""

    __module__ = "xpool.testing"  # the public name, in pickles and tracebacks


@contextlib.contextmanager
def no_leaks(limit: float = 5.0, ignore: str = "(?!)") -> Iterator[None]:
    """Check that the block leaves nothing behind.

    New threads, processes, descriptors (including sockets) and names in ``/dev/shm`` have ``limit``
    seconds to disappear.  After `mark_this_run`, processes whose parent has ended count, too.
    Threads whose whole names match the pattern ``ignore`` may stay.  The fork servers that xpool
    and multiprocessing keep for the next pool are not leaks.

    A name in ``/dev/shm`` counts if this process or a descendant has it open or mapped, or if the
    name contains the id of one of these processes (``torch_1234_...``).

    Raises:
        LeakError (an `AssertionError`): the block has left something behind.  If the block itself
            raises an error, there is no check.
    """
    before = Snapshot.take()
    yield
    left = before.leaks(limit, ignore)
    if left:
        raise LeakError("left over:\n  " + "\n  ".join(left))
