"""Share mode for memory of GPUs: who keeps, who opens, what is refused, what deaths do.

Most tests run with a stand-in for a GPU, whose memory is files, and where there is a GPU on that.
"""

from __future__ import annotations

import functools
import gc
import os
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
from xpool._pickling.tensors import cuda, cuda_ipc
from xpool.devices import nvml

from . import gpu_tasks as tasks

pytestmark = pytest.mark.torch

KINDS = ["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)]
STAND_IN = pytest.mark.parametrize("device", KINDS[:1], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The GPU that parent and workers see: what installs it in a worker."""
    if request.param == "gpu":
        torch.ones(1, device="cuda").cpu()  # what CUDA opens stays open: no test is charged with it
        yield os.getpid
        return
    folder = str(tmp_path_factory.mktemp("gpu"))
    gpu.install(folder)
    yield functools.partial(gpu.install, folder)
    gpu.uninstall()


@pytest.fixture
def share(device: Any, make_pool: Callable[..., Any]) -> Callable[..., Any]:
    """Make pools in share mode whose workers have the GPU."""
    return lambda kind=P2PPool, count=2, **more: make_pool(
        kind, count, device, **{"is_copy_tensor": False, **more}
    )


@pytest.fixture(autouse=True)
def all_given_back(device: Any) -> Iterator[None]:
    """Nothing is exported or imported after a test."""
    yield
    gc.collect()
    eventually(lambda: not cuda_ipc.collect(everything=True), "cuda_ipc given back")
    assert not cuda_ipc._imported


def values(*tensors: Any) -> list[Any]:
    return [x.cpu().tolist() for x in tensors]


# -- writes are seen ---------------------------------------------------------------------------


def test_from_the_parent(share: Any):
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


def test_from_a_worker(share: Any):
    """The parent opens a handle when it is asked to, and then sees the worker's writes."""
    pool = share()
    handle = pool.apply(tasks.make, ("mine",), worker=1)
    assert type(handle) is TensorHandle
    assert handle.gpu == cuda.calls.identity(0)
    opened = handle.open()
    assert opened.is_cuda
    opened.add_(1)
    assert pool.apply(tasks.kept_values, ("mine",), worker=1) == [1.0, 2.0, 3.0, 4.0]
    pool.apply(tasks.change, (handle,))
    assert values(opened, handle) == [[2.0, 3.0, 4.0, 5.0]] * 2


@pytest.mark.exhaustive
def test_from_worker_to_worker(share: Any):
    """Another worker of that GPU gets the tensor itself, on a handle."""
    pool = share()
    handle = pool.apply(tasks.make, ("mine",), worker=0)
    pool.apply(tasks.keep, ("theirs", handle), worker=1)
    pool.apply(tasks.change_kept, ("theirs",), worker=1)
    assert pool.apply(tasks.kept_values, ("mine",), worker=0) == [1.0, 2.0, 3.0, 4.0]
    pool.apply(tasks.change_kept, ("mine",), worker=0)
    assert pool.apply(tasks.kept_values, ("theirs",), worker=1) == [2.0, 3.0, 4.0, 5.0]
    assert pool.apply(tasks.counts, worker=1)[1:] == (0, 1)


@pytest.mark.exhaustive
def test_handles_of_two_workers(share: Any):
    """Both tensors are where the task runs, neither is a copy."""
    pool = share()
    one, two = (pool.apply(tasks.make, (str(i),), worker=i) for i in range(2))
    assert pool.apply(tasks.first_and_second, (one, two)) == [0.0, 1.0, 2.0, 3.0]
    assert pool.apply(tasks.first_and_second, (two, one)) == [7.0] * 4
    assert pool.apply(tasks.kept_values, ("1",), worker=1) == [7.0] * 4


@pytest.mark.exhaustive
def test_many_hops(share: Any):
    """What was received is sent on, any number of times: it is the one memory for all."""
    pool = share()
    mine = pool.apply(tasks.make, ("mine",), worker=0)
    theirs = pool.apply(tasks.same, (mine,), worker=1)
    assert (mine.worker, theirs.worker) == (0, 1)
    pool.apply(tasks.change, (theirs,), worker=0)
    assert pool.apply(tasks.kept_values, ("mine",), worker=0) == [1.0, 2.0, 3.0, 4.0]
    opened = theirs.open()
    for worker in (0, 1):
        pool.apply(tasks.change, (opened,), worker=worker)
    assert values(opened, mine, theirs) == [[3.0, 4.0, 5.0, 6.0]] * 3
    again = pool.apply(tasks.same, (opened,), worker=1)
    pool.apply(tasks.change, (again,))
    assert pool.apply(tasks.kept_values, ("mine",), worker=0) == [4.0, 5.0, 6.0, 7.0]


def test_back_to_the_parent(share: Any):
    """The parent's tensor comes back as that memory, not as a handle, and is never opened."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    for worker in (0, 1, 0):
        back = pool.apply(tasks.same, (x,), worker=worker)
        assert type(back) is not TensorHandle
        assert back.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    back.add_(1)
    assert values(x) == [[1.0] * 4]


def test_views_and_aliases(share: Any):
    """Views of one storage are views of one storage there, in place and geometry."""
    pool = share()
    x = tasks.put(torch.arange(12.0).reshape(3, 4))
    row, turned = (tasks.view(x, of) for of in (lambda x: x[1], lambda x: x.t()))
    assert pool.apply(tasks.values, (row, turned), worker=0) == [
        ([4.0, 5.0, 6.0, 7.0], True),
        (torch.arange(12.0).reshape(3, 4).t().tolist(), True),
    ]
    assert pool.apply(tasks.first_and_second, (row, turned), worker=1)[0] == [0.0, 7.0, 8.0]
    assert values(x)[0][1] == [7.0] * 4


def test_what_a_tensor_is_besides(share: Any):
    """Parameters stay Parameters, with their attributes, from everywhere."""
    pool = share()
    model = tasks.make_model()
    expected = (type(model.weight).__name__, True, "weights", [[5.0] * 3] * 2)
    assert pool.apply(tasks.model_facts, (model,), worker=0) == expected
    assert model.weight.detach().cpu().tolist() == expected[3]
    theirs = pool.apply(tasks.make_model, worker=0)
    assert type(theirs.weight) is TensorHandle
    opened = theirs.weight.open()
    assert isinstance(opened, torch.nn.Parameter) and opened.requires_grad
    assert opened.label == "weights"


def test_every_verb(share: Any):
    """Lent memory goes with functions, chunks, retries and calls of all workers."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    expected = [([0.0] * 4, True)]
    assert pool.map(tasks.values, [x] * 5, 2) == [expected] * 5
    assert list(pool.imap(tasks.values, [x] * 5)) == [expected] * 5
    assert pool.map(functools.partial(tasks.first_and_second, x), [x], 1) == [[7.0] * 4]
    assert pool.apply(tasks.values, (x,), retries=2) == [([7.0] * 4, True)]
    assert pool.run_all(tasks.values, x) == [[([7.0] * 4, True)]] * 2


def test_share_method_cuda(share: Any):
    """Then memory of GPUs is shared and that of the host copied."""
    pool = share(share_method="cuda")
    x, host = tasks.put(torch.zeros(4)), torch.zeros(4)
    assert pool.apply(tasks.first_and_second, (x, host), worker=0) == [0.0] * 4
    pool.apply(tasks.change, (host,))
    assert values(x, host) == [[7.0] * 4, [0.0] * 4]


def test_a_raw_storage(share: Any):
    """A storage goes as its tensors do; a worker's own comes back as a copy."""
    if type(cuda.calls) is gpu.Calls:
        pytest.skip("the stand-in's storages are the host's")
    pool = share()
    x = tasks.put(torch.zeros(4))
    assert pool.apply(tasks.raw_storage, (x.untyped_storage(),)) == 16
    assert pool.apply(tasks.same, (x.untyped_storage(),)).data_ptr() == x.data_ptr()


@STAND_IN
def test_exported_once(share: Any):
    """However often it is sent: torch keeps a wrapper for each export as long as the storage."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    for _ in range(5):
        pool.apply(tasks.change, (x,))
        cuda_ipc.collect(everything=True)  # it may be exported anew
    assert x.untyped_storage().exports == 1
    assert values(x) == [[5.0] * 4]


@STAND_IN
def test_an_answer_comes_after_the_writes(share: Any):
    """Both sides wait for the GPU before memory changes hands; where none is shared, nobody."""
    pool = share()
    pool.apply(tasks.make, ("own",), worker=0)
    assert pool.apply(tasks.waited, worker=0) == 0
    x = tasks.put(torch.zeros(4))
    before = cuda.calls.waited  # type: ignore[attr-defined]
    pool.apply(tasks.keep, ("x", x), worker=0)
    assert cuda.calls.waited > before  # type: ignore[attr-defined]
    first, second = (pool.apply(tasks.waited, worker=0) for _ in range(2))
    assert 0 < first < second


@STAND_IN
def test_the_parent_opens_nothing_unasked(share: Any, monkeypatch: pytest.MonkeyPatch):
    """Whatever comes from the workers, CUDA is not started here."""
    pool = share()
    mine = pool.apply(tasks.make, ("mine",), worker=0)
    opened: list[int] = []
    monkeypatch.setattr(gpu.Calls, "identities", lambda calls: opened.append(1) or [])
    theirs = pool.apply(tasks.same, (mine,), worker=1)
    results = [theirs, mine.cpu(), pool.apply(tasks.same, ([theirs, mine],), worker=0)]
    assert type(results[0]) is TensorHandle
    assert not opened


# -- letting go --------------------------------------------------------------------------------


def test_the_lender_keeps(share: Any):
    """What the parent has dropped lives on for those who have it, and goes with the last."""
    pool = share()
    x = tasks.put(torch.ones(4))
    for worker in (0, 1):
        pool.apply(tasks.keep, ("x", x), worker=worker)
    del x
    gc.collect()
    assert cuda_ipc.collect(everything=True)
    assert pool.apply(tasks.kept_values, ("x",), worker=0) == [1.0] * 4
    pool.apply(tasks.forget, worker=0)
    assert cuda_ipc.collect(everything=True)
    pool.apply(tasks.forget, worker=1)
    eventually(lambda: not cuda_ipc.collect(everything=True), "taken back")


def test_nothing_waits_for_a_sweep(share: Any):
    """When a call has been answered, the memory of its arguments is the exporter's own again."""
    pool = share()
    for _ in range(3):
        pool.apply(tasks.values, (tasks.put(torch.ones(4)),))
        assert not cuda_ipc._exported
    results = [pool.apply_async(tasks.values, (tasks.put(torch.ones(4)),)) for _ in range(10)]
    for result in results:
        result.get()
    pool.map(tasks.values, [tasks.put(torch.ones(4)) for _ in range(10)])
    eventually(lambda: not cuda_ipc._exported, "swept by the engine")


def test_a_worker_keeps(share: Any):
    """It exports as long as a handle or a borrower is there, and no longer."""
    pool = share()
    handle = pool.apply(tasks.make, worker=0)
    pool.apply(tasks.keep, ("theirs", handle), worker=1)
    opened = handle.open()
    del handle
    gc.collect()
    assert pool.apply(tasks.counts, worker=0)[1] == 1
    pool.apply(tasks.forget, worker=1)
    assert pool.apply(tasks.counts, worker=0)[1] == 1
    assert values(opened) == [[0.0, 1.0, 2.0, 3.0]]
    del opened
    eventually(lambda: pool.apply(tasks.counts, worker=0) == (0, 0, 0), "let go")


@pytest.mark.exhaustive
def test_a_borrower_dies(share: Any):
    """What it had is given back, by parent and worker: nobody has to count."""
    pool = share()
    x = tasks.put(torch.ones(4))
    handle = pool.apply(tasks.make, worker=0)
    pool.apply(tasks.keep, ("x", x), worker=1)
    pool.apply(tasks.keep, ("theirs", handle), worker=1)
    del handle
    gc.collect()
    assert pool.apply(tasks.counts, worker=0)[1] == 1
    with pytest.raises(WorkerDied, match="SIGKILL"):
        pool.apply(tasks.kill_oneself, worker=1)
    eventually(lambda: pool.apply(tasks.counts, worker=0) == (0, 0, 0), "the worker's")
    eventually(lambda: not cuda_ipc.collect(everything=True), "the parent's")
    pool.apply(tasks.change, (x,), worker=1)  # by who came in its place
    assert values(x) == [[2.0] * 4]


def test_a_task_that_is_never_run(share: Any):
    """A message that nobody has opened exports nothing after the pool's end."""
    pool = share(Pool, 1)
    x = tasks.put(torch.ones(4))
    pool.apply_async(tasks.kill_oneself)
    waiting = [pool.apply_async(tasks.values, (x,)) for _ in range(3)]
    pool.terminate()
    pool.join()
    del waiting


@pytest.mark.parametrize("end", ["close", "terminate"])
def test_the_pool_ends(share: Any, end: str):
    """All is given back, at once."""
    pool = share()
    x = tasks.put(torch.ones(4))
    pool.apply(tasks.keep, ("x", x), worker=0)
    assert cuda_ipc.collect(everything=True)
    getattr(pool, end)()
    pool.join()
    assert not cuda_ipc._exported
    assert values(x) == [[1.0] * 4]


def test_the_lender_dies(share: Any):
    """A handle says so, and so does memory that a borrower sends on."""
    pool = share(P2PPool, 3)
    mine = pool.apply(tasks.make, worker=0)
    theirs = pool.apply(tasks.same, (mine,), worker=1)
    with pytest.raises(WorkerDied):
        pool.apply(tasks.kill_oneself, worker=0)
    for use in (mine.open, mine.cpu, lambda: pool.apply(tasks.change, (mine,), worker=2)):
        with pytest.raises(TensorLost, match="is lost"):
            use()
    with pytest.raises(DeviceError, match="16 bytes .* are lost: that process has ended"):
        pool.apply(tasks.change, (theirs,), worker=2)
    with pytest.raises(DeviceError, match="are lost"):
        theirs.open()
    assert pool.apply(tasks.make, worker=0).cpu().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_many_at_once(share: Any):
    """Hundreds of tensors exported and imported, and given back: some are looked at at a time."""
    pool = share(Pool, 1)
    every = [tasks.put(torch.full((2,), float(i))) for i in range(200)]
    assert pool.apply(tasks.values, every) == [([float(i)] * 2, True) for i in range(200)]
    for _ in range(3):
        pool.apply(tasks.forget)
    assert not cuda_ipc._exported


# -- who sees what -----------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees two GPUs, its tensors are on the first; NVML knows both."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-one,GPU-two")
    monkeypatch.setattr(nvml, "find_gpus", lambda: (nvml.Gpu("GPU-one"), nvml.Gpu("GPU-two")))


def bound(share: Any, *masks: str) -> Any:
    contexts = [tasks.Bound(mask) for mask in masks]
    return share(CtxPool, len(contexts), worker_contexts=contexts)


def call(pool: Any, func: Any, *args: Any) -> Any:
    return pool.apply(tasks.with_context, (func, *args))


@STAND_IN
def test_a_task_goes_to_who_sees_its_gpu(share: Any, two_gpus: None):
    """By the GPU's identity: it has other numbers in the workers."""
    pool = bound(share, "GPU-two", "GPU-one", "GPU-two", "GPU-one")
    x = tasks.put(torch.zeros(4))
    pids = pool.run_all(tasks.with_context, tasks.pid)
    assert {call(pool, tasks.pid, x) for _ in range(8)} == {pids[1], pids[3]}
    call(pool, tasks.change, x)
    assert values(x) == [[1.0] * 4]


@pytest.mark.exhaustive
@STAND_IN
def test_workers_of_other_gpus_get_copies(share: Any, two_gpus: None):
    """Through the host's memory: they cannot open each other's."""
    pool = bound(share, "GPU-one", "GPU-two")
    one, two = pool.run_all(tasks.with_context, tasks.make)
    assert (one.gpu, two.gpu) == ("one", "two")
    found = call(pool, tasks.values, one, two)
    assert [x for x, _ in found] == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert [on_gpu for _, on_gpu in found] in ([True, False], [False, True])
    assert values(one, two) == [[0.0, 1.0, 2.0, 3.0]] * 2


@STAND_IN
def test_no_worker_sees_it(share: Any, two_gpus: None, monkeypatch: pytest.MonkeyPatch):
    """A tensor that cannot be shared with whom it is for is refused with what would do."""
    pool = bound(share, "GPU-two", "GPU-two")
    x = tasks.put(torch.zeros(4))
    words = (
        r"A tensor of shape \(4,\), torch.float32, on cuda:0 cannot be shared: no worker sees its "
        r"GPU \(one\).*is_copy_tensor=True, or share_method='cpu'"
    )
    with pytest.raises(TaskNotPicklable, match=words):
        call(pool, tasks.values, x)
    copies = share(P2PPool, 1, share_method="cpu")
    assert copies.apply(tasks.values, (x,)) == [([0.0] * 4, False)]


@STAND_IN
def test_the_worker_asked_for_does_not_see_it(share: Any, monkeypatch: pytest.MonkeyPatch):
    """Then it is refused, though another one would; and so are two that no one sees both of."""
    from xpool._pools.packing import Packer

    pool = share()
    x = tasks.put(torch.zeros(4))
    packer: Packer = pool._packer
    monkeypatch.setattr(packer._sight, "_known", [frozenset({"one"}), frozenset({"two"})])
    with pytest.raises(TaskNotPicklable, match=r"worker 1 does not see its GPU \(one\)"):
        pool.apply(tasks.values, (x,), worker=1)
    with pytest.raises(TaskNotPicklable, match="worker 1 does not see"):
        pool.run_all(tasks.values, x)
    with pytest.raises(TaskNotPicklable, match="worker 0 does not see its GPU"):
        y = tasks.put(torch.zeros(4))
        identity = iter(["one", "two"] * 5)
        monkeypatch.setattr(gpu.Calls, "identity", lambda calls, ordinal: next(identity))
        z = tasks.put(torch.zeros(4))
        pool.apply(tasks.values, (y, z))


@STAND_IN
def test_a_mask_changed_in_the_worker(share: Any, device: Any):
    """What the parent could not know the worker says, with what to do."""
    pool = share(P2PPool, 1)
    pool.apply(tasks.set_variable, ("CUDA_VISIBLE_DEVICES", "two"))
    x = tasks.put(torch.zeros(4))
    with pytest.raises(DeviceError, match=r"sees \['two'\].*in an initializer"):
        pool.apply(tasks.values, (x,))


# -- where it cannot be ------------------------------------------------------------------------


@STAND_IN
def test_two_versions_of_torch(share: Any, monkeypatch: pytest.MonkeyPatch):
    """The form of a handle is a version's own: who has another one refuses, and says what to do."""
    old = tasks.Bound(XPOOL_TEST_TORCH="2.12.1")
    pool = share(CtxPool, 1, worker_contexts=[old])
    x = tasks.put(torch.zeros(4))
    with pytest.raises(DeviceError, match=r"has torch 2\.13\.0, this one 2\.12\.1\. Start both"):
        call(pool, tasks.values, x)
    handle = call(pool, tasks.make)
    with pytest.raises(DeviceError, match=r"has torch 2\.12\.1, this one 2\.13\.0"):
        handle.open()
    assert handle.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]


@STAND_IN
def test_no_ipc_here(share: Any, monkeypatch: pytest.MonkeyPatch):
    """Where CUDA refuses, on either side, its reason is told, and the way out."""
    pool = share()
    x = tasks.put(torch.zeros(4))
    monkeypatch.setattr(cuda.calls, "fails", "operation not permitted")
    words = r"on cuda:0 cannot be shared: CUDA's IPC .*\(operation not permitted\).*is_copy_tensor"
    with pytest.raises(TaskNotPicklable, match=words):
        pool.apply(tasks.values, (x,))
    monkeypatch.setattr(cuda.calls, "fails", None)
    handle = pool.apply(tasks.make, worker=0)
    for worker in (0, 1):
        pool.apply(tasks.fail_to_share, ("not supported",), worker=worker)
    with pytest.raises(DeviceError, match=r"cannot be opened: not supported\. Copies can always"):
        pool.apply(tasks.values, (x,), worker=1)
    for use in (handle.open, lambda: pool.apply(tasks.values, (handle,), worker=1)):
        with pytest.raises(TaskNotPicklable, match=r"cannot be shared: .*\(not supported\)"):
            use()
    assert handle.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]


