"""`Block`: a hold on a block of the arena, and the memory of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xpool._python.interrupt import uninterrupted

if TYPE_CHECKING:
    from xpool._memory.arena import Arena

__all__ = ["Block", "block_types", "make_block_type"]


class Block:
    """A hold on a block, in this process: as long as this lives the memory is not given away.

    Instances are of a subclass that is a ctypes array over the memory: what is made of
    `memoryview(block)` (an array, a tensor) keeps the block alive, by whatever way.
    """

    __slots__ = ()

    capacity: int
    arena: Arena
    number: int
    stands_for: tuple[int, int]
    """Where it stands for a tensor on a device: the index of the worker, and the tensor's bytes."""

    former: Any
    """Memory that must live as long as this does."""

    filled: bool
    """True where a sender has filled it for one message, and does not look at it any more."""

    @property
    def name(self) -> int:
        """What a message calls it: the stamp of this lease, and the number."""
        return self.arena.file.stamps[self.number] << 32 | self.number

    def view(self, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` bytes."""
        return memoryview(self).cast("B")[:nbytes]  # type: ignore[arg-type]

    @uninterrupted
    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            return  # names of this module are gone; whoever looks after the dead clears the hold
        try:
            arena = self.arena
        except AttributeError:
            return  # an exception came while it was made: it stays held, for want of a better
        arena.drop(self.number)


block_types: dict[int, Any] = {}  # by capacity: four an octave, so there are few


def make_block_type(capacity: int) -> Any:
    """Return the type of blocks of this many bytes."""
    made = block_types.get(capacity)
    if made is None:
        import ctypes

        # `arena` keeps the mapping: what `from_address` makes owns no memory.
        bases = Block, ctypes.c_char * capacity
        slots = "arena", "filled", "former", "number", "stands_for"
        space = {"__slots__": slots, "capacity": capacity}
        # Two threads may make the same type at once: either does.
        made = block_types[capacity] = type(f"Block{capacity}", bases, space)
    return made
