"""The tasks that work with tensors."""

from __future__ import annotations

import os
import time

import torch

from bench.procs import private_bytes

FLOATS_A_PAGE = 1024


def touch(tensor: torch.Tensor) -> float:
    """Read one element of each page, so that the time to map the pages is measured."""
    return float(tensor[::FLOATS_A_PAGE].sum())


def make(floats: int) -> tuple[torch.Tensor, float]:
    """Make a new tensor; return it, and the seconds that this took.

    A tensor that was sent before may be in shared memory already.  Sending it again would
    measure its handle only.
    """
    begin = time.perf_counter()
    tensor = torch.full((floats,), 1.0)
    return tensor, time.perf_counter() - begin


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def count(tensor: torch.Tensor) -> int:
    """Return the number of elements without reading them."""
    return tensor.numel()


def small(number: int) -> torch.Tensor:
    """Make a tensor of 4 KiB."""
    return torch.full((1024,), float(number))


def first() -> torch.Tensor:
    """Make a small tensor: the first task of a new pool."""
    return torch.ones(16)


def who() -> int:
    """Use torch, then return the worker's pid."""
    torch.ones(4).sum()
    return os.getpid()


def private() -> tuple[int, int]:
    """Use torch, then return the worker's pid and its private bytes."""
    matrix = torch.rand(64, 64)
    float((matrix @ matrix).relu().sum())
    return os.getpid(), private_bytes(os.getpid())
