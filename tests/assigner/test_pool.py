"""A pool whose workers hold the models that were placed on their devices."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.assigner is about torch's models")

import torch
from torch import Tensor, nn

from xpool import CtxPool, P2PPool, WorkerDied, current_worker
from xpool.assigner import ModelAssigner, ModelContext
from xpool.devices import DeviceContext

pytestmark = pytest.mark.torch


class AddressedPool(CtxPool, P2PPool):
    """A pool with contexts, whose tasks can be sent to one worker."""


def held(context: ModelContext) -> tuple[int, list[int], str, int]:
    devices = {p.device for model in context.models.values() for p in model.parameters()}
    assert devices <= {context.device}
    return current_worker().index, list(context.models), str(context.device), os.getpid()


def run(context: ModelContext, number: int, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return context.models[number](inputs)


def forget(context: ModelContext) -> None:
    for model in context.models.values():
        nn.init.zeros_(model.weight)
    os.kill(os.getpid(), signal.SIGKILL)


def same_weight(context: ModelContext) -> bool:
    first, second = context.models.values()
    return first.weight is second.weight


@pytest.fixture
def placed() -> ModelAssigner:
    """Six models for three workers, two for each."""
    models = [nn.Linear(8, 4) for _ in range(6)]
    return ModelAssigner(models, {(0, 3): 1, (1, 4): 1, (2, 5): 1}, ["cpu"] * 3)


def test_workers_hold_their_models(make_pool: Callable[..., Any], placed: ModelAssigner):
    """Worker i holds the models of device i, and they return the same results as here."""
    pool = make_pool(AddressedPool, worker_contexts=placed)
    assert pool.size() == 3
    for worker in range(3):
        index, numbers, device, _ = pool.apply(held, worker=worker)
        assert index == worker
        assert numbers == [i for i in range(6) if placed.placement[i] == worker]
        assert device == "cpu"
    inputs = torch.randn(3, 8)
    results = [
        pool.apply_async(run, (number, inputs), worker=worker)
        for number, worker in enumerate(placed.placement)
    ]
    for model, result in zip(placed._models, results):
        assert torch.allclose(result.get(), model(inputs))


def test_contexts_of_a_ctx_pool(make_pool: Callable[..., Any], placed: ModelAssigner):
    """A `CtxPool` takes an assigner or the list of its contexts."""
    for contexts in (placed, list(placed)):
        pool = make_pool(CtxPool, worker_contexts=contexts)
        index, numbers, _, _ = pool.apply(held)
        assert numbers == [i for i in range(6) if placed.placement[i] == index]


def test_a_replacement_holds_the_same(make_pool: Callable[..., Any], placed: ModelAssigner):
    """A replacement worker holds the same models in their original state."""
    pool = make_pool(AddressedPool, worker_contexts=placed)
    number, worker = 0, placed.placement[0]
    _, before, _, pid = pool.apply(held, worker=worker)
    with pytest.raises(WorkerDied):
        pool.apply(forget, worker=worker)
    _, after, _, new = pool.apply(held, worker=worker)
    assert after == before
    assert new != pid
    inputs = torch.randn(3, 8)
    expected = placed._models[number](inputs)
    assert torch.allclose(pool.apply(run, (number, inputs), worker=worker), expected)


def test_a_worker_without_models(make_pool: Callable[..., Any]):
    """With more devices than models some workers hold no model."""
    assigner = ModelAssigner([nn.Linear(8, 4)], {}, ["cpu"] * 2)
    pool = make_pool(AddressedPool, worker_contexts=assigner)
    found = [pool.apply(held, worker=worker)[1] for worker in range(2)]
    assert sorted(found) == [[], [0]]


def test_shared_parameters_stay_shared(make_pool: Callable[..., Any]):
    """Models of one worker still share a parameter."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    pool = make_pool(CtxPool, worker_contexts=ModelAssigner([first, second], {}, ["cpu"]))
    assert pool.apply(same_weight)


def test_the_binding_is_passed_on():
    """A worker gets the variables and cores of its device's context."""
    binding = DeviceContext("cuda", 3, 4, {"CUDA_VISIBLE_DEVICES": "3"}, cpus=(4, 5))
    context = ModelContext(binding, {})
    assert context.env == {"CUDA_VISIBLE_DEVICES": "3"}
    assert context.cpus == (4, 5)
    assert context.device == torch.device("cuda", 0)
    assert repr(context) == "ModelContext(DeviceContext(cuda:3, threads=4), models [])"


def test_models_on_a_device_cannot_be_sent():
    """Models on a device are refused when the pool is made, with a remedy."""
    model = nn.Linear(8, 4, device="meta")  # any device except the CPU
    assigner = ModelAssigner([model], {}, ["cpu"], move_models=False)
    with pytest.raises(ValueError, match="model 0 is on meta.*move_models=False"):
        CtxPool(worker_contexts=assigner)


@pytest.mark.gpu
def test_on_a_gpu(make_pool: Callable[..., Any]):
    """Models are placed and run on a GPU without starting a runtime in this process."""
    before = torch.cuda.is_initialized()  # by other tests
    models = [nn.Linear(8, 4) for _ in range(2)]
    assigner = ModelAssigner(models, {}, ["cuda:0", "cpu"], move_models=False, cpu_weight=1)
    assert torch.cuda.is_initialized() == before
    pool = make_pool(AddressedPool, worker_contexts=assigner)
    inputs = torch.randn(3, 8)
    devices = {pool.apply(held, worker=worker)[2] for worker in range(2)}
    assert devices == {"cuda:0", "cpu"}
    for number, worker in enumerate(assigner.placement):
        device = "cuda" if assigner.assignment[number].type == "cuda" else "cpu"
        found = pool.apply(run_on, (number, inputs, device), worker=worker)
        assert torch.allclose(found, models[number](inputs), atol=1e-5)


def run_on(context: ModelContext, number: int, inputs: Tensor, device: str) -> Tensor:
    assert context.device.type == device
    with torch.no_grad():
        return context.models[number](inputs.to(context.device)).cpu()
