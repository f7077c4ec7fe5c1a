"""The system's processors and memory: how much there is, and new buffers and anonymous files.

The first touch of new memory is the largest cost of a large message, because the kernel clears the
memory page by page.  Pages of 2 MiB, which some systems allow, make this several times faster.
"""

import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import ctypes

from xpool._python.descriptors import new_file
from xpool._python.hidden import ctypes_module

_CGROUPS = "/sys/fs/cgroup"
_PROC = "/proc"


class _Version(NamedTuple):
    """The files that describe memory and cores in a version of cgroups."""

    limits: tuple[str, ...]  # above the first, the kernel kills processes; above others, slows them
    used: str
    cache: bytes  # the name of the file cache in memory.stat; the kernel reclaims it first
    quota: tuple[str, ...]  # the files with the time on cores, and with the period for which it is
    events: str  # has the number of processes that the kernel has killed for lack of memory


_SECOND = _Version(("memory.max", "memory.high"), "memory.current", b"inactive_file", ("cpu.max",),
    "memory.events",
)  # fmt: skip
_FIRST = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    b"total_inactive_file",
    ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
    "memory.oom_control",
)


class Scope(NamedTuple):
    """The memory of the machine or of a cgroup with a limit, in bytes."""

    total: int
    used: int

    @property
    def part(self) -> float:
        """The used share of the memory, from 0 to 1."""
        return min(1.0, self.used / max(1, self.total))


def default_processes() -> int:
    """Return the number of cores that this process may use.

    The quota of a container (``docker run --cpus=1.5``) is rounded up.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    for version, folder in _folders("cpu"):
        words = [word for name in version.quota for word in _words(os.path.join(folder, name))]
        quota, period = words if len(words) == 2 else ("max", "")
        if quota.isdigit() and period.isdigit():  # "max" and "-1" mean no limit
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def available_memory(part: float = 1.0) -> int:
    """Return how many bytes this process may still use, by the machine and by its cgroups.

    ``part``: from 0 to 1; the rest of each memory stays unused.
    """
    return max(0, min(int(total * part) - used for total, used in scopes()))


def fullest_scope() -> Scope:
    """Return the machine or the cgroup of this process, whichever has the largest used share."""
    return max(scopes(), key=lambda scope: scope.part)


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory: of the cgroup of this
    process, or of the machine if its cgroup does not say; 0: not known."""
    for version, folder in _folders("memory"):
        kills = _named(os.path.join(folder, version.events), b"oom_kill")
        if kills is not None:
            return kills
    return _named(f"{_PROC}/vmstat", b"oom_kill") or 0


def scopes() -> Iterator[Scope]:
    """Yield the memory of the machine, and that of each cgroup of this process with a limit."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _named(f"{_PROC}/meminfo", b"MemAvailable:")
    yield Scope(installed, 0 if available is None else installed - available * 1024)
    for version, folder in _folders("memory"):
        limits = [_number(os.path.join(folder, name)) for name in version.limits]
        limit = min([one for one in limits if one is not None], default=installed)
        used = _number(os.path.join(folder, version.used))
        if used is not None and limit < installed:
            cache = _named(os.path.join(folder, "memory.stat"), version.cache) or 0
            yield Scope(limit, max(0, used - cache))


def _folders(controller: str) -> Iterator[tuple[_Version, str]]:
    """Yield the folder of each cgroup of this process, and of the groups that contain it: their
    limits apply, too."""
    for version, group in _groups(controller):
        top = os.path.join(_CGROUPS, "" if version is _SECOND else controller)
        while True:
            yield version, os.path.join(top, group)
            if not group:
                break
            group = os.path.dirname(group)


def _groups(controller: str) -> Iterator[tuple[_Version, str]]:
    """Yield the cgroups of this process, or the top ones if /proc is missing."""
    try:
        with open(f"{_PROC}/self/cgroup", "rb") as file:
            lines = os.fsdecode(file.read()).splitlines()
    except OSError:
        lines = ["0::/", f"1:{controller}:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _SECOND, path.strip("/")
        elif controller in controllers.split(","):
            yield _FIRST, path.strip("/")


def _words(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read()).split()
    except OSError:
        return []


def _number(path: str) -> int | None:
    text = "".join(_words(path))
    return int(text) if text.isdigit() else None  # "max" means no limit


def _named(path: str, name: bytes) -> int | None:
    """Return the number after a name in a file whose lines have a name and a number."""
    try:
        with open(path, "rb") as file:
            for line in file:
                first, *rest = line.split()
                if first == name:
                    return int(rest[0])
    except OSError:
        pass
    return None


def fixed_file(name: str, size: int) -> int:
    """Return the descriptor of a new anonymous file of ``size`` zero bytes, with a sealed size.

    If another process could truncate the file, processes that map it would get SIGBUS.

    Raises:
        OSError: no descriptor is left, or the system has no such files.
    """
    fd = new_file(name, os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fix_size(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def temporary_file() -> tuple[int, str]:
    """Return the descriptor and the path of a new file, on a system without anonymous ones."""
    import tempfile  # imported here, because it takes as long as five modules of xpool

    return tempfile.mkstemp(prefix="xpool-shared-")


def fix_size(fd: int) -> None:
    """Seal the size of an anonymous file that was made with ``MFD_ALLOW_SEALING``."""
    # F_SEAL_SEAL stops other processes from sealing the file against writing.
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def is_fixed(fd: int) -> bool:
    """Whether no process can truncate a file."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False  # not an anonymous file


# -- buffers ---------------------------------------------------------------------------------------

HUGE_PAGES_FROM = 4 * 1024 * 1024
"""Buffers of at least this many bytes get their own mapping, in large pages."""


def new_buffer(size: int) -> bytearray | mmap.mmap:
    """Return ``size`` zero bytes of writable memory.  It is freed with the last view of it."""
    if size < HUGE_PAGES_FROM or sys.platform != "linux":
        return bytearray(size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        pass  # the kernel has no large pages
    return memory


def address_of(mapping: mmap.mmap) -> int:
    address: int = ctypes_module().addressof(array_type(1).from_buffer(mapping))
    return address


@lru_cache(maxsize=256)  # making a type takes 20 us
def array_type(nbytes: int) -> "type[ctypes.Array[ctypes.c_char]]":
    return ctypes_module().c_char * nbytes  # type: ignore[no-any-return]


def buffer_at(start: int, nbytes: int, owner: Any) -> "ctypes.Array[ctypes.c_char]":
    """Return a view of ``nbytes`` (> 0) bytes at an address, which keeps ``owner`` alive.

    `pickle.PickleBuffer` gets this view and never a memoryview: CPython before 3.12.7 crashes if
    the garbage collector finds a `PickleBuffer` and its memoryview in a cycle, such as the
    traceback of an error during pickling (CPython's issue 77894).
    """
    made = array_type(nbytes).from_address(start)
    made.owner = owner  # type: ignore[attr-defined]  # `from_address` keeps no reference
    return made


_PART = 64 * 1024


def same_bytes(one: memoryview, other: memoryview) -> bool:
    """Whether two contiguous views of bytes, of the same length, are equal.

    This compares 5 GB a second with the memcmp of `bytearray`.  A memoryview compares single items.
    """
    size = _PART
    return all(
        bytearray(one[at : at + size]) == other[at : at + size] for at in range(0, one.nbytes, size)
    )
