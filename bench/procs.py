"""Reads the parents, memory and CPU time of processes from /proc, and kills processes."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name; None if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def descendants(root: int) -> list[int]:
    """The descendants of `root` that have not ended, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        stat = _stat(int(entry)) if entry.isdigit() else None
        if stat is not None and stat[0] != "Z":
            children.setdefault(int(stat[1]), []).append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of `pid`; 0 if it is gone."""
    stat = _stat(pid)
    if stat is None:
        return 0.0
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def private_bytes(pid: int) -> int:
    """The memory that only process `pid` uses, in bytes (USS)."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                total += int(line.split()[1]) * 1024
    return total


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends.

    So `descendants` still finds the workers of a peer that was killed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def kill_descendants(spare: Iterable[int] = (), grace: float = 3.0) -> None:
    """Kill all descendants except those in `spare`, and wait until they are gone.

    Resource trackers, which remove semaphores and shared memory after the others have ended,
    are killed only if they have not ended after `grace` seconds.
    """
    # The children of a killed process become children of this one, so look again.
    while pids := set(descendants(os.getpid())) - set(spare):
        cleaners = {pid for pid in pids if _is_cleaner(pid)}
        for pid in pids - cleaners:
            _await_end(pid, kill=True)
        reap()
        for pid in cleaners:
            if not _await_end(pid, grace):
                _await_end(pid, kill=True)
        reap()


def _is_cleaner(pid: int) -> bool:
    """Is `pid` a resource tracker of multiprocessing or loky, or torch's manager?"""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"resource_tracker" in command or b"torch_shm_manager" in command


def _await_end(pid: int, seconds: float = 10.0, *, kill: bool = False) -> bool:
    """Kill `pid` if `kill`; return whether it ends within `seconds`."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if kill:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        return bool(select.select([fd], [], [], seconds)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(fd)


def reap() -> None:
    """Wait for all children that have ended, so that they do not stay zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return
