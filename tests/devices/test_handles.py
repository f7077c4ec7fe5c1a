"""Share mode for device tensors: the tensor stays in its worker, and a handle is sent.

Each test runs with a simulated device, and by ``make test-xla`` with torch_xla.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

from support import work
from support.memory import own_arena
from support.waiting import Gate, Mailbox, eventually, together

import xpool
from xpool import (
    CtxPool,
    P2PPool,
    Pool,
    PoolClosed,
    ResultNotPicklable,
    TaskNotPicklable,
    TensorHandle,
    TensorLost,
    WorkerDied,
)
from xpool._engine.answers import Answers
from xpool._pools.engine_submitter import Packer
from xpool.devices import devices
from xpool.queue import SimpleQueue

from . import handle_tasks as tasks

pytestmark = pytest.mark.usefixtures("cpu_client")

KINDS = [
    pytest.param("stand-in", marks=pytest.mark.torch),
    pytest.param("xla", marks=pytest.mark.xla),
]


def contexts(kind: str, count: int) -> Any:
    return devices("xla", count) if kind == "xla" else [tasks.Stand() for _ in range(count)]


def start(kind: str, count: int, **options: Any) -> CtxPool:
    return CtxPool(worker_contexts=contexts(kind, count), is_copy_tensor=False, **options)


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest) -> str:
    """The workers' device: simulated, or torch_xla's CPU client."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two(device: str) -> Iterator[CtxPool]:
    """A pool in share mode of two workers with a device each, shared by the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        pool = start(device, 2)
        pool.map(work.pid, range(2), 1)
        yield pool
        pool.close()
        pool.join()


@pytest.fixture
def make_two(device: str, make_pool: Callable[..., Any]) -> Callable[..., Any]:
    """Make separate pools, for tests that damage them."""
    return lambda count=2, **options: make_pool(start, device, count, **options)


class Pair(NamedTuple):
    a: TensorHandle
    b: TensorHandle


def pair(pool: Any, sizes: tuple[int, int] = (4, 4)) -> Pair:
    """Return a handle of each worker."""
    found = Pair(*(pool.run_all(tasks.make, size)[worker] for worker, size in enumerate(sizes)))
    assert found.a.pid != found.b.pid
    return found


# -- what a handle is --------------------------------------------------------------------------


def test_a_handle_says_what_it_is(two: CtxPool):
    """A handle has shape, dtype, device, size and worker, and shows them in its repr."""
    import torch

    handle = two.apply(tasks.make, (6,))
    assert type(handle) is xpool.TensorHandle
    assert handle.shape == (6,)
    assert handle.dtype is torch.float32
    assert handle.device == "xla:0"
    assert handle.nbytes == 24
    assert not handle.requires_grad
    assert handle.pid in two.statistics()["pids"]
    assert two.statistics()["pids"][handle.worker] == handle.pid
    assert repr(handle) == (
        f"<TensorHandle to a tensor of shape (6,), torch.float32, on xla:0, of worker "
        f"{handle.worker} (pid {handle.pid})>"
    )


def test_inside_any_structure(two: CtxPool):
    """In any structure each device tensor becomes one handle; other tensors are sent."""
    found = two.apply(tasks.structure)
    x = found["x"]
    assert found["again"] is x
    handles = [x, found["view"], found["in"][0][0], found["model"].weight, found["empty"]]
    assert all(type(handle) is TensorHandle for handle in handles)
    assert [handle.shape for handle in handles] == [(6,), (2,), (6,), (2, 6), (0,)]
    assert found["host"].tolist() == [1.0, 1.0, 1.0]
    assert found["model"].bias.device.type == "cpu"
    seen = two.apply(tasks.look_at_structure, (found,))
    assert seen["pid"] == x.pid
    assert seen["same"]
    assert seen["sums"] == [15.0, 3.0, 30.0]
    assert seen["types"] == {"xla"}
    assert seen["parameter"] in ("Parameter", "Away")
    assert seen["host"] == "cpu"


def test_the_owner_gets_the_tensor_itself(two: CtxPool):
    """The owner gets the same tensor object, and keeps a task's writes to it."""
    handle = two.apply(tasks.make)
    assert two.apply(tasks.is_it, (handle,))
    two.apply(tasks.change, (handle,))
    assert handle.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_copy_on_the_cpu(two: CtxPool):
    """Each call of `cpu` makes a new copy."""
    handle = two.apply(tasks.make)
    first = handle.cpu()
    assert (first.device.type, first.tolist()) == ("cpu", [0.0, 1.0, 2.0, 3.0])
    first.add_(7)
    assert handle.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_parameters(two: CtxPool):
    """requires_grad and the Parameter type are kept, in the owner and on the CPU."""
    import torch

    parameter = two.apply(tasks.make_parameter)
    assert parameter.requires_grad
    assert two.apply(tasks.is_it, (parameter,))
    copy = parameter.cpu()
    assert type(copy) is torch.nn.Parameter
    assert copy.requires_grad
    assert copy.label == "weights"
    leaf = two.apply(tasks.make_leaf)
    assert leaf.requires_grad
    assert leaf.cpu().requires_grad
    assert leaf.cpu().is_leaf
    assert not two.apply(tasks.make).cpu().requires_grad


