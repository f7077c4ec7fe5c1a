"""`xpool.data.DataLoader` against torch's: `python -m bench.loaders`.

Images of 64x64 and 224x224, decoded from JPEG, scaled and made into batches of 32 by two workers.
Epochs of the two take turns; the first of each, which starts workers for the first time, is shown
by itself.  Prints a line for each size and way: images a second, medians, and their ratio.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader as Theirs
from torch.utils.data import Dataset

from xpool.data import DataLoader as Ours

BATCH, WORKERS = 32, 2


class Photos(Dataset):  # type: ignore[misc]
    """Pictures with something in them, as compressed as photos are."""

    def __init__(self, images: int, side: int) -> None:
        self.images, self.side = images, side
        noise = np.random.default_rng(0).integers(0, 256, (2 * side // 16, 3 * side // 16, 3))
        picture = Image.fromarray(noise.astype("uint8")).resize((3 * side, 2 * side))
        file = io.BytesIO()
        picture.save(file, "jpeg")
        self.file = file.getvalue()

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if not 0 <= i < self.images:
            raise IndexError(i)
        with Image.open(io.BytesIO(self.file)) as picture:
            array = np.asarray(picture.resize((self.side, self.side)), dtype="float32")
        return torch.from_numpy(array.transpose(2, 0, 1) / 255), i


def epoch(loader: Any, images: int) -> float:
    """Walk through the loader once; return the seconds that took."""
    begin = time.perf_counter()
    seen = sum(len(batch) for batch, _ in loader)
    seconds = time.perf_counter() - begin
    assert seen == images, seen
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for side, images in (64, 4096), (224, 768):
        dataset = Photos(images, side)
        for persistent in True, False:
            loaders = {
                kind: kind(
                    dataset, BATCH, num_workers=WORKERS, shuffle=True, persistent_workers=persistent
                )
                for kind in (Ours, Theirs)
            }
            first = {kind: epoch(loader, images) for kind, loader in loaders.items()}
            taken: dict[Any, list[float]] = {kind: [] for kind in loaders}
            for _ in range(args.epochs):
                for kind, loader in loaders.items():
                    taken[kind].append(epoch(loader, images))
            rate = {kind: images / statistics.median(times) for kind, times in taken.items()}
            print(
                f"{side}x{side}, {'the same workers' if persistent else 'new workers each epoch'}: "
                f"{rate[Ours]:,.0f} images/s, torch {rate[Theirs]:,.0f}, "
                f"ratio {rate[Ours] / rate[Theirs]:.2f}; "
                f"first epoch {first[Ours]:.2f} s, torch {first[Theirs]:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
