"""An error that ends CUDA in a worker fails its task only: the worker is replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support import work
from support.tiers import also

from xpool import CtxPool, P2PPool, Pool, ResultNotPicklable
from xpool.devices import devices

pytestmark = pytest.mark.torch

ASSERTED = "CUDA error: device-side assert triggered"
lost = False
"""Whether CUDA has failed in this worker, for the stand-in."""


def stand_in() -> None:
    """Let torch say in this worker that CUDA runs, until a task loses it."""

    def synchronize(*_: Any) -> None:
        if lost:
            raise RuntimeError(ASSERTED)

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = synchronize


def lose() -> None:
    global lost
    lost = True
    raise RuntimeError(ASSERTED)


def fail(item: int, bad: tuple[int, ...], text: str = ASSERTED, loses: bool = True) -> int:
    global lost
    assert not lost, "a task began in a worker without CUDA"
    if item in bad:
        lost = loses
        raise RuntimeError(text)
    return item


class FailsLater:
    """A result whose copy from the GPU fails."""

    def __reduce__(self) -> Any:
        lose()


def outcome(result: Any) -> Any:
    try:
        return result.get()
    except Exception as exc:
        return type(exc), str(exc)


@pytest.mark.parametrize(("kind", "count"), [(Pool, 1), *also((P2PPool, 2))])
def test_no_other_task_fails(make_pool: Callable[..., Any], kind: type[Pool], count: int):
    """Also tasks that were sent to the worker before it was lost are run."""
    pool = make_pool(kind, count, stand_in)
    bad = 3, 4, 11
    found = [pool.apply_async(fail, (i, bad)) for i in range(16)]
    expected = [(RuntimeError, ASSERTED) if i in bad else i for i in range(16)]
    assert [outcome(one) for one in found] == expected
    with pytest.raises(RuntimeError, match="device-side"):
        pool.starmap(fail, [(i, bad) for i in range(16)], chunksize=4)
    assert pool.starmap(fail, [(i, ()) for i in range(16)]) == list(range(16))


def test_a_result_that_cannot_be_copied(make_pool: Callable[..., Any]):
    """The copy of a result may be the first to see the failure of a kernel."""
    pool = make_pool(Pool, 1, stand_in)
    before = pool.apply(os.getpid)
    with pytest.raises(ResultNotPicklable):
        pool.apply(FailsLater)
    assert pool.apply(os.getpid) != before


@pytest.mark.parametrize("text", ["CUDA error: out of memory", "cuda is not what failed"])
def test_other_errors_keep_the_worker(make_pool: Callable[..., Any], text: str):
    """CUDA still works after them."""
    pool = make_pool(Pool, 1, stand_in)
    before = pool.apply(os.getpid)
    with pytest.raises(RuntimeError, match=text):
        pool.apply(fail, (1, (1,), text, False))
    assert pool.apply(os.getpid) == before


@pytest.mark.gpu
def test_on_a_gpu(warm: None):
    """An index outside a tensor ends CUDA in the worker's process."""
    with CtxPool(worker_contexts=devices("cuda")[:1]) as pool:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="device-side assert"):
                pool.apply(index, (100,))
            assert pool.apply(index, (1,)) == 1
    pool.join()


def index(context: Any, at: int) -> int:
    numbers = torch.arange(4, device=context.device)
    found = numbers[torch.tensor([at], device=context.device)]
    return int(found.cpu())


@pytest.mark.gpu
def test_the_first_errors_are_those_of_the_task(warm: None):
    """A lack of GPU memory has torch's own class, and the worker goes on."""
    with CtxPool(worker_contexts=devices("cuda")[:1]) as pool:
        before = pool.apply(work.pid)
        with pytest.raises(torch.OutOfMemoryError):
            pool.apply(take, (1 << 50,))
        assert pool.apply(work.pid) == before
    pool.join()


def take(context: Any, nbytes: int) -> None:
    torch.empty(nbytes, dtype=torch.uint8, device=context.device)