@pytest.mark.parametrize("device", KINDS[1:], indirect=True)  # the simulated device has no autograd
def test_a_graph_cannot_be_kept(two: CtxPool):
    """A tensor with a gradient graph is refused, as in copy mode."""
    with pytest.raises(ResultNotPicklable, match=r"x\.detach\(\)"):
        two.apply(tasks.make_computed)


# The simulated device computes at once.
@pytest.mark.parametrize("device", KINDS[1:], indirect=True)
def test_kept_tensors_are_computed(two: CtxPool):
    """A task computes the tensors that it returns before the next task begins."""
    handle = two.apply(tasks.make)
    for _ in range(3):
        handle = two.apply(tasks.add_one, (handle,))
        assert not two.apply(tasks.pending, (handle,))
    two.apply(tasks.change, (handle,))
    assert two.apply(tasks.pending, (handle,))  # proves that `pending` can be true
    assert handle.cpu().tolist() == [4.0, 5.0, 6.0, 7.0]


# -- where tasks go ----------------------------------------------------------------------------


def test_every_verb_brings_the_task_to_the_owner(two: CtxPool):
    """A task with a handle in arguments, keywords or items runs at the handle's owner."""
    both = pair(two)
    for handle in both:
        expected = (handle.pid, 6.0, ["xla"])
        assert two.apply(tasks.use, (handle,)) == expected
        assert two.apply(tasks.use, kwds={"x": handle}) == expected
        assert two.apply_async(tasks.use, (handle,)).get() == expected
    items = [both[i % 2] for i in range(9)]
    expected_pids = [handle.pid for handle in items]
    assert [pid for pid, _, _ in two.map(tasks.use, items, 1)] == expected_pids
    assert [pid for pid, _, _ in two.starmap(tasks.use, [(h,) for h in items], 1)] == expected_pids
    assert [pid for pid, _, _ in two.imap(tasks.use, items)] == expected_pids
    unordered = [pid for pid, _, _ in two.imap_unordered(tasks.use, items)]
    assert sorted(unordered) == sorted(expected_pids)
    assert two.map_async(tasks.use, items[:1], 1).get()[0][0] == both.a.pid
    chunks = [both.a] * 4 + [both.b] * 4
    assert [pid for pid, _, _ in two.map(tasks.use, chunks, 4)] == [h.pid for h in chunks]
    assert [pid for pid, _, _ in two.imap(tasks.use, chunks, 4)] == [h.pid for h in chunks]


