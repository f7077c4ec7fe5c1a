"""An exactly-once, ordered stream of messages over calls that may fail, arrive late or run twice.

Each side has a `Link`.  It numbers the messages that it sends and keeps them until the other side
acknowledges them.  It puts arriving messages in order and drops duplicates.
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
        """The other side has all messages up to this number."""
        self.got = 0
        """All messages up to this number have arrived."""
        self._early: dict[int, Sequence[Any]] = {}  # arrived out of order, by their first number

    def send(self, message: Any) -> None:
        """Queue a message."""
        self._out.append(message)

    @property
    def last(self) -> int:
        """The number of the last queued message."""
        return self.acked + len(self._out)

    def take(self, after: int, most: int, weight: Any) -> list[Any]:
        """Return messages from number ``after + 1`` on, in order.

        The weight of the first does not count, so that a large batch and the message that permits
        it travel together.  The others weigh ``most`` in all at most.
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
        """Drop the messages up to this number, which the other side has."""
        while self.acked < upto and self._out:
            self._out.popleft()
            self.acked += 1

    def receive(self, first: int, messages: Sequence[Any]) -> list[Any]:
        """Return the new messages in order, including those that had arrived too early."""
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
