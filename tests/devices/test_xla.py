"""Real torch_xla with its CPU client: run by ``make test-xla``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import scripts, work
from support.limits import WAIT
from support.waiting import Gate

from xpool import CtxPool, OptionError, WorkerDied, xla
from xpool.devices import DeviceContext, devices
from xpool.xla import MpModelWrapper, MpSerialExecutor

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("cpu_client")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def two(cache: Path) -> Iterator[CtxPool]:
    """Two workers with an XLA device each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        pool = CtxPool(worker_contexts=devices("xla", 2, cache=cache))
        pool.map(facts, range(2), 1)
        yield pool
        pool.close()
        pool.join()


def facts(context: DeviceContext, *_: Any) -> dict[str, Any]:
    """Return what torch_xla reports in this worker."""
    import torch
    import torch_xla
    import torch_xla.runtime as runtime

    x = torch.ones(2, device=context.device)
    return {
        "ordinal": context.ordinal,
        "devices": [str(device) for device in context.devices],
        "device": str(x.device),
        "default": str(torch_xla.device()),
        "global": (runtime.global_ordinal(), runtime.world_size()),
        "client": runtime.device_type(),
        "pid": os.getpid(),
    }


def product(context: DeviceContext, seed: int) -> float:
    """Return the result of a compiled graph."""
    import torch

    a = torch.rand(64, 64, generator=torch.Generator().manual_seed(seed)).to(context.device)
    return float((a @ a).relu().sum().item())


def test_workers_are_independent(two: CtxPool):
    """Each worker has its own runtime and device, in a topology of one."""
    found = two.run_all(facts)
    assert [f["ordinal"] for f in found] == [0, 1]
    for f in found:
        assert f["device"] == f["default"] == "xla:0"
        assert f["devices"] == ["xla:0"]
        assert f["global"] == (0, 1)
        assert f["client"] == "CPU"
    assert found[0]["pid"] != found[1]["pid"]


def test_a_killed_worker_comes_back_on_its_ordinal(make_pool: Callable[..., Any]):
    """The replacement has the same ordinal, and answers after its runtime has started."""
    pool = make_pool(CtxPool, worker_contexts=devices("xla", 2))
    begin = time.monotonic()
    before = pool.run_all(facts)
    started = time.monotonic() - begin
    begin = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        pool.apply(work.kill_oneself)
    after = pool.run_all(facts)
    took = time.monotonic() - begin
    assert [f["ordinal"] for f in after] == [0, 1]
    assert len({f["pid"] for f in before} & {f["pid"] for f in after}) == 1
    print(f"two workers started and answered in {started:.1f} s; killed, again in {took:.1f} s")


def structure(context: DeviceContext) -> Any:
    import torch

    x = torch.arange(6.0, device=context.device).reshape(2, 3)
    model = torch.nn.Linear(3, 2).to(context.device)
    empty = torch.empty(0, 4, device=context.device)
    half = x.to(torch.bfloat16)
    return {"x": x, "views": [x[0], x.t()], "model": model, "empty": empty, "half": half}


def total(context: DeviceContext, tensors: Any, model: Any) -> tuple[list[str], float]:
    """Compute with the received tensors on the worker's device."""
    x = tensors["x"].to(context.device)
    return [str(tensors["x"].device), str(x.device)], model.to(context.device)(x).sum().item()


def test_xla_tensors_as_results_and_arguments(two: CtxPool):
    """In any structure they arrive as CPU tensors; a worker can move them to its device."""
    import torch

    found = two.apply(structure)
    expected = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(found["x"], expected)
    assert torch.equal(found["views"][0], expected[0])
    assert torch.equal(found["views"][1], expected.t())
    assert found["half"].dtype == torch.bfloat16
    assert found["empty"].shape == (0, 4)
    model = found["model"]
    assert isinstance(model.weight, torch.nn.Parameter)
    assert model.weight.requires_grad
    tensors = [found["x"], *found["views"], found["empty"], found["half"], *model.parameters()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    devices, value = two.apply(total, (found, model))
    assert devices == ["cpu", "xla:0"]
    assert value == pytest.approx(model(expected).sum().item(), rel=1e-3)


def fail_with_tensor(context: DeviceContext) -> None:
    import torch

    raise ValueError("with a tensor", torch.ones(2, device=context.device))


def test_an_exception_with_an_xla_tensor(two: CtxPool):
    """A tensor in an exception is sent like a result."""
    with pytest.raises(ValueError, match="with a tensor") as caught:
        two.apply(fail_with_tensor)
    assert caught.value.args[1].tolist() == [1.0, 1.0]
    assert caught.value.args[1].device.type == "cpu"


def test_compilation_caches(two: CtxPool, cache: Path):
    """`cache=` gives each worker its own compilation cache."""
    two.map(product, range(100, 104), 1)
    used = {path.parent.name for path in cache.glob("worker-*/*")}
    assert used
    assert used <= {"worker-0", "worker-1"}


def ordinals(index: int, offset: int) -> tuple[Any, ...]:
    import torch
    import torch_xla
    import torch_xla.runtime as runtime

    x = torch.full((2,), float(index + offset), device=torch_xla.device())
    return (
        index,
        runtime.global_ordinal(),
        runtime.local_ordinal(),
        runtime.world_size(),
        str(x.device),
        (x * 2).cpu().tolist(),
    )


THEIRS = """
import sys, torch_xla, torch_xla.runtime as runtime
def tell(index):
    with open(sys.argv[1], "a") as file:
        print(index, runtime.global_ordinal(), runtime.local_ordinal(), runtime.world_size(),
              torch_xla.device(), file=file)
if __name__ == "__main__":
    torch_xla.launch(tell)
"""


@pytest.mark.parametrize("count", [1, 4])
def test_spawn_has_torch_xlas_ordinals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int):
    """Replicas have the ordinals and devices of torch_xla's own launcher, and return results."""
    monkeypatch.setenv("CPU_NUM_DEVICES", str(count))
    ours = xla.spawn(ordinals, (10,))
    theirs = scripts.run([scripts.write(tmp_path / "theirs.py", THEIRS), str(tmp_path / "out")])
    assert theirs.returncode == 0, theirs.stderr
    found = sorted(line.split() for line in (tmp_path / "out").read_text().splitlines())
    assert [[str(fact) for fact in one[:5]] for one in ours] == found
    assert [one[5] for one in ours] == [[2.0 * (i + 10)] * 2 for i in range(count)]


