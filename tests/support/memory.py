"""How shared memory is used."""

from __future__ import annotations

from xpool._memory.arena import Arena
from xpool._memory.layout import HOLDS


def own_arena() -> Arena:
    """Return this process's arena."""
    found = Arena.own()
    assert found is not None
    return found


def block_bytes(arena: Arena) -> int:
    """Return the bytes of blocks; the tables keep 512 bytes for each block that ever existed."""
    file = arena.file
    return file.used() - 512 * sum(file.entries(attachment) for attachment in range(HOLDS))


def is_free(arena: Arena, number: int) -> bool:
    """Whether no process holds a block."""
    return arena.file.only(number, 0) and not arena.file.holds(0)[number]
