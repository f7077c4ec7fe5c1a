"""An exactly-once, ordered stream of messages over calls that may fail, come late or run twice.

Each side has a `Link`.  What is sent gets a number and is kept until the other side says that it
has it; what comes is put in order, and what comes again is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

__all__ = ["Link"]


class Link:
    """One side of a stream of messages.  Messages are numbered from 1."""

    def __init__(self) -> None:
        self._out: deque[Any] = deque()  # not acknowledged, oldest first
        self.acked = 0
        """The other side has all messages up to this one."""
        self.got = 0
        """All messages up to this one have come."""
        self._early: dict[int, Sequence[Any]] = {}  # came before others, by their first number

    def send(self, message: Any) -> None:
        """Queue a message."""
        self._out.append(message)

    @property
    def last(self) -> int:
        """Number of the last message that was queued."""
        return self.acked + len(self._out)

    def take(self, after: int, most: int, weight: Any) -> list[Any]:
        """Return messages that come after number ``after``, in order.

        The first, whatever it weighs, and so many more that these weigh ``most`` in all: what
        permits a large batch travels with it.
        """
        found: list[Any] = []
        total = 0
        for i in range(max(0, after - self.acked), len(self._out)):
            total += weight(self._out[i]) if found else 0
            if total > most:
                break
            found.append(self._out[i])
        return found

    def acknowledge(self, upto: int) -> None:
        """Note that the other side has all messages up to this number."""
        while self.acked < upto and self._out:
            self._out.popleft()
            self.acked += 1

    def receive(self, first: int, messages: Sequence[Any]) -> list[Any]:
        """Return those messages that are new, in order, with what had come too early before."""
        if first > self.got + 1:
            if len(messages) > len(self._early.get(first, ())):
                self._early[first] = messages
            return []
        found = list(messages[self.got + 1 - first :])
        self.got += len(found)
        for begin in sorted(self._early):
            if begin > self.got + 1:
                break
            more = self._early.pop(begin)[self.got + 1 - begin :]
            found += more
            self.got += len(more)
        return found
