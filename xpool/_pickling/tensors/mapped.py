"""Share mode for memory that other processes have mapped already, which does not move.

``share_memory_()``, ``from_file(shared=True)`` and `numpy.memmap` make tensors whose memory is a
file.  If such a tensor moved, other processes that map the file would not see its writes.  So the
name of the file is sent, and the receiver maps it, too.

A file without a name (torch removes it at once) is opened by the sender's descriptor under /proc.
So the storage must live until the receiver has opened it: a block of the arena, the token, is sent
in the same message and stands for the storage (`_lent`).
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from xpool._memory.holds import Block
from xpool._pickling.reducers import Context, builder, in_place
from xpool._pickling.tensors.extents import Seen
from xpool._python import at_fork
from xpool.errors import TaskNotPicklable

_DELETED = " (deleted)"
_OURS = "/memfd:xpool-"
"""Name prefix of arenas and other files of this package, which have their own rules."""

Place = tuple[str, int, int]
"""The path of a file, its inode, and an offset in it."""

_Map = tuple[int, int, int, int, str]
"""Start, end, offset in the file, inode and path of a mapping."""

_lent: list[tuple[Block, Any]] = []
"""Tokens and their storages."""

at_fork.renew(globals(), _lent=list)


def place_of(pickler: Context, storage: Any) -> Place | None:
    """Return the place of a storage in a file with a shared mapping; None: it is in none.

    The path is empty if no other process can open the file.
    """
    # Memory that torch has allocated for itself is not shared: most storages end here.
    if not storage.is_shared() and storage.resizable():
        return None
    address, process = storage.data_ptr(), os.getpid()
    # Found before by this process: the attribute lives as long as the storage and its mapping.
    known = getattr(storage, "xpool_place", None)
    if known is not None and known[:2] == (process, address) and _is(*known[2][:2]):
        place: Place = known[2]
        return place
    seen = Seen.of(pickler)
    if seen.maps is None:
        seen.maps = _shared_maps()
    at = bisect_right(seen.maps, address, key=itemgetter(0)) - 1
    if at < 0 or address >= seen.maps[at][1]:
        return None
    start, _, offset, inode, path = seen.maps[at]
    place = _path_of(path, inode), inode, offset + address - start
    if place[0]:
        storage.xpool_place = process, address, place
    return place


def _shared_maps() -> list[_Map]:
    """Return the shared mappings of this process, by address."""
    found: list[_Map] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            # proc(5): from-to, rights, offset, device, inode, path.
            extent, rights, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if rights.endswith("s") and path and not path[0].startswith(_OURS):
                start, stop = (int(number, 16) for number in extent.split("-"))
                found.append((start, stop, int(offset, 16), int(inode), path[0]))
    return found


def _path_of(path: str, inode: int) -> str:
    if not path.endswith(_DELETED) and _is(path, inode):
        return path
    for fd in os.listdir("/proc/self/fd"):
        if _is(f"/proc/self/fd/{fd}", inode):
            return f"/proc/{os.getpid()}/fd/{fd}"
    return ""


def _is(path: str, inode: int) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False  # closed meanwhile, or the name belongs to another file by now


def lend(pickler: Context, storage: Any, place: Place, about: Callable[[], str]) -> Any:
    """Return the arguments of `open_file`.

    Raises:
        TaskNotPicklable: it cannot be shared; the message says why and what to do.
    """
    collect()
    layout = pickler.layout
    arena = layout.arena
    assert arena is not None
    token = (layout.lessor or arena.lease)(1) if place[0] else None
    if token is None:
        why = "there is no shared memory left" if place[0] else "no other process can open its file"
        raise TaskNotPicklable(
            f"{about()} cannot be shared: it lies in a file that is shared with other processes, "
            f"and {why}. Send a clone() of it instead."
        )
    _lent.append((token, storage))
    # The message has its own hold, which ends when the receiver has opened it.
    return in_place(pickler, token.arena.adopt(token.name)), *place, storage.nbytes()


def collect() -> bool:
    """Release storages that their receivers have opened; return whether any are left."""
    for entry in list(_lent):
        token = entry[0]
        if token.arena.alone(token):
            try:
                _lent.remove(entry)
            except ValueError:
                continue  # another thread collects too
    return bool(_lent)


@builder
def open_file(token: Any, path: str, inode: int, offset: int, nbytes: int) -> Any:
    import torch

    gone = f"the file of a tensor is gone ({path}): its sender has ended"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise LookupError(f"{gone}, or {exc}") from exc
    try:
        if os.fstat(fd).st_ino != inode:
            raise LookupError(gone)
        skip = offset % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(fd, skip + nbytes, offset=offset - skip)
    finally:
        os.close(fd)
    part = memoryview(pages)[skip:]
    return torch.frombuffer(part, dtype=torch.uint8).untyped_storage()
