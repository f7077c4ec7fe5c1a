"""Share mode for memory in files, which is not moved because other processes may have mapped it.

``share_memory_()``, ``from_file(shared=True)`` and `numpy.memmap` make tensors whose memory is a
file.  If such a tensor were moved, other processes that map the file would not see its writes.  So
the name of the file is sent, and the receiver maps the file, too.

If the file has no name (torch removes it at once), the receiver opens it by the sender's descriptor
under /proc.  So the storage must exist until then.  The message holds a token, which is a small
block of the arena, and the sender keeps the storage as long as the token is held (`_lent`).

A worker keeps its mappings for some seconds, because the same tensor is often sent again.  A file
is identified by device and inode, which no other file gets while it is mapped.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import islice
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from xpool._memory.arena import IDLE_SECONDS
from xpool._memory.holds import Block
from xpool._pickling.reducers import Context, in_place
from xpool._pickling.tensors.extents import Seen
from xpool._python import at_fork
from xpool.errors import TaskNotPicklable

_DELETED = " (deleted)"
_OURS = "/memfd:xpool-"
"""Name prefix of arenas and other files of this package, which are not handled here."""

_LOOKS = 2  # number of entries of `_lent` that are checked when one is added

_MOST_OPENED = 16  # the largest number of kept mappings, each of which has a descriptor

Place = tuple[str, int, int, int]
"""The path of a file, its device and inode, and an offset in the file."""

_Map = tuple[int, int, int, int, str]
"""Start, end, offset in the file, inode and path of a mapping."""

_lent: dict[int, tuple[Block, Any]] = {}
"""Tokens that receivers may still hold, and their storages, by the `id` of the token."""

_opened: dict[tuple[int, int, int, int], tuple[Any, float]] = {}
"""Buffers, and the times when they were last used, by device, inode, offset and length.  The last
used one comes last.  Workers use this, and call `collect` regularly."""

keeps_opened = False
"""Whether mappings are kept for tensors that are sent again; `collect` is called regularly then."""

at_fork.renew(globals(), _lent=dict, _opened=dict)


def place_of(pickler: Context, storage: Any) -> Place | None:
    """Return the place of a storage in a file with a shared mapping, or None.

    The path is empty if no other process can open the file.
    """
    # This is the way of most storages: torch has allocated their memory, which is not shared.
    if not storage.is_shared() and storage.resizable():
        return None
    address, process = storage.data_ptr(), os.getpid()
    # An earlier call in this process has set the attribute, if the storage was sent before.
    known = getattr(storage, "xpool_place", None)
    if known is not None and known[:2] == (process, address):
        place: Place = known[2]
        path, device, inode, offset = place
        if _device_of(path, inode, offset + storage.nbytes()) == device:
            return place
    found = _mapping_at(pickler, address)
    if found is None:
        return None
    start, _, offset, inode, path = found
    offset += address - start
    place = (*_path_of(path, inode, offset + storage.nbytes()), inode, offset)
    if place[0]:
        storage.xpool_place = process, address, place
    return place


# By the `mmap` of an array: this process, and the mapping.
_of_arrays: WeakKeyDictionary[mmap.mmap, tuple[int, _Map]] = WeakKeyDictionary()


def place_of_array(pickler: Context, array: Any) -> Place | None:
    """Return the place of the first element of an array in a file, if it is mapped with writes that
    reach the file, and the file still has its name; else None."""
    pages: Any = array
    while (base := getattr(pages, "base", None)) is not None:
        pages = base
    if type(pages) is memoryview:
        pages = pages.obj
    if type(pages) is not mmap.mmap:
        return None
    address: int = array.__array_interface__["data"][0]
    process, found = _of_arrays.get(pages, (0, None))
    if process != os.getpid() or found is None or not found[0] <= address < found[1]:
        found = _mapping_at(pickler, address)
        if found is None:
            return None
    start, _, offset, inode, path = found
    now = None if path.endswith(_DELETED) else _device_of(path, inode, 0)
    if now is None:
        return None
    _of_arrays[pages] = os.getpid(), found
    return path, now, inode, offset + address - start


def _mapping_at(pickler: Context, address: int) -> _Map | None:
    """Return the shared mapping of a file at an address, or None."""
    seen = Seen.of(pickler)
    if seen.maps is None:
        seen.maps = _shared_maps()
    at = bisect_right(seen.maps, address, key=itemgetter(0)) - 1
    return seen.maps[at] if at >= 0 and address < seen.maps[at][1] else None


def _shared_maps() -> list[_Map]:
    found: list[_Map] = []
    with open("/proc/self/maps", "rb") as maps:
        for line in map(os.fsdecode, maps):  # a path may have any bytes
            # The fields are: from-to, rights, offset, device, inode, path (proc(5)).
            extent, rights, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if not rights.endswith("s") or not path or path[0].startswith(_OURS):
                continue
            start, stop = (int(number, 16) for number in extent.split("-"))
            found.append((start, stop, int(offset, 16), int(inode), path[0]))
    return found


def _path_of(path: str, inode: int, size: int) -> tuple[str, int]:
    """Return a path by which other processes can open a file (else ""), and the file's device."""
    if not path.endswith(_DELETED) and (device := _device_of(path, inode, size)) is not None:
        return path, device
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/{os.getpid()}/fd/{fd}"
        if (device := _device_of(path, inode, size)) is not None:
            return path, device
    return "", 0


