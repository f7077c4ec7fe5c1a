"""`Pool.broadcast`: objects that each worker loads once, while the machine has their data once.

The object is pickled once, with its large buffers, into one block of the arena.  A task with a
reference gets the object.  The first such task in a worker maps the block **privately** and loads
the message in place.  So all workers share the pages, and a write changes only the writer's copy.

A small block, the token, represents the reference.  Processes with the reference, and messages with
it, hold the token, and a worker keeps the object as long as its parent holds the token.  The worker
holds the large block as long as any part of the object is in use.

Without an arena, or if the pool's ``memory_limit`` is 0, the message is in an anonymous file of the
parent until the pool ends.  For a worker that cannot map the arena, each task brings the message in
place of the token (`frame.inline`), and the worker keeps the object until it ends.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from xpool._memory.arena import Arena
from xpool._memory.holds import Block
from xpool._memory.layout import LARGE
from xpool._pickling import Key
from xpool._pickling.frame import Layout, pools
from xpool._pickling.pickler import decode
from xpool._pickling.reducers import Context, in_place, register
from xpool._python.worker_local import WorkerLocal
from xpool.errors import TaskNotPicklable

_TOKEN = 64  # bytes of a token; they are not used, because only the holds matter
_EVERYONE = -1  # as a message's target: copies replace handles to tensors on devices


class Broadcast:
    """A reference to an object that each worker of a pool keeps once.

    If an argument or a closure of a task of this pool contains the reference, the task gets the
    object.  Workers keep the object as long as the reference and the pool exist.

    Attributes:
        nbytes: size of the pickled object in bytes, with its tensors and arrays.
        names: the globals of the program that the object uses.  Messages with the reference bring
            them, as they are then.
    """

    names: frozenset[Key] = frozenset()

    def __init__(self, pool: str, place: Any, nbytes: int, token: Block | None, what: str) -> None:
        self.pool, self.nbytes = pool, nbytes
        self._place = place
        self._token = token
        self._what = what

    @property
    def _about(self) -> tuple[Any, ...]:
        """The arguments of `open_broadcast`, without the buffer."""
        token = None if self._token is None else self._token.name
        return self.pool, token, self._place, self.nbytes

    def content(self) -> memoryview:
        """Return the message itself, to read it in the process that wrote it."""
        if self._token is not None:
            block: Block = self._token.former
            return block.view(self.nbytes)
        return self._place.pages()  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return open_broadcast, (None, *self._about)

    def __repr__(self) -> str:
        return f"<Broadcast of a {self._what}, {self.nbytes:,} bytes>"

    # Type checkers take the reference for the object, so these mistakes show at run time.

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self!r} has no attribute {name!r}{_ONLY_IN_TASKS}")

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError(f"{self!r} has no items{_ONLY_IN_TASKS}")


_ONLY_IN_TASKS = ": only tasks get the object itself; outside of them, use what was broadcast"


@register(Broadcast)
def _reduce(pickler: Context, ref: Broadcast) -> Any:
    layout = pickler.layout
    if layout.room is not None or (layout.pool is not None and layout.pool != ref.pool):
        raise TaskNotPicklable(
            f"{ref!r} can be sent only in tasks of the pool that made it, and not within another "
            "broadcast. Send or broadcast the object itself."
        )
    pickler.names |= ref.names
    if ref._token is None or layout.pool is None:
        return ref.__reduce__()
    # The message holds the token, so workers keep the object.
    return open_broadcast, (in_place(pickler, ref._token), *ref._about)


def publish(
    write: Callable[[Layout], bytes | memoryview],
    pool: str,
    lessor: Callable[[int], Block | None],
    what: str,
) -> Broadcast:
    """Return a reference to the message that ``write(layout)`` makes in a block of ``lessor``.

    Raises:
        TaskNotPicklable: there is no memory for the message, or ``write`` raises this.
    """
    block: Block | None = None

    def room(nbytes: int) -> memoryview:
        nonlocal block
        block = lessor(max(nbytes, LARGE))  # a block with its own pages
        if block is None:
            raise TaskNotPicklable(
                f"No shared memory is left for a broadcast of {nbytes} bytes; delete earlier "
                "broadcasts and results, or give the pool a larger memory_limit."
            )
        return block.view(nbytes)

    message = write(Layout(room=room, pool=pool, target=_EVERYONE))
    # For a message without large buffers, a plain pickle, `room` was not called.
    if block is None:
        room(len(message))[:] = message
    assert block is not None
    token = lessor(_TOKEN)
    if token is None:
        raise TaskNotPicklable("No shared memory is left for a broadcast; delete earlier ones.")
    token.former = block  # so a hold on the token keeps the message, too
    return Broadcast(pool, block.name, len(message), token, what)


class _Pages(mmap.mmap):
    """A private mapping of a block, which holds the block."""

    block: Block


class Objects:
    here: WorkerLocal[Objects] = WorkerLocal()

    def __init__(self, arena: Arena | None, pool: str) -> None:
        self.pool = pool
        self._arena = arena
        self._kept: dict[Any, Any] = {}
        Objects.here.set(self)

    def get(self, buffer: Any, token: int | None, place: Any, nbytes: int) -> Any:
        key = place.key if token is None else token
        try:
            return self._kept[key]
        except KeyError:
            self.collect()  # drops objects without references, to make room
        if token is None:
            message = place.pages()
        elif self._arena is None:
            message = memoryview(bytearray(memoryview(buffer)[:nbytes]))
        else:
            message = self._map(self._arena, place, nbytes)
        obj = self._kept[key] = decode(message)
        return obj

    def _map(self, arena: Arena, name: int, nbytes: int) -> memoryview:
        block = arena.adopt(name)
        file = arena.file
        at = file.place(block.number)[0]
        how: dict[str, Any] = {"access": mmap.ACCESS_COPY, "offset": at}
        if sys.version_info >= (3, 13):
            how["trackfd"] = False  # otherwise it keeps a descriptor
        pages = _Pages(file.fd, nbytes, **how)
        pages.block = block
        return memoryview(pages)

    def collect(self) -> bool:
        """Drop objects without references.  Return whether any objects are left."""
        for key in list(self._kept):
            # Objects in files have no token, and without the arena no token can be looked at.
            if type(key) is int and self._arena is not None and not self._referred(key):
                del self._kept[key]
        return bool(self._kept)

    def _referred(self, name: int) -> bool:
        """Whether the pool's process still holds a token."""
        assert self._arena is not None
        # The stamp detects a block that was leased again.  The pool's process has attachment 0.
        file, number = self._arena.file, name & 0xFFFF_FFFF
        return file.stamps[number] == name >> 32 and bool(file.holds(0)[number])


def open_broadcast(buffer: Any, pool: str, token: int | None, place: Any, nbytes: int) -> Any:
    """Return the object of a reference.  Only workers of the pool can load it."""
    objects = Objects.here.get()
    if objects is None or objects.pool != pool:
        where = "the pool's own" if pool in pools else "a"
        raise LookupError(
            f"a reference to a broadcast was loaded in {where} process; only the workers of the "
            "pool that made it have the object"
        )
    return objects.get(buffer, token, place, nbytes)
