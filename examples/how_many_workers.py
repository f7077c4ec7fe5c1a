"""The loader finds its number of workers: one for a slow training step, more for a fast one.

Each row takes a worker 2 ms of waiting, as a read from a network does.

    python examples/how_many_workers.py
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.utils.data import Dataset

from xpool.data import DataLoader

ROWS, BATCH = 1000, 5
ROW_SECONDS = 0.002


class Remote(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(ROW_SECONDS)
        return torch.full((4,), float(i))


def train(name: str, step_seconds: float) -> None:
    """Train with steps of this length, and print the workers and how long the program waited."""
    loader = DataLoader(Remote(), BATCH, num_workers="auto", persistent_workers=True)
    waits, total, begin = [], 0.0, time.perf_counter()
    for batch in loader:
        waits.append(time.perf_counter() - begin)
        total += float(batch[:, 0].sum())
        time.sleep(step_seconds)
        begin = time.perf_counter()
    assert total == ROWS * (ROWS - 1) / 2
    found, most = loader.report().workers, loader.num_workers
    wait = sum(waits[len(waits) // 2 :]) / (len(waits) // 2)
    print(f"{name}: {found} of at most {most} workers; a batch is waited for {wait * 1e3:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow", type=float, default=0.04, help="seconds of a slow step")
    slow = parser.parse_args().slow
    train("slow steps", slow)
    train("fast steps", 0.001)
