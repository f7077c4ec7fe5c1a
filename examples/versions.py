"""Evaluate the versions of a model while it is trained: `xpool.server` with a pool.

This process trains a model on half of scikit-learn's handwritten digits, and pushes a version after
each epoch. The workers of a `CtxPool` pull the newest version, and report its accuracy on the other
half. All are members of one `xpool.distributed.World`. A plot shows the accuracy by version.

    python examples/versions.py --workers 2 --out examples/out/versions.svg
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xpool import CtxPool, current_worker
from xpool.distributed import World
from xpool.server import PushPullModelServerImpl

SEED = 7
EPOCHS = 30
STYLE = """<style>
text { font: 12px sans-serif; fill: currentColor; } svg { color: #222; background: #fff; }
@media (prefers-color-scheme: dark) { svg { color: #ddd; background: #181818; } }
@media (max-width: 500px) { text { font-size: 20px; } }
</style>"""


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels for training, and images and labels for the test: half each."""
    # Imported here: workers run the top of this file and do not need it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    train, test = order.tensor_split(2)
    return images[train], labels[train], images[test], labels[test]


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the model classifies correctly."""
    return (model(images).argmax(dim=1) == labels).double().mean().item()


class Evaluator:
    """The context of a worker: the test data, its member of the world, and access to the server.

    The pool sets ``env`` in the worker's environment, and calls ``enter`` there once, before the
    first task.
    """

    env: Mapping[str, str] = {}

    def __init__(self, world_size: int, address: str, images: Tensor, labels: Tensor) -> None:
        self.world_size, self.address = world_size, address
        self.images, self.labels = images, labels

    def enter(self) -> None:
        torch.set_num_threads(1)
        rank = current_worker().index + 1
        self.world = World(
            f"evaluator-{rank}", rank, self.world_size, dist_init_method=self.address
        )
        group = self.world.create_rpc_group("versions", self.world.get_members())
        group.barrier()  # waits until the trainer has made its server
        self.server = group.get_paired("model").to_here()
        self.model = make_model()


class Report(NamedTuple):
    """The result of an evaluation, and its worker."""

    version: int
    accuracy: float
    worker: int


def evaluate(evaluator: Evaluator) -> Report:
    """The task: pull the newest version, and evaluate it."""
    evaluator.server.pull(evaluator.model)
    found = accuracy(evaluator.model, evaluator.images, evaluator.labels)
    return Report(evaluator.model.pp_version, found, current_worker().index)


def leave(evaluator: Evaluator) -> None:
    """Leave the world.  Returns when all members have left, so each worker runs one of these."""
    evaluator.world.stop()


def train(images: Tensor, labels: Tensor, model: nn.Module) -> Iterator[None]:
    """Train, and yield after each epoch."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        yield


def scale(low: float, high: float) -> list[float]:
    """Return at most seven round numbers that cover ``low`` to ``high``."""
    for step in (0.01, 0.02, 0.05, 0.1, 0.2):
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < 7:
            break
    return [round(number * step, 2) for number in range(first, last + 1)]


def plot(found: Mapping[int, float]) -> str:
    """Plot the accuracy by version (SVG)."""
    width, height, left, bottom = 640, 370, 60, 320
    marks = scale(min(found.values()), 1.0)
    low, high = marks[0], marks[-1]

    def x(version: float) -> float:
        return left + (width - left - 20) * version / EPOCHS

    def y(value: float) -> float:
        return bottom - (bottom - 30) * (value - low) / (high - low)

    points = sorted(found.items())
    line = " ".join(f"{x(version):.1f},{y(value):.1f}" for version, value in points)
    dots = [
        f'<circle cx="{x(version):.1f}" cy="{y(value):.1f}" r="3"><title>version {version}: '
        f"{value:.4f}</title></circle>"
        for version, value in points
    ]
    rules = [
        f'<path d="M{left} {y(mark):.1f}H{width - 20}" stroke="currentColor" opacity=".2"/>'
        f'<text x="{left - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:.2f}</text>'
        for mark in marks
    ]
    versions = [
        f'<text x="{x(version):.1f}" y="{bottom + 20}" text-anchor="middle">{version}</text>'
        for version in range(0, EPOCHS + 1, 5)
    ]
    middle = f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
            STYLE,
            *rules,
            *versions,
            f'<polyline points="{line}" fill="none" stroke="#28a" stroke-width="2"/>',
            f'<g fill="#28a">{"".join(dots)}</g>',
            f"{middle}version of the model</text>",
            f'<text x="{left}" y="14">accuracy</text>',
            "</svg>\n",
        ]
    )


def run(workers: int) -> list[Report]:
    """Train while workers evaluate, and compare each accuracy with this process's own."""
    images, labels, test_images, test_labels = load()
    model = make_model()
    alone: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        address, size = f"file://{folder}/world", workers + 1
        contexts = [Evaluator(size, address, test_images, test_labels)] * workers
        with CtxPool(worker_contexts=contexts) as pool:
            with World("trainer", 0, size, dist_init_method=address) as world:
                group = world.create_rpc_group("versions", world.get_members())
                PushPullModelServerImpl("model", group)
                server = group.get_paired("model").to_here()
                group.barrier()
                pending = []
                for _ in train(images, labels, model):
                    assert server.push(model)
                    pending.append(pool.apply_async(evaluate))
                    alone[model.pp_version] = accuracy(model, test_images, test_labels)
                pending += [pool.apply_async(evaluate) for _ in range(workers)]
                reports = [result.get() for result in pending]
                leaving = [pool.apply_async(leave) for _ in range(workers)]
            for result in leaving:
                result.get()
    for report in reports:
        assert report.accuracy == alone[report.version], (
            f"one process has another accuracy: {report}"
        )
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a model while it is being trained.")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    default = Path(__file__).parent / "out" / "versions.svg"
    parser.add_argument("--out", type=Path, default=default, help="write the plot to this file")
    options = parser.parse_args()

    reports = run(options.workers)
    found = {report.version: report.accuracy for report in reports}
    for version in sorted(found):
        by = sorted({report.worker for report in reports if report.version == version})
        names = " and ".join(map(str, by))
        print(f"version {version:2}: accuracy {found[version]:.4f}, by worker {names}")
    assert max(found) == EPOCHS, "the last version was not evaluated"
    assert found[EPOCHS] > 0.95, f"low accuracy: {found[EPOCHS]}"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(plot(found), encoding="utf-8")
    print(f"checked: one process finds the same in each of the {len(found)} versions evaluated")
    print(f"plot: {options.out}")


if __name__ == "__main__":
    main()
