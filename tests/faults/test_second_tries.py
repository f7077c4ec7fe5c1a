"""Tasks are repeated after deaths and chosen exceptions, a limited number of times."""

import functools
import os
import re
import time

import pytest
from support import work
from support.limits import WAIT
from support.tiers import also

import xpool
from xpool import PoolBroken, PoolClosed, TaskTimeout, WorkerDied

from .after_faults import story

pytestmark = pytest.mark.xpool_only


class Unsteady(OSError):
    """An exception class of the caller."""


def test_chosen_exceptions(kind, make_pool, log):
    """A task that raises a chosen exception runs again, at most `retries` times."""
    pool, on = make_pool(kind, 2), (KeyError, OSError)
    task = (str(log), 2, Unsteady, "third")
    assert pool.apply(work.raise_times, task, retries=2, retry_on=on) == "third"
    assert log.read_text().count("ran") == 3
    log.write_text("")
    with pytest.raises(Unsteady, match="not yet"):
        pool.apply(work.raise_times, (str(log), 9, Unsteady), retries=2, retry_on=on)
    assert log.read_text().count("ran") == 3


def test_other_exceptions(kind, make_pool, log):
    """After another exception, or if no exceptions are chosen, the task does not run again."""
    pool = make_pool(kind, 1)
    with pytest.raises(OSError, match="not yet"):
        pool.apply(work.raise_times, (str(log), 9, OSError), retries=5, retry_on=KeyError)
    with pytest.raises(OSError, match="not yet"):
        pool.apply(work.raise_times, (str(log), 9, OSError), retries=5)
    assert log.read_text().count("ran") == 2


@pytest.mark.pure
def test_exceptions_without_a_number():
    """`retry_on=` without `retries=` is refused, because it would have no effect."""
    with xpool.ThreadPool(1) as pool:
        with pytest.raises(ValueError, match="retries="):
            pool.apply(abs, (-1,), retry_on=OSError)
        with pytest.raises(ValueError, match="retries="):
            pool.map(abs, [-1], retry_on=OSError)


@pytest.mark.parametrize("chunksize", [3, *also(1)])
def test_verbs(kind, make_pool, tmp_path, chunksize):
    """All verbs accept `retry_on=`. If an item raises, its whole chunk runs again."""
    pool = make_pool(kind, 2)
    for verb in ("map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered"):
        task = functools.partial(raise_once, str(tmp_path / verb))
        items = [(i,) for i in range(9)] if verb.startswith("starmap") else range(9)
        results = getattr(pool, verb)(task, items, chunksize, retries=chunksize, retry_on=OSError)
        results = results.get(WAIT) if verb.endswith("async") else list(results)
        assert sorted(results) == list(range(9))


def raise_once(flag, x):
    if work.first(f"{flag}-{x}"):
        raise OSError(x)
    return x


def test_the_traceback_is_the_tasks(process_kind, make_pool):
    """The traceback of the last exception shows only frames of the task."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(KeyError) as caught:
        pool.apply(work.fail, retries=1, retry_on=KeyError)
    text = str(caught.value.__cause__)
    assert "in fail" in text
    # The path of the package may contain any name.
    package = os.path.dirname(xpool.__file__)
    files = re.findall(r'File "(.+?)", line', text)
    assert files and not [file for file in files if file.startswith(package)]


def test_closures_and_local_classes(process_kind, make_pool, log):
    """`retry_on` accepts local classes. They are sent with the function."""

    class Local(Exception):
        pass

    path = str(log)

    def task():
        with open(path, "a+") as file:
            file.write("x")
            file.seek(0)
            if len(file.read()) < 3:
                raise Local
        return "third"

    pool = make_pool(process_kind, 1)
    assert pool.apply(task, retries=2, retry_on=Local) == "third"


def test_after_a_time_limit(kind, make_pool, tmp_path):
    """A task that exceeded its time limit runs again only if `retry_on` names TaskTimeout."""
    pool = make_pool(kind, 1)
    late = work.stay_once if kind.processes else stay_once
    # On a busy machine, the first tries may end before they have left their mark.
    args = (str(tmp_path / "flag"), "later")
    assert pool.apply(late, args, timeout=0.3, retries=20, retry_on=TaskTimeout) == "later"
    with pytest.raises(TaskTimeout):
        pool.apply(late, (str(tmp_path / "other"),), timeout=0.3, retries=1)


def stay_once(flag, x=None):
    if work.first(flag):
        time.sleep(1.5)
    return x


def test_a_task_that_kills_every_worker(process_kind, make_pool, log):
    """A task that kills every worker runs at most five times. The error has this number."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(WorkerDied, match="has killed 5 workers") as caught:
        pool.apply(work.end_or_return, ("os._exit", 1, str(log), 1), retries=10**6)
    assert caught.value.killed == 5
    assert log.read_text().split() == ["1"] * 5
    with pytest.raises(WorkerDied) as caught:
        pool.apply(work.end_or_return, ("os._exit", 1, str(log), 1), retries=2)
    assert caught.value.killed == 3
    assert pool.apply(work.square, (3,)) == 9


# The budget of the pool --------------------------------------------------------------------------


def test_a_pool_whose_workers_die_and_die(process_kind, make_pool):
    """If more workers die than the budget allows and no task finishes, the pool stops."""
    pool = make_pool(process_kind, 2, restart_budget=4)
    results = [pool.apply_async(work.end, ("os._exit",)) for _ in range(20)]
    errors = []
    for result in results:
        with pytest.raises((WorkerDied, PoolBroken)) as caught:
            result.get(WAIT)
        errors.append(caught.value)
    assert 5 <= sum(isinstance(error, WorkerDied) for error in errors) <= 6
    broken = errors[-1]
    assert isinstance(broken, PoolBroken) and broken.deaths == 5 and "exit code 4" in broken.last
    with pytest.raises(PoolClosed) as caught:
        pool.apply(work.square, (3,))
    assert "5 workers died" in story(caught.value)
    pool.close()
    pool.join()


def test_a_pool_that_gets_something_done(process_kind, make_pool):
    """Each finished task restores the whole budget, even if it raised."""
    pool = make_pool(process_kind, 1, restart_budget=2)
    for i in range(12):
        with pytest.raises(WorkerDied):
            pool.apply(work.end, ("SIGKILL",))
        if i % 4 == 1:
            assert pool.apply(work.square, (3,)) == 9
        elif i % 4 == 3:
            with pytest.raises(KeyError):
                pool.apply(work.fail)


def test_stopping_tasks_costs_no_budget(process_kind, make_pool):
    """Workers killed because of a time limit do not use the budget."""
    pool = make_pool(process_kind, 1, restart_budget=1)
    for _ in range(2):
        with pytest.raises(TaskTimeout):
            pool.apply(work.spin_in_c, timeout=0.05)
    assert pool.apply(work.square, (3,)) == 9
