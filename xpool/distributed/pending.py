"""Operations of a collective group that are under way, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError

from xpool.distributed.errors import GroupError
from xpool.distributed.faults import connection_lost

if TYPE_CHECKING:
    from xpool.distributed.collective import CollectiveGroup

__all__ = ["Pending", "ReceivingAny", "Watch"]


class Pending:
    """An operation under way; what ``async_op=True``, `isend` and `irecv` return.

    It has the attributes of torch's ``Work`` too.
    """

    def __init__(self, group: CollectiveGroup, what: str, work: Any) -> None:
        self._group, self._what, self._work = group, what, work
        self._then: Callable[[], object] | None = None  # what is left to do here
        self._src: int | None = None
        self._dst: int | None = None

    def wait(self, timeout: timedelta | None = None) -> Any:
        """Wait for the end, at most ``timeout``, else the group's own.

        Returns True; for `irecv`, the rank of the sender.

        Raises:
            PeerLost: a member of the group has died.
            GroupTimeout: it took longer; the group is broken then.
        """
        with self._group._watched(self._what):
            self._work.wait(*(() if timeout is None else (timeout,)))
        # Only after success: `_send_out` reports what is left as lost.
        self._group._taken(self)
        # Once, however often this is called.
        then, self._then = self._then, None
        if then is not None:
            then()
        return True if self._src is None else self._src

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __repr__(self) -> str:
        return f"<Pending {self._what} of {self._group!r}>"


class ReceivingAny(Pending):
    """`irecv` from any rank: gloo would not end it when a member dies.

    So a thread waits for the message, and the caller for that thread or the group's end.
    """

    def __init__(self, group: CollectiveGroup, what: str, work: Any) -> None:
        super().__init__(group, what, work)
        self._received = False
        self._error: Exception | None = None
        # It is set at once where the group is broken by now, so no wait is missed.
        self._over = group._over_event()
        threading.Thread(target=self._receive, name="xpool-irecv", daemon=True).start()

    def _receive(self) -> None:
        try:
            self._work.wait()
            # Before `_over`: whoever that wakes looks here.
            self._received = True
        except RuntimeError as exc:
            self._error = exc
        self._over.set()

    def is_completed(self) -> bool:
        """Whether a message has come."""
        return self._received

    def wait(self, timeout: timedelta | None = None) -> int:
        in_time = self._over.wait(None if timeout is None else timeout.total_seconds())
        self._group._forget(self._over)
        # Raised inside, so that it becomes the group's error; `timed_out` goes by the text.
        with self._group._watched("irecv"):
            if not in_time:
                raise RuntimeError("Timed out waiting")
            if self._error is not None:
                raise self._error
            if not self._received:
                raise RuntimeError("the group is broken")
        sender: int = self._group._ranks[self._work._source_rank()]
        return sender


class Watch:
    """Turns an error of torch's into the group's end, with a reason."""

    def __init__(self, group: CollectiveGroup, what: str, launching: bool) -> None:
        self._group, self._what, self._launching = group, what, launching

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, exc: BaseException | None, tb: Any) -> None:
        # A GroupError has been explained already, by a watch inside of this one.
        if not isinstance(exc, RuntimeError) or isinstance(exc, GroupError):
            return
        if self._launching and not (connection_lost(exc) or isinstance(exc, DistError)):
            return  # the caller's arguments: nothing has been sent
        raise self._group._explain(self._what, exc) from exc
