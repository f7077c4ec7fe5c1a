"""Share mode for GPU memory: what is shared, what is copied, what is refused.

torch shares the memory. Most tests use a simulated GPU, whose memory is files, and a real one if
present.
"""

from __future__ import annotations

import functools
import gc
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support import gpu
from support.waiting import eventually

from xpool import (
    CtxPool,
    DeviceError,
    OptionError,
    P2PPool,
    Pool,
    TaskNotPicklable,
    TensorHandle,
    TensorLost,
    WorkerDied,
)
from xpool._pickling.tensors import device_memory as cuda

from . import gpu_tasks as tasks

pytestmark = pytest.mark.torch

KINDS = ["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)]
STAND_IN = pytest.mark.parametrize("device", KINDS[:1], indirect=True)
ON_GPU = pytest.mark.parametrize("device", KINDS[1:], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The GPU of parent and workers; the value is an initializer for workers."""
    if request.param == "gpu":
        # CUDA keeps descriptors open; open them before the leak check.
        torch.ones(1, device="cuda").cpu()
        yield os.getpid
        return
    folder = str(tmp_path_factory.mktemp("gpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(gpu.FOLDER, folder)
        gpu.install(folder)
        yield functools.partial(gpu.install, folder)
        gpu.uninstall()


@pytest.fixture(scope="module")
def pool(device: Any) -> Iterator[P2PPool]:
    """Two workers that have the GPU, in share mode, for tests that leave them as they were."""
    with P2PPool(2, device, is_copy_tensor=False) as pool:
        yield pool
    pool.join()


@pytest.fixture
def share(device: Any, make_pool: Callable[..., Any]) -> Callable[..., Any]:
    """Make pools in share mode whose workers have the GPU."""
    return lambda kind=P2PPool, count=2, **more: make_pool(
        kind, count, device, **{"is_copy_tensor": False, **more}
    )


@pytest.fixture
def each_opened(device: Any) -> Iterator[None]:
    """Check that receivers open each handle exactly once; otherwise torch keeps its memory."""
    before = set(gpu.unopened()) if gpu.FOLDER in os.environ else set()
    yield
    assert gpu.FOLDER not in os.environ or set(gpu.unopened()) <= before


def values(*tensors: Any) -> list[Any]:
    return [x.cpu().tolist() for x in tensors]


# -- writes are seen ---------------------------------------------------------------------------


def test_from_the_parent(pool: Any, each_opened: None):
    """Workers and parent see each other's writes to the parent's tensor."""
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.keep, ("x", x), worker=0)
    pool.apply(tasks.change, (x,), worker=1)
    assert pool.apply(tasks.kept_values, ("x",), worker=0) == [1.0] * 4
    x.add_(1)
    assert pool.apply(tasks.values, (x,), worker=1) == [([2.0] * 4, True)]
    assert pool.apply(tasks.kept_values, ("x",), worker=0) == [2.0] * 4
    pool.apply(tasks.change_kept, ("x",), worker=0)
    assert values(x) == [[3.0] * 4]


def test_from_a_worker(pool: Any, each_opened: None):
    """The parent opens a handle only on request, and then sees the worker's writes."""
    handle = pool.apply(tasks.make, ("mine",), worker=1)
    assert type(handle) is TensorHandle
    assert handle.gpu == cuda.identity(0)
    opened = handle.open()
    assert opened.is_cuda
    opened.add_(1)
    assert pool.apply(tasks.kept_values, ("mine",), worker=1) == [1.0, 2.0, 3.0, 4.0]
    pool.apply(tasks.change, (handle,))
    assert values(opened, handle) == [[2.0, 3.0, 4.0, 5.0]] * 2


def test_views_and_aliases(pool: Any, each_opened: None):
    """Views of one storage stay views of one storage."""
    x = tasks.put(torch.arange(12.0).reshape(3, 4))
    row, turned = (tasks.view(x, of) for of in (lambda x: x[1], lambda x: x.t()))
    assert pool.apply(tasks.values, (row, turned), worker=0) == [
        ([4.0, 5.0, 6.0, 7.0], True),
        (torch.arange(12.0).reshape(3, 4).t().tolist(), True),
    ]
    assert pool.apply(tasks.first_and_second, (row, turned), worker=1)[0] == [0.0, 7.0, 8.0]
    assert values(x)[0][1] == [7.0] * 4


def test_parameters(pool: Any, each_opened: None):
    """Parameters keep their type and attributes on the way to a worker."""
    model = tasks.make_model()
    expected = (type(model.weight).__name__, True, "weights", [[5.0] * 3] * 2)
    assert pool.apply(tasks.model_facts, (model,), worker=0) == expected
    assert model.weight.detach().cpu().tolist() == expected[3]
    theirs = pool.apply(tasks.make_model, worker=0)
    assert type(theirs.weight) is TensorHandle


def test_every_verb(pool: Any, each_opened: None):
    """All verbs share memory in items, and open each handle once."""
    a, b, c = (tasks.put(torch.zeros(4)) for _ in range(3))
    items = [a, a, b, b, c]
    pool.map(tasks.change, items, 2)  # no two workers add to one tensor at a time
    expected = [[([n] * 4, True)] for n in (2.0, 2.0, 2.0, 2.0, 1.0)]
    assert list(pool.imap(tasks.values, items)) == expected
    assert pool.apply_async(tasks.values, (a,)).get() == expected[0]


def test_share_method_cuda(share: Any, each_opened: None):
    """``share_method="cuda"`` shares GPU memory and copies host memory."""
    pool = share(share_method="cuda")
    x, host = tasks.put(torch.zeros(4)), torch.zeros(4)
    assert pool.apply(tasks.first_and_second, (x, host), worker=0) == [0.0] * 4
    pool.apply(tasks.change, (host,))
    assert values(x, host) == [[7.0] * 4, [0.0] * 4]


@STAND_IN
def test_messages_pickled_by_dill(pool: Any, each_opened: None):
    """If the first pickler fails and dill pickles the message, it still has one handle."""
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.keep, ("x", [x, types.MappingProxyType({})]), worker=0)
    pool.apply(tasks.first_and_second, (x, torch.ones(2)))
    assert values(x) == [[7.0] * 4]


@STAND_IN
def test_an_answer_comes_after_the_writes(share: Any):
    """A worker waits for the GPU before it answers, but only if it shares memory."""
    pool = share()
    pool.apply(tasks.make, ("own",), worker=0)
    assert pool.apply(tasks.waited, worker=0) == 0
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.keep, ("x", x), worker=0)
    first, second = (pool.apply(tasks.waited, worker=0) for _ in range(2))
    assert 0 < first < second


