"""What forked children of the program may still look at, of the blocks that it held.

A child that the program forks sees the same memory, but has no attachment.  What its parent held at
that moment must not be given away while the child may look: it is held once more until the child
ends, or becomes another program, and with it the writing end of a pipe.
"""

from __future__ import annotations

import os
import select

__all__ = ["Pins"]


class Pins:
    """The pipes of forked children, and the blocks that each may look at."""

    def __init__(self) -> None:
        self._pins: list[tuple[int, list[int]]] = []

    def __bool__(self) -> bool:
        return bool(self._pins)

    def add(self, fd: int, numbers: list[int]) -> None:
        """Note a child with the other end of this pipe; -1: there is none, so it is for good."""
        self._pins.append((fd, numbers))

    def take_ended(self) -> list[int]:
        """Return the blocks of children that have ended, once for each; forget these."""
        found: list[int] = []
        for pin in list(self._pins):
            fd, numbers = pin
            if fd < 0:
                continue
            poller = select.poll()
            poller.register(fd, 0)  # a hang-up is always told
            if poller.poll(0):
                self._pins.remove(pin)
                os.close(fd)
                found += numbers
        return found

    def close(self) -> None:
        """In a child: close what is the parent's."""
        for fd, _ in self._pins:
            if fd >= 0:
                os.close(fd)
