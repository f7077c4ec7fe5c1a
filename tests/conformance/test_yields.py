"""`yields=True`: the values of generators, in order or as they come, with back pressure."""

import contextlib
import gc
import itertools
import threading
from functools import partial
from pathlib import Path

import pytest
from support import work
from support.limits import WAIT
from support.waiting import eventually, pass_gate

import xpool
from xpool import OptionError, Pool, ResultNotPicklable, TaskCancelled, TaskTimeout, ThreadPool
from xpool._pools.input_reader import FlowControl

pytestmark = pytest.mark.xpool_only

LENGTHS = [3, 0, 5, 1, 100]
VALUES = [(n, i) for n in LENGTHS for i in range(n)]


@pytest.fixture
def pool(pool, kind):
    """A pool, unless its kind refuses generators."""
    if kind.name in ("ctxthread", "hosts"):
        pytest.skip("refused: see test_refused")
    return pool


@pytest.fixture
def one(kind, make_pool):
    """A pool of one worker."""
    if kind.name in ("ctxthread", "hosts"):
        pytest.skip("refused: see test_refused")
    return make_pool(kind, 1)


def parse(n):
    for i in range(n):
        yield n, i


def counted(log, n):
    """Log each value before it is given, and the end."""
    try:
        for i in range(n) if n is not None else itertools.count():
            work.log_line(log, str(i))
            yield i
    finally:
        work.log_line(log, "closed")


def closing(log, n):
    """Log the exception that ends a wait for room."""
    try:
        yield from itertools.count()
    except GeneratorExit:
        work.log_line(log, "GeneratorExit")
        raise


def lines(log):
    return log.read_text().split()


@pytest.mark.parametrize("options", [{}, {"buffersize": 1}, {"buffersize": 3}, {"retries": 1}])
def test_order(pool, options):
    """`imap` gives all values of the first item, then of the second; `imap_unordered` all."""
    assert list(pool.imap(parse, LENGTHS, yields=True, **options)) == VALUES
    got = pool.imap_unordered(parse, iter(LENGTHS), yields=True, with_index=True, **options)
    numbered = [(k, (n, i)) for k, n in enumerate(LENGTHS) for i in range(n)]
    assert sorted(got) == numbered


def test_other_iterables(pool):
    """A function may return any iterable, and a generator delegate to others; other results are
    errors. Without items there are no values, and their number is not known."""
    assert list(pool.imap(parse, [], yields=True)) == []
    assert list(pool.imap_unordered(parse, [0, 0], yields=True)) == []
    assert list(pool.imap(range, [2, 3], yields=True)) == [0, 1, 0, 1, 2]
    values = pool.imap(list, ["ab"], yields=True)
    with pytest.raises(TypeError, match="an item gives many results"):
        len(values)
    assert list(values) == ["a", "b"]
    assert list(pool.imap(nested, [7], yields=True)) == ["inner", 7, (2, 0), (2, 1)]
    with pytest.raises(OptionError, match=r"returns a generator .* returned 4"):
        next(pool.imap(work.square, [2], yields=True))


def nested(n):
    def inner():
        got = yield "inner"
        assert got is None
        return n

    yield (yield from inner())
    yield from parse(2)


def alternate(gate, n):
    for i in range(n):
        yield i
        if i in (0, 20):
            pass_gate(gate)


def test_values_come_as_they_are_made(one, gate):
    """A value arrives while its generator makes the next one, also of those that were asked for
    together."""
    values = one.imap(partial(alternate, gate.path), [30], yields=True)
    assert next(values) == 0
    gate.open()
    assert [next(values) for _ in range(20)] == list(range(1, 21))
    gate.open()
    assert list(values) == list(range(21, 30))


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
@pytest.mark.parametrize("size", [1, 7])
def test_a_slow_consumer_stops_the_generator(one, log, verb, size):
    """A generator of 10^6 values is never more than ``buffersize`` values ahead."""
    run = partial(counted, str(log))
    values = getattr(one, verb)(run, [10**6], buffersize=size, yields=True)
    for taken in range(1, 30):
        next(values)
        eventually(lambda: len(lines(log)) == taken + size, "the generator is ahead")  # noqa: B023
    one.apply(work.nothing)  # the worker is free
    assert len(lines(log)) == 29 + size
    values.close()
    eventually(lambda: lines(log)[-1] == "closed", "the generator is closed")


