"""Decides how many tasks of a function run at a time after one has died for lack of memory.

Such a function is **heavy**.  A task of it is expected to need as much memory as the latest ones.
It begins if there is enough for it and for the heavy ones that run, and always if none runs.  It is
given to a worker that has nothing else, in a batch of its own, because an idle worker would have
the rest of a batch taken back.

The engine's lock guards all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from xpool._engine.jobs.ranges import WHOLE, Batch, TaskRange, name_of

FALL = 0.75
"""The expected memory rises at once, and falls at most to this part of it with each task.  So the
other tasks soon run as before if one of them was much larger."""


class HeavyFunctions:
    """The expected memory of the tasks of heavy functions, in bytes, by the function's name.

    ``busy``: the set of what a worker's next tasks depend on; this is in it while a function is
    heavy.  ``describe(job, WHOLE)`` names the function of a job; "": not known.
    """

    def __init__(self, busy: set[Any], describe: Callable[[int, int], str]) -> None:
        self.needs: dict[str, float] = {}  # 0: not known yet, so tasks begin as others
        self._busy, self._describe = busy, describe
        # By worker, if its latest task is heavy: the function, what it was expected to need when
        # the task began, and the most memory that the worker was seen to have meanwhile.
        self._latest: dict[int, tuple[str, float, float]] = {}
        # As measured: the machine's free memory, the limits of workers that heavy tasks may divide,
        # and what each worker has.
        self._free = self._limits = 0.0
        self._sizes: Mapping[int, int] = {}

    def name(self, part: Batch | TaskRange) -> str:
        """Return the name of the function of a range's next item, or of a batch's running one."""
        index = part.first + part.done if isinstance(part, Batch) else part.first
        return self._describe(name_of(part.job, index)[0], WHOLE)

    def add(self, part: Batch | TaskRange, seen: float, held: Iterable[tuple[int, Batch]]) -> None:
        """Record that a task has died for lack of memory.

        ``seen``: the most bytes that a worker had in tasks of its function; 0: not known.
        ``held``: the batches that workers run.
        """
        name = self.name(part)
        if not name:
            return
        if not self.needs:  # nothing is measured yet
            self._free = self._limits = 0.0
        self.needs[name] = max(seen, self.needs.get(name, 0.0))
        self._busy.add(self)
        for w, batch in held:
            if w not in self._latest and self.name(batch) == name:
                self._latest[w] = name, 0.0, 0.0

    def may_begin(self, w: int, part: TaskRange, holding: Iterable[int]) -> bool:
        """Whether worker ``w`` may get a range's next item; ``holding``: workers that have some."""
        if w in holding and w in self._latest:
            return False
        need = self.needs.get(self.name(part), 0.0)
        if not need:
            return True
        heavy = ((v, *self._latest[v]) for v in holding if v in self._latest)
        running = [
            (v, max(self.needs[name], start)) for v, name, start, _ in heavy if name in self.needs
        ]
        needs = sum(its for _, its in running)
        if w in holding or not needs:
            return w not in holding
        return needs + need <= self._limits and self._growth([*running, (w, need)]) <= self._free

    def _growth(self, needs: Iterable[tuple[int, float]]) -> float:
        """Return how many bytes more than now workers take if each needs so many."""
        return sum(max(0.0, need - self._sizes.get(w, 0)) for w, need in needs)

    def settle(self, workers: Iterable[int]) -> None:
        """Record that these workers have ended their latest tasks."""
        for w in workers:
            name, _, seen = self._latest.pop(w, ("", 0.0, 0.0))
            if name in self.needs:
                self.needs[name] = max(seen, FALL * self.needs[name])

    def given(self, w: int, batch: Batch) -> None:
        """Record that a worker without items was given a batch."""
        name = self.name(batch)
        if name in self.needs:
            self._latest[w] = name, self.needs[name], 0.0
        else:
            self._latest.pop(w, None)

    def goes_on(self, w: int, batch: Batch) -> None:
        """Record that a worker has ended a task, and runs the next one of a batch that it holds."""
        if w not in self._latest or self._latest[w][0] != self.name(batch):
            self.settle((w,))
            self.given(w, batch)

    def has_heavy(self, w: int) -> bool:
        """Whether the latest task of a worker is heavy, if its end is not settled."""
        return w in self._latest

    def weighed(self, w: int, memory: int) -> None:
        """Record the bytes of a worker that runs a heavy task."""
        name, start, seen = self._latest[w]
        self._latest[w] = name, start, max(seen, memory)
        if name in self.needs:
            self.needs[name] = max(memory, self.needs[name])

    def limit(self, w: int, each: int, workers: int) -> int:
        """Return how many bytes worker ``w`` may have where each of ``workers`` may have ``each``.

        If fewer tasks of its function fit in the memory of all, those divide it.
        """
        start = self._latest[w][1] if w in self._latest else 0.0
        if start <= each:
            return each
        return each * workers // max(1, int(each * workers // start))

    def measured(self, free: float, limits: float, sizes: Mapping[int, int]) -> None:
        """Record the memory that there is, and which each worker has."""
        self._free, self._limits, self._sizes = free, limits, sizes

    def forget(self, workers: int) -> None:
        """Forget functions of which each worker could run a task now."""
        for name, need in list(self.needs.items()):
            growth = self._growth((w, need) for w in range(workers))
            if growth <= self._free and workers * need <= self._limits:
                del self.needs[name]
        if not self.needs:
            self.clear()

    def clear(self) -> None:
        """Forget all functions."""
        self.needs.clear()
        self._latest.clear()
        self._busy.discard(self)