def _device_of(path: str, inode: int, size: int) -> int | None:
    """Return the device of the file at a path, or None if it is another file or is shorter."""
    try:
        found = os.stat(path)
    except OSError:
        return None  # the descriptor was closed, or the file was removed
    if found.st_ino != inode or (stat.S_ISREG(found.st_mode) and found.st_size < size):
        return None
    return found.st_dev


def lend(pickler: Context, storage: Any, place: Place, about: Callable[[], str]) -> Any:
    """Return the arguments of `open_file`, and keep the storage until it has been opened.

    Raises:
        TaskNotPicklable: the storage cannot be shared.  The text says why and what to do.
    """
    layout = pickler.layout
    arena = layout.arena
    assert arena is not None
    token = getattr(storage, "xpool_token", None) if place[0] else None
    if token is None or token.arena is not arena:
        token = (layout.lessor or arena.lease)(1) if place[0] else None
        if token is None:
            none_left = "there is no shared memory left"
            why = none_left if place[0] else "no other process can open its file"
            raise TaskNotPicklable(
                f"{about()} cannot be shared: it lies in a file that is shared with other "
                f"processes, and {why}. Send a clone() of it instead."
            )
        storage.xpool_token = token
    # The message has its own hold, which ends when the receiver has opened it.
    sent = token.arena.adopt(token.name)
    if id(token) not in _lent:
        collect(_LOOKS)
    # Entered again, because `collect` in another thread may have removed it.
    _lent[id(token)] = token, storage
    return in_place(pickler, sent), *place, storage.nbytes()


def collect(most: int | None = None) -> bool:
    """Release storages that their receivers have opened, and mappings that were not used for long.

    Checks ``most`` storages; None: all.  Returns whether any storages or mappings are left.
    """
    for key in list(islice(_lent, most)):
        # Removed before the check, because `lend` takes a hold before it enters the token again.
        entry = _lent.pop(key, None)
        if entry is not None and not entry[0].arena.alone(entry[0]):
            _lent[key] = entry
    if _opened:
        before = time.monotonic() - IDLE_SECONDS
        for file, (_, used) in list(_opened.items()):
            if used > before and len(_opened) <= _MOST_OPENED:
                break
            _opened.pop(file, None)
    return bool(_lent or _opened)


def open_buffer(path: str, device: int, inode: int, offset: int, nbytes: int) -> Any:
    key = device, inode, offset, nbytes
    known = _opened.pop(key, None)  # removed, so that it comes last when it is entered again
    if known is not None:
        buffer = known[0]
    else:
        gone = f"the file of a tensor is gone ({path}): its sender has ended"
        pages, skip = map_file((path, *key), True, gone)
        buffer = memoryview(pages)[skip:]
    if keeps_opened:
        _opened[key] = buffer, time.monotonic()
        if len(_opened) > _MOST_OPENED:
            collect(0)
    return buffer


def open_file(token: Any, *place: Any) -> Any:
    torch = imported_torch()
    return torch.frombuffer(open_buffer(*place), dtype=torch.uint8).untyped_storage()


def imported_torch() -> Any:
    import torch  # this may be the first tensor of the process

    return torch


def map_file(
    where: tuple[str, int, int, int, int], writable: bool, gone: str = ""
) -> tuple[mmap.mmap, int]:
    """Map a part of a file, which begins at an offset; return the mapping, and where the part
    begins in it.

    Raises:
        LookupError: it is another file now; ``gone`` says so.
    """
    path, device, inode, offset, nbytes = where
    gone = gone or f"the file of an array is gone ({path})"
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as exc:
        raise LookupError(f"{gone}, or {exc}") from exc
    try:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != (device, inode):
            raise LookupError(gone)
        skip = offset % mmap.ALLOCATIONGRANULARITY
        # The mapping keeps a descriptor, with which this process can send the tensor to others.
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(fd, skip + nbytes, access=access, offset=offset - skip), skip
    finally:
        os.close(fd)