@STAND_IN
def test_the_parent_opens_nothing_unasked(pool: Any, monkeypatch: pytest.MonkeyPatch):
    """Receiving GPU tensors does not start CUDA in the parent."""
    mine = pool.apply(tasks.make, ("mine",), worker=0)
    monkeypatch.setattr(cuda, "_identities", pytest.fail)
    results = [mine.cpu(), pool.apply(tasks.same, ([mine, mine],), worker=0)]
    assert type(results[1][0]) is TensorHandle


# -- what is copied ----------------------------------------------------------------------------


def test_copies_of_tensors_with_several_receivers(pool: Any, each_opened: None):
    """With `retries=`, `run_all` and `broadcast`, tensors are copied."""
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.change, (x,), retries=2)
    pool.run_all(tasks.change, x)
    reference = pool.broadcast(x)
    pool.apply(tasks.change, (reference,))
    assert values(x) == [[0.0] * 4]


def test_handles_of_two_workers(pool: Any):
    """If a task has tensors of two workers, one of them is copied."""
    one, two = (pool.apply(tasks.make, (str(i),), worker=i) for i in range(2))
    assert pool.apply(tasks.first_and_second, (one, two), worker=0) == [0.0, 1.0, 2.0, 3.0]
    assert pool.apply(tasks.first_and_second, (two, one), worker=0) == [7.0] * 4
    assert pool.apply(tasks.kept_values, ("1",), worker=1) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.exhaustive
def test_in_a_pool_of_a_worker(share: Any, device: Any):
    """A worker passes on its parent's tensor as a copy, because CUDA cannot export it again."""
    pool = share(P2PPool, 1, is_daemon=False)
    x = tasks.put(torch.zeros(4))
    assert pool.apply(inner_pool, (device, x))[0][0] == [0.0] * 4
    assert values(x) == [[0.0] * 4]


def inner_pool(device: Any, x: Any) -> Any:
    with P2PPool(1, device, is_copy_tensor=False) as pool:
        pool.apply(tasks.change, (x,))
        return pool.apply(tasks.values, (x,))


# -- what is refused ---------------------------------------------------------------------------


def test_opening_the_parents_own_tensor(pool: Any):
    """The parent's tensor comes back as a handle that cannot be opened."""
    x = tasks.put(torch.zeros(4))
    back = pool.apply(tasks.same, (x,), worker=0)
    assert type(back) is TensorHandle
    pool.apply(tasks.change, (back,))
    assert values(x, back) == [[1.0] * 4] * 2
    with pytest.raises(TaskNotPicklable, match=r"cannot be opened: another process made it.*cpu"):
        back.open()


