"""`MpSerialExecutor` and `MpModelWrapper`, used by pool workers."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import work
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
    """What workers run through the executor does not overlap; each gets its own result."""
    executor = MpSerialExecutor()
    pool = make_pool(Pool, 3, context=method)
    tasks = [(executor, str(log), i) for i in range(60)]
    assert pool.starmap(log_turn, tasks, 1) == list(range(60))
    lines = log.read_text().splitlines()
    for begin, end in zip(lines[::2], lines[1::2]):
        assert begin.split()[0] == "begin"
        assert end == begin.replace("begin", "end")


def test_threads_take_turns_too():
    """Threads of one process do not run at once either."""
    executor, inside, most = MpSerialExecutor(), [0], [0]

    def run() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        inside[0] -= 1

    threads = [
        threading.Thread(target=lambda: [executor.run(run) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_who_dies_lets_go(make_pool: Callable[..., Any], mailbox: Mailbox, gate: Gate, log: Path):
    """A worker that is killed in its turn does not keep the others from theirs."""
    executor = MpSerialExecutor()
    pool = make_pool(Pool, 2)
    held = pool.apply_async(hold, (executor, mailbox.path, gate.path))
    pid = int(mailbox.line())
    waiting = pool.apply_async(log_turn, (executor, str(log), 1))
    os.kill(pid, signal.SIGKILL)
    assert waiting.get(WAIT) == 1
    with pytest.raises(WorkerDied):
        held.get(WAIT)


def test_what_the_function_raises_comes_out():
    """An error ends the turn and is raised; the next one can run."""
    executor = MpSerialExecutor()
    with pytest.raises(ZeroDivisionError):
        executor.run(lambda: 1 // 0)
    assert executor.run(lambda: 5) == 5


def test_its_maker_has_let_go():
    """A copy of an executor that nobody holds any more says so."""
    data = pickle.dumps(MpSerialExecutor())
    gc.collect()
    with pytest.raises(XPoolError, match="has let go of it; keep it there"):
        pickle.loads(data).run(lambda: 1)


def test_its_number_is_another_files():
    """A descriptor's number that was given to another file is not taken for the executor."""
    executor = MpSerialExecutor()
    data = pickle.dumps(executor)
    number = int(executor._lock._at[0].rpartition("/")[2])
    del executor
    gc.collect()
    other = os.open(os.devnull, os.O_RDWR)
    os.dup2(other, number)
    try:
        with pytest.raises(XPoolError, match="has let go of it"):
            pickle.loads(data).run(lambda: 1)
    finally:
        os.close(number)
        if other != number:
            os.close(other)


def test_no_descriptor_left():
    """At the limit of descriptors the error is the system's, and the executor still works after."""
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
    """Return the model's output, where its weights lie in this process, and its mode."""
    model = wrapper.to("cpu")
    address = model[0].weight.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return model(x).detach(), line.split(maxsplit=5)[-1], model.training
    return None, "nowhere", False


def step(wrapper: MpModelWrapper, x: Any) -> float:
    """Train the worker's own model by a step; return the largest change of a weight."""
    import torch

    model = wrapper.to("cpu")
    before = model[0].weight.detach().clone()
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return float((model[0].weight.detach() - before).abs().max())


@pytest.mark.torch
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_one_host_copy(make_pool: Callable[..., Any], model: Any):
    """Workers compute with the weights in the one shared file, and what they write is their own."""
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
def test_later_weights_and_modes_are_sent_anew(make_pool: Callable[..., Any], model: Any):
    """A wrapper that is sent again after training carries what the model is then."""
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
def test_the_model_itself_is_moved_where_it_was_made(model: Any):
    """In the process that made it, as torch_xla's does; a second device gets a copy."""
    wrapper = MpModelWrapper(model)
    assert wrapper.to("cpu") is model
    assert wrapper.to("cpu") is model
    second = wrapper.to("meta")
    assert second is not model
    assert second[0].weight.is_meta
    assert not model[0].weight.is_meta


@pytest.mark.torch
def test_a_model_that_was_moved_is_not_sent(model: Any):
    """A wrapper whose model is on a device is no longer a host copy to share."""
    wrapper = MpModelWrapper(model)
    wrapper.to("meta")
    with pytest.raises(Exception, match="is on meta already"):
        pickle.dumps(wrapper)


def output_on_each(index: int, wrapper: MpModelWrapper, x: Any) -> Any:
    return wrapper.to("cpu")(x).detach()


@pytest.mark.torch
@pytest.mark.parametrize("method", [METHODS[0], *also(*METHODS[1:])])
def test_with_spawn(warm: None, model: Any, method: str | None):
    """As torch_xla's examples use it: an argument of `spawn`, with any start method."""
    import torch

    x = torch.rand(4, 512)
    wrapper = MpModelWrapper(model.eval())
    expected = model(x).detach()
    outputs = xpool.start_processes(output_on_each, (wrapper, x), 2, start_method=method)
    assert all(torch.equal(output, expected) for output in outputs)


def test_xla_does_not_import_torch():
    """`xpool.xla` is there without torch or torch_xla being imported."""
    code = "import sys, xpool.xla; print({'torch', 'torch_xla'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"
