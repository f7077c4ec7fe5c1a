"""What /proc tells about processes: who belongs to whom, their memory and CPU time."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat that follow the command's name; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def descendants(root: int) -> list[int]:
    """All processes below `root` that have not ended, parents before their children."""
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
    """User and system time that `pid` has used, all its threads included; 0 if it is gone."""
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
    """Become the parent of every process below whose own parent ends.

    A peer that is killed leaves workers behind; so they stay findable by `descendants`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def kill_descendants(spare: Iterable[int] = (), grace: float = 3.0) -> None:
    """Kill every process below this one but those in `spare`, and wait until they are gone.

    Those that clean up after the others (semaphores, shared memory) see their end, and are
    given `grace` seconds to do it.
    """
    # Killed parents hand their children to this process, so a second look may find more.
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
    """Is it a resource tracker of multiprocessing or loky, or torch's manager?"""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"resource_tracker" in command or b"torch_shm_manager" in command


def _await_end(pid: int, seconds: float = 10.0, *, kill: bool = False) -> bool:
    """Has `pid` ended within `seconds`, killed if that is asked for?"""
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
    """Take leave of the children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return
