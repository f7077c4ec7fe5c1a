"""Workers that end in any way, at any stage, fail one task only."""

from __future__ import annotations

import collections
import functools
import os
import signal
import traceback

import pytest
from support import work
from support.limits import WAIT
from support.waiting import eventually, wait_gone

from xpool import WorkerDied

pytestmark = pytest.mark.xpool_only

EXIT = {"sys.exit": 3, "os._exit": 4, "SIGKILL": -signal.SIGKILL, "SIGSEGV": -signal.SIGSEGV}


def story(error):
    """Return an exception and its causes as text."""
    return "".join(traceback.format_exception(error))


def check_death(error, how, workers):
    """Check that the error says which worker died, and how."""
    assert isinstance(error, WorkerDied), story(error)
    assert error.exitcode == EXIT.get(how, 1)
    assert error.signal == (how if how.startswith("SIG") else None)
    assert 0 <= error.worker < workers
    assert isinstance(error.pid, int) and error.pid != os.getpid()
    assert wait_gone([error.pid], 5) == []
    assert error.task and str(error.pid) in str(error)


def check_usable(pool, mailbox, gate, workers):
    """Check that every worker runs a task."""
    results = [
        pool.apply_async(work.who_at_gate, (mailbox.path, gate.path)) for _ in range(workers)
    ]
    mailbox.lines(workers)
    gate.open(workers)
    assert sorted(r.get()[0] for r in results) == list(range(workers))


@pytest.mark.parametrize("chunksize", [1, 5])
def test_in_the_middle_of_a_map(process_kind, make_pool, chunksize, log):
    """If a worker dies, the map fails with WorkerDied after all other chunks have run once."""
    pool = make_pool(process_kind, 2)
    task = functools.partial(work.end_or_return, "SIGKILL", 17, str(log))
    result = pool.map_async(task, range(40), chunksize)
    with pytest.raises(Exception) as caught:
        result.get(WAIT)
    check_death(caught.value, "SIGKILL", 2)
    ran = collections.Counter(map(int, log.read_text().split()))
    lost = set(range(18, 20)) if chunksize == 5 else set()
    assert set(ran) == set(range(40)) - lost and set(ran.values()) == {1}
    assert pool.map(work.square, range(10)) == [i * i for i in range(10)]


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_in_the_middle_of_a_lazy_map(process_kind, make_pool, verb, log):
    """A lazy map raises WorkerDied for one item, and yields the results of the others."""
    pool = make_pool(process_kind, 2)
    task = functools.partial(work.end_or_return, "os._exit", 7, str(log))
    results = getattr(pool, verb)(task, range(30))
    good, died = [], []
    while True:
        try:
            good.append(next(results))
        except WorkerDied as error:
            died.append(error)
        except StopIteration:
            break
    assert sorted(good) == [i for i in range(30) if i != 7] and len(died) == 1
    assert verb == "imap_unordered" or good == sorted(good)
    check_death(died[0], "os._exit", 2)


def test_only_saboteurs(process_kind, make_pool):
    """Workers killed by tasks do not count as workers that cannot start."""
    pool = make_pool(process_kind, 2)
    results = [pool.apply_async(work.end, ("os._exit",)) for _ in range(20)]
    for result in results:
        with pytest.raises(WorkerDied):
            result.get(WAIT)
    assert pool.apply(work.square, (3,)) == 9


def test_death_reaches_the_error_callback(process_kind, make_pool):
    """The error callback gets the WorkerDied error."""
    pool = make_pool(process_kind, 1)
    bad: list[BaseException] = []
    result = pool.apply_async(work.end, ("os._exit",), error_callback=bad.append)
    result.wait(WAIT)
    assert len(bad) == 1 and isinstance(bad[0], WorkerDied)


def test_exit_without_a_code(process_kind, make_pool):
    """`sys.exit()` in a task ends the worker with exit code 0, and the error has this code."""
    import sys

    pool = make_pool(process_kind, 1)
    with pytest.raises(WorkerDied) as caught:
        pool.apply(sys.exit)
    assert caught.value.exitcode == 0
    assert "raise an exception instead" in str(caught.value)
    assert pool.apply(work.square, (3,)) == 9


@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_garbage_collection(process_kind, make_pool, how, mailbox, gate):
    """If the garbage collection after a task ends the worker, at most one task fails."""
    pool = make_pool(process_kind, 2)
    results = [pool.apply_async(work.end_when_collected, (how,))]
    results += [pool.apply_async(work.square, (i,)) for i in range(50)]
    lost = 0
    for result in results:
        try:
            result.get(WAIT)
        except WorkerDied:
            lost += 1
    assert lost <= 1
    if how != "raise":
        # The collection may run after these tasks, and would fail one of the next ones.
        eventually(lambda: pool.statistics()["deaths"] == 1, "the worker has died")
    check_usable(pool, mailbox, gate, 2)


# Retries -----------------------------------------------------------------------------------------


def test_retries_of_maps(process_kind, make_pool, tmp_path):
    """All verbs accept `retries=`."""
    pool = make_pool(process_kind, 2)
    for n, verb in enumerate(("map", "map_async", "starmap", "imap", "imap_unordered")):
        task = functools.partial(work.end_once, "SIGKILL", str(tmp_path / str(n)))
        items = [(i,) for i in range(10)] if verb == "starmap" else range(10)
        results = getattr(pool, verb)(task, items, chunksize=1, retries=1)
        results = results.get(WAIT) if verb == "map_async" else list(results)
        assert sorted(results) == list(range(10))


def test_a_death_among_many_calls_costs_one(process_kind, make_pool):
    """If calls are sent together and a worker dies, only the call that it was running fails."""
    pool = make_pool(process_kind, 2)
    # The pool learns that these tasks are short.
    assert pool.map(work.same, range(500), 1) == list(range(500))
    deadly = {3, 50, 51, 120}
    calls = [
        pool.apply_async(os._exit, (7,)) if i in deadly else pool.apply_async(work.same, (i,))
        for i in range(200)
    ]
    for i, call in enumerate(calls):
        if i in deadly:
            with pytest.raises(WorkerDied, match="exit"):
                call.get(WAIT)
        else:
            assert call.get(WAIT) == i
    assert pool.statistics()["deaths"] == 4


def test_calls_of_one_worker_run_in_order(process_kind, make_pool, log):
    """Calls run in the order in which they were made, whatever their options."""
    pool = make_pool(process_kind, 1)
    terms = [{}, {"timeout": 30}, {"retries": 2}, {}]
    calls = [pool.apply_async(work.logged, (str(log), i), **terms[i % 4]) for i in range(100)]
    assert [call.get(WAIT) for call in calls] == list(range(100))
    assert [int(line) for line in log.read_text().split()] == list(range(100))