def test_the_memory_of_values_is_limited(process_kind, make_pool, log, monkeypatch):
    """Without a buffersize, untaken values of a certain size stop the generator."""
    from xpool._pools import yielded

    monkeypatch.setattr(yielded, "room_for_results", lambda: 1_000_000)
    pool = make_pool(process_kind, 1)
    values = pool.imap(partial(large, str(log)), [None], yields=True)
    assert len(next(values)) == 10_000
    eventually(lambda: len(lines(log)) >= 90, "the generator is ahead")
    eventually(lambda: _waits(values), "the generator waits")
    assert len(lines(log)) <= 100
    assert len([next(values) for _ in range(300)]) == 300


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_values_larger_than_the_limit(process_kind, make_pool, log, monkeypatch, verb):
    """If a value alone exceeds the limit, generators give one at a time."""
    from xpool._pools import yielded

    monkeypatch.setattr(yielded, "room_for_results", lambda: 1000)
    pool = make_pool(process_kind, 2)
    got = getattr(pool, verb)(some_large, [5, 0, 7, 3], yields=True)
    assert [len(value) for value in got] == [10_000] * 15


def some_large(n):
    for _ in range(n):
        yield bytes(10_000)


def large(log, _):
    for i in itertools.count():
        work.log_line(log, str(i))
        yield bytes(10_000)


def test_many_long_generators_and_a_small_buffer(pool):
    """The buffer never fills with values behind those that the consumer needs next."""
    got = list(pool.imap(parse, [50] * 9, buffersize=2, yields=True))
    assert got == [(50, i) for i in range(50)] * 9


def test_other_tasks_run_between_values(pool, log):
    """A loop over values may use the same pool, also if all its workers have generators."""
    values = pool.imap(partial(counted, str(log)), [200] * 4, buffersize=8, yields=True)
    assert [pool.apply(work.square, (x,)) for x in values] == [i * i for i in range(200)] * 4


def test_calls_run_beside_endless_generators(kind, make_pool, log):
    """A call runs although a fast consumer takes the values of endless generators."""
    if kind.name == "ctxthread":
        pytest.skip("refused: see test_refused")
    pool = make_pool(kind, 2)
    values = pool.imap_unordered(partial(counted, str(log)), [None] * 4, yields=True)
    done = [pool.apply_async(work.square, (x,)) for x in range(20)]
    while not all(result.ready() for result in done):
        next(values)
    assert [result.get() for result in done] == [x * x for x in range(20)]
    values.close()
    eventually(lambda: "closed" in lines(log), "the generators are closed")


def test_two_iterators(pool):
    """Two iterators have generators at the same time, for items of the same numbers."""
    pairs = zip(
        pool.imap(parse, [50] * 4, yields=True, buffersize=5),
        pool.imap(parse, [60] * 4, yields=True, buffersize=5),
        strict=False,
    )
    got = list(pairs)
    assert [a for a, _ in got] == [(50, i) for i in range(50)] * 4
    assert [b for _, b in got] == ([(60, i) for i in range(60)] * 4)[:200]


def fails_after(n):
    yield from range(n)
    raise KeyError("broken")


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_an_error_comes_after_the_values(pool, verb):
    """The values come first, then the error at its place, then the next item's values."""
    values = getattr(pool, verb)(fails_after, [3], yields=True)
    assert [next(values) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="broken") as caught:
        next(values)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert "item 0 of fails_after()" in notes and "3, after 3 values" in notes
    assert list(values) == []


def test_errors_as_results(pool):
    """With ``on_error="return"``, the iterator gives the error."""
    first, second, error, *rest = pool.imap(fails_after, [2, 0], yields=True, on_error="return")
    assert (first, second) == (0, 1) and type(error) is KeyError
    assert len(rest) == 1 and type(rest[0]) is KeyError
    *got, last = pool.imap_unordered(
        fails_after, [2], yields=True, on_error="return", with_index=True
    )
    assert got == [(0, 0), (0, 1)] and last[0] == 0 and type(last[1]) is KeyError


def test_an_error_of_the_input(pool):
    """It is raised behind the values of earlier items."""

    def items():
        yield 2
        raise LookupError("no more")

    values = pool.imap(parse, items(), yields=True)
    assert [next(values), next(values)] == [(2, 0), (2, 1)]
    with pytest.raises(LookupError, match="no more"):
        next(values)
    assert list(values) == []


def test_the_input_may_wait_for_values(pool):
    """The second item is known only when the first one's values have come."""
    seen = []

    def items():
        yield 300
        while len(seen) < 300:
            changed.wait(WAIT)
            changed.clear()
        yield 2

    changed = threading.Event()
    for value in pool.imap(parse, items(), yields=True, buffersize=4):
        seen.append(value)
        changed.set()
    assert len(seen) == 302


