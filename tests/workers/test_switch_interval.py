"""Threads that switch as often as possible lose, repeat and misplace no task.

With a switch interval of a microsecond, a thread may lose the interpreter lock at nearly every
call. Two steps that need a lock, but have none, are then often interrupted. The tests compare exact
values: every task ran once, and every value is in its place.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import together

from xpool import ThreadPool
from xpool._python.waiters import Flag, TaskQueue
from xpool.queue import SimpleQueue

pytestmark = [pytest.mark.exhaustive, pytest.mark.xpool_only]

CALLERS = 4


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Let threads switch every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_results_of_many_callers() -> None:
    """Each caller gets its own results, in order, and each task runs once."""
    ran: list[tuple[int, int]] = []

    def task(caller: int, n: int) -> tuple[int, int]:
        ran.append((caller, n))
        return caller, n

    def call(i: int) -> None:
        for _ in range(40):
            mapped = pool.starmap_async(task, [(i, n) for n in range(100)], chunksize=1)
            single = [pool.apply_async(task, (i, n)) for n in range(100, 120)]
            assert mapped.get() == [(i, n) for n in range(100)]
            assert [one.get() for one in single] == [(i, n) for n in range(100, 120)]

    with ThreadPool(CALLERS) as pool:
        together(call, CALLERS)
    pool.join()
    assert Counter(ran) == {(i, n): 40 for i in range(CALLERS) for n in range(120)}


def test_one_result_of_many_readers() -> None:
    """All threads that wait for a result get the same object or its exception."""
    with ThreadPool(2) as pool:
        for n in range(100):
            result = pool.apply_async(lambda n=n: [n])
            failing = pool.apply_async(lambda n=n: [][n])
            seen: list[Any] = []

            def read(
                i: int, result: Any = result, failing: Any = failing, seen: Any = seen
            ) -> None:
                seen.append(id(result.get()))
                with pytest.raises(IndexError):
                    failing.get()

            together(read, CALLERS)
            assert seen == [id(result.get())] * CALLERS
            assert result.get() == [n]
    pool.join()


def test_streams_of_many_callers() -> None:
    """Streams keep their order, lose no result, and draw each input once."""

    def call(i: int) -> None:
        items = range(i * 10_000, i * 10_000 + 1500)
        expected = [-n for n in items]
        assert list(pool.imap(int.__neg__, iter(items))) == expected
        assert list(pool.imap(int.__neg__, items, chunksize=7)) == expected
        assert sorted(pool.imap_unordered(int.__neg__, items)) == sorted(expected)
        assert list(pool.imap(int.__neg__, iter(items), buffersize=3)) == expected

    with ThreadPool(CALLERS) as pool:
        together(call, CALLERS)
    pool.join()


def test_one_stream_of_many_readers() -> None:
    """Threads that share an iterator get each result once. Each thread gets them in order."""
    with ThreadPool(3) as pool:
        for _ in range(20):
            results = pool.imap(int.__neg__, range(1000))
            taken: list[list[int]] = [[] for _ in range(CALLERS)]

            def take(i: int, results: Any = results, taken: Any = taken) -> None:
                for value in results:
                    taken[i].append(-value)

            together(take, CALLERS)
            assert all(one == sorted(one) for one in taken)
            assert sorted(n for one in taken for n in one) == list(range(1000))
    pool.join()


def test_callbacks_come_once() -> None:
    """Each callback runs once, with its own value, before `get` returns."""
    called: list[tuple[int, int]] = []

    def call(i: int) -> None:
        results = [pool.apply_async(lambda n=n: (i, n), callback=called.append) for n in range(200)]
        assert [one.get() for one in results] == [(i, n) for n in range(200)]
        mine = [n for caller, n in called.copy() if caller == i]
        assert sorted(mine) == list(range(200))

    with ThreadPool(3) as pool:
        together(call, CALLERS)
    pool.join()
    assert Counter(called) == dict.fromkeys(((i, n) for i in range(CALLERS) for n in range(200)), 1)


def test_limits_and_retries() -> None:
    """A task with a limit and retries gets one answer, that of its last attempt."""
    tries: Counter[int] = Counter()

    def task(n: int) -> int:
        tries[n] += 1  # no race: attempts of one number never overlap
        if tries[n] == 1 and n % 5 == 0:
            raise ConnectionError(n)
        return -n

    def call(i: int) -> None:
        items = range(i * 1000, i * 1000 + 100)
        answers = pool.map(
            task, items, timeout=600, retries=1, retry_on=(ConnectionError,), chunksize=1
        )
        assert answers == [-n for n in items]

    with ThreadPool(3) as pool:
        together(call, CALLERS)
    pool.join()
    assert tries == {
        n: 1 + (n % 5 == 0) for i in range(CALLERS) for n in range(i * 1000, i * 1000 + 100)
    }


def test_life_of_threads() -> None:
    """Each task runs once, although threads end after ten tasks and the pool is resized."""
    ran: list[int] = []

    def task(n: int) -> int:
        ran.append(n)
        return -n

    with ThreadPool(3, maxtasksperchild=10) as pool:

        def call(i: int) -> None:
            if i == 0:
                for size in (1, 4, 2, 5, 3) * 4:
                    pool.resize(size)
                return
            items = range(i * 1000, i * 1000 + 300)
            assert pool.map(task, items, chunksize=1) == [-n for n in items]

        together(call, CALLERS)
    pool.join()
    expected = [n for i in range(1, CALLERS) for n in range(i * 1000, i * 1000 + 300)]
    assert Counter(ran) == dict.fromkeys(expected, 1)


def test_flags_and_the_queue_of_tasks() -> None:
    """A thread that begins to wait misses no `set` of a flag and no `put` of an item."""
    for _ in range(100):
        flag, other = Flag(), Flag()

        def step(i: int, flag: Flag = flag, other: Flag = other) -> None:
            if i == 0:
                flag.set()
                assert other.wait()
            elif i == 1:
                assert flag.wait()
                other.set()
            else:
                assert other.wait()

        together(step, CALLERS)
    for _ in range(20):
        tasks, back = TaskQueue(), TaskQueue()

        def serve(i: int, tasks: TaskQueue = tasks, back: TaskQueue = back) -> None:
            take = (tasks if i else back).taker()
            if i:
                while (item := take()) is not None:
                    back.put(-item)
                return
            for n in range(1, 51):  # one at a time, so that the serving threads wait
                tasks.put(n)
                assert take() == -n
            for _ in range(CALLERS - 1):
                tasks.put(None)

        together(serve, CALLERS)


@pytest.mark.skipif(sys.platform != "linux", reason="xpool.queue.SimpleQueue needs Linux")
def test_simple_queue() -> None:
    """Each message arrives once. The messages of one writer arrive in order."""
    messages = SimpleQueue()
    got: list[list[tuple[int, int, bytes]]] = [[], []]

    def call(i: int) -> None:
        if i < 2:
            for n in range(300):
                messages.put((i, n, bytes([n % 256]) * (n % 2 * 3000)))
            messages.put(None)  # one for each reader
        else:
            while (message := messages.get()) is not None:
                got[i - 2].append(message)

    together(call, CALLERS)
    messages.close()
    for one in got:
        for writer in range(2):
            numbers = [n for i, n, _ in one if i == writer]
            assert numbers == sorted(numbers)
    assert sorted(got[0] + got[1]) == [
        (i, n, bytes([n % 256]) * (n % 2 * 3000)) for i in range(2) for n in range(300)
    ]
