"""What a queue promises about objects: order, many users, waiting, ending."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import threading
import time
from collections import Counter
from typing import Any

import parts
import pytest
from support import scripts
from support.tiers import also
from support.waiting import LIMIT, eventually

from xpool import Pool, TaskNotPicklable
from xpool.errors import OptionError
from xpool.queue import SimpleQueue


def test_quick_names(make_queue: Any):
    """`quick_put` and `quick_get` are the same as `put` and `get`."""
    one = make_queue()
    one.quick_put({"a": 1})
    assert one.quick_get(timeout=LIMIT) == {"a": 1}
    with pytest.raises(queue.Empty):
        one.quick_get(0)


@pytest.mark.parametrize("method", ["spawn", *also("fork", "forkserver")])
def test_order(make_queue: Any, start: Any, method: str):
    """Items of one process arrive in order, with every start method. Lambdas and local functions
    can be sent, as through a pool."""
    there, back = make_queue(), make_queue()
    start(method, parts.echo, there, back)
    items = [0, "one", [2], {"three": 3}, None.__class__, b"5" * 100_000, list(range(50_000))]
    for item in items:
        there.put(item)
    assert [back.get(LIMIT) for _ in items] == items
    base = 40
    there.put(lambda x: base + x)
    assert back.get(LIMIT)(2) == 42
    there.put(None)


@pytest.mark.parametrize("method", ["fork", *also("forkserver")])
def test_many_readers_and_writers(make_queue: Any, start: Any, method: str):
    """Each item is received once, and each reader gets one writer's items in order."""
    q, results = make_queue(), make_queue()
    writers = [start(method, parts.put_numbers, q, who, 2000) for who in range(3)]
    for _ in range(3):
        start(method, parts.collect, q, results)
    for writer in writers:
        writer.join(LIMIT)
    for _ in range(3):
        q.put(None)
    got = [results.get(LIMIT) for _ in range(3)]
    assert Counter(item for one in got for item in one) == Counter(
        (who, i) for who in range(3) for i in range(2000)
    )
    for one in got:
        for who in range(3):
            numbers = [i for writer, i in one if writer == who]
            assert numbers == sorted(numbers)
    assert q.empty()