@STAND_IN
def test_a_worker_that_does_not_see_the_gpu(share: Any, monkeypatch: pytest.MonkeyPatch):
    """The error lists the visible GPUs and recommends copies."""
    pool = share()
    pool.apply(tasks.set_variable, ("CUDA_VISIBLE_DEVICES", "two"), worker=1)
    x = tasks.put(torch.zeros(4))
    with pytest.raises(DeviceError, match=r"GPU one cannot be opened: this process sees \['two'\]"):
        pool.apply(tasks.values, (x,), worker=1)
    handle = pool.apply(tasks.make, worker=0)
    # Not the variable, which workers would get with the question that `open` asks.
    monkeypatch.setattr(cuda, "_identities", lambda: ["two"])
    with pytest.raises(DeviceError, match="is_copy_tensor=True"):
        handle.open()


@STAND_IN
def test_gpus_in_another_order(share: Any):
    """A GPU is found by its UUID, not by its number in the receiver."""
    pool = share()
    pool.apply(tasks.set_variable, ("CUDA_VISIBLE_DEVICES", "two,one"), worker=0)
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.change, (x,), worker=0)
    assert values(x) == [[1.0] * 4]


@STAND_IN
def test_ipc_fails(share: Any, monkeypatch: pytest.MonkeyPatch):
    """If CUDA IPC fails, the error has CUDA's reason and a remedy, at the sender and the
    receiver."""
    pool = share()
    x, handle = tasks.put(torch.zeros(4)), pool.apply(tasks.make, worker=0)
    pool.apply(tasks.set_variable, (gpu.FAILS, "peer access is not supported"), worker=0)
    with pytest.raises(DeviceError, match="peer access is not supported.*share_method='cpu'"):
        pool.apply(tasks.values, (x,), worker=0)
    with pytest.raises(TaskNotPicklable, match=r"IPC fails here \(peer access is not supported\)"):
        handle.open()
    monkeypatch.setenv(gpu.FAILS, "operation not permitted")
    with pytest.raises(TaskNotPicklable, match="operation not permitted.*is_copy_tensor=True"):
        pool.apply(tasks.values, (x,))


@STAND_IN
def test_torch_without_identities(pool: Any, monkeypatch: pytest.MonkeyPatch):
    """torch before 2.4 cannot identify GPUs, so sharing is refused."""
    x = tasks.put(torch.zeros(4))
    monkeypatch.setattr(cuda, "identity", lambda ordinal: None)
    with pytest.raises(TaskNotPicklable, match=r"gives GPUs no UUIDs; torch 2\.4 does"):
        pool.apply(tasks.values, (x,))


def test_fork_of_a_process_with_cuda(monkeypatch: pytest.MonkeyPatch):
    """Forking after CUDA has started is refused, because CUDA does not survive a fork."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(OptionError, match="has started the CUDA runtime, which does not survive"):
        Pool(1, context="fork", is_copy_tensor=False)


def test_the_owner_dies(share: Any):
    """Any use of a dead worker's handle raises TensorLost."""
    pool = share()
    mine = pool.apply(tasks.make, worker=0)
    with pytest.raises(WorkerDied):
        pool.apply(tasks.kill_oneself, worker=0)
    for use in (mine.open, mine.cpu, lambda: pool.apply(tasks.change, (mine,), worker=1)):
        with pytest.raises(TensorLost, match="is lost"):
            use()


# -- on a GPU only -----------------------------------------------------------------------------

SIZE = 64 << 20


@pytest.mark.gpu
@ON_GPU
def test_gpu_memory_is_freed(share: Any):
    """When the receiver has dropped a tensor, the sender can reuse the memory."""
    pool = share()
    before = torch.cuda.memory_allocated()
    x = torch.zeros(SIZE // 4, device="cuda")
    pool.apply(tasks.keep, ("x", x), worker=0)
    del x
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() >= before + SIZE
    pool.apply(tasks.forget, worker=0)

    def came_back() -> bool:
        torch.cuda.ipc_collect()
        return torch.cuda.memory_allocated() <= before

    eventually(came_back, "the memory is free")


@pytest.mark.gpu
@ON_GPU
def test_queued_kernels_finish_first(share: Any):
    """Receiver and caller see the results of GPU work queued before."""
    pool = share()
    x = torch.zeros(1000, device="cuda")
    torch.cuda._sleep(50_000_000)
    x.fill_(1)
    assert pool.apply(tasks.values, (x,), worker=0)[0][0][-1] == 1
    pool.apply(tasks.slow_fill, (x, 2), worker=0)
    assert x.max().item() == x.min().item() == 2


@pytest.mark.gpu
@ON_GPU
def test_masked_workers(share: Any):
    """Each worker sees its own GPU as ``cuda:0``; other workers' tensors are copied through the
    host."""
    from xpool.devices import devices

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = share(CtxPool, 2, worker_contexts=devices("cuda")[:2])
    one, two = pool.run_all(tasks.with_context, tasks.make)
    assert one.gpu != two.gpu
    found = pool.apply(tasks.with_context, (tasks.values, one, two))
    assert [on_gpu for _, on_gpu in found] == [True, True]
    assert two.open().get_device() == 1
