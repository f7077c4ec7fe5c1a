"""How work is shared out among real workers, where a guess was wrong."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from support.tiers import also
from support.waiting import eventually

from xpool import Pool, WorkerDied


def same(x):
    return x


def wait_if_first(task):
    number, fifo = task
    if number == 0:
        with open(fifo, "rb") as gate:
            gate.read()
    return number


def wait_at(task):
    number, fifo = task
    if fifo is not None:
        with open(fifo, "rb") as gate:
            gate.read()
    return number


def die_if(task):
    number, victim = task
    if number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("verb", ["imap_unordered", "map_async"])
def test_tasks_behind_a_long_one_are_taken_back(tmp_path, verb):
    """Tasks that were queued behind one that takes for ever are run by the other worker."""
    fifo = str(tmp_path / "gate")
    os.mkfifo(fifo)
    with Pool(2) as pool:
        pool.map(same, range(4_000), chunksize=1)  # now tasks are believed to be short
        tasks = [(i, fifo) for i in range(300)]
        if verb == "imap_unordered":
            results = pool.imap_unordered(wait_if_first, tasks)
            others = [next(results) for _ in range(299)]
            assert sorted(others) == list(range(1, 300))
            open(fifo, "wb").close()
            assert list(results) == [0]
        else:
            result = pool.map_async(wait_if_first, tasks, chunksize=1)
            while pool.statistics()["succeeded"] < 4_000 + 299:
                result.wait(0.01)
            open(fifo, "wb").close()
            assert result.get() == list(range(300))


@pytest.mark.parametrize("victim", [250, *also(0, 1, 7, 499)])
def test_a_death_in_a_batch_costs_one_task(victim):
    """Of many short tasks in one hand, only the one that kills the worker is lost."""
    with Pool(2) as pool:
        pool.map(same, range(4_000), chunksize=1)
        results = pool.imap(die_if, [(i, victim) for i in range(500)])
        for i in range(500):
            if i == victim:
                with pytest.raises(WorkerDied) as caught:
                    next(results)
                assert caught.value.signal == "SIGKILL" and "item" not in caught.value.task
            else:
                assert next(results) == i


def test_answers_behind_a_silence_are_found(tmp_path):
    """Short tasks between two long ones are answered when they are done, not when the second is."""
    fifos = [str(tmp_path / name) for name in ("first", "second")]
    for fifo in fifos:
        os.mkfifo(fifo)
    with Pool(1) as pool:
        pool.map(same, range(4_000), chunksize=1)  # now tasks are believed to be short
        tasks = [(0, fifos[0]), (1, None), (2, None), (3, fifos[1])]
        result = pool.map_async(wait_at, tasks, chunksize=1)
        with open(fifos[0], "wb"):
            engine: Any = pool._engine
            slot, looks = engine.workers[0], engine._monitor._looks
            eventually(lambda: not looks.pending(slot), "the engine looks at it no more")
        eventually(lambda: pool.statistics()["succeeded"] == 4_003, "three answers")
        open(fifos[1], "wb").close()
        assert result.get() == [0, 1, 2, 3]