def test_close(one, log):
    """`close` raises GeneratorExit in a generator that waits, and its worker stays alive."""
    pid = one.apply(work.pid)
    values = one.imap(partial(closing, str(log)), [0], yields=True, buffersize=2)
    with contextlib.closing(values):
        assert next(values) == 0
        eventually(lambda: _waits(values), "the generator waits")
    with pytest.raises(TaskCancelled):
        list(values)
    eventually(lambda: lines(log) == ["GeneratorExit"], "the generator is closed")
    assert one.apply(work.pid) == pid


def _waits(values):
    """Whether a generator has given all values that it was asked for."""
    job = values.cancelling[0]
    return not job._asks and job._lacks_room


@pytest.mark.usefixtures("patient")
def test_a_dropped_iterator(one, log):
    """Its generators are closed, also those that never end."""
    for _ in one.imap(partial(counted, str(log)), [None], yields=True):
        break
    gc.collect()
    eventually(lambda: "closed" in lines(log), "the generator is closed")
    assert one.apply(work.square, (3,)) == 9
    n = len(lines(log))
    one.apply(work.nothing)
    assert len(lines(log)) == n


def in_finally(log, n):
    try:
        yield 1
        yield 2
    finally:
        work.log_line(log, "finally")
        raise OSError("in finally")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_in_finally(one, log):
    """At the end it is the generator's error; after `close` the worker prints it."""
    values = one.imap(partial(in_finally, str(log)), [0], yields=True)
    assert [next(values), next(values)] == [1, 2]
    with pytest.raises(OSError, match="in finally"):
        next(values)
    values = one.imap(partial(in_finally, str(log)), [0], yields=True, buffersize=1)
    assert next(values) == 1
    values.close()
    eventually(lambda: len(lines(log)) == 2, "the generator is closed")
    assert one.apply(work.square, (3,)) == 9


def with_lock(n):
    yield n
    yield [threading.Lock()]
    yield n + 1


def test_a_value_that_cannot_be_pickled(process_kind, make_pool):
    """The error says what it is; the generator is closed, and the next item's values come."""
    pool = make_pool(process_kind, 1)
    values = pool.imap(with_lock, [5, 6], yields=True)
    assert next(values) == 5
    with pytest.raises(ResultNotPicklable, match="lock"):
        next(values)
    assert next(values) == 6


