"""Share mode for memory of GPUs: what is shared, what is copied, what is refused.

torch shares the memory; most tests run with a stand-in for that, whose memory is files, and where
there is a GPU on that.
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
from xpool._pickling.tensors import cuda

from . import gpu_tasks as tasks

pytestmark = pytest.mark.torch

KINDS = ["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)]
STAND_IN = pytest.mark.parametrize("device", KINDS[:1], indirect=True)
ON_GPU = pytest.mark.parametrize("device", KINDS[1:], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The GPU that parent and workers see: what installs it in a worker."""
    if request.param == "gpu":
        torch.ones(1, device="cuda").cpu()  # what CUDA opens stays open: no test is charged with it
        yield os.getpid
        return
    folder = str(tmp_path_factory.mktemp("gpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(gpu.FOLDER, folder)
        gpu.install(folder)
        yield functools.partial(gpu.install, folder)
        gpu.uninstall()


@pytest.fixture
def share(device: Any, make_pool: Callable[..., Any]) -> Callable[..., Any]:
    """Make pools in share mode whose workers have the GPU."""
    return lambda kind=P2PPool, count=2, **more: make_pool(
        kind, count, device, **{"is_copy_tensor": False, **more}
    )


@pytest.fixture
def each_opened(device: Any) -> Iterator[None]:
    """The receivers open each handle that is written, once: torch would keep its memory else."""
    before = set(gpu.unopened()) if gpu.FOLDER in os.environ else set()
    yield
    assert gpu.FOLDER not in os.environ or set(gpu.unopened()) <= before


def values(*tensors: Any) -> list[Any]:
    return [x.cpu().tolist() for x in tensors]


# -- writes are seen ---------------------------------------------------------------------------


def test_from_the_parent(share: Any, each_opened: None):
    """A tensor of the parent's is seen by its workers, and each sees the others' writes."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.keep, ("x", x), worker=0)
    pool.apply(tasks.change, (x,), worker=1)
    assert pool.apply(tasks.kept_values, ("x",), worker=0) == [1.0] * 4
    x.add_(1)
    assert pool.apply(tasks.values, (x,), worker=1) == [([2.0] * 4, True)]
    assert pool.apply(tasks.kept_values, ("x",), worker=0) == [2.0] * 4
    pool.apply(tasks.change_kept, ("x",), worker=0)
    assert values(x) == [[3.0] * 4]


def test_from_a_worker(share: Any, each_opened: None):
    """The parent opens a handle when it is asked to, and then sees the worker's writes."""
    pool = share()
    handle = pool.apply(tasks.make, ("mine",), worker=1)
    assert type(handle) is TensorHandle
    assert handle.gpu == cuda.identity(0)
    opened = handle.open()
    assert opened.is_cuda
    opened.add_(1)
    assert pool.apply(tasks.kept_values, ("mine",), worker=1) == [1.0, 2.0, 3.0, 4.0]
    pool.apply(tasks.change, (handle,))
    assert values(opened, handle) == [[2.0, 3.0, 4.0, 5.0]] * 2


def test_views_and_aliases(share: Any, each_opened: None):
    """Views of one storage are views of one memory there, in place and geometry."""
    pool = share()
    x = tasks.put(torch.arange(12.0).reshape(3, 4))
    row, turned = (tasks.view(x, of) for of in (lambda x: x[1], lambda x: x.t()))
    assert pool.apply(tasks.values, (row, turned), worker=0) == [
        ([4.0, 5.0, 6.0, 7.0], True),
        (torch.arange(12.0).reshape(3, 4).t().tolist(), True),
    ]
    assert pool.apply(tasks.first_and_second, (row, turned), worker=1)[0] == [0.0, 7.0, 8.0]
    assert values(x)[0][1] == [7.0] * 4


def test_what_a_tensor_is_besides(share: Any, each_opened: None):
    """Parameters stay Parameters, with their attributes, on their way to a worker."""
    pool = share()
    model = tasks.make_model()
    expected = (type(model.weight).__name__, True, "weights", [[5.0] * 3] * 2)
    assert pool.apply(tasks.model_facts, (model,), worker=0) == expected
    assert model.weight.detach().cpu().tolist() == expected[3]
    theirs = pool.apply(tasks.make_model, worker=0)
    assert type(theirs.weight) is TensorHandle


def test_every_verb(share: Any, each_opened: None):
    """Shared memory goes with the items of all verbs; each handle is opened once."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    pool.map(tasks.change, [x] * 5, 2)
    assert list(pool.imap(tasks.values, [x] * 5)) == [[([5.0] * 4, True)]] * 5
    assert pool.apply_async(tasks.values, (x,)).get() == [([5.0] * 4, True)]


def test_share_method_cuda(share: Any, each_opened: None):
    """Then memory of GPUs is shared and that of the host copied."""
    pool = share(share_method="cuda")
    x, host = tasks.put(torch.zeros(4)), torch.zeros(4)
    assert pool.apply(tasks.first_and_second, (x, host), worker=0) == [0.0] * 4
    pool.apply(tasks.change, (host,))
    assert values(x, host) == [[7.0] * 4, [0.0] * 4]


@STAND_IN
def test_beside_what_only_dill_can_pickle(share: Any, each_opened: None):
    """A message that is pickled by two picklers, the first in vain, has one handle."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.keep, ("x", [x, types.MappingProxyType({})]), worker=0)
    pool.apply(tasks.first_and_second, (x, torch.ones(2)))
    assert values(x) == [[7.0] * 4]


@STAND_IN
def test_an_answer_comes_after_the_writes(share: Any):
    """A worker that shares memory waits for the GPU before it answers; others do not."""
    pool = share()
    pool.apply(tasks.make, ("own",), worker=0)
    assert pool.apply(tasks.waited, worker=0) == 0
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.keep, ("x", x), worker=0)
    first, second = (pool.apply(tasks.waited, worker=0) for _ in range(2))
    assert 0 < first < second


@STAND_IN
def test_the_parent_opens_nothing_unasked(share: Any, monkeypatch: pytest.MonkeyPatch):
    """Whatever comes from the workers, CUDA is not started here."""
    pool = share()
    mine = pool.apply(tasks.make, ("mine",), worker=0)
    monkeypatch.setattr(cuda, "_identities", pytest.fail)
    results = [mine.cpu(), pool.apply(tasks.same, ([mine, mine],), worker=0)]
    assert type(results[1][0]) is TensorHandle


# -- what is copied ----------------------------------------------------------------------------


def test_what_may_be_opened_several_times(share: Any, each_opened: None):
    """With `retries=`, in `run_all` and in what every worker gets, tensors are copies."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.change, (x,), retries=2)
    pool.run_all(tasks.change, x)
    reference = pool.broadcast(x)
    pool.apply(tasks.change, (reference,))
    assert values(x) == [[0.0] * 4]


def test_handles_of_two_workers(share: Any):
    """The tensor of the other worker is a copy."""
    pool = share()
    one, two = (pool.apply(tasks.make, (str(i),), worker=i) for i in range(2))
    assert pool.apply(tasks.first_and_second, (one, two), worker=0) == [0.0, 1.0, 2.0, 3.0]
    assert pool.apply(tasks.first_and_second, (two, one), worker=0) == [7.0] * 4
    assert pool.apply(tasks.kept_values, ("1",), worker=1) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.exhaustive
def test_in_a_pool_of_a_worker(share: Any, device: Any):
    """A worker passes on a copy of what it has from its parent: CUDA cannot export it again."""
    pool = share(P2PPool, 1, is_daemon=False)
    x = tasks.put(torch.zeros(4))
    assert pool.apply(inner_pool, (device, x))[0][0] == [0.0] * 4
    assert values(x) == [[0.0] * 4]


def inner_pool(device: Any, x: Any) -> Any:
    with P2PPool(1, device, is_copy_tensor=False) as pool:
        pool.apply(tasks.change, (x,))
        return pool.apply(tasks.values, (x,))


# -- what is refused ---------------------------------------------------------------------------


def test_open_what_a_worker_received(share: Any):
    """The parent's own tensor comes back as a handle, which cannot be opened."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    back = pool.apply(tasks.same, (x,), worker=0)
    assert type(back) is TensorHandle
    pool.apply(tasks.change, (back,))
    assert values(x, back) == [[1.0] * 4] * 2
    with pytest.raises(TaskNotPicklable, match=r"cannot be opened: another process made it.*cpu"):
        back.open()


@STAND_IN
def test_a_worker_that_does_not_see_the_gpu(share: Any, monkeypatch: pytest.MonkeyPatch):
    """The worker says which GPUs it sees, and how copies are sent."""
    pool = share()
    pool.apply(tasks.set_variable, ("CUDA_VISIBLE_DEVICES", "two"), worker=1)
    x = tasks.put(torch.zeros(4))
    with pytest.raises(DeviceError, match=r"GPU one cannot be opened: this process sees \['two'\]"):
        pool.apply(tasks.values, (x,), worker=1)
    handle = pool.apply(tasks.make, worker=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "two")
    with pytest.raises(DeviceError, match="is_copy_tensor=True"):
        handle.open()


@STAND_IN
def test_gpus_in_another_order(share: Any):
    """A GPU is found by its UUID, whatever its number is in the receiver."""
    pool = share()
    pool.apply(tasks.set_variable, ("CUDA_VISIBLE_DEVICES", "two,one"), worker=0)
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.change, (x,), worker=0)
    assert values(x) == [[1.0] * 4]