def test_handles_among_other_items(two: CtxPool):
    """One job may have items with and without handles; results stay in order."""
    import torch

    both = pair(two)
    items = [torch.full((2,), float(i)) if i % 3 else both[i % 2] for i in range(30)]
    sums = [2.0 * i if i % 3 else 6.0 for i in range(30)]
    for found in (
        two.map(tasks.use, items, 1),
        list(two.imap(tasks.use, items)),
        two.map(tasks.use, items, 4),
    ):
        assert [total for _, total, _ in found] == sums
    for handle, (pid, _, _) in zip(items, two.map(tasks.use, items, 1)):
        if isinstance(handle, TensorHandle):
            assert pid == handle.pid


def test_two_handles_of_one_owner(two: CtxPool):
    """A task with two handles of one worker runs there with both tensors."""
    one = two.apply(tasks.make)
    other = two.apply(tasks.add_one, (one,))
    assert other.pid == one.pid
    assert two.apply(tasks.use, (one, other)) == (one.pid, 16.0, ["xla", "xla"])


def test_handles_of_two_owners(two: CtxPool, device: str):
    """The task runs where most bytes are, and the other tensor is copied there."""
    both = pair(two, (4, 8))
    # The copy is on the device, if the worker has a real one.
    where = "xla" if device == "xla" else "cpu"
    assert two.apply(tasks.use, both) == (both.b.pid, 34.0, [where, "xla"])
    assert two.apply(tasks.use, both[::-1]) == (both.b.pid, 34.0, ["xla", where])
    assert two.map(tasks.use, both, 2)[0][0] == both.b.pid
    assert [handle.cpu().sum().item() for handle in both] == [6.0, 28.0]


@pytest.mark.torch
def test_another_worker_can_be_requested(make_pool: Callable[..., Any]):
    """With ``worker=`` the task runs at that worker, with a copy."""
    pool = make_pool(P2PPool, 2, is_copy_tensor=False)
    handle = pool.apply(tasks.plain_make, worker=1)
    assert handle.worker == 1
    assert pool.apply(tasks.plain_use, (handle,), worker=1)[1][2] == ["xla"]
    index, (_, total, where) = pool.apply(tasks.plain_use, (handle,), worker=0)
    assert (index, total, where) == (0, 6.0, ["cpu"])
    for _ in range(3):
        assert pool.apply(tasks.plain_use, (handle,))[0] == 1
        assert pool.map(tasks.plain_use, [handle] * 3, 1)[0][0] == 1
        assert next(pool.imap(tasks.plain_use, [handle]))[0] == 1


def test_functions_that_hold_handles(two: CtxPool):
    """Handles in a partial or a closure bind the job's tasks like arguments."""
    both = pair(two, (4, 8))
    for handle, total in zip(both, (6.0, 28.0)):

        def closure(context: Any, other: Any, held: Any = handle) -> Any:
            return tasks.use(context, held)

        def cell(context: Any, other: Any) -> Any:
            return tasks.use(context, handle)  # noqa: B023  # runs before the next iteration

        expected = (handle.pid, total, ["xla"])
        assert two.apply(closure, (0,)) == expected
        assert two.map(closure, range(5), 1) == [expected] * 5
        assert two.map(cell, range(5)) == [expected] * 5
        assert list(two.imap(cell, range(5))) == [expected] * 5
        assert sorted(two.imap_unordered(closure, range(5), 2)) == [expected] * 5
    summed = functools.partial(tasks.use, x=both.a)
    # The function's handle decides; the items of the other worker are copied.
    pids = {pid for pid, total, _ in two.map(summed, [both.b] * 3, 1) if total == 34.0}
    assert pids == {both.a.pid}
    assert two.map(functools.partial(tasks.use, x=both.a, y=both.b), [both.a], 1)[0][:2] == (
        both.b.pid,
        40.0,
    )


# -- what travels ------------------------------------------------------------------------------


