"""`apply` and `apply_async` run one call."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import work


def test_arguments(pool):
    """`apply` returns ``f(*args, **kwds)``. Both may be left out, and `args` is any sequence."""
    both = (1, "b"), {"c": [3], "d": None}
    assert pool.apply(work.square, (5,)) == 25
    assert pool.apply(work.square, (), {"x": 3}) == 9
    assert pool.apply(work.echo, *both) == both
    assert pool.apply_async(func=work.echo, args=(1,), kwds={"a": 2}).get() == ((1,), {"a": 2})
    assert pool.apply(work.echo) == pool.apply_async(work.echo).get() == ((), {})
    assert pool.apply(work.add, [1, 2]) == pool.apply_async(work.add, [1, 2]).get() == 3
    assert pool.apply(work.nothing) is None


@pytest.mark.xpool_only
def test_lambdas_and_closures(pool):
    """Lambdas, local functions and closures may be tasks."""
    offset = 10

    def local(x, *, by=1):
        return x * by + offset

    assert pool.apply(lambda x: x + offset, (1,)) == 11
    assert pool.apply(local, (2,), {"by": 3}) == 16
    assert pool.apply(functools.partial(local, by=2), (1,)) == 12


@pytest.mark.xpool_only
def test_instances_of_local_classes_return_as_the_same_class(pool):
    """An instance of a local class comes back as an instance of the same class."""

    class Local:
        def __init__(self, x):
            self.x = x

        def double(self):
            return type(self)(self.x * 2)

    back = pool.apply(Local(3).double)
    assert type(back) is Local and back.x == 6


def test_where_tasks_run(pool, kind):
    """Process pools run tasks in other processes, with copies. Thread pools pass the object."""
    assert (pool.apply(work.pid) != os.getpid()) is kind.processes
    thing = ["a"]
    back = pool.apply(work.same, (thing,))
    assert back == thing and (back is thing) is not kind.processes


def test_large_arguments_and_results(pool):
    """An argument and a result of 64 MiB arrive, although no pipe holds so much."""
    data = os.urandom(1 << 20) * 64
    assert pool.apply(work.same, (data,)) == data


def test_many_threads_submit(pool):
    """Many threads call verbs at once, and each thread gets its own results."""

    def caller(n):
        assert [pool.apply(work.add, (n, i)) for i in range(50)] == [n + i for i in range(50)]
        assert pool.map(work.square, range(n)) == [i * i for i in range(n)]
        assert list(pool.imap(work.square, range(n), chunksize=3)) == [i * i for i in range(n)]
        assert sorted(pool.imap_unordered(work.same, range(n))) == list(range(n))

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(caller, range(12))) == [None] * 12


def test_wrong_arguments_raise_in_the_call(pool):
    """Arguments that do not match the function raise the function's own TypeError."""
    with pytest.raises(TypeError, match="multiply"):
        pool.apply(work.multiply, (1,))


def test_a_long_task_does_not_delay_the_others(pool, mailbox, gate):
    """While one worker runs a long task, the other worker runs the tasks submitted after it."""
    long = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, "long"))
    mailbox.line()
    assert [pool.apply(work.square, (i,)) for i in range(20)] == [i * i for i in range(20)]
    assert not long.ready()
    gate.open()
    assert long.get() == "long"


def test_short_tasks_queued_first_do_not_wait_behind_a_long_one(pool, mailbox, gate):
    """Short tasks submitted together with a long task do not wait for it."""
    short = [pool.apply_async(work.square, (i,)) for i in range(100)]
    long = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, "long"))
    short += [pool.apply_async(work.square, (i,)) for i in range(100)]
    mailbox.line()
    assert sum(r.get() for r in short) == 2 * sum(i * i for i in range(100))
    gate.open()
    assert long.get() == "long"