@STAND_IN
def test_no_ipc_here(share: Any, monkeypatch: pytest.MonkeyPatch):
    """CUDA's reason comes with what to do, for the sender and for the receiver."""
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
def test_torch_without_identities(share: Any, monkeypatch: pytest.MonkeyPatch):
    """Before 2.4, torch does not tell which GPU is which."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    monkeypatch.setattr(cuda, "identity", lambda ordinal: None)
    with pytest.raises(TaskNotPicklable, match=r"does not tell GPUs apart; 2\.4 does"):
        pool.apply(tasks.values, (x,))


def test_fork_of_a_process_with_cuda(monkeypatch: pytest.MonkeyPatch):
    """CUDA does not survive it, so such workers are refused with that reason."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(OptionError, match="has started the CUDA runtime, which does not survive"):
        Pool(1, context="fork", is_copy_tensor=False)


def test_the_owner_dies(share: Any):
    """A handle says so."""
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
def test_memory_of_a_gpu_comes_back(share: Any):
    """After the receiver has let go, the sender can use the memory again."""
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

    eventually(came_back, "the memory")


@pytest.mark.gpu
@ON_GPU
def test_kernels_still_under_way(share: Any):
    """A receiver, and the caller of a task, see what the GPU was asked before."""
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
    """Each worker sees its own GPU as ``cuda:0``; the others' tensors come by the host."""
    from xpool.devices import devices

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU; it takes two")
    pool = share(CtxPool, 2, worker_contexts=devices("cuda")[:2])
    one, two = pool.run_all(tasks.with_context, tasks.make)
    assert one.gpu != two.gpu
    found = pool.apply(tasks.with_context, (tasks.values, one, two))
    assert [on_gpu for _, on_gpu in found] == [True, True]
    assert two.open().get_device() == 1
