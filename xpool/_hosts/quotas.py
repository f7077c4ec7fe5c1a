"""How much a host is permitted, and how much is staged there: numbers only.

A host is permitted one item for each of its workers, and beside these what its workers do in
`AHEAD_SECONDS`, since the next permission is a round trip away.  It has staged what they do in
`STAGED_SECONDS`, but not more than `STAGED_BYTES`.
"""

from __future__ import annotations

import math

from xpool._hosts.holdings import Host

__all__ = ["Quotas"]

AHEAD_SECONDS = 0.05
"""Seconds of work for which a host may begin without another word of the driver."""

STAGED_SECONDS = 1.0
STAGED_BYTES = 64 * 1024 * 1024
"""What is sent ahead to a host, at most: in seconds of its work, and in bytes."""

BATCH_SECONDS = 0.004
"""Seconds of work in a batch: of one worker, if it is bound to that, else of all of a host."""

LONG_SECONDS = 0.25
"""Of items that take longer none is permitted ahead: a round trip is short beside them."""

RECALL_SECONDS = 0.1
"""Seconds between two looks at a host that was permitted more than it has workers."""

MOST_ITEMS = 512
"""Items in one batch at most."""

MOST_AHEAD = 8192
"""Items that a host may have been permitted at most, unless it has more workers."""


class Quotas:
    """What follows from the cost of an item: its seconds, by the last answers."""

    def __init__(self) -> None:
        self.cost = math.inf

    @property
    def look_seconds(self) -> float:
        """Seconds between two looks at a host: what waits behind one task each has begun by then,
        if these take as long as the last ones did."""
        return RECALL_SECONDS if self.cost > LONG_SECONDS else max(RECALL_SECONDS, 2 * self.cost)

    def batch_items(self, workers: int) -> int:
        """Return how many items a batch for so many workers has."""
        return max(1, min(MOST_ITEMS, int(BATCH_SECONDS * workers / self.cost)))

    def extra(self, host: Host) -> int:
        """Return how many items each worker of a host may have beside the one that it runs."""
        if self.cost > LONG_SECONDS or host.nbytes >= STAGED_BYTES:
            return 0
        return min(MOST_AHEAD, math.ceil(AHEAD_SECONDS / self.cost))

    def most_ahead(self, host: Host) -> int:
        """Return how many items that any of its workers may run a host may be permitted."""
        most = min(MOST_AHEAD, host.workers * (1 + self.extra(host)))
        if host.pace is not None:
            most = min(most, host.pace)
        return max(host.workers, most)

    def room(self, host: Host) -> int:
        """Return how many more items a host may be permitted."""
        return self.most_ahead(host) - host.ahead if host.accepting else 0

    def room_staged(self, host: Host) -> int:
        """Return how many more items a host may have staged."""
        if math.isinf(self.cost) or host.nbytes >= STAGED_BYTES:
            return 0
        return host.workers * math.ceil(STAGED_SECONDS / self.cost) - host.staged_items