@STAND_IN
def test_torch_without_identities(share: Any, monkeypatch: pytest.MonkeyPatch):
    """Before torch 2.4 handles stay what they were, and sharing is refused."""

    def none(calls: Any, ordinal: int) -> str:
        raise AttributeError("uuid")

    x = tasks.put(torch.zeros(4))
    monkeypatch.setattr(gpu.Calls, "identity", none)
    pool = share(P2PPool, 1, context="fork")
    with pytest.raises(TaskNotPicklable, match=r"torch 2\.13\.0 does not tell GPUs apart; 2\.4 do"):
        pool.apply(tasks.values, (x,))
    handle = pool.apply(tasks.make)
    assert handle.gpu is None
    with pytest.raises(OptionError, match=r"use handle\.cpu\(\)"):
        handle.open()


@STAND_IN
def test_no_memory_for_a_token(share: Any, monkeypatch: pytest.MonkeyPatch):
    """A message says what to do when there is no shared memory at all."""
    from xpool._memory.arena import Arena

    pool = share(P2PPool, 1)
    x = tasks.put(torch.zeros(4))
    monkeypatch.setattr(Arena, "lease", lambda *_: None)
    with pytest.raises(TaskNotPicklable, match="no shared memory is left for what stands for it"):
        pool.apply(tasks.values, (x,))