def test_threads(make_queue: Any):
    """Threads of one process may put and get concurrently."""
    q = make_queue()
    got: list[list[Any]] = [[] for _ in range(4)]

    def read(into: list[Any]) -> None:
        while (item := q.get()) is not None:
            into.append(item)

    readers = [threading.Thread(target=read, args=(into,)) for into in got]
    writers = [threading.Thread(target=parts.put_numbers, args=(q, who, 2000)) for who in range(4)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    for _ in readers:
        q.put(None)
    for thread in readers:
        thread.join()
    assert Counter(item for one in got for item in one) == Counter(
        (who, i) for who in range(4) for i in range(2000)
    )


@pytest.mark.parametrize("size", [0, 1, 60_000, 96 * 1024, 1 << 20, 40 << 20])
def test_sizes(make_queue: Any, size: int):
    """Objects of all sizes arrive unchanged."""
    q = make_queue()
    data = os.urandom(min(size, 1 << 20)) * (size >> 20 or 1)
    q.put((data, bytearray(data)))
    assert q.get() == (data, bytearray(data))


def test_without_an_arena(make_queue: Any, monkeypatch: pytest.MonkeyPatch):
    """Without shared memory, each long message has its own file."""
    from xpool._memory.arena import Arena

    monkeypatch.setattr(Arena, "_own", None)
    monkeypatch.setattr(Arena, "_make", classmethod(lambda cls, limit: None))
    q = make_queue()
    data = [os.urandom(1 << 20), {"a": 1}, bytearray(300_000)]
    q.put(data)
    q.put("short")
    assert q.get() == data
    assert q.get() == "short"


# -- waiting -----------------------------------------------------------------------------------


def test_timeout(make_queue: Any):
    """`queue.Empty` is raised after the timeout, not before."""
    q = make_queue()
    begin = time.monotonic()
    with pytest.raises(queue.Empty):
        q.get(timeout=0.2)
    assert 0.2 <= time.monotonic() - begin < LIMIT
    with pytest.raises(queue.Empty):
        q.get(0)
    with pytest.raises(ValueError, match="at least 0"):
        q.get(-1)
    q.put(1)
    assert q.get(0) == 1


def test_empty_and_fileno(make_queue: Any):
    """`empty` and `multiprocessing.connection.wait` tell whether an item is there."""
    q = make_queue()
    assert q.empty()
    assert multiprocessing.connection.wait([q], 0) == []
    q.put(1)
    assert not q.empty()
    assert multiprocessing.connection.wait([q], LIMIT) == [q]
    assert q.get() == 1
    assert q.empty()


def test_put_waits_while_it_is_full(make_queue: Any):
    """A writer waits while the queue is full, and no item is lost."""
    q = make_queue()
    done = threading.Event()

    def write() -> None:
        parts.put_numbers(q, 0, 50_000)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert q.get() == (0, 0)
    eventually(lambda: _rest(q), "the queue is full")
    assert not done.is_set(), "the writer did not wait"
    assert [q.get(LIMIT)[1] for _ in range(49_999)] == list(range(1, 50_000))
    thread.join()


def _rest(q: SimpleQueue) -> bool:
    """Whether a packet would have to wait."""
    import select

    return not select.select([], [q._writer], [], 0)[1]


def test_get_is_interrupted(tmp_path: Any):
    """Ctrl-C ends a waiting `get` and a waiting `put`."""
    out = scripts.program(
        tmp_path,
        """
        import os, signal, threading, time
        from xpool.queue import SimpleQueue

        def interrupt_when_asleep(main):
            def asleep():
                with open(f"/proc/self/task/{main}/stat") as file:
                    return file.read().rpartition(")")[2].split()[0] == "S"
            while not asleep():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        def interrupted(function):
            threading.Thread(target=interrupt_when_asleep, args=(os.getpid(),)).start()
            try:
                function()
            except KeyboardInterrupt:
                print("interrupted")

        def fill():
            while True:
                q.put("x" * 1000)

        q = SimpleQueue()
        interrupted(q.get)
        interrupted(fill)
        """,
    )
    assert out.split() == ["interrupted"] * 2


def test_a_handler_that_uses_the_queue(make_queue: Any, on_signal: Any):
    """A signal handler may put into a queue while its thread is putting."""
    q = make_queue()
    on_signal(lambda *_: q.put("signal"))
    sent = 0
    for i in range(3000):
        if i % 10 == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            sent += 1
        q.put(bytearray(70_000) if i % 100 == 0 else i)
        while not q.empty():
            sent -= q.get() == "signal"
    while not q.empty():
        sent -= q.get() == "signal"
    assert sent == 0


# -- what goes wrong ---------------------------------------------------------------------------


def test_not_picklable(make_queue: Any):
    """`put` refuses an object that cannot be pickled, and the queue still works."""
    q = make_queue()
    with pytest.raises(TaskNotPicklable):
        q.put(threading.Lock())
    q.put(1)
    assert q.get() == 1


def test_unpickling_fails(make_queue: Any):
    """`get` raises the error of an object that cannot be unpickled, and the next `get` works."""
    q = make_queue()
    q.put(parts.Unloadable())
    q.put((parts.Unloadable(), bytearray(100_000)))
    q.put(1)
    for _ in range(2):
        with pytest.raises(KeyError, match="as asked"):
            q.get()
    assert q.get() == 1


class Striking:
    """Raises a signal when it is unpickled, while there are any ``strikes``."""

    strikes = 0

    def __setstate__(self, state: Any) -> None:
        if Striking.strikes:
            Striking.strikes -= 1
            signal.raise_signal(signal.SIGUSR1)

    def __getstate__(self) -> str:
        return "state"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_interrupted_get_loses_nothing(
    make_queue: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, on_signal: Any
):
    """If a signal handler raises in `get`, the next `get` returns the object; a forked child has no
    copy of it."""

    def ring(*_: Any) -> None:
        raise error

    used = make_queue()
    used.put(Striking())
    used.put(2)
    monkeypatch.setattr(Striking, "strikes", 2)
    on_signal(ring)
    for _ in range(2):
        with pytest.raises(error):
            used.get(timeout=LIMIT)
    assert not used.empty()
    child = os.fork()
    if not child:
        os._exit(0 if used.get(timeout=LIMIT) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert type(used.get(timeout=LIMIT)) is Striking


def test_only_by_inheritance(make_queue: Any):
    """A queue can be passed to a process only when the process is started."""
    q = make_queue()
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(q)
    with pytest.raises(RuntimeError, match="inheritance"):
        q.put(q)
    with Pool(1) as pool, pytest.raises(RuntimeError, match="inheritance"):
        pool.apply(parts.remember, (q,))
    pool.join()


def test_closed(make_queue: Any, start: Any):
    """A closed queue raises; its items stay, and other processes can still use their ends."""
    q, results = make_queue(), make_queue()
    q.put("left")
    start("fork", parts.get_one, q, results)
    with q:
        assert "open" in repr(q)
    for call in (q.get, q.empty, q.fileno, q.__enter__, lambda: q.put(1)):
        with pytest.raises(ValueError, match="closed"):
            call()
    q.close()
    assert "closed" in repr(q)
    assert results.get(LIMIT)[1] == "left"


def test_closed_by_another_thread(make_queue: Any):
    """Closing the queue in another thread ends a waiting `get` with an error."""
    q = make_queue()
    raised = []

    def get() -> None:
        with pytest.raises(ValueError, match="closed") as info:
            q.get()
        raised.append(info.value)

    thread = threading.Thread(target=get)
    thread.start()
    q.close()
    thread.join(LIMIT)
    assert raised


@pytest.mark.parametrize(
    ("ctx", "error"), [("thread", OptionError), (7, TypeError), (object(), TypeError)]
)
def test_ctx_is_checked(ctx: Any, error: type[Exception]):
    """An unknown start method or an object that is no context is refused."""
    with pytest.raises(error, match="ctx must be"):
        SimpleQueue(ctx=ctx)


@pytest.mark.parametrize("ctx", [None, "spawn", multiprocessing.get_context("fork")])
def test_ctx(make_queue: Any, ctx: Any):
    """The constructor takes a context or its name."""
    q = make_queue(ctx=ctx)
    q.put(1)
    assert q.get() == 1


# -- processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [None, *also("fork", "spawn", "forkserver")])
def test_initargs_of_a_pool(make_queue: Any, context: Any):
    """Workers get a queue by ``initargs`` with every start method, replacements too."""
    q = make_queue()
    with Pool(2, parts.remember, (q,), context=context) as pool:
        pids = {pool.apply(parts.put_remembered, (i,)) for i in range(4)}
        assert sorted(q.get(LIMIT) for _ in range(4)) == [0, 1, 2, 3]
        os.kill(pids.pop(), signal.SIGKILL)
        eventually(lambda: pool.statistics()["deaths"] == 1, "the death is counted")
        for i in range(4):
            q.put(i)
        assert sorted(pool.apply(parts.get_remembered) for _ in range(4)) == [0, 1, 2, 3]
    pool.join()


def test_plain_fork(make_queue: Any):
    """A process forked by the program itself can use the queue."""
    q = make_queue()
    q.put(bytearray(100_000))
    pid = os.fork()
    if pid == 0:
        try:
            q.put(len(q.get(LIMIT)))
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert q.get(LIMIT) == 100_000


@pytest.mark.exhaustive
def test_forks_while_threads_use_it(make_queue: Any):
    """After forks during puts and gets of other threads, parent and children have working
    queues."""
    q = make_queue()
    end = threading.Event()
    sent, got = [0], [0]

    def write() -> None:
        while not end.is_set():
            q.put(bytearray(70_000))
            sent[0] += 1

    def read() -> None:
        while q.get() is not None:
            got[0] += 1

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            mine = SimpleQueue()
            pid = os.fork()
            if pid == 0:
                try:
                    mine.put(bytearray(70_000))
                    os._exit(len(mine.get(LIMIT)) != 70_000)
                finally:
                    os._exit(9)
            assert os.waitpid(pid, 0)[1] == 0
            mine.close()
    finally:
        end.set()
        threads[0].join()
        q.put(None)
        threads[1].join()
    assert sent == got


def test_interpreter_shutdown(tmp_path: Any):
    """A program that exits with queues, messages and received items writes no error."""
    scripts.program(
        tmp_path,
        """
        import threading
        from xpool.queue import SimpleQueue

        q = SimpleQueue()
        q.put(bytearray(1 << 20))
        q.put(bytearray(1 << 20))
        kept = q.get()
        cycle = [q]
        cycle.append(cycle)
        threading.Thread(target=q.get).start()
        threading.Thread(target=SimpleQueue().get, daemon=True).start()
        """,
    )


def test_import_is_light():
    """Importing the queue imports neither torch nor dill nor numpy."""
    code = "import sys; from xpool.queue import SimpleQueue\n"
    code += "q = SimpleQueue(); q.put(bytearray(1 << 20)); q.get()\n"
    code += "print({'torch', 'dill', 'numpy'} & set(sys.modules))"
    assert scripts.run_ok(["-c", code]).strip() == "set()"


def test_other_systems(monkeypatch: pytest.MonkeyPatch):
    """On a system other than Linux the constructor raises an error."""
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(OptionError, match="needs Linux"):
        SimpleQueue()
