"""What the system has to give: memory, and anonymous files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

if sys.platform == "linux":
    import fcntl

__all__ = ["available_memory", "fix_size", "fixed_file", "is_fixed", "total_memory"]

_CGROUPS = "/sys/fs/cgroup"
_LIMITS = (
    ("memory.max", "memory.current"),  # version 2, and 1
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Return how many bytes this process may hope to get: of the machine, and of its cgroup."""
    return max(0, min([*_of_machine(), *(most - now for most, now in _of_cgroup())]))


def total_memory() -> int:
    """Return how many bytes the machine has, or allows this process's cgroup."""
    return min([_installed(), *(most for most, _ in _of_cgroup())])


def _installed() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_machine() -> Iterator[int]:
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    # proc(5): in kB.
                    yield int(line.split()[1]) * 1024
                    return
    except OSError:
        pass  # no /proc: what the machine has will do
    yield _installed()


def _of_cgroup() -> Iterator[tuple[int, int]]:
    """Yield what the cgroup allows, and what it has of that."""
    for limit, used in _LIMITS:
        try:
            with open(f"{_CGROUPS}/{limit}") as first, open(f"{_CGROUPS}/{used}") as second:
                most, now = first.read().strip(), second.read().strip()
        except OSError:
            continue
        # Version 2 says `max` where there is no limit.
        if most.isdigit() and now.isdigit():
            yield int(most), int(now)


def fixed_file(name: str, size: int) -> int:
    """Return the descriptor of a new anonymous file of ``size`` zero bytes, for processes to map.

    The size is sealed.  A process that maps a file gets SIGBUS where another has cut it short.

    Raises:
        OSError: no descriptor is left, or the system has no such files.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fix_size(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def fix_size(fd: int) -> None:
    """Seal the size of an anonymous file that was made with ``MFD_ALLOW_SEALING``."""
    # F_SEAL_SEAL: else any process that has the file could forbid others to write to it.
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def is_fixed(fd: int) -> bool:
    """Whether nobody can cut a file short."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False  # not a file of this kind
