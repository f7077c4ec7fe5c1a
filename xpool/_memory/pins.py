"""Keeps the blocks of a process held for the children that it forks.

A forked child has the same memory, but no attachment.  The blocks that its parent held at the fork
must not be reused while the child may read them.  So the parent holds them once more until the
child ends or executes another program, which closes the child's end of a pipe.
"""

from __future__ import annotations

import os
import select


class Pins:
    """The pipes to forked children, and the blocks that are held for each."""

    def __init__(self) -> None:
        self._pins: list[tuple[int, list[int]]] = []

    def __bool__(self) -> bool:
        return bool(self._pins)

    def add(self, fd: int, numbers: list[int]) -> None:
        """Add a child that has the other end of the pipe ``fd``; -1: no pipe, held for good."""
        self._pins.append((fd, numbers))

    def take_ended(self) -> list[int]:
        """Remove the children that have ended, and return their blocks, once for each child."""
        found: list[int] = []
        for pin in list(self._pins):
            fd, numbers = pin
            if fd < 0:
                continue
            poller = select.poll()
            poller.register(fd, 0)  # poll(2) always reports a hang-up
            if poller.poll(0):
                self._pins.remove(pin)
                os.close(fd)
                found += numbers
        return found

    def close(self) -> None:
        """In a child, close the parent's ends of the pipes."""
        for fd, _ in self._pins:
            if fd >= 0:
                os.close(fd)
