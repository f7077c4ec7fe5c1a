"""`TaskFiles` names the files of ``output="files"``: the pool's side of `output_files`."""

from __future__ import annotations

import os
import re
import time
from itertools import chain, count

from xpool._calls.results import Job


class TaskFiles:
    """A new folder, and the names of the tasks' files in it."""

    # Ends of the names of the files of single items, and of single workers.
    ITEM, WORKER = "-{number:06}", "-worker-{worker}"

    def __init__(self, pool: str) -> None:
        name = os.path.abspath(f"xpool-output/{time.strftime('%Y%m%d-%H%M%S')}-{_plain(pool)}")
        for end in chain([""], (f"-{n}" for n in count(2))):
            try:
                os.makedirs(name + end)
            except FileExistsError:
                continue
            self.folder = name + end
            break

    def of(self, job: Job, called: str, end: str = "") -> tuple[str, str]:
        """Return the ``file`` of a `TaskFunction`; ``called`` names the function."""
        return os.path.join(self.folder, f"{job.number:04}-{_plain(called)}"), end


def _plain(name: str) -> str:
    """Return the part of a text that a file's name may have."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:80] or "task"