class Counted:
    """Sizes of a pool's messages in both directions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        self.received: list[int] = []
        pack_task, answer = Packer.pack_task, Answers._answer

        def packed(packer: Any, *args: Any) -> Any:
            payload, worker = pack_task(packer, *args)
            self.sent.append(len(payload))
            return payload, worker

        def received(answers: Any, slot: Any, error: bool, payload: Any, *args: Any) -> None:
            self.received.append(len(payload))
            answer(answers, slot, error, payload, *args)

        monkeypatch.setattr(Packer, "pack_task", packed)
        monkeypatch.setattr(Answers, "_answer", received)


def used() -> int:
    """Shared memory in use by this program, in bytes."""
    return own_arena().statistics()["bytes"]


def test_no_bytes_of_the_tensor_move(make_two: Any, monkeypatch: pytest.MonkeyPatch):
    """Passing an 8 MiB tensor between tasks of its worker sends only its handle."""
    pool = make_two(1)
    handle = pool.apply(tasks.make, (2,))
    counted = Counted(monkeypatch)
    before = used()
    size = 2 << 20
    handle = pool.apply(tasks.make, (size,))
    for _ in range(5):
        handle = pool.apply(tasks.add_one, (handle,))
        count, memory = pool.apply(tasks.kept_and_blocks, (handle,))
        assert count == 1
        assert memory - before < 64 * 1024
    assert handle.nbytes == 4 * size
    assert len(counted.sent) == 11
    assert len(counted.received) >= 6
    assert max(counted.sent + counted.received) < 50_000  # with the state of the program
    assert pool.apply(tasks.use, (handle,))[0] == handle.pid
    assert used() - before < 64 * 1024
    print(f"largest message to the worker {max(counted.sent)} bytes, from it "
          f"{max(counted.received)}")  # fmt: skip
    assert handle.cpu()[-1].item() == size - 1 + 5


# -- letting go --------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_tensor_is_freed_with_its_last_handle(make_two: Any):
    """A worker frees tensors with dropped handles, unread results and unfinished iterators."""
    pool = make_two(1)
    handles = [pool.apply(tasks.make, (i,)) for i in range(5)]
    assert pool.apply(tasks.kept) == 5
    del handles[1:3]
    gc.collect()
    assert pool.apply(tasks.kept) == 3
    handles.clear()
    assert pool.apply(tasks.kept) == 0
    result = pool.apply_async(tasks.make)
    result.wait()
    assert pool.apply(tasks.kept) == 1
    del result
    assert pool.apply(tasks.kept) == 0
    found = pool.imap(tasks.make, [3] * 20)
    first = next(found)
    del found
    gc.collect()
    assert pool.apply(tasks.kept) <= 20
    del first
    gc.collect()
    # The pool's thread drops the unread results, and a caller's own answer may overtake it.
    eventually(lambda: pool.apply(tasks.kept) == 0, "the worker freed all tensors")


def test_unsendable_results_are_not_kept(make_two: Any):
    """If a result cannot be sent, its tensors are not kept, even without the collector."""
    pool = make_two(1)
    pool.apply(tasks.stop_collecting)
    with pytest.raises(ResultNotPicklable, match="lock"):
        pool.apply(tasks.make_with_lock)
    assert pool.apply(tasks.kept) == 0


# The simulated device has no copy mode.
@pytest.mark.parametrize("device", KINDS[1:], indirect=True)
def test_an_exception_holds_a_copy(two: CtxPool):
    """A tensor in an exception is sent as a copy and not kept."""
    handle = two.apply(tasks.make)
    with pytest.raises(ValueError, match="with") as caught:
        two.apply(tasks.fail_with, (handle,))
    assert caught.value.args[1].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.exhaustive
def test_a_thousand_handles(make_two: Any):
    """Many handles need no descriptors and little time, and all are freed."""
    pool = make_two(1)
    pool.apply(tasks.make)
    files = len(os.listdir("/proc/self/fd"))
    handles = pool.map(tasks.make, [2] * 1000, 50)
    assert len(os.listdir("/proc/self/fd")) == files
    assert pool.apply(tasks.kept) == 1000
    assert len({id(handle) for handle in handles}) == 1000
    assert pool.apply(tasks.use, handles)[1] == 1000.0
    handles.clear()
    looks = 1
    while pool.apply(tasks.kept):
        looks += 1
    assert looks <= 20  # some are freed before each task


def test_many_threads(two: CtxPool):
    """Threads use and drop handles of both workers concurrently."""
    both = pair(two)

    def run(i: int) -> None:
        for _ in range(20):
            new = two.apply(tasks.add_one, (both[i % 2],))
            assert new.pid == both[i % 2].pid
            assert new.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]

    together(run, 6)


# -- what goes wrong ---------------------------------------------------------------------------


def test_the_owner_dies(make_two: Any):
    """Each use of a dead worker's handles raises TensorLost; other handles work."""
    pool = make_two(2)
    lost, good = pair(pool)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        pool.apply(work.kill_oneself, (lost,))
    for use in (lost.cpu, lambda: pool.apply(tasks.use, (good, lost))):
        with pytest.raises(TensorLost, match=r"shape \(4,\), torch.float32, on xla:0 is lost"):
            use()
    with pytest.raises(TensorLost, match=f"pid {lost.pid}.*keep a copy") as caught:
        pool.map(tasks.use, [good, lost], 1)
    assert isinstance(caught.value, WorkerDied)
    assert (caught.value.worker, caught.value.pid) == (lost.worker, lost.pid)
    with pytest.raises(TensorLost):
        pool.map(functools.partial(tasks.use, x=lost), [good], 1)
    assert pool.apply(tasks.use, (good,))[0] == good.pid
    new = pool.apply(tasks.make)
    assert new.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_waiting_tasks_of_a_dead_owner(make_two: Any, mailbox: Mailbox, gate: Gate):
    """Tasks that wait for a dead owner fail; retries do not restore its tensor."""
    pool = make_two(1)
    handle = pool.apply(tasks.make)
    first = pool.apply_async(tasks.make_at_gate, (mailbox.path, gate.path))
    killer = pool.apply_async(work.kill_oneself, (handle,), retries=2)
    behind = [pool.apply_async(tasks.use, (handle,)) for _ in range(3)]
    mailbox.lines(1)
    gate.open(1)
    assert type(first.get()) is TensorHandle
    for result in (killer, *behind):
        with pytest.raises(TensorLost):
            result.get()


