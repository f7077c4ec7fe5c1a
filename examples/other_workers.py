"""An epoch goes on with other numbers of workers, from a state of the loader.

Prints a digest of the remaining batches, whose rows have random noise.

    python examples/other_workers.py
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import Dataset

from xpool.data import DataLoader


class Noisy(Dataset[Any]):
    """Rows with noise, which is drawn for each batch anew."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> Any:
        return torch.full((4,), float(i)) + torch.rand(4)


def make_loader(workers: int) -> Any:
    return DataLoader(
        Noisy(), 8, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(1)
    )


def show(workers: int, batches: Iterable[Any]) -> None:
    rest = list(batches)
    digest = zlib.crc32(torch.cat(rest).numpy().tobytes())
    print(f"{workers} workers: {len(rest)} batches are left, digest {digest:08x}")


if __name__ == "__main__":
    # torch warns of more workers than processors.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    loader = make_loader(3)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()  # of torch.save or json.dump, beside the model's
    show(3, batches)
    for workers in 1, 2:
        loader = make_loader(workers)
        loader.load_state_dict(state)
        show(workers, loader)
