"""What shared memory is used for."""

from __future__ import annotations

from xpool._memory.arena import Arena
from xpool._memory.layout import HOLDS


def block_bytes(arena: Arena) -> int:
    """Return how many bytes blocks have; tables keep theirs, 512 for each block there ever was."""
    file = arena.file
    return file.used() - 512 * sum(file.entries(attachment) for attachment in range(HOLDS))
