"""An exactly-once, ordered stream of messages over calls that may fail, arrive late or run twice.

Each side has a `Link`.  It numbers the messages that it sends and keeps them until the other side
acknowledges them.  It puts arriving messages in order and drops duplicates.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any


class Link:
    """One side of a stream of messages.  Messages are numbered from 1."""

    def __init__(self) -> None:
        self._out: deque[Any] = deque()  # not acknowledged, oldest first
        self.acked = 0
        """The other side has all messages up to this number."""
        self.sent = 0
        """All messages up to this number were sent, and none of them has to be sent again."""
        self.got = 0
        """All messages up to this number have arrived."""
        self._early: dict[int, Sequence[Any]] = {}  # arrived out of order, by their first number

    def queue(self, message: Any) -> None:
        self._out.append(message)

    @property
    def has_unsent(self) -> bool:
        return self.sent < self.acked + len(self._out)

    def take(self, most: int, weight: Any) -> tuple[int, list[Any]]:
        """Return the messages to send next: the number of the first, and the messages.

        The weight of the first does not count, so that a large batch and the message that permits
        it travel together.  The others together weigh at most ``most``.
        """
        first, found, total = self.sent + 1, list[Any](), 0
        for message in itertools.islice(self._out, self.sent - self.acked, None):
            total += weight(message) if found else 0
            if total > most:
                break
            found.append(message)
        self.sent += len(found)
        return first, found

    def send_again(self, after: int) -> None:
        """Send the messages after this number again, except acknowledged ones."""
        self.sent = max(self.acked, min(self.sent, after))

    def acknowledge(self, upto: int) -> None:
        """Drop the messages up to this number, which the other side has."""
        while self.acked < upto and self._out:
            self._out.popleft()
            self.acked += 1
        # A later call may have delivered messages that had to be sent again.
        self.sent = max(self.sent, self.acked)

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
