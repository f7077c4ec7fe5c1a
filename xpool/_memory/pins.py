"""Holds the blocks of a process for the children that it forks.

A forked child has the same memory, but no attachment.  The blocks that its parent held at the fork
must not be reused while the child may read them.  So the parent holds them once more until the
child ends or executes another program.  Either closes the child's end of a pipe.
"""

from __future__ import annotations

import os
import select


class Pins:
    """The pipes to forked children, and the blocks that are held for each."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[int]] = {}
        self._poller = select.poll()

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, fd: int, numbers: list[int]) -> None:
        """Add a child that has the other end of the pipe ``fd``, and the blocks held for it."""
        self._blocks[fd] = numbers
        self._poller.register(fd, 0)  # poll(2) always reports a hang-up

    def take_ended(self) -> list[int]:
        """Remove the children that have ended.  Return their blocks, once for each child."""
        found: list[int] = []
        for fd, _ in self._poller.poll(0) if self._blocks else ():
            self._poller.unregister(fd)
            os.close(fd)
            found += self._blocks.pop(fd)
        return found

    def close(self) -> None:
        """Close the parent's ends of the pipes, in a child."""
        for fd in self._blocks:
            os.close(fd)
