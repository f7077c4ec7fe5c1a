"""Tensors through queues: shared and copied, passed on, and freed."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

import parts
import pytest
from support import scripts
from support.leaks import descriptors
from support.limits import PROGRAM_LIMIT
from support.memory import block_bytes, own_arena
from support.tiers import also
from support.waiting import LIMIT, eventually

from xpool import Pool, TaskNotPicklable
from xpool._memory.arena import Arena
from xpool._memory.foreign import ForeignArena
from xpool.queue import SimpleQueue

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")


@pytest.mark.parametrize("count", [20_000, *also(1, 3)])
def test_shared(make_queue: Any, start: Any, method: str, count: int):
    """Both sides see each other's writes, in tensors of any size."""
    there, back, go = make_queue(), make_queue(), make_queue()
    start(method, parts.keep, there, back, go)
    tensor = torch.zeros(count)
    view = tensor[:1]
    there.put(tensor)
    assert back.get(LIMIT) == "kept"
    tensor += 2
    go.put("go")
    assert back.get(LIMIT) == [2.0] * count
    assert view.item() == 2.0


@pytest.mark.exhaustive
def test_hops_of_foreign_tensors(make_queue: Any, start: Any):
    """One message carries tensors of two processes to a third, which writes to both."""
    queues = [make_queue() for _ in range(4)]
    for queue in queues[:2]:
        start("spawn", parts.make_tensors, queue, 1, 10)
    pair = [queue.get(LIMIT) for queue in queues[:2]]
    mine = torch.zeros(2)
    start("forkserver", _write_to_all, queues[2], queues[3])
    queues[2].put([*pair, mine])
    again = queues[3].get(LIMIT)
    for sent, got in zip([*pair, mine], again, strict=True):
        assert sent.data_ptr() == got.data_ptr()
        assert sent.tolist() == [7.0] * len(sent)


def _write_to_all(inbox: Any, outbox: Any) -> None:
    tensors = inbox.get()
    for tensor in tensors:
        tensor.fill_(7)
    outbox.put(tensors)


@pytest.mark.parametrize("count", [3, *also(1, 20_000)])
def test_copied(make_queue: Any, start: Any, method: str, count: int):
    """With ``copy_tensor=True`` the receiver may write to its own tensor."""
    there, back = (make_queue(copy_tensor=True) for _ in range(2))
    start(method, parts.add_one, there, back, 2)
    tensor = torch.zeros(count)
    for _ in range(2):
        there.put(tensor)
        got = back.get(LIMIT)
        assert tensor.sum() == 0
        assert got.tolist() == [1.0] * count
        got.fill_(9)


@pytest.mark.parametrize("copy", [True, False])
def test_aliases(make_queue: Any, copy: bool):
    """Views of one storage stay views of one storage; parameters stay parameters."""
    q = make_queue(copy_tensor=copy)
    base = torch.arange(100_000, dtype=torch.float32)
    views = base[10:20], base[15:90_000:3], torch.nn.Parameter(base[:5])
    q.put(views)
    first, second, parameter = q.get()
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    assert torch.equal(first, views[0]) and torch.equal(second, views[1])
    first.fill_(-1)
    assert second[0] == -1
    assert (base[15] == -1) == (not copy)


def test_limit_of_memory(make_queue: Any, start: Any, monkeypatch: pytest.MonkeyPatch):
    """A writer waits when the arena's limit is reached."""
    monkeypatch.setattr(own_arena(), "limit", 16 << 20)
    q, results = make_queue(copy_tensor=True), make_queue()
    start("fork", parts.sums, q, results)
    for i in range(40):
        q.put(torch.full((4 << 20,), i, dtype=torch.uint8))
        assert block_bytes(own_arena()) <= 17 << 20
    q.put(None)
    assert [results.get(LIMIT) for _ in range(40)] == [(i, True, 4 << 20) for i in range(40)]


def test_more_than_the_limit(make_queue: Any, monkeypatch: pytest.MonkeyPatch):
    """A tensor larger than the arena is copied through a file; sharing it is refused."""
    monkeypatch.setattr(own_arena(), "limit", 1 << 20)
    tensor = torch.ones(1 << 20)
    q = make_queue(copy_tensor=True)
    q.put(tensor)
    assert torch.equal(q.get(), tensor)
    q = make_queue()
    with pytest.raises(TaskNotPicklable, match="limit"):
        q.put(tensor)
    q.put(1)
    assert q.get() == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("copy", [True, False])
