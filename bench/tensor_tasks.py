"""The tasks that work with tensors."""

from __future__ import annotations

import os
import time

import torch

from bench.procs import private_bytes

FLOATS_A_PAGE = 1024


def touch(tensor: torch.Tensor) -> float:
    """Read one element of each page, so that a mapping not yet read does not pass for data."""
    return float(tensor[::FLOATS_A_PAGE].sum())


def make(floats: int) -> tuple[torch.Tensor, float]:
    """Make a new tensor; return it with the seconds that making it took.

    New each time: a tensor that was sent before may already lie in shared memory, and
    sending it again would measure the handle only.
    """
    begin = time.perf_counter()
    tensor = torch.full((floats,), 1.0)
    return tensor, time.perf_counter() - begin


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Send back what came."""
    return tensor


def count(tensor: torch.Tensor) -> int:
    """Say how many elements there are, without a look at them."""
    return tensor.numel()


def small(number: int) -> torch.Tensor:
    """Make a tensor of 4 KiB."""
    return torch.full((1024,), float(number))


def first() -> torch.Tensor:
    """Make the small tensor that a new pool is asked for first."""
    return torch.ones(16)


def who() -> int:
    """Say which process runs the tasks, having used torch."""
    torch.ones(4).sum()
    return os.getpid()


def private() -> tuple[int, int]:
    """Use torch, then say who this is and how many bytes belong to this process alone."""
    matrix = torch.rand(64, 64)
    float((matrix @ matrix).relu().sum())
    return os.getpid(), private_bytes(os.getpid())
