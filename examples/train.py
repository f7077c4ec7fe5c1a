"""Train a small network on JPEG files with torch's loader and with xpool's.

The images are scikit-learn's handwritten digits, written as 1,797 JPEG files.  The same training
runs with each loader.  The training with xpool's is killed in the middle of its second epoch, and a
new process continues from the last checkpoint.  Both must have the same losses.  The plot shows
them by time.

    python examples/train.py
    python examples/train.py --loader xpool --folder digits    # one training, from its checkpoint
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import Tensor, nn

from xpool.data import DataLoader

SEED = 7
EPOCHS = 4
BATCH = 32
SAVE_EVERY = 10  # batches
STYLE = """<style>
text { font: 12px sans-serif; fill: currentColor; } svg { color: #222; background: #fff; }
@media (prefers-color-scheme: dark) { svg { color: #ddd; background: #181818; } }
@media (max-width: 500px) { text { font-size: 20px; } }
</style>"""
LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "xpool": DataLoader}

Point = tuple[int, float, float]
"""The number of a batch, the seconds since the training began, and the loss."""


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The JPEG files of a folder.  The last character of a file's stem is its label."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[i]) as image:
            pixels = np.array(image.resize((16, 16)), dtype=np.float32)
        return torch.from_numpy(pixels).unsqueeze(0) / 255, int(self.paths[i].stem[-1])


def write_digits(folder: Path) -> None:
    """Write each digit as a JPEG file of 128 x 128 pixels."""
    # Imported here: workers run the top of this file and do not need it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    for i, (pixels, label) in enumerate(zip(digits.images, digits.target)):
        image = Image.fromarray((pixels * 15.9).astype("uint8")).resize((128, 128))
        image.save(folder / f"{i:04}-{label}.jpg")


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint.  A kill at any moment leaves the old one or the new one."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def train(kind: str, folder: Path) -> list[Point]:
    """Train with this loader; continue from the checkpoint if it exists; return all losses."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    # The shuffling has its own generator, which the loader's state includes.
    loader = LOADERS[kind](
        Digits(folder), BATCH, shuffle=True, num_workers=2, persistent_workers=True,
        drop_last=True, generator=torch.Generator().manual_seed(SEED),
    )  # fmt: skip
    begun, points, checkpoint = time.time(), [], folder / f"{kind}.pt"
    if kind == "xpool" and checkpoint.exists():
        state = torch.load(checkpoint)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        begun, points = state["begun"], state["points"]
        print(f"xpool: goes on after batch {len(points)}", flush=True)
    for epoch in range(len(points) // len(loader), EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            points.append((len(points) + 1, time.time() - begun, loss.item()))
            if kind == "xpool" and len(points) % SAVE_EVERY == 0:
                state = {
                    "network": network.state_dict(), "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(), "begun": begun, "points": points,
                }  # fmt: skip
                save(state, checkpoint)
                print(f"xpool: batch {len(points)} saved", flush=True)
        print(f"{kind}: epoch {epoch + 1}, loss {mean(points[-len(loader) :]):.4f}", flush=True)
    torch.save(points, folder / f"{kind}.points")
    return points


def mean(points: list[Point]) -> float:
    return sum(loss for _, _, loss in points) / len(points)


def run(kind: str, folder: Path, kill_after: int = 0) -> list[Point]:
    """Train in another process; kill it after it has saved batch ``kill_after``."""
    with subprocess.Popen(
        [sys.executable, __file__, "--loader", kind, "--folder", str(folder)],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if "saved" not in line:
                print(line, end="")
            elif line == f"xpool: batch {kill_after} saved\n":
                os.kill(process.pid, signal.SIGKILL)
                print(f"xpool: kill -9 after batch {kill_after}")
    if kill_after:
        return []
    assert process.returncode == 0
    points: list[Point] = torch.load(folder / f"{kind}.points")
    return points


def plot(series: dict[str, list[Point]]) -> str:
    """Plot the losses by time (SVG).  Each point is the mean of the last ten batches."""
    width, height, left, bottom = 640, 320, 50, 270
    colours = {"torch": "#8c959f", "xpool": "#0969da"}
    last = max(points[-1][1] for points in series.values())
    parts = [
        f'<path d="M{left} 20 V{bottom} H{width - 20}" fill="none" stroke="#8c959f"/>',
        f'<text x="{width - 20}" y="{bottom + 40}" text-anchor="end">seconds</text>',
        '<text x="8" y="14">loss</text>',
    ]
    for seconds in range(0, int(last) + 1, max(1, int(last / 6))):
        x = left + (width - left - 20) * seconds / last
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{seconds}</text>')
    for value in (0, 1, 2):
        y = bottom - (bottom - 30) * value / 2.4
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for row, (name, points) in enumerate(series.items()):
        line = [
            (
                left + (width - left - 20) * seconds / last,
                bottom - (bottom - 30) * mean(points[max(0, i - 9) : i + 1]) / 2.4,
            )
            for i, (_, seconds, _) in enumerate(points)
        ]
        data = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        colour = f'stroke="{colours[name]}" stroke-width="2"'
        parts += [
            f'<polyline points="{data}" fill="none" {colour}><title>{name}</title></polyline>',
            f'<path d="M{width - 150} {32 + 20 * row} h24" {colour}/>',
            f'<text x="{width - 120}" y="{36 + 20 * row}">{name}</text>',
        ]
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{STYLE}'
    return "\n".join([begin, *parts, "</svg>\n"])


def compare(folder: Path, out: Path) -> None:
    """Train with both loaders; kill the training with xpool's once."""
    write_digits(folder)
    torchs = run("torch", folder)
    batches = len(torchs) // EPOCHS
    run("xpool", folder, kill_after=(batches + batches // 2) // SAVE_EVERY * SAVE_EVERY)
    ours = run("xpool", folder)
    assert losses(ours) == losses(torchs)
    print(f"checked: both give the same {len(ours)} losses")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(plot({"torch": torchs, "xpool": ours}), encoding="utf-8")
    print(f"plot: {os.path.relpath(out)}")


def losses(points: Iterable[Point]) -> list[tuple[int, float]]:
    return [(number, loss) for number, _, loss in points]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).parent / "out" / "training.svg"
    parser.add_argument("--out", type=Path, default=default, help="write the plot to this file")
    parser.add_argument("--loader", choices=list(LOADERS), help="train once, in this process")
    parser.add_argument("--folder", type=Path, help="has the JPEG files and the checkpoint")
    args = parser.parse_args()
    if args.loader:
        train(args.loader, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), args.out)


if __name__ == "__main__":
    main()