def test_nothing_is_left(make_queue: Any, start: Any, copy: bool):
    """When tensors and queues are gone, descriptors, holds and memory are freed on both sides."""
    arena = own_arena()
    parts.settled()
    before = arena.statistics(), set(descriptors().values())
    there, back = (make_queue(copy_tensor=copy) for _ in range(2))
    process = start("spawn", parts.echo, there, back)
    for size in (10, 100_000, 5_000_000):
        kept = []
        for _ in range(3):
            there.put(torch.ones(size))
            kept.append(back.get(LIMIT))
        assert sum(float(one[-1]) for one in kept) == 3
        del kept
    there.put(None)
    process.join(LIMIT)
    there.close()
    back.close()
    parts.settled()
    after = arena.statistics(), set(descriptors().values())
    assert after[0]["out"] == before[0]["out"] and after[0]["held"] == before[0]["held"]
    assert after[0]["bytes"] <= before[0]["bytes"] + (1 << 20)
    # A process's sentinel is a pipe.
    new = [to for to in after[1] - before[1] if not to.startswith("pipe:")]
    assert not new
    assert not any(isinstance(one, ForeignArena) for one in Arena._known.values())


@pytest.mark.exhaustive
def test_reader_frees_a_living_writers_blocks(make_queue: Any, start: Any):
    """A writer's blocks are free when the reader has dropped the tensors."""
    there, back, ask = make_queue(), make_queue(), make_queue()
    start("spawn", _make_and_tell, there, back, ask)
    tensors = [there.get(LIMIT) for _ in range(5)]
    ask.put("how many")
    assert back.get(LIMIT)["out"] == 5
    del tensors
    parts.settled()
    ask.put("how many")
    after = back.get(LIMIT)
    assert after["out"] == 0 and after["bytes"] < 1 << 20


def _make_and_tell(outbox: Any, results: Any, ask: Any) -> None:
    parts.make_tensors(outbox, 5, 1 << 20)
    while True:
        ask.get()
        parts.statistics(results)


def test_memory_of_a_dead_writers_worker(make_queue: Any, start: Any):
    """Memory of a dead writer's worker is freed too."""
    q, go = make_queue(), make_queue()
    process = start("fork", parts.pass_on_results, q, 4, 4 << 20, go)
    taken = [q.get(PROGRAM_LIMIT) for _ in range(4)]  # its fork server imports torch first
    go.put(None)
    process.join(LIMIT)
    (theirs,) = [arena for arena in Arena._known.values() if isinstance(arena, ForeignArena)]
    kept = taken[1]
    del taken

    def tidied() -> bool:
        parts.foreign.tidy()  # the worker dies a moment after its parent
        return theirs.file.used() < 2 * (4 << 20)

    eventually(tidied, "the memory of three tensors is freed")
    assert bool((kept == 7).all())


@pytest.mark.exhaustive
def test_descriptors_in_flight(tmp_path: Any):
    """`put` waits while the system allows the user no more descriptors in flight."""
    out = scripts.program(
        tmp_path,
        """
        import errno, os, resource, threading, torch
        from xpool.queue import SimpleQueue
        from xpool import queue as simple

        SimpleQueue().put(torch.zeros(1))  # import now: only root may read some folders
        if os.getuid() == 0:
            os.setuid(65534)  # root may have any number
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        q = SimpleQueue()
        refused = threading.Event()

        class Told:
            def sleep(self, seconds):
                refused.set()
                time.sleep(seconds)

            def __getattr__(self, name):
                return getattr(time, name)

        time, simple.time = simple.time, Told()

        def write():
            for i in range(300):
                q.put(torch.full((3,), i))

        thread = threading.Thread(target=write)
        thread.start()
        refused.wait()
        got = [int(q.get()[0]) for _ in range(300)]
        thread.join()
        print(got == list(range(300)))
        """,
    )
    assert out.strip() == "True"


def test_out_of_descriptors(make_queue: Any, start: Any):
    """Without a free descriptor `get` and `put` raise, and later both work with all messages."""
    q, results = make_queue(), make_queue()
    results.put(torch.ones(3))  # imports the code that pickles tensors
    assert results.get(LIMIT).sum() == 3
    start("fork", parts.make_tensors, q, 1, 100)
    assert not q.empty() or _readable(q)
    parts.foreign.reclaim_arrived()  # the first put's lease is closed, so the next put opens one
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, most[1]))
    taken = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(0))
        with pytest.raises(OSError, match="Too many open files"):
            q.get(LIMIT)
        with pytest.raises(OSError, match="Too many open files"):
            results.put(torch.ones(3))
        for _ in range(3):
            os.close(taken.pop())
        assert q.get(LIMIT).tolist() == [0] * 100
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    results.put(torch.ones(3))
    assert results.get(LIMIT).sum() == 3