def test_fork_of_a_process_with_cuda(monkeypatch: pytest.MonkeyPatch):
    """CUDA does not survive it, so such workers are refused with that reason."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(OptionError, match="has started the CUDA runtime, which does not survive"):
        Pool(1, context="fork", is_copy_tensor=False)


@pytest.mark.exhaustive
@STAND_IN
def test_in_a_pool_of_a_worker(share: Any, device: Any):
    """What a worker has from its parent is not for the workers of a pool of its own."""
    pool = share(P2PPool, 1, is_daemon=False)
    x = tasks.put(torch.zeros(4))
    with pytest.raises(TaskNotPicklable, match=r"those of another pool.*Send a clone\(\)"):
        pool.apply(inner_pool, (device, x))


def inner_pool(device: Any, x: Any) -> Any:
    with P2PPool(1, device, is_copy_tensor=False) as pool:
        return pool.apply(tasks.values, (x,))


@pytest.mark.exhaustive
@STAND_IN
def test_a_child_of_this_process(share: Any):
    """A process that the program forks exports nothing of its parent's, nor takes it back."""
    pool = share(P2PPool, 1)
    x = tasks.put(torch.zeros(4))
    pool.apply(tasks.keep, ("x", x))
    child = os.fork()
    if not child:
        os._exit(0 if not cuda_ipc.collect(everything=True) and not cuda_ipc._imported else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cuda_ipc._exported
    pool.apply(tasks.change_kept, ("x",))
    assert values(x) == [[1.0] * 4]


# -- on a GPU only -----------------------------------------------------------------------------

SIZE = 64 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("device", KINDS[1:], indirect=True)
def test_memory_of_a_gpu_comes_back(share: Any):
    """After a borrower's death, and after one that let go, the exporter can use it again."""
    pool = share()
    before = torch.cuda.memory_allocated()
    for end in (lambda: pool.apply(tasks.forget, worker=0), lambda: killed(pool, 0)):
        x = torch.zeros(SIZE // 4, device="cuda")
        pool.apply(tasks.keep, ("x", x), worker=0)
        del x
        assert cuda_ipc.collect(everything=True)
        assert torch.cuda.memory_allocated() >= before + SIZE
        end()
        eventually(lambda: not cuda_ipc.collect(everything=True), "taken back")
        assert torch.cuda.memory_allocated() <= before


def killed(pool: Any, worker: int) -> None:
    with pytest.raises(WorkerDied):
        pool.apply(tasks.kill_oneself, worker=worker)


@pytest.mark.gpu
@pytest.mark.parametrize("device", KINDS[1:], indirect=True)
def test_kernels_still_under_way(share: Any):
    """Who sends, and who answers, has waited for what the GPU was asked."""
    pool = share()
    x = torch.zeros(1000, device="cuda")
    torch.cuda._sleep(50_000_000)
    x.fill_(1)
    assert pool.apply(tasks.values, (x,), worker=0)[0][0][-1] == 1
    pool.apply(tasks.slow_fill, (x, 2), worker=0)
    assert x.max().item() == x.min().item() == 2
    handle = pool.apply(tasks.make, ("mine", 1000), worker=0)
    pool.apply(tasks.slow_fill, (handle, 3), worker=0)
    assert pool.apply(tasks.values, (handle,), worker=1)[0][0][-1] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("device", KINDS[1:], indirect=True)
def test_masked_workers(share: Any):
    """Each worker sees its own GPU as ``cuda:0``; the others' tensors come by the host."""
    from xpool.devices import devices

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU; it takes two")
    pool = share(CtxPool, 2, worker_contexts=devices("cuda")[:2])
    one, two = pool.run_all(tasks.with_context, tasks.make)
    assert one.gpu != two.gpu
    assert [on_gpu for _, on_gpu in call(pool, tasks.values, one, two)] == [True, True]
    for i in range(2):
        x = torch.zeros(4, device=f"cuda:{i}")
        call(pool, tasks.change, x)
        assert x.tolist() == [1.0] * 4
