"""How many items are permitted to a host and staged there: numbers only.

A host is permitted one item for each of its workers, and beyond these the items that its workers
finish in `AHEAD_SECONDS`, since the next permission takes a round trip.  If items are long, no
more than one for each worker is permitted.  One more for each is staged, so that it is on the host
when its worker is free.
"""

from __future__ import annotations

import math

from xpool._hosts.holdings import HostState

AHEAD_SECONDS = 0.05
"""Seconds of work that a host may begin without another message of the driver."""

AHEAD_BYTES = 64 * 1024 * 1024
"""A host that holds as many bytes gets only what its workers run at once."""

BATCH_SECONDS = 0.004
"""Seconds of work in a batch: of one worker if the batch is bound to it, otherwise of all workers
of the host."""

LONG_SECONDS = 0.25
"""Items that take longer are not permitted ahead: compared with them, a round trip is short."""

RECALL_SECONDS = 0.1
"""Seconds between two looks at a host that was permitted more items than it has workers."""

MOST_ITEMS = 512
"""The most items in one batch."""

MOST_AHEAD = 8192
"""The most items that are permitted to a host, unless it has more workers."""


class Quotas:
    """The quotas that follow from the cost of an item: its seconds, by the last answers."""

    def __init__(self) -> None:
        self.cost = math.inf

    @property
    def look_seconds(self) -> float:
        """Seconds between two looks at a host.

        By then each worker has begun its next task, if tasks take as long as the last ones did.
        """
        return RECALL_SECONDS if self.cost > LONG_SECONDS else max(RECALL_SECONDS, 2 * self.cost)

    def batch_items(self, workers: int) -> int:
        """Return the number of items in a batch for this number of workers."""
        return max(1, min(MOST_ITEMS, int(BATCH_SECONDS * workers / self.cost)))

    def extra(self, host: HostState) -> int:
        """Return how many items each worker of a host may hold besides the one that it runs."""
        if self.cost > LONG_SECONDS or host.nbytes >= AHEAD_BYTES:
            return 0
        return min(MOST_AHEAD, math.ceil(AHEAD_SECONDS / self.cost))

    def most_ahead(self, host: HostState) -> int:
        """Return the most items, not bound to a worker, that may be permitted to a host."""
        most = min(MOST_AHEAD, host.workers * (1 + self.extra(host)))
        if host.pace is not None:
            most = min(most, host.pace)
        return max(host.workers, most)

    def room(self, host: HostState) -> int:
        """Return how many more items may be permitted to a host."""
        return self.most_ahead(host) - host.ahead if host.accepting else 0

    def room_staged(self, host: HostState) -> int:
        """Return how many more items may be staged at a host."""
        if not LONG_SECONDS < self.cost < math.inf or host.nbytes >= AHEAD_BYTES:
            return 0
        return host.workers - host.staged_items
