"""Copies of GPU tensors through host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support import gpu

from xpool import CtxPool, Pool
from xpool.devices import devices

from . import gpu_tasks as tasks

pytestmark = pytest.mark.torch

LARGE = 64 * 1024


def views() -> list[Any]:
    x = torch.arange(float(4 * LARGE)).reshape(16, -1)
    return [x, x[3:9], x.t(), x[:, ::2], x[5:6].expand(8, x.shape[1]), x.reshape(4, 4, -1)[:, 2]]


def test_copy_mode(make_pool: Callable[..., Any], tmp_path: Any):
    """A pool in copy mode copies in both directions and exports no handle."""
    gpu.install(str(tmp_path))
    try:
        pool = make_pool(Pool, 1, functools.partial(gpu.install, str(tmp_path)))
        x = tasks.put(torch.zeros(LARGE))
        assert pool.apply(tasks.values, (x,)) == [([0.0] * LARGE, False)]
        back = pool.apply(tasks.make, ("", LARGE))
        assert back.device.type == "cpu"
        assert torch.equal(back, torch.arange(float(LARGE)))
        pool.apply(tasks.change, (x,))
        assert not x.cpu().any()
        for number, view in enumerate(views()):
            found, strides = pool.apply(with_strides, (tasks.put(view),))
            assert torch.equal(found, view)
            assert strides == found.stride() == torch.empty_like(view).stride()
            back = pool.apply(put_view, (number,))
            assert torch.equal(back, view)
            assert back.stride() == strides
        assert not gpu.unopened()
    finally:
        gpu.uninstall()


def with_strides(x: Any) -> Any:
    return x, x.stride()


def put_view(number: int) -> Any:
    return tasks.put(views()[number])


# -- on a GPU ----------------------------------------------------------------------------------


DTYPES = [
    name
    for name in (
        "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64",
        "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32",
    )
    if hasattr(torch, name)
]  # fmt: skip


@pytest.fixture(scope="module")
def on_gpu(warm: None) -> Iterator[Any]:
    """A pool in copy mode with one worker, bound to the first GPU."""
    # CUDA keeps descriptors open; open them before the leak check.
    torch.ones(1, device="cuda").cpu()
    with CtxPool(worker_contexts=devices("cuda")[:1]) as pool:
        pool.apply(tasks.with_context, (tasks.pid,))
        yield pool
    pool.join()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1000, LARGE, 4_000_007])
@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_on_a_gpu(on_gpu: Any, name: str, size: int):
    """Every byte of every dtype survives the way to a worker and back."""
    dtype = getattr(torch, name)
    count = size // dtype.itemsize
    content = torch.randint(0, 2 if name == "bool" else 255, (count * dtype.itemsize,)).byte()
    x = content.cuda().view(dtype)
    is_there, back = on_gpu.apply(on_bound_gpu, (x,))
    assert is_there
    assert back.device.type == "cpu" and back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), content)


def on_bound_gpu(context: Any, x: Any) -> Any:
    return x.is_cuda, x


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(6))
def test_views_on_a_gpu(on_gpu: Any, number: int):
    """Views keep their values and the order of their axes."""
    x = tasks.put(views()[number])
    is_there, back = on_gpu.apply(on_bound_gpu, (x,))
    assert is_there
    assert torch.equal(back, x.cpu())
    assert back.stride() == torch.empty_like(x).stride()
    assert on_gpu.apply(on_bound_gpu, (x.requires_grad_(),))[1].requires_grad


@pytest.mark.gpu
def test_a_copy_waits_for_its_stream(on_gpu: Any):
    """A copy waits for the work queued on the current stream."""
    stream = torch.cuda.Stream()
    x = torch.zeros(4_000_000, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.fill_(1)
        assert on_gpu.apply(on_bound_gpu, (x,))[1].min() == 1
