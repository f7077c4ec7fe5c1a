"""Seeded bugs: what the simulated worlds must find.

A mutant is a module of xpool, a piece of its text that occurs exactly once, and what stands there
instead.  When a change of the module makes the piece disappear, write the bug anew; the test says
which.  `load` imports a whole copy of xpool in which that one module has the bug.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xpool

PACKAGE = Path(xpool.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One bug, and the world that has to find it."""

    name: str
    module: str
    old: str
    new: str
    world: str = "scheduler"

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        """The file that is patched."""
        return PACKAGE.parent / (self.module.replace(".", "/") + ".py")

    def source(self) -> str:
        """Return the module's text with the bug; raise `LookupError` when it does not fit."""
        text = self.path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise LookupError(
                f"the text of mutant {self.name!r} occurs {text.count(self.old)} times in "
                f"{self.module}; write it anew for what stands there now:\n{self.old}"
            )
        return text.replace(self.old, self.new)


class _Loader(importlib.abc.SourceLoader, importlib.abc.MetaPathFinder):
    """Finds the one module, with the bug in it."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self.mutant.path, loader=self)

    def get_filename(self, fullname: str) -> str:
        return str(self.mutant.path)

    def get_data(self, path: str) -> bytes:
        return self.mutant.source().encode()


@contextlib.contextmanager
def load(mutant: Mutant) -> Iterator[Any]:
    """Give the simulation of a copy of xpool with the bug; `sys.modules` is as before, after."""
    mine = {n: m for n, m in sys.modules.items() if n == "xpool" or n.startswith("xpool.")}
    for name in mine:
        del sys.modules[name]
    loader = _Loader(mutant)
    sys.meta_path.insert(0, loader)
    try:
        yield importlib.import_module(f"xpool.testing.simulation.{mutant.world}")
    finally:
        sys.meta_path.remove(loader)
        for name in [n for n in sys.modules if n == "xpool" or n.startswith("xpool.")]:
            del sys.modules[name]
        sys.modules.update(mine)


SCHEDULER = "xpool.jobs.scheduler"
EXCHANGE = "xpool.engine.dispatcher"
LOOP = "xpool.engine.loop"
DEATHS = "xpool.engine.replacement"

MUTANTS = [
    # -- the scheduler, found by its own world ---------------------------------------------------
    Mutant(
        "a batch numbers its first item wrongly",
        SCHEDULER,
        "batch = Batch(task_range, items, in_flight.sent)",
        "batch = Batch(task_range, items, in_flight.answered)",
    ),
    Mutant(
        "what a dead worker held is put back in the wrong order",
        SCHEDULER,
        "        for task_range in reversed(back):\n            self.put_back(task_range)\n"
        "        in_flight.reset(None)",
        "        for task_range in back:\n            self.put_back(task_range)\n"
        "        in_flight.reset(None)",
    ),
    Mutant(
        "a dead worker's task counts as not begun",
        SCHEDULER,
        "batch.seq + start < began",
        "batch.seq + start < began - 1",
    ),
    Mutant(
        "the task that a worker died in is put back as well",
        SCHEDULER,
        "                lost = batch, start\n                start += 1",
        "                lost = batch, start",
    ),
    Mutant(
        "a dead worker's second batch is forgotten",
        SCHEDULER,
        "        for batch in in_flight.held:\n            start = batch.done\n"
        "            if start < batch.taken and batch.seq",
        "        for batch in list(in_flight.held)[:1]:\n            start = batch.done\n"
        "            if start < batch.taken and batch.seq",
    ),
    Mutant(
        "a retry costs no retry",
        SCHEDULER,
        "        task_range.retries -= 1\n",
        "",
        "engine",
    ),
    Mutant(
        "a retry stands at the end of the queue",
        SCHEDULER,
        "        if when is None:\n            self.put_back(task_range)",
        "        if when is None:\n            self.put(task_range)",
    ),
    Mutant(
        "a worker with an empty in_flight is not listed as idle",
        SCHEDULER,
        "if not in_flight.held and in_flight.accepting:",
        "if not in_flight.held and in_flight.accepting and not self._queued:",
    ),
    Mutant(
        "a worker is given one task more than its lifetime",
        SCHEDULER,
        "in_flight.accepting = in_flight.left > 0",
        "in_flight.accepting = in_flight.left >= 0",
    ),
    Mutant(
        "a long task gets others behind it",
        SCHEDULER,
        "return 2 * self.cost <= PREFETCH_SECONDS",
        "return self.cost <= PREFETCH_SECONDS",
    ),
    Mutant(
        "an open task_range that ran dry stays marked as queued",
        SCHEDULER,
        "        queue.popleft()\n        task_range.queued = False\n",
        "        queue.popleft()\n",
    ),
    Mutant(
        "items that were taken back are taken for held",
        SCHEDULER,
        "                batch.taken = start\n",
        "",
    ),
    Mutant(
        "a skipped item at the door is lost",
        SCHEDULER,
        "if position < batch.taken and not batch.withdrawn:",
        "if position > batch.taken and not batch.withdrawn:",
    ),
    Mutant(
        "withdrawing forgets what is bound",
        SCHEDULER,
        "        for queue in (self.shared, *self.own):\n            for task_range in [",
        "        for queue in (self.shared,):\n            for task_range in [",
    ),
    Mutant(
        "the least loaded is judged by what it holds alone",
        SCHEDULER,
        "self.in_flight[w].size + self._bound[w], not",
        "self.in_flight[w].size, not",
    ),
    Mutant(
        "the input reader's look comes before the mark",
        SCHEDULER,
        "        if task_range.items:\n            task_range.queued = True\n"
        "            self._queued += 1\n"
        "            queue.appendleft(task_range)\n            return True",
        "        if task_range.items:\n            return True",
    ),
    Mutant(
        "what a dead worker held of a job that has ended is queued again",
        SCHEDULER,
        "            if start < batch.taken and not batch.withdrawn:\n                back.append("
        "_piece(batch, start, batch.taken))\n        for",
        "            if start < batch.taken:\n                back.append("
        "_piece(batch, start, batch.taken))\n        for",
    ),
    Mutant(
        "what waits for its time survives the end of its job",
        SCHEDULER,
        "if entry[2].job != job]",
        "if True]",
    ),
    Mutant(
        "the second try comes before its time",
        SCHEDULER,
        "while self._later and self._later[0][0] <= now:",
        "while self._later and self._later[0][0] <= now + 1:",
    ),
    # -- states and engine -----------------------------------------------------------------------
    Mutant(
        "a worker that is ready counts as starting",
        "xpool.jobs.states",
        "WorkerEvent.HELLO: WorkerStates.READY,",
        "WorkerEvent.HELLO: WorkerStates.STARTING,",
        "engine",
    ),
    Mutant(
        "a slot whose worker has gone stays as it was",
        "xpool.jobs.states",
        "    WorkerStates.READY: {\n        WorkerEvent.RETIRE: WorkerStates.RETIRING,\n"
        "        WorkerEvent.GONE: WorkerStates.ABSENT,",
        "    WorkerStates.READY: {\n        WorkerEvent.RETIRE: WorkerStates.RETIRING,\n"
        "        WorkerEvent.GONE: WorkerStates.READY,",
        "engine",
    ),
    Mutant(
        "answers found in the outbox are counted again when they are announced",
        EXCHANGE,
        "        boxed = count - slot.answers_taken_early\n",
        "        boxed = count\n",
        "engine",
    ),
    Mutant(
        "what a worker may last_progress begin is given to others at once",
        EXCHANGE,
        "            self.sched.pause(w)\n            return now + GRACE",
        "            self.sched.pause(w)\n            self.sched.take_back(w, began)\n"
        "            self._give_idle()\n            return now + GRACE",
        "engine",
    ),
    Mutant(
        "a silent worker is looked at no more",
        EXCHANGE,
        "            self._expect_silence(slot)  # it may",
        "            pass  # it may",
        "engine",
    ),
    Mutant(
        "nobody looks for a worker that sits on tasks",
        EXCHANGE,
        "            self._look_at_all(self._deep, ",
        "            self._look_at_all({}, ",
        "engine",
    ),
    Mutant(
        "a new worker is taken to know the functions of the one before",
        "xpool.workers.slot",
        "        self.known: set[int] = set()",
        "        self.known: set[int] = getattr(self, 'known', set())",
        "engine",
    ),
    Mutant(
        "the limit stays after the worker has emptied its in_flight",
        EXCHANGE,
        "            slot.box.limit = NO_LIMIT\n",
        "",
        "engine",
    ),
    Mutant(
        "the rest of a message that did not fit is not sent",
        EXCHANGE,
        "        if writer.backlog and writer.fd not in self._watch:",
        "        if writer.backlog and writer.fd in self._watch:",
        "engine",
    ),
    Mutant(
        "after a death nobody is given what waits",
        DEATHS,
        "            self._start_again(slot)\n        self._give_idle()\n",
        "            self._start_again(slot)\n",
        "engine",
    ),
    Mutant(
        "the answers of a dead worker are not looked for in its outbox",
        DEATHS,
        "                self._take_late(one, one.box.tail)\n",
        "                pass\n",
        "engine",
    ),
    Mutant(
        "the pipe of a dead worker is not emptied",
        DEATHS,
        "            self._drain(one)\n",
        "",
        "engine",
    ),
    Mutant(
        "of the threads of a dead process, only one's pipe is emptied",
        DEATHS,
        "            self._drain(one)\n",
        "            self._drain(slot)\n",
        "engine",
    ),
    Mutant(
        "of the threads of a dead process, only one's outbox is looked into",
        DEATHS,
        "                self._take_late(one, one.box.tail)\n",
        "                self._take_late(slot, slot.box.tail)\n",
        "engine",
    ),
    Mutant(
        "what the other threads of a dead process held is lost",
        DEATHS,
        "        for one in ended:\n            found = self.sched.gone",
        "        for one in ended[:1]:\n            found = self.sched.gone",
        "engine",
    ),
    Mutant(
        "a process is put away while a caller drives one of its threads",
        DEATHS,
        "            if one.direct_job:",
        "            if one is slot and one.direct_job:",
        "engine",
    ),
    Mutant(
        "a process is started once for each of its threads",
        LOOP,
        "                if slot.state is WorkerStates.ABSENT:  # else it came with a sibling\n"
        "                    self._start(slot)",
        "                self._start(slot)",
        "engine",
    ),
    Mutant(
        "a worker that does not listen is not killed",
        LOOP,
        "                    slot.kill()\n                else:",
        "                    pass\n                else:",
        "engine",
    ),
    Mutant(
        "a caller that lets go leaves its worker muted",
        LOOP,
        "            # What else it holds is for the engine's thread again.\n"
        "            self._mute(slot, False)",
        "            pass",
        "engine",
    ),
    Mutant(
        "a death during a caller's turn is forgotten",
        LOOP,
        "        if slot.exit_pending:\n            slot.exit_pending = False\n"
        "            self._watch_end(slot)",
        "        if slot.exit_pending:\n            slot.exit_pending = False",
        "engine",
    ),
    Mutant(
        "a start that the system refused is not tried again",
        DEATHS,
        "        slot.start_at = when\n        self._watch.alarm(when)",
        "        slot.start_at = when",
        "engine",
    ),
    Mutant(
        "a task that does not listen is not killed when its time is over",
        "xpool.engine.deadlines",
        "            elif box.began == stop.seq + 1:\n                slot.kill()",
        "            elif box.began == stop.seq + 1:\n                pass",
        "engine",
    ),
    Mutant(
        "limits are looked at once, not again",
        "xpool.engine.deadlines",
        "            if due is not None:\n                self._check_by(slot, due)",
        "            pass",
        "engine",
    ),
    Mutant(
        "a task that was stopped is answered by what it said, too",
        EXCHANGE,
        "            self._broken_off(slot, batch, position)\n        elif again",
        "            self._broken_off(slot, batch, position)\n"
        "            self.results.append((batch.job, index, (False, answer)))\n        elif again",
        "engine",
    ),
    Mutant(
        "the alarm for a second try is not set",
        EXCHANGE,
        "killed=killed, when=when)\n        self._watch.alarm(when)",
        "killed=killed, when=when)",
        "engine",
    ),
    Mutant(
        "a frame that came in part loses its beginning",
        "xpool.queue.channel",
        "        self._buffer = data[at:]",
        "        self._buffer = b''",
        "engine",
    ),
    Mutant(
        "an alarm that is already set is set again later",
        "xpool.engine.watch",
        "if self._alarm is not None and self._alarm <= when:",
        "if self._alarm is not None and self._alarm > when:",
        "engine",
    ),
    Mutant(
        "an answer that wraps around the outbox is cut",
        "xpool.queue.outbox",
        "            self._data[: stop - self.capacity] = entry[cut:]",
        "            pass",
        "engine",
    ),
]
