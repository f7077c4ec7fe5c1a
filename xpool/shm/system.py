"""What the system has to give."""

from __future__ import annotations

import os
from collections.abc import Iterator

__all__ = ["available_memory", "total_memory"]

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
