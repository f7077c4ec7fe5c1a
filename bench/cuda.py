"""Tensors of 256 MiB on a GPU: shared between processes, and copied, beside what the GPU can do.

    python -m bench.cuda            (a machine with a GPU; elsewhere it says so)

All in one run, medians, times with the GPU done.  The first share opens the memory in the worker
and is told apart; torch gives later tensors the memory of the first.  The floor: the same bytes
copied by torch between the GPU and pinned memory, ordinary memory, and the GPU itself.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import xpool
from xpool.devices import DeviceContext, devices

MIB = 1 << 20
SIZE = 256 * MIB
COUNT = 12


def make(context: DeviceContext) -> Any:
    """A new tensor on the GPU."""
    made = torch.ones(SIZE // 4, device=context.device)
    torch.cuda.synchronize()
    return made


def look(context: DeviceContext, tensor: Any) -> float:
    """Read what came, wherever it lies."""
    return float(tensor[-1].item())


def seconds(step: Callable[[], object], count: int = COUNT) -> list[float]:
    """How long a step takes, each time."""
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found


def line(name: str, times: list[float]) -> None:
    """Print the first of some times, and the median of the others."""
    later = statistics.median(times[1:])
    rate = SIZE / later / 1e9
    print(f"| {name} | {times[0] * 1e3:.2f} | {later * 1e3:.2f} | {rate:.1f} |", flush=True)


def floor() -> None:
    """What torch takes for these bytes, without processes."""
    there = torch.ones(SIZE // 4, device="cuda")
    other = torch.empty_like(there)
    pinned = torch.empty(SIZE // 4, pin_memory=True)
    plain = torch.ones(SIZE // 4)
    line("GPU to GPU, one process", seconds(lambda: other.copy_(there)))
    line("GPU to pinned memory", seconds(lambda: pinned.copy_(there)))
    line("GPU to ordinary memory, warm", seconds(lambda: plain.copy_(there)))
    line("GPU to ordinary memory, new: x.cpu()", seconds(lambda: there.cpu()))
    line("pinned memory to GPU", seconds(lambda: there.copy_(pinned)))
    line("ordinary memory to GPU", seconds(lambda: there.copy_(plain)))
    line("memory to memory, warm", seconds(lambda: plain.copy_(pinned)))


def shared(contexts: list[DeviceContext]) -> None:
    """Share mode: 256 MiB that stay where they are."""
    with xpool.CtxPool(worker_contexts=contexts, is_copy_tensor=False) as pool:
        mine = torch.ones(SIZE // 4, device="cuda")
        line("share: parent to worker, one tensor", seconds(lambda: pool.apply(look, (mine,))))

        def new() -> None:
            pool.apply(look, (torch.ones(SIZE // 4, device="cuda"),))

        line("share: parent to worker, new tensors", seconds(new))
        handle = pool.apply(make)
        line("share: worker to parent, handle.open()", seconds(lambda: handle.open()))
        line("share: a handle to its own worker", seconds(lambda: pool.apply(look, (handle,))))
        line("copy: handle.cpu()", seconds(lambda: handle.cpu()))


def copied(contexts: list[DeviceContext]) -> None:
    """Copy mode: parent's GPU, block, worker's GPU; and worker's GPU, block."""
    with xpool.CtxPool(worker_contexts=contexts) as pool:
        mine = torch.ones(SIZE // 4, device="cuda")
        line("copy: parent's GPU to worker's GPU", seconds(lambda: pool.apply(look, (mine,))))
        line("copy: worker's GPU to parent's memory", seconds(lambda: pool.apply(make)))


def main() -> None:
    """Measure all."""
    if not torch.cuda.is_available():
        sys.exit("bench.cuda: no CUDA device here")
    contexts = devices("cuda")[:1]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    print("| 256 MiB | first, ms | then, ms | GB/s |\n|---|---|---|---|")
    floor()
    shared(contexts)
    copied(contexts)


if __name__ == "__main__":
    main()
