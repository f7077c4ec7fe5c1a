"""A worker for each device of a process, with torch_xla's CPU client: run by ``make test-xla``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import work
from support.waiting import Gate, Mailbox

from xpool import CtxPool, TaskTimeout, WorkerDied, current_worker
from xpool._engine import monitor
from xpool.devices import DeviceContext, devices

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("cpu_client")]


def start(workers: int, per_process: int, **options: Any) -> CtxPool:
    cache = options.pop("cache", None)
    contexts = devices("xla", workers, per_process=per_process, cache=cache)
    return CtxPool(worker_contexts=contexts, **options)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def four(cache: Path) -> Iterator[CtxPool]:
    """Two processes with two devices each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        pool = start(4, 2, cache=cache)
        pool.run_all(facts)
        yield pool
        pool.close()
        pool.join()


def facts(context: DeviceContext) -> dict[str, Any]:
    """Return what torch_xla reports in this worker."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as runtime

    x = torch.ones(2, device=context.device)
    return {
        "worker": (context.ordinal, current_worker().index, context.core),
        "pid": os.getpid(),
        "devices": {
            str(x.device),
            str(context.device),
            str(current_worker().device),
            str(torch_xla.device()),
            str(torch.ones(2, device="xla").device),
            *map(str, context.devices),
        },
        "of_process": xm.get_xla_supported_devices(),
        "world": runtime.world_size(),
    }


def test_each_worker_has_a_device_of_its_process(four: CtxPool):
    """In each worker's thread ``"xla"`` is its own device, in a topology of one."""
    found = four.run_all(facts)
    assert [f["worker"] for f in found] == [(0, 0, 0), (1, 1, 1), (2, 2, 0), (3, 3, 1)]
    assert [f["devices"] for f in found] == [{"xla:0"}, {"xla:1"}] * 2
    assert {tuple(f["of_process"]) for f in found} == {("xla:0", "xla:1")}
    assert {f["world"] for f in found} == {1}
    pids = [f["pid"] for f in found]
    assert pids[0] == pids[1] != pids[2] == pids[3]


def train(context: DeviceContext, seed: int, steps: int) -> tuple[str, list[float], list[float]]:
    """Train a small model on the worker's device and on the CPU; return the device and both
    losses."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    losses = []
    for device in (context.device, torch.device("cpu")):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.rand(16, 4, generator=generator).to(device) for _ in range(2))
        weight = torch.rand(4, 4, generator=generator).to(device).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        values = []
        for _ in range(steps):
            loss = (x @ weight - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if device.type == "xla":
                xm.optimizer_step(optimizer)
                torch_xla.sync()
            else:
                optimizer.step()
            values.append(loss.item())
        losses.append(values)
    return str(context.device), losses[0], losses[1]


def test_concurrent_training(four: CtxPool):
    """Graphs of several threads are compiled and run concurrently, each on its device."""
    results = [four.apply_async(train, (seed, 5)) for seed in range(12)]
    where = set()
    for result in results:
        device, on_device, on_cpu = result.get()
        where.add(device)
        assert on_device == pytest.approx(on_cpu, rel=1e-4)
    assert where == {"xla:0", "xla:1"}


def test_a_cache_for_each_process(four: CtxPool, cache: Path):
    """The workers of a process share a cache, named after the first of them."""
    four.run_all(train, 50, 1)
    used = {path.parent.name for path in cache.glob("worker-*/*")}
    assert used == {"worker-0", "worker-2"}


def look(context: DeviceContext, tensor: Any) -> tuple[str, list[float]]:
    return str(tensor.device), tensor.tolist()


def test_tensors_arrive_on_the_worker_s_own_device(four: CtxPool):
    """A pickled device tensor arrives on the receiver's device, or on the CPU in this process."""
    import torch

    from xpool import pickle

    made = four.run_all(ordinal_on_device)
    assert [(t.device.type, t.item()) for t in made] == [("cpu", float(i)) for i in range(4)]
    data = four.apply(dumped)
    assert pickle.loads(data).device.type == "cpu"
    assert four.run_all(loaded, data) == ["xla:0", "xla:1"] * 2
    assert four.run_all(look, torch.ones(1)) == [("cpu", [1.0])] * 4


def ordinal_on_device(context: DeviceContext) -> Any:
    import torch

    return torch.tensor(float(context.ordinal), device=context.device)


