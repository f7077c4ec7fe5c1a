"""A stand-in: a worker without torch, forked while another server still imports torch.

Its tasks may need torch.  If the unpickling of its first task imports torch, no task has run here
yet.  Then the stand-in marks the task as not begun, and ends.  The parent gives its tasks to its
replacement, which is forked from the other server.  A later task, or one that already runs, imports
torch here instead, and this worker keeps the state that tasks have left in it.  That import costs
memory that is not shared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from types import CodeType
from typing import Any

from xpool._wire.outbox import Outbox
from xpool._wire.wire import STEPPED_ASIDE


def stand_in(
    missing: Collection[str], box: Outbox, run: Collection[CodeType], opens: Collection[CodeType]
) -> None:
    """Make this worker end if the unpickling of its first task imports one of these modules.

    ``run`` is the code that runs a task; ``opens`` is the code that it calls to unpickle the task.
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
        """Check an import; return None, so that the import system asks its other finders."""
        if name not in self._missing:
            return
        # Only the first import can end the worker; later the module is imported as any other.  Do
        # not remove this finder: the import system iterates over the list, and would skip the next.
        self._missing = ()
        if self._box.began == 1 and self._unpickling():
            self._box.leave()
            # Do not raise an exception: code may catch it and continue without the module.
            os._exit(STEPPED_ASIDE)

    def _unpickling(self) -> bool:
        """Whether this thread unpickles a task, and does not run it."""
        frame, inner = sys._getframe(1), None
        while frame is not None and frame.f_code not in self._run:
            frame, inner = frame.f_back, frame  # type: ignore[assignment]
        return frame is not None and inner is not None and inner.f_code in self._opens
