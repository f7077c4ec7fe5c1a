"""Measure tensors of 256 MiB on a GPU: shared between processes, copied, and copied by torch alone.

    python -m bench.cuda            (needs a GPU)

Each time includes the GPU's own work.  The table shows the first time and the median of the later
ones, because the first share opens the memory in the worker.  torch gives later tensors the same
memory.
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
    """Return a new tensor on the GPU."""
    made = torch.ones(SIZE // 4, device=context.device)
    torch.cuda.synchronize()
    return made


def look(context: DeviceContext, tensor: Any) -> float:
    """Read an element of the tensor, on whichever device it is."""
    return float(tensor[-1].item())


def seconds(step: Callable[[], object], count: int = COUNT) -> list[float]:
    """Return the seconds of each of ``count`` steps."""
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found


def line(name: str, times: list[float]) -> None:
    later = statistics.median(times[1:])
    rate = SIZE / later / 1e9
    print(f"| {name} | {times[0] * 1e3:.2f} | {later * 1e3:.2f} | {rate:.1f} |", flush=True)


def floor() -> None:
    """Time torch's own copies of these bytes, without other processes."""
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
    """Time share mode, in which the 256 MiB are not copied."""
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
    """Time copy mode, in which tensors pass through shared memory of the host."""
    with xpool.CtxPool(worker_contexts=contexts) as pool:
        mine = torch.ones(SIZE // 4, device="cuda")
        line("copy: parent's GPU to worker's GPU", seconds(lambda: pool.apply(look, (mine,))))
        line("copy: worker's GPU to parent's memory", seconds(lambda: pool.apply(make)))


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench.cuda: this machine has no CUDA device")
    contexts = devices("cuda")[:1]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    print("| 256 MiB | first, ms | then, ms | GB/s |\n|---|---|---|---|")
    floor()
    shared(contexts)
    copied(contexts)


if __name__ == "__main__":
    main()
