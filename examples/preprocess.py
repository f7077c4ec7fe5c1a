"""Preprocess images on workers: ``map`` of a closure that returns tensors.

scikit-learn's two sample photographs are cut into tiles.  Each tile is shifted and flipped at
random, normalised with the mean and deviation of all tiles, and filtered for edges.  Each tile has
its own seed, so all runs have the same results.  They must equal those of a plain loop.  A picture
shows the input and the output.

    python examples/preprocess.py --workers 2 --out examples/out/tiles.png
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xpool import Pool

SIDE = 70
SHIFT = 8
SEED = 7


def load_tiles() -> tuple[list[Tensor], int]:
    """Return the tiles row by row (uint8, 3 x SIDE x SIDE), and the number of tiles in a row."""
    # Imported here: workers run the top of this file and do not need it.
    from sklearn.datasets import load_sample_images

    tiles: list[Tensor] = []
    across = 0
    for photograph in load_sample_images().images:
        image = torch.from_numpy(np.ascontiguousarray(photograph.transpose(2, 0, 1)))
        down, across = image.shape[1] // SIDE, image.shape[2] // SIDE
        for row in range(down):
            for column in range(across):
                top, left = row * SIDE, column * SIDE
                tiles.append(image[:, top : top + SIDE, left : left + SIDE].clone())
    return tiles, across


def make_transform(tiles: list[Tensor]) -> Callable[[tuple[int, Tensor]], Tensor]:
    """Return the function to map: a closure over the statistics of all tiles."""
    everything = torch.stack(tiles).double() / 255
    mean = everything.mean(dim=(0, 2, 3)).float().reshape(3, 1, 1)
    deviation = everything.std(dim=(0, 2, 3)).float().reshape(3, 1, 1)

    def transform(numbered: tuple[int, Tensor]) -> Tensor:
        """Return three normalised channels and one of edges (float32, 4 x SIDE x SIDE)."""
        number, tile = numbered
        random = torch.Generator().manual_seed(SEED + number)
        padded = torch.nn.functional.pad(tile.float() / 255, (SHIFT,) * 4, mode="reflect")
        top, left = torch.randint(2 * SHIFT + 1, (2,), generator=random).tolist()
        crop = padded[:, top : top + SIDE, left : left + SIDE]
        if torch.rand((), generator=random) < 0.5:
            crop = crop.flip(2)
        return torch.cat([(crop - mean) / deviation, edges(crop)])

    return transform


def edges(image: Tensor) -> Tensor:
    """Apply Sobel's filter to the grey values; return the edges (1 x height x width)."""
    grey = torch.nn.functional.pad(image.mean(dim=0, keepdim=True), (1, 1, 1, 1), mode="reflect")
    rows = grey[:, :-2] + 2 * grey[:, 1:-1] + grey[:, 2:]
    columns = grey[:, :, :-2] + 2 * grey[:, :, 1:-1] + grey[:, :, 2:]
    across = rows[:, :, 2:] - rows[:, :, :-2]
    down = columns[:, 2:] - columns[:, :-2]
    return (across.square() + down.square()).sqrt()


def mosaic(tiles: list[Tensor], across: int) -> Tensor:
    """Arrange tiles (uint8, 3 x SIDE x SIDE) in rows, with thin lines between them."""
    height, width = (len(tiles) // across) * (SIDE + 2), across * (SIDE + 2)
    canvas = torch.full((3, height, width), 255, dtype=torch.uint8)
    for number, tile in enumerate(tiles):
        top, left = number // across * (SIDE + 2), number % across * (SIDE + 2)
        canvas[:, top : top + SIDE, left : left + SIDE] = tile
    return canvas


def picture(tiles: list[Tensor], results: list[Tensor], across: int) -> Image.Image:
    """Show the input, the normalised tiles and the edges side by side."""
    colours = [(128 + 50 * result[:3]).clamp(0, 255).byte() for result in results]
    outlines = [
        (255 - 255 * result[3:]).clamp(0, 255).byte().expand(3, -1, -1) for result in results
    ]
    gap = torch.full((3, len(tiles) // across * (SIDE + 2), 20), 255, dtype=torch.uint8)
    parts = [mosaic(tiles, across), gap, mosaic(colours, across), gap, mosaic(outlines, across)]
    return Image.fromarray(torch.cat(parts, dim=2).permute(1, 2, 0).numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description="Preprocess images on workers.")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    default = Path(__file__).parent / "out" / "tiles.png"
    parser.add_argument("--out", type=Path, default=default, help="write the picture to this file")
    options = parser.parse_args()

    tiles, across = load_tiles()
    transform = make_transform(tiles)
    results: list[Tensor] = []
    with Pool(options.workers) as pool:
        for name in ("first pass, with the workers' start", "second pass"):
            begin = time.perf_counter()
            results += pool.map(transform, list(enumerate(tiles)))
            seconds = time.perf_counter() - begin
            speed = f"{len(tiles) / seconds:,.0f} tiles/s"
            print(f"{name}: {len(tiles)} tiles in {seconds:.3f} s, {speed}")

    expected = [transform(numbered) for numbered in enumerate(tiles)]
    assert len(results) == 2 * len(tiles)
    for number, (result, alone) in enumerate(zip(results, 2 * expected)):
        assert torch.equal(result, alone), f"result {number} differs from the plain loop's"
    results = results[len(tiles) :]
    digest = hashlib.sha256(b"".join(result.numpy().tobytes() for result in results)).hexdigest()

    options.out.parent.mkdir(parents=True, exist_ok=True)
    picture(tiles, results, across).save(options.out)
    print(f"checked: a plain loop finds the same, sha256 {digest[:16]}")
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
