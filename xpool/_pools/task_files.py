"""`TaskFiles` names the files of ``output="files"``: the pool's side of `InFile`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from itertools import chain, count
from typing import Any

from xpool._calls.options import label
from xpool._calls.results import Job
from xpool._pools.submitters import Put, Work
from xpool._worker.callables import Item
from xpool._worker.output_files import InFile


class TaskFiles:
    """A new folder, and the names of the tasks' files in it."""

    def __init__(self, pool: str) -> None:
        name = os.path.abspath(f"xpool-output/{time.strftime('%Y%m%d-%H%M%S')}-{_plain(pool)}")
        for end in chain([""], (f"-{n}" for n in count(2))):
            try:
                os.makedirs(name + end)
            except FileExistsError:
                continue
            self.folder = name + end
            break

    def of_call(self, job: Job, func: Callable[..., Any]) -> InFile:
        """Return a function whose single call prints into a file."""
        return InFile(func, self._path(job, job.label))

    def of_all(self, job: Job, func: Callable[..., Any]) -> InFile:
        """Return a function whose call in each worker prints into a file."""
        return InFile(func, self._path(job, label(func)), "worker")

    def of_items(self, job: Job, work: Work) -> Work:
        """Return work whose call with each `Item` prints into a file."""
        func = InFile(work.func, self._path(job, job.label), "args" if work.starred else "item")
        return Work(func, chunked=work.chunked)

    def numbering(self, put: Put, chunked: bool, size: int) -> Put:
        """Return a ``put`` that gives each plain item of a task its number, as an `Item`."""

        def put_numbered(index: int, task: Any) -> int:
            if chunked:
                return put(index, list(map(Item, count(index * size), task)))
            return put(index, Item(index, task))

        return put_numbered

    def _path(self, job: Job, name: str) -> str:
        return os.path.join(self.folder, f"{job.number:04}-{_plain(name)}")


def _plain(name: str) -> str:
    """Return the part of a text that a file's name may have."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:80] or "task"
