"""How real workers share tasks after a wrong guess of their duration."""

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
    """Tasks queued behind an endless task are taken back, and the other worker runs them."""
    fifo = str(tmp_path / "gate")
    os.mkfifo(fifo)
    with Pool(2) as pool:
        pool.map(same, range(4_000), chunksize=1)  # the pool learns that tasks are short
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
    """If a task in a batch kills the worker, only this task fails."""
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


def test_answers_between_two_long_tasks(tmp_path):
    """A short task between two long ones is answered before the second long task ends."""
    fifos = [str(tmp_path / name) for name in ("first", "second")]
    for fifo in fifos:
        os.mkfifo(fifo)
    with Pool(1) as pool:
        pool.map(same, range(4_000), chunksize=1)  # the pool learns that tasks are short
        tasks = [(0, fifos[0]), (1, None), (2, None), (3, fifos[1])]
        result = pool.map_async(wait_at, tasks, chunksize=1)
        with open(fifos[0], "wb"):
            engine: Any = pool._engine
            slot, looks = engine.workers[0], engine._monitor._looks
            eventually(lambda: not looks.pending(slot), "the engine no longer checks it")
        eventually(lambda: pool.statistics()["succeeded"] == 4_003, "three answers")
        open(fifos[1], "wb").close()
        assert result.get() == [0, 1, 2, 3]