def test_a_generator_without_yields(process_kind, make_pool):
    """The error names `yields=True`."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(ResultNotPicklable, match=r"imap\(\.\.\., yields=True\)"):
        pool.map(parse, [1])


def arrays(n):
    import numpy

    for i in range(n):
        yield numpy.full(500_000, i)


def test_large_values(pool):
    """Arrays in shared memory; a value of the consumer stays valid."""
    pytest.importorskip("numpy")
    got = list(pool.imap(arrays, [6, 5], yields=True, buffersize=2))
    assert [int(a[-1]) for a in got] == [*range(6), *range(5)]


def test_items_that_are_large_or_functions(pool):
    """An item is sent once, with what it uses, also if the generator may begin again."""
    numpy, factor = pytest.importorskip("numpy"), 7
    items = [lambda x: x * factor, abs, numpy.arange(200_000).item]
    for options in {}, {"retries": 1}:
        values = pool.imap(applied, items, yields=True, **options)
        assert list(values) == [0, 7, 14, 0, 1, 2, 0, 1, 2]


def applied(func):
    for i in range(3):
        yield func(i)


def stuck_after(n):
    yield from range(n)
    threading.Event().wait()


def test_a_time_limit_is_for_each_value(process_kind, make_pool):
    """A generator that stops giving values fails, after those that have come."""
    pool = make_pool(process_kind, 1)
    assert list(pool.imap(parse, [1], yields=True)) == [(1, 0)]  # imports what it needs
    values = pool.imap(stuck_after, [3], yields=True, timeout=0.5)
    assert [next(values) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TaskTimeout, match=r"item 0 of stuck_after\(\), after 3 values"):
        next(values)
    assert list(values) == []


def fails_twice(log, n):
    for i in range(n):
        if i == 2 and work.first(f"{log}{len(lines_of(log))}"):
            work.log_line(log, "failed")
            if len(lines_of(log)) < 3:
                raise KeyError("again")
        yield i


def lines_of(path):
    with open(path) as file:
        return file.read().split()


def test_retries_after_an_error(pool, log):
    """With ``retry_on``, a generator begins again, and no value comes twice."""
    values = pool.imap(
        partial(fails_twice, str(log)), [5], yields=True, retries=3, retry_on=KeyError
    )
    assert list(values) == [0, 1, 2, 3, 4]
    assert lines(log)[:2] == ["failed"] * 2


def test_progress_counts_items(pool):
    """An item is done when its generator has ended."""
    seen = []
    values = pool.imap(
        parse, [3, 4], yields=True, progress=lambda done, total: seen.append((done, total))
    )
    assert len(list(values)) == 7
    assert seen[-1] == (2, 2)


def test_join_waits_for_the_consumer(kind, make_pool):
    """After `close`, the iterator still gives all values."""
    if kind.name == "ctxthread":
        pytest.skip("refused: see test_refused")
    pool = make_pool(kind, 2)
    values = pool.imap(parse, [100] * 4, yields=True, buffersize=2)
    pool.close()
    assert len(list(values)) == 400
    pool.join()


def test_output_files(process_kind, make_pool, tmp_path, monkeypatch):
    """With ``output="files"``, what a generator prints is in the file of its item."""
    monkeypatch.chdir(tmp_path)  # the folder of the files is made there
    pool = make_pool(process_kind, 1, output="files")
    assert list(pool.imap(printing, [2, 1], yields=True)) == [0, 1, 0]
    texts = sorted(path.read_text() for path in Path(pool.output_folder).rglob("*.txt"))
    assert texts == ["0 of 1\n", "0 of 2\n1 of 2\n"]


def printing(n):
    for i in range(n):
        print(i, "of", n)
        yield i


def test_answers_delivered_in_another_order(process_kind, make_pool, monkeypatch):
    """Several threads receive answers, so one may overtake another."""
    from xpool._calls.results import tasks_in

    pool, swaps, kept = make_pool(process_kind, 1), [], []
    jobs = pool._jobs
    deliver = jobs.deliver

    def swapping(number, index, ok, value):
        job = jobs.unanswered.get(number)
        asked = getattr(job, "_asks", {}).get(index, (None, 0))[0]
        if not kept and asked is not None and asked.asked > tasks_in(value):
            kept.append((number, index, ok, value))
            return
        deliver(number, index, ok, value)
        if kept:
            swaps.append(index)
            deliver(*kept.pop())

    monkeypatch.setattr(jobs, "deliver", swapping)
    values = pool.imap(slow_numbers, [6, 4], yields=True)
    assert list(values) == [*range(6), *range(4)]
    assert swaps


def slow_numbers(n):
    for i in range(n):
        work.slow_square(0.002, i)  # so that each value is sent by itself
        yield i


class Hooked(ThreadPool):
    def pool_inqueue_put(self, obj):
        super().pool_inqueue_put(obj)


def test_refused(make_pool, tmp_path):
    """What cannot be combined with `yields=True` is named, with the reason."""
    pool = make_pool(Pool, 1)
    for options, why in [
        ({"journal": tmp_path / "j"}, "journal="),
        ({"seed": 1}, "seed="),
        ({"chunksize": 2}, "chunksize="),
    ]:
        with pytest.raises(OptionError, match=why):
            pool.imap(parse, [1], yields=True, **options)
    with pytest.raises(TypeError, match="yields must be True or False"):
        pool.imap(parse, [1], yields="yes")
    with pytest.raises(TypeError, match="imap and imap_unordered have it"):
        pool.map(parse, [1], yields=True)
    with pytest.raises(OptionError, match="maxtasksperchild="):
        make_pool(Pool, 1, maxtasksperchild=5).imap(parse, [1], yields=True)
    with pytest.raises(OptionError, match="threads with contexts"):
        make_pool(xpool.CtxThreadPool, 1).imap(parse, [1], yields=True)
    with pytest.raises(OptionError, match="hooks"):
        make_pool(Hooked, 1).imap(parse, [1], yields=True)


def test_join_ends_a_job_whose_iterator_was_dropped_in_vain(one, monkeypatch):
    """A signal handler that raises in the iterator's finalizer leaves no job behind."""
    stop, lost = FlowControl.stop, []

    def stop_later(flow):
        if lost:
            stop(flow)
        lost.append(flow)

    monkeypatch.setattr(FlowControl, "stop", stop_later)
    values = one.imap(itertools.count, [0], yields=True)
    assert next(values) == 0
    del values
    eventually(lambda: lost, "it is dropped")
    one.close()
    one.join()