def dumped(context: DeviceContext) -> bytes:
    import torch

    from xpool import pickle

    return pickle.dumps(torch.ones(2, device=context.device))


def loaded(context: DeviceContext, data: bytes) -> str:
    from xpool import pickle

    return str(pickle.loads(data).device)


def test_handles(make_pool: Callable[..., Any]):
    """The owner uses its tensor, and the other core's worker gets a copy on its own device."""
    from . import handle_tasks as tasks

    pool = make_pool(start, 2, 2, is_copy_tensor=False)
    first, second = pool.run_all(tasks.make)
    assert (first.worker, first.device, second.worker, second.device) == (0, "xla:0", 1, "xla:1")
    assert pool.run_all(placed, first) == ["xla:0", "xla:1"]
    for handle in (first, second):
        assert pool.apply(placed, (handle,)) == handle.device
        assert handle.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
        # computed on its device, by the thread whose default device it is
        new = pool.apply(tasks.add_one, (handle,))
        assert (new.worker, new.device) == (handle.worker, handle.device)
        assert new.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]


def placed(context: DeviceContext, tensor: Any) -> str:
    return str(tensor.device)


def at_gate(context: DeviceContext, box: str, gate: str) -> dict[str, Any]:
    work.post(box, str(context.ordinal))
    work.pass_gate(gate)
    return facts(context)


def steps_for_ever(context: DeviceContext) -> None:
    import torch
    import torch_xla

    x = torch.ones(8, 8, device=context.device)
    while True:
        x = (x @ x).tanh()
        torch_xla.sync()


def test_a_task_over_its_time(
    make_pool: Callable[..., Any], mailbox: Mailbox, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    """A timeout interrupts a loop of training steps without disturbing the other core's task."""
    # On a busy machine one step may wait too long for a processor.
    monkeypatch.setattr(monitor, "STARVED_SECONDS", 60.0)
    pool = make_pool(start, 2, 2)
    pool.run_all(train, 0, 1)
    beside = pool.apply_async(at_gate, (mailbox.path, gate.path))
    mailbox.line()
    with pytest.raises(TaskTimeout, match="steps_for_ever"):
        pool.apply(steps_for_ever, timeout=1.0)
    gate.open(1)
    assert beside.get()["world"] == 1
    assert pool.statistics()["deaths"] == 0
    _, on_device, on_cpu = pool.apply(train, (1, 3))
    assert on_device == pytest.approx(on_cpu, rel=1e-4)


def test_a_killed_process_comes_back_on_its_cores(
    make_pool: Callable[..., Any], mailbox: Mailbox, gate: Gate
):
    """Both workers of a killed process return on their devices; the other process continues."""
    pool = make_pool(start, 4, 2)
    before = pool.run_all(facts)
    asked = [pool.apply_async(at_gate, (mailbox.path, gate.path)) for _ in range(3)]
    mailbox.lines(3)
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        pool.apply(work.kill_oneself)
    gate.open(3)
    lived, lost = [], []
    for one in asked:
        try:
            lived.append(one.get()["worker"][0])
        except WorkerDied as exc:
            lost.append(exc.worker)
    assert len(lost) == 1 and lost[0] // 2 == caught.value.worker // 2 != lived[0] // 2
    after = pool.run_all(facts)
    for key in ("worker", "devices", "of_process"):
        assert [f[key] for f in after] == [f[key] for f in before]
    assert len({f["pid"] for f in before} & {f["pid"] for f in after}) == 1


def test_more_than_two(make_pool: Callable[..., Any]):
    """Any number of devices works; the last process may have fewer workers."""
    pool = make_pool(start, 5, 4)
    found = pool.run_all(facts)
    assert [f["worker"][2] for f in found] == [0, 1, 2, 3, 0]
    assert [sorted(f["devices"]) for f in found] == [[f"xla:{i}"] for i in (0, 1, 2, 3, 0)]
    assert len({f["pid"] for f in found}) == 2


def test_a_device_that_is_not_there():
    """The error names the missing core and the devices of torch_xla."""
    from xpool import WorkerStartFailed

    contexts = devices("xla", 2, per_process=2)
    for context in contexts:
        context.env["CPU_NUM_DEVICES"] = "1"  # type: ignore[index]
    with CtxPool(worker_contexts=contexts) as pool:
        with pytest.raises(WorkerStartFailed, match=r"core 1, with torch_xla.*only \['xla:0'\]"):
            pool.apply(facts)
    pool.join()