def _readable(q: SimpleQueue) -> bool:
    import select

    return bool(select.select([q], [], [], LIMIT)[0])


@pytest.mark.exhaustive
def test_limit_on_addresses(tmp_path: Any):
    """Under ``ulimit -v`` copies work; sharing is refused, and the error names the remedy."""
    first, second, third = scripts.program(
        tmp_path,
        """
        import resource, torch
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        from xpool.queue import SimpleQueue
        q = SimpleQueue(copy_tensor=True)
        q.put(torch.ones(1 << 20))
        print(int(q.get().sum()))
        q = SimpleQueue()
        q.put("no tensor")
        print(q.get())
        try:
            q.put(torch.ones(3))
        except ValueError as error:
            print(error)
        """,
    ).splitlines()
    assert (first, second) == (str(1 << 20), "no tensor")
    assert "use copy_tensor=True" in third


# -- together with pools -----------------------------------------------------------------------


def _fill(number: int) -> int:
    parts.inherited.put(torch.full((100_000,), float(number)))
    return os.getpid()


def _pass_on(tensor: Any) -> None:
    tensor += 1
    parts.inherited.put(tensor)


def test_workers_as_writers(make_queue: Any):
    """Tensors that workers put survive the replacement of those workers."""
    q = make_queue()
    with Pool(2, parts.remember, (q,), maxtasksperchild=1) as pool:
        pool.map(_fill, range(6), chunksize=1)
        got = [q.get(LIMIT) for _ in range(6)]
    pool.join()
    assert sorted(int(one[0]) for one in got) == list(range(6))
    assert all(bool((one == one[0]).all()) for one in got)


def test_from_a_pool_into_a_queue(make_queue: Any):
    """A worker can share a tensor of its pool through a queue; the tensor outlives the worker."""
    q = make_queue()
    tensor = torch.zeros(1000)
    with Pool(1, parts.remember, (q,), is_copy_tensor=False) as pool:
        pool.apply(_pass_on, (tensor,))
    pool.join()
    back = q.get(LIMIT)
    assert back.data_ptr() == tensor.data_ptr()
    assert tensor.tolist() == [1.0] * 1000


@pytest.mark.exhaustive
def test_from_a_queue_into_a_pool(make_queue: Any, start: Any):
    """A received tensor can be copied to workers; sharing it is refused with advice."""
    q, ask = make_queue(), make_queue()
    start("spawn", _make_and_keep, q, ask)
    tensor = q.get(LIMIT)
    with Pool(1) as pool:
        assert int(pool.apply(torch.sum, (tensor,))) == 0
    pool.join()
    with Pool(1, is_copy_tensor=False) as pool:
        with pytest.raises(TaskNotPicklable, match="clone"):
            pool.apply(torch.sum, (tensor,))
        assert int(pool.apply(torch.sum, (tensor.clone(),))) == 0
    pool.join()


def _make_and_keep(outbox: Any, ask: Any) -> None:
    tensor = torch.zeros(100_000)
    outbox.put(tensor)
    ask.get()


def _make_and_remember(value: float) -> Any:
    parts.made = torch.full((100_000,), value)
    return parts.made


def _put_made() -> int:
    parts.inherited.put(parts.made)
    return os.getpid()


def test_a_worker_dies_after_it_put(make_queue: Any):
    """A block that only a dead worker held is kept for the message that the worker put."""
    q = make_queue()
    arena = own_arena()
    with Pool(1, parts.remember, (q,), is_copy_tensor=False) as pool:
        pool.apply(_make_and_remember, (7.0,))
        os.kill(pool.apply(_put_made), signal.SIGKILL)
        eventually(lambda: arena._pending_reclaim, "the worker's attachment is kept")
        assert pool.apply(os.getpid)
        tensor = q.get(LIMIT)
        arena.trim(float("inf"))
        assert not arena._pending_reclaim
        assert bool((tensor == 7).all())
    pool.join()
    assert bool((tensor == 7).all())
