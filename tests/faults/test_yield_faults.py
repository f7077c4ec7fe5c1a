"""Generators of `yields=True`, whose workers die, or that end in the middle."""

import os
import random
import signal
from functools import partial

import pytest
from support import scripts, work
from support.waiting import eventually, post, together, wait_gone

from xpool import Pool, PoolClosed, SharedList, TaskCancelled, ThreadPool, WorkerDied

pytestmark = pytest.mark.xpool_only


ENDS = """
import xpool

def endless(_):
    i = 0
    while True:
        yield i
        i += 1

if __name__ == "__main__":
    pool = xpool.{kind}(2)
    values = pool.imap(endless, range(3), yields=True)
    print([next(values) for _ in range(3)])
"""


class DiesWhenPickled:
    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        if work.first(self.flag):
            os.kill(os.getpid(), signal.SIGKILL)
        return str, ("pickled",)


def dies(flag, how, k, n):
    """Give ``n`` values.  The worker dies once, after ``k`` values."""
    for i in range(n):
        if i == k and how == "sending":
            yield DiesWhenPickled(flag)
            continue
        if i == k and work.first(flag):
            os.kill(os.getpid(), signal.SIGKILL)
        yield i


def pids(box, n):
    post(box, str(os.getpid()))
    yield from range(n)


def waits(values):
    job = values.cancelling[0]
    return not job._asks and job._lacks_room


@pytest.mark.parametrize("how", ["running", "sending"])
@pytest.mark.parametrize("k", [0, 3, 40])
def test_a_death_after_some_values(process_kind, make_pool, tmp_path, how, k):
    """The values before come, then WorkerDied that says how many; the next item is whole."""
    pool = make_pool(process_kind, 1)
    task = partial(dies, str(tmp_path / "flag"), how, k)
    values = pool.imap(task, [60, 5], yields=True)
    assert [next(values) for _ in range(k)] == list(range(k))
    number = "1 value" if k == 1 else f"{k} values"
    with pytest.raises(WorkerDied, match=rf"item 0 of .*, after {number}\.") as caught:
        next(values)
    assert caught.value.exitcode == -signal.SIGKILL
    rest = list(values)
    assert rest == list(upto(5)) if how == "running" or k > 5 else rest.count("pickled") == 1
    assert len(rest) == 5


@pytest.mark.parametrize(
    ("verb", "k", "how"),
    [
        ("imap", 0, "running"),
        ("imap", 3, "sending"),
        ("imap_unordered", 3, "running"),
        ("imap_unordered", 40, "sending"),
    ],
)
def test_a_death_with_retries(process_kind, make_pool, tmp_path, how, k, verb):
    """The generator begins again, and no value comes twice."""
    pool = make_pool(process_kind, 1)
    task = partial(dies, str(tmp_path / "flag"), how, k)
    got = list(getattr(pool, verb)(task, [60], yields=True, retries=2))
    assert got == [*range(k), "pickled" if how == "sending" else k, *range(k + 1, 60)]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_death_while_the_generator_waits_for_room(process_kind, make_pool, mailbox, retries):
    """The next value is an error, or comes from another worker; nobody waits for ever."""
    pool = make_pool(process_kind, 1)
    values = pool.imap(partial(pids, mailbox.path), [9], yields=True, buffersize=2, retries=retries)
    assert next(values) == 0
    eventually(lambda: waits(values), "the generator waits")
    pid = int(mailbox.line())
    os.kill(pid, signal.SIGKILL)
    assert wait_gone([pid]) == []
    assert [next(values), next(values)] == [1, 2]
    if retries:
        assert list(values) == list(range(3, 9))
    else:
        with pytest.raises(WorkerDied, match="after 3 values.*waited in it"):
            next(values)
        assert list(values) == []


def test_resize(make_pool, mailbox):
    """A worker that `resize` removes takes its waiting generator with it."""
    pool = make_pool(Pool, 2)
    values = pool.imap_unordered(
        partial(pids, mailbox.path), [9, 9], yields=True, buffersize=2, on_error="return"
    )
    assert mailbox.lines(2) != []
    eventually(lambda: waits(values), "the generators wait")
    pool.resize(1)
    got = list(values)
    errors = [one for one in got if isinstance(one, WorkerDied)]
    assert len(errors) == 1 and [x for x in got if type(x) is int][-1] == 8


def spins(log, box, _):
    """Run for ever between two values."""
    yield 1
    work.count_up(log, box)
    yield 2


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("end", ["close", "cancel", "drop"])
def test_a_running_generator_is_stopped(process_kind, make_pool, log, mailbox, end):
    """Its `finally` runs, and its worker stays alive."""
    pool = make_pool(process_kind, 1)
    pid = pool.apply(work.pid)
    values = pool.imap(partial(spins, str(log), mailbox.path), [0], yields=True)
    assert next(values) == 1
    mailbox.line()
    if end == "drop":
        del values
    else:
        getattr(values, end)()
    assert pool.apply(work.pid) == pid
    assert log.read_text() == "cleaned\n"


def endless(_):
    i = 0
    while True:
        yield i
        i += 1


@pytest.mark.parametrize("how", ["terminate", "with"])
@pytest.mark.parametrize("make", [Pool, ThreadPool])
def test_the_pool_ends_in_the_middle(make, how):
    """The values that have come are given, and then `PoolClosed` is raised."""
    pool = make(2)
    with pool:
        values = pool.imap(endless, range(5), yields=True, buffersize=10)
        assert [next(values) for _ in range(30)] == list(range(30))
        if how == "terminate":
            pool.terminate()
    with pytest.raises(PoolClosed):
        for _ in range(12):
            next(values)
    pool.join()


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool"])
def test_the_program_ends_in_the_middle(kind, tmp_path):
    """A program may end with an unfinished iterator."""
    out = scripts.program(tmp_path, ENDS.format(kind=kind))
    assert out == "[0, 1, 2]\n"


@pytest.mark.parametrize("make", [Pool, ThreadPool])
def test_many_threads_with_iterators_that_end_anywhere(make, make_pool):
    """The pool stays usable, and complete iterators are complete."""
    pool = make_pool(make, 2)

    def consume(seed):
        rng = random.Random(seed)
        for _ in range(15):
            length, size = rng.randrange(60), rng.choice([None, 1, 5])
            values = pool.imap(upto, [length] * 3, yields=True, buffersize=size)
            if rng.random() < 0.5:
                assert list(values) == list(range(length)) * 3, (seed, length, size)
                continue
            for _ in zip(range(rng.randrange(40)), values, strict=False):
                pass
            if rng.random() < 0.5:
                values.close()

    together(consume, 4)
    assert pool.map(work.square, range(10)) == [x * x for x in range(10)]


def upto(n):
    yield from range(n)


def test_cancel(make_pool):
    """`next` gives what has come, then raises `TaskCancelled`."""
    pool = make_pool(Pool, 1)
    values = pool.imap(endless, [0, 0], yields=True, buffersize=5)
    assert next(values) == 0
    assert values.cancel() and values.cancel()
    with pytest.raises(TaskCancelled):
        for _ in range(7):
            next(values)


@pytest.mark.parametrize(
    "make", [lambda _: SharedList(range(5)), lambda pool: pool.broadcast([0] * 5)]
)
def test_items_that_the_message_keeps(make):
    """The message of an item keeps what lies in blocks of their own, also one for several tries."""
    with Pool(2) as pool:
        sizes = pool.imap(
            lambda one: iter([len(one), one[0]]), (make(pool) for _ in range(20)),
            yields=True, retries=1,
        )  # fmt: skip
        assert list(sizes) == [5, 0] * 20
