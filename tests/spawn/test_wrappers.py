"""`MpSerialExecutor` and `MpModelWrapper` in workers of a pool."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import scripts, work
from support.limits import WAIT
from support.tiers import also
from support.waiting import Gate, Mailbox

import xpool
from xpool import Pool, WorkerDied, XPoolError, pickle
from xpool.xla import MpModelWrapper, MpSerialExecutor

METHODS = [None, "spawn", "fork"]


def log_turn(executor: MpSerialExecutor, path: str, index: int) -> int:
    def run() -> int:
        work.log_line(path, f"begin {index}")
        work.log_line(path, f"end {index}")
        return index

    return executor.run(run)


def hold(executor: MpSerialExecutor, box: str, gate: str) -> None:
    def run() -> None:
        work.post(box, str(os.getpid()))
        work.pass_gate(gate)

    executor.run(run)


@pytest.mark.parametrize("method", [METHODS[0], *also(*METHODS[1:])])
def test_one_at_a_time(make_pool: Callable[..., Any], log: Path, method: str | None):
    """Functions run by the executor do not overlap. Each worker gets its own result."""
    executor = MpSerialExecutor()
    pool = make_pool(Pool, 3, context=method)
    tasks = [(executor, str(log), i) for i in range(60)]
    assert pool.starmap(log_turn, tasks, 1) == list(range(60))
    lines = log.read_text().splitlines()
    for begin, end in zip(lines[::2], lines[1::2]):
        assert begin.split()[0] == "begin"
        assert end == begin.replace("begin", "end")


def test_threads_take_turns_too():
    """Threads of one process do not run at the same time either."""
    executor, inside, most = MpSerialExecutor(), [0], [0]

    def run() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        inside[0] -= 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: [executor.run(run) for _ in range(50)], range(4)))
    assert most == [1]


def test_a_killed_worker_ends_its_turn(
    make_pool: Callable[..., Any], mailbox: Mailbox, gate: Gate, log: Path
):
    """If a worker is killed during its turn, the next worker gets its turn."""
    executor = MpSerialExecutor()
    pool = make_pool(Pool, 2)
    held = pool.apply_async(hold, (executor, mailbox.path, gate.path))
    pid = int(mailbox.line())
    waiting = pool.apply_async(log_turn, (executor, str(log), 1))
    os.kill(pid, signal.SIGKILL)
    assert waiting.get(WAIT) == 1
    with pytest.raises(WorkerDied):
        held.get(WAIT)


def test_an_error_of_the_function():
    """`run` raises the function's error. The next function can run."""
    executor = MpSerialExecutor()
    with pytest.raises(ZeroDivisionError):
        executor.run(lambda: 1 // 0)
    assert executor.run(lambda: 5) == 5


def test_the_original_is_dropped():
    """If the original executor is dropped, its copy raises an error."""
    data = pickle.dumps(MpSerialExecutor())
    gc.collect()
    with pytest.raises(XPoolError, match="has dropped it, or has ended; keep it there"):
        pickle.loads(data).run(lambda: 1)


def test_the_descriptor_number_is_reused():
    """If the dropped executor's descriptor number belongs to another file, its copy raises an
    error."""
    executor = MpSerialExecutor()
    data = pickle.dumps(executor)
    number = int(executor._lock._at[0].rpartition("/")[2])
    del executor
    gc.collect()
    other = os.open(os.devnull, os.O_RDWR)
    os.dup2(other, number)
    try:
        with pytest.raises(XPoolError, match="has dropped it"):
            pickle.loads(data).run(lambda: 1)
    finally:
        os.close(number)
        if other != number:
            os.close(other)


def test_no_descriptor_left():
    """Without free descriptors, `run` raises OSError. Later it works."""
    import resource

    executor = MpSerialExecutor()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
    try:
        os.close(spare)
        held = []
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            executor.run(lambda: 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    assert executor.run(lambda: 2) == 2


@pytest.fixture
def model() -> Any:
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Dropout(), torch.nn.ReLU())


def evaluate(wrapper: MpModelWrapper, x: Any) -> tuple[Any, str, bool]:
    """Return the model's output, the file of its weights in this process, and its mode."""
    model = wrapper.to("cpu")
    address = model[0].weight.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return model(x).detach(), line.split(maxsplit=5)[-1], model.training
    return None, "nowhere", False


def step(wrapper: MpModelWrapper, x: Any) -> float:
    """Train the worker's model by one step. Return the largest change of a weight."""
    import torch

    model = wrapper.to("cpu")
    before = model[0].weight.detach().clone()
    model(x).sum().backward()
    with torch.no_grad():
        for one in model.parameters():
            one -= one.grad
    return float((model[0].weight.detach() - before).abs().max())


@pytest.mark.torch
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_one_host_copy(make_pool: Callable[..., Any], model: Any):
    """Workers read the weights from one shared file. A worker's changes stay private."""
    import torch

    x = torch.rand(4, 512)
    wrapper = MpModelWrapper(model.eval())
    expected = model(x).detach()
    pool = make_pool(Pool, 2)
    for output, where, training in pool.starmap(evaluate, [(wrapper, x)] * 4, 1):
        assert torch.equal(output, expected)
        assert "memfd:xpool-shared" in where
        assert not training
    assert pool.apply(step, (wrapper, x)) != 0
    assert torch.equal(pool.apply(evaluate, (wrapper, x))[0], expected)


@pytest.mark.torch
def test_later_weights_and_modes_are_sent(make_pool: Callable[..., Any], model: Any):
    """If a wrapper is sent again after training, it has the new weights and mode."""
    import torch

    x = torch.rand(4, 512)
    wrapper = MpModelWrapper(model.eval())
    pool = make_pool(Pool, 1)
    first = pool.apply(evaluate, (wrapper, x))[0]
    with torch.no_grad():
        model[0].weight += 1
    model.train()
    second, _, training = pool.apply(evaluate, (wrapper, x))
    assert not torch.equal(first, second)
    assert training


@pytest.mark.torch
def test_the_model_is_moved_in_its_own_process(model: Any):
    """As with torch_xla, the process that made the model moves it. A second device gets a copy."""
    wrapper = MpModelWrapper(model)
    assert wrapper.to("cpu") is model
    assert wrapper.to("cpu") is model
    second = wrapper.to("meta")
    assert second is not model
    assert second[0].weight.is_meta
    assert not model[0].weight.is_meta


@pytest.mark.torch
def test_a_model_that_was_moved_is_not_sent(model: Any):
    """If the model has been moved to a device, its wrapper cannot be sent."""
    wrapper = MpModelWrapper(model)
    wrapper.to("meta")
    with pytest.raises(Exception, match="is on meta already"):
        pickle.dumps(wrapper)


def output_on_each(index: int, wrapper: MpModelWrapper, x: Any) -> Any:
    return wrapper.to("cpu")(x).detach()


@pytest.mark.torch
@pytest.mark.parametrize("method", [METHODS[0], *also(*METHODS[1:])])
def test_with_spawn(warm: None, model: Any, method: str | None):
    """As in torch_xla's examples, `spawn` accepts a wrapper with any start method."""
    import torch

    x = torch.rand(4, 512)
    wrapper = MpModelWrapper(model.eval())
    expected = model(x).detach()
    outputs = xpool.start_processes(output_on_each, (wrapper, x), 2, start_method=method)
    assert all(torch.equal(output, expected) for output in outputs)


def test_xla_does_not_import_torch():
    """`xpool.xla` imports neither torch nor torch_xla."""
    code = "import sys, xpool.xla; print({'torch', 'torch_xla'} & set(sys.modules))"
    assert scripts.run_ok(["-c", code]) == "set()\n"