def test_retries_keep_the_tensor(two: CtxPool):
    """A task that may be retried gets the tensor itself too."""
    handle = two.apply(tasks.make)
    assert two.apply(tasks.is_it, (handle,), retries=2)
    with pytest.raises(ValueError, match="with"):
        two.apply(tasks.fail_with, (handle,), retries=1, retry_on=ValueError)
    assert two.apply(tasks.is_it, (handle,), timeout=1000)


@pytest.mark.exhaustive
def test_the_owner_retires(make_two: Any):
    """A worker that ``maxtasksperchild`` replaces loses its tensors."""
    pool = make_two(1, maxtasksperchild=2)
    handle = pool.apply(tasks.make)
    assert handle.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(TensorLost, match="has ended"):
        handle.cpu()


@pytest.mark.parametrize("end", ["close", "terminate"])
def test_the_pool_has_ended(make_two: Any, end: str):
    """After the pool has ended, each use of a handle raises PoolClosed."""
    pool = make_two(1)
    handle = pool.apply(tasks.make)
    unopened = pool.apply_async(tasks.make)
    unopened.wait()
    getattr(pool, end)()
    pool.join()
    for use in (handle.cpu, lambda: pool.apply(tasks.use, (handle,)), unopened.get().cpu):
        with pytest.raises(PoolClosed, match="takes no more work"):
            use()


@pytest.mark.torch
def test_the_pool_is_gone():
    """A handle does not keep its pool alive."""
    pool = start("stand-in", 1)
    handle = pool.apply(tasks.make)
    unopened = pool.apply_async(tasks.make)
    unopened.wait()
    pool.terminate()
    pool.join()
    del pool
    gc.collect()
    with pytest.raises(PoolClosed, match="its pool is gone"):
        handle.cpu()
    assert "of shape (4,)" in repr(handle)
    del unopened