def fail_one(index: int, gate: str) -> None:
    if index == 2:
        raise LookupError(f"replica {index}")
    work.pass_gate(gate)


def test_the_first_failure_stops_the_replicas(monkeypatch: pytest.MonkeyPatch, gate: Gate):
    """If one of four replicas raises while the others wait, its error is raised here."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    with pytest.raises(LookupError, match="replica 2") as caught:
        xla.spawn(fail_one, (gate.path,))
    assert "in fail_one" in str(caught.value.__cause__)


def test_numbers_of_processes(monkeypatch: pytest.MonkeyPatch):
    """The caller may pass the number of devices; another number is refused with the remedy."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    context = xla.spawn(ordinals, (0,), nprocs=4, join=False)
    with pytest.raises(OptionError, match=r"each of the 4 devices.*devices\('xla', n\)"):
        xla.spawn(ordinals, (0,), nprocs=3)
    while not context.join(timeout=WAIT):
        pass
    assert [one[0] for one in context.results()] == [0, 1, 2, 3]


def with_wrapper(index: int, wrapper: MpModelWrapper, turns: MpSerialExecutor, x: Any) -> Any:
    import torch_xla

    model = turns.run(lambda: wrapper.to(torch_xla.device()))
    device = str(next(model.parameters()).device)
    return device, model(x.to(torch_xla.device())).detach().cpu()


def test_a_model_on_every_device(monkeypatch: pytest.MonkeyPatch):
    """Each replica gets the host's model on its own device, and all compute the same."""
    import torch

    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    model = torch.nn.Linear(16, 4)
    x = torch.rand(3, 16)
    results = xla.launch(with_wrapper, (MpModelWrapper(model), MpSerialExecutor(), x))
    assert [device for device, _ in results] == [f"xla:{i}" for i in range(4)]
    for _, output in results:
        torch.testing.assert_close(output, model(x).detach(), rtol=1e-4, atol=1e-5)


def run(code: str, **env: str) -> str:
    """Run code as a separate program, because it may start a runtime."""
    done = scripts.run(["-c", code], **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_process_runs_here():
    """``nprocs=1`` and ``debug_single_process`` run the function in this process."""
    code = (
        "import os, torch_xla, torch, xpool.xla as xla\n"
        "def f(i, x):\n"
        "    return i, os.getpid(), (torch.ones(2, device=torch_xla.device()) * x).tolist()\n"
        "for out in xla.spawn(f, (3,), nprocs=1), xla.launch(f, (3,), debug_single_process=True):\n"
        "    print(out == [(0, os.getpid(), [3.0, 3.0])])"
    )
    assert run(code, CPU_NUM_DEVICES="4").split() == ["True", "True"]


def test_under_torchrun_this_process_is_the_replica(monkeypatch: pytest.MonkeyPatch):
    """Under torchrun `launch` starts no process."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert xla.launch(lambda index, x: (index, x, os.getpid()), (5,)) == [(3, 5, os.getpid())]


def test_a_started_runtime_is_not_forked():
    """After this process has started XLA, fork is refused with that reason; other methods work."""
    code = (
        "import torch, torch_xla, xpool\n"
        "torch.ones(1, device=torch_xla.device()).cpu()\n"
        "try: xpool.Pool(1, context='fork')\n"
        "except xpool.OptionError as exc: print(exc)\n"
        "with xpool.Pool(1) as pool: print(pool.apply(abs, (-3,)))"
    )
    refusal, other = run(code).splitlines()
    assert "has started the XLA runtime, which does not survive a fork" in refusal
    assert other == "3"
