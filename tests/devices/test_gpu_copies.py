"""Copies of tensors on GPUs: straight into the block that travels, through pinned memory."""

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

from xpool import CtxPool, Pool
from xpool._pickling.frame import Leased
from xpool._pickling.policy import Layout
from xpool._pickling.tensors import pinned
from xpool._pickling.tensors.pinned import PART, Stage
from xpool.devices import devices
from xpool.pickle import decode, encode

from . import gpu_tasks as tasks

pytestmark = pytest.mark.torch


# -- two parts in turn -------------------------------------------------------------------------


class Stream:
    """What a GPU has been asked to do and has not done yet."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []

    def run(self, count: int) -> None:
        for one in self.asked[:count]:
            one()
        self.asked[:count] = [lambda: None] * min(count, len(self.asked))


class Event:
    """Done when what was asked before its record has been done."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, 0

    def record(self) -> None:
        self.at = len(self.stream.asked)

    def synchronize(self) -> None:
        self.stream.run(self.at)


class Bytes:
    """A flat tensor of bytes; the GPU copies as late as it may."""

    def __init__(self, view: memoryview, stream: Stream) -> None:
        self.view, self.stream = view, stream

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, part: slice) -> Bytes:
        return Bytes(self.view[part], self.stream)

    def split(self, size: int) -> list[Bytes]:
        return [self[at : at + size] for at in range(0, len(self), size)]

    def copy_(self, other: Bytes, non_blocking: bool = False) -> None:
        assert len(other) == len(self)
        if non_blocking:
            self.stream.asked.append(lambda: self.copy_(other))
        else:
            self.view[:] = other.view


@pytest.mark.parametrize("size", [1, 50, 99, 100, 101, 200, 307, 600])
@pytest.mark.parametrize("way", ["download", "upload"])
def test_every_byte_arrives(monkeypatch: pytest.MonkeyPatch, way: str, size: int):
    """However late the GPU does what it is asked, nothing is read before or overwritten."""
    monkeypatch.setattr(pinned, "PART", 100)
    stream = Stream()

    def buffer(content: bytes) -> Bytes:
        return Bytes(memoryview(bytearray(content)), stream)

    stage = Stage([(buffer(bytes(100)), Event(stream)) for _ in range(2)])
    for _ in range(2):  # the second finds what the first has left
        content = os.urandom(size)
        source, target = buffer(content), buffer(bytes(size))
        getattr(stage, way)(source, target)
        assert target.view.tobytes() == content


# -- what is sent ------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Any) -> Iterator[None]:
    gpu.install(str(tmp_path))
    yield
    gpu.uninstall()


LARGE = 64 * 1024


def views() -> list[Any]:
    x = torch.arange(float(4 * LARGE)).reshape(16, -1)
    return [x, x[3:9], x.t(), x[:, ::2], x[5:6].expand(8, x.shape[1]), x.reshape(4, 4, -1)[:, 2]]


@pytest.mark.parametrize("number", range(6))
def test_straight_into_a_block(stand_in: None, number: int):
    """A message has one block, which the copy from the device fills; values and axes stay."""
    from xpool._memory.arena import Arena

    arena = Arena.own()
    assert arena is not None
    leased: list[int] = []

    def lease(nbytes: int) -> Any:
        leased.append(nbytes)
        return arena.lease(nbytes)

    x = tasks.put(views()[number])
    expected = torch.empty_like(x.inner).copy_(x.inner)
    message = encode([x], layout=Layout(lease))
    assert type(message) is Leased
    assert leased == [expected.nbytes]
    arrived = decode(message)[0]
    assert torch.equal(arrived, expected)
    assert arrived.stride() == expected.stride()
    again = decode(message)[0]
    arrived.fill_(1)
    assert torch.equal(again, arrived)  # both are the block: a message is opened once
    kept = encode([x], layout=Layout(lease, kept=True))
    decode(kept)[0].fill_(1)
    assert torch.equal(decode(kept)[0], expected)  # or, to be sent again, copied
    del arrived, again, message, kept
    gc.collect()


def test_when_memory_is_short(stand_in: None):
    """Without a block, or for a small tensor, all goes as other tensors do."""
    x = tasks.put(views()[0])
    assert torch.equal(decode(encode(x, layout=Layout(lambda nbytes: None))), x.inner)
    assert torch.equal(decode(encode(x)), x.inner)
    small = tasks.put(torch.arange(4.0))
    assert torch.equal(decode(encode(small, layout=Layout(_no_lease))), small.inner)


def _no_lease(nbytes: int) -> Any:
    raise AssertionError("a block for something small")


def test_copy_mode(stand_in: None, make_pool: Callable[..., Any], tmp_path: Any):
    """A pool in copy mode copies both ways, and nothing is exported."""
    pool = make_pool(Pool, 1, functools.partial(gpu.install, str(tmp_path)))
    x = tasks.put(torch.zeros(LARGE))
    assert pool.apply(tasks.values, (x,)) == [([0.0] * LARGE, False)]
    back = pool.apply(tasks.make, ("", LARGE))
    assert back.device.type == "cpu"
    assert torch.equal(back, torch.arange(float(LARGE)))
    pool.apply(tasks.change, (x,))
    assert not x.cpu().any()


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
    """A pool in copy mode with a worker that is bound to the first GPU."""
    torch.ones(1, device="cuda").cpu()  # what CUDA opens stays open: no test is charged with it
    pinned.download(torch.ones(8, dtype=torch.uint8, device="cuda"), torch.ones(8).byte())
    with CtxPool(worker_contexts=devices("cuda")[:1]) as pool:
        pool.apply(tasks.with_context, (tasks.pid,))
        yield pool
    pool.join()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1000, LARGE, PART + 1001, 3 * PART + 7])
@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_on_a_gpu(on_gpu: Any, name: str, size: int):
    """There and back, every byte of every dtype, below and above a part of pinned memory."""
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
    """Views arrive with their values, and their axes in the same order."""
    x = tasks.put(views()[number])
    is_there, back = on_gpu.apply(on_bound_gpu, (x,))
    assert is_there
    assert torch.equal(back, x.cpu())
    assert back.stride() == torch.empty_like(x).stride()
    assert on_gpu.apply(on_bound_gpu, (x.requires_grad_(),))[1].requires_grad


@pytest.mark.gpu
def test_a_stream_of_ones_own(on_gpu: Any):
    """A copy comes after what the current stream was asked for."""
    stream = torch.cuda.Stream()
    x = torch.zeros(PART, device="cuda")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.fill_(1)
        assert on_gpu.apply(on_bound_gpu, (x,))[1].min() == 1
