"""A stand-in: a worker that was forked while another server still imports torch, which it lacks.

What it is given may need torch.  If that turns out while its first task is unpickled, nothing of
any task has run here, and nothing of it is lost: the stand-in takes back that the task was begun,
and ends.  Its parent gives what it held to the worker in its place, which is forked from the other
server.  Later, and while a task runs, torch is imported here, at the cost of memory that is not
shared: what tasks have left in this worker stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from types import CodeType
from typing import Any

from xpool._wire.outbox import Outbox
from xpool._wire.wire import STEPPED_ASIDE

__all__ = ["stand_in"]


def stand_in(
    missing: Collection[str], box: Outbox, run: Collection[CodeType], opens: Collection[CodeType]
) -> None:
    """Have this worker end when its first task needs one of these modules to be unpickled.

    ``run`` is the code in which a task is run, ``opens`` what that calls to unpickle it.
    """
    sys.meta_path.insert(0, _Finder(missing, box, run, opens))


class _Finder:
    def __init__(
        self,
        missing: Collection[str],
        box: Outbox,
        run: Collection[CodeType],
        opens: Collection[CodeType],
    ) -> None:
        self._missing, self._box, self._run, self._opens = missing, box, run, opens

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Called by the import system, which finds the module by its other finders."""
        if name not in self._missing:
            return
        # The first import decides: from then on the module is imported here like any other.  This
        # stays in the list, which is being gone through: the next finder would be left out.
        self._missing = ()
        if self._box.began == 1 and self._unpickling():
            self._box.leave()
            # At once: some code would catch an exception, and go on without the module.
            os._exit(STEPPED_ASIDE)

    def _unpickling(self) -> bool:
        """Whether this thread is in what opens a task, and not in the task."""
        frame, inner = sys._getframe(1), None
        while frame is not None and frame.f_code not in self._run:
            frame, inner = frame.f_back, frame  # type: ignore[assignment]
        return frame is not None and inner is not None and inner.f_code in self._opens