def test_handles_outside_their_pool(two: CtxPool, make_pool: Callable[..., Any]):
    """A handle is refused outside its pool, and the error names the remedy."""
    handle = two.apply(tasks.make)
    other = make_pool(Pool, 1, is_copy_tensor=False)
    copies = make_pool(Pool, 1)
    words = r"only in tasks of the pool that it came from. Send handle.cpu\(\) instead"
    queue = SimpleQueue()
    queue_of_shared = SimpleQueue(copy_tensor=False)
    for refuses in (
        lambda: other.apply(tasks.plain_use, (handle,)),
        lambda: copies.apply(tasks.plain_use, (handle,)),
        lambda: other.map(tasks.plain_use, [handle]),
        lambda: list(other.imap(functools.partial(tasks.plain_use, handle), [1])),
        lambda: Pool(1, tasks.plain_use, (handle,), is_copy_tensor=False),
        lambda: CtxPool(worker_contexts=[handle], is_copy_tensor=False),
        lambda: queue.put(handle),
        lambda: queue_of_shared.put(handle),
        lambda: pickle.dumps(handle),
        lambda: xpool.pickle.dumps([handle]),
        lambda: xpool.pickle.dumps(handle, copy_tensor=False),
    ):
        with pytest.raises(TaskNotPicklable, match=words):
            refuses()
    queue.close()
    queue_of_shared.close()
    copy = handle.cpu()
    assert other.apply(tasks.plain_types, (copy,)) == ["Tensor"]


@pytest.mark.torch
def test_a_forked_child(make_pool: Callable[..., Any]):
    """A forked child cannot reach the workers."""
    pool = make_pool(start, "stand-in", 1)
    handle = pool.apply(tasks.make)
    pid = os.fork()
    if not pid:
        try:
            handle.cpu()
        except PoolClosed:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert handle.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
    used()  # checks that the child has ended, which frees what was held for it


# -- what is shared ----------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.torch
@pytest.mark.parametrize(
    ("method", "device_shared", "host_shared"),
    [(None, True, True), ("xla", True, False), ("cpu", None, True), ("cuda", None, False)],
)
def test_share_methods(
    make_pool: Callable[..., Any],
    method: str | None,
    device_shared: bool | None,
    host_shared: bool,
):
    """``share_method`` names the shared kind; tensors of other kinds are copied."""
    import torch

    pool = make_pool(Pool, 1, is_copy_tensor=False, share_method=method)
    if device_shared:  # the simulated device cannot be copied
        found = pool.apply(tasks.plain_make)
        assert found.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
        assert pool.apply(tasks.plain_types, (found,)) == ["Away"]
    host = torch.zeros(2)
    pool.apply(tasks.write_to, (host,))
    assert host.tolist() == ([1.0, 1.0] if host_shared else [0.0, 0.0])


@pytest.mark.torch
def test_options_are_shared(make_pool: Callable[..., Any]):
    """Tensors in ``initargs`` are shared, also with a replacement."""
    import torch

    small, large = torch.zeros(2), torch.zeros(1 << 16)
    pool = make_pool(Pool, 1, tasks.write_to, (small, large), is_copy_tensor=False)
    with pytest.raises(WorkerDied):
        pool.apply(work.kill_oneself, (None,))
    pool.apply(tasks.plain_types)
    assert small.tolist() == [2.0, 2.0]
    assert large.sum().item() == 2.0 * (1 << 16)
    contexts = [large]
    pool = make_pool(CtxPool, worker_contexts=contexts, is_copy_tensor=False)
    pool.apply(tasks.write_to)
    assert large[0].item() == 3.0


@pytest.mark.xla
@pytest.mark.parametrize("method", ["cpu", "cuda", "xla"])
def test_share_methods_on_xla(make_pool: Callable[..., Any], method: str):
    """ "xla" shares tensors on an XLA device; the other methods copy them."""
    pool = make_pool(start, "xla", 1, share_method=method)
    found = pool.apply(tasks.make)
    if method == "xla":
        assert pool.apply(tasks.is_it, (found,))
        found = found.cpu()
    assert (found.device.type, found.tolist()) == ("cpu", [0.0, 1.0, 2.0, 3.0])
