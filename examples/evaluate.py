"""Evaluate a model on workers: ``apply_async`` on a `CtxPool`.

A small classifier is trained on half of scikit-learn's handwritten digits (1,797 images of
8 x 8 pixels).  Each worker gets the model once, when it starts, and evaluates batches of the other
half.  The results must equal those of one process.

    python examples/evaluate.py --workers 2
    python examples/evaluate.py --device auto      # every device that the machine has
"""

from __future__ import annotations

import argparse
import os
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xpool import CtxPool, current_worker
from xpool.devices import DeviceContext, devices

SEED = 7
BATCH = 16
EPOCHS = 40


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)
    )


class Evaluator:
    """The context of a worker: its device, and the model on it.

    The pool sets ``env`` in the worker before any import, and then calls ``enter`` there once.
    The successor of a dead worker gets both again.
    """

    def __init__(self, context: DeviceContext, weights: dict[str, Tensor]) -> None:
        self.context = context
        self.env = context.env
        self.cpus = context.cpus
        self.weights = weights

    def enter(self) -> None:
        self.context.enter()
        self.device = self.context.device
        self.model = make_model()
        self.model.load_state_dict(self.weights)
        self.model.to(self.device).eval()

    @torch.no_grad()  # torch_xla has no inference mode
    def correct(self, images: Tensor, labels: Tensor) -> int:
        """Return how many images the model classifies correctly."""
        classes = self.model(images.to(self.device)).argmax(dim=1)
        return int((classes == labels.to(self.device)).sum())


class Score(NamedTuple):
    """The result of a batch, and its worker."""

    correct: int
    items: int
    worker: int
    device: str
    pid: int


def evaluate(evaluator: Evaluator, images: Tensor, labels: Tensor) -> Score:
    """The task: evaluate a batch with the worker's model."""
    correct = evaluator.correct(images, labels)
    worker = current_worker().index
    return Score(correct, len(images), worker, str(evaluator.device), os.getpid())


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels for training, and images and labels for the test: half each."""
    # Imported here: workers run the top of this file and do not need it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32).reshape(-1, 8, 8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    train, test = order.tensor_split(2)
    return images[train], labels[train], images[test], labels[test]


def train(images: Tensor, labels: Tensor) -> nn.Module:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the batches are too small for threads
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model


def score(pool: CtxPool, batches: list[tuple[Tensor, Tensor]], name: str) -> list[Score]:
    """Evaluate all batches on the pool, print the time, and return the scores."""
    begin = time.perf_counter()
    pending = [pool.apply_async(evaluate, batch) for batch in batches]
    scores = [result.get() for result in pending]
    seconds = time.perf_counter() - begin
    items = sum(score.items for score in scores)
    print(f"{name}: {items} images in {seconds:.3f} s, {items / seconds:,.0f} items/s")
    return scores


def report(scores: list[Score], workers: int) -> None:
    """Print a line for each worker."""
    for worker in range(workers):
        own = [score for score in scores if score.worker == worker]
        if own:
            done = f"{len(own)} batches, {sum(score.items for score in own)} items"
            print(f"worker {worker}: {own[0].device}, {done}, pid {own[0].pid}")
        else:
            print(f"worker {worker}: no batches, the others were faster")


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate a model on workers.")
    parser.add_argument("--device", default="cpu", help="a kind of xpool.devices, or auto")
    parser.add_argument(
        "--workers",
        type=int,
        help="worker processes (default: 2 on the CPU, else one for each device)",
    )
    args = parser.parse_args()
    workers = args.workers
    if workers is None and args.device == "cpu":
        workers = 2

    bound = devices(args.device, n=workers)
    workers = len(bound)
    print("\n".join(str(context) for context in bound))
    images, labels, test_images, test_labels = load()
    weights = train(images, labels).state_dict()
    batches = list(zip(test_images.split(BATCH), test_labels.split(BATCH)))

    contexts = [Evaluator(context, weights) for context in bound]
    with CtxPool(worker_contexts=contexts) as pool:
        first = score(pool, batches, "first pass, with the workers' start")
        scores = score(pool, batches, "second pass")
    report(scores, workers)
    accuracy = sum(score.correct for score in scores) / len(test_images)
    print(f"accuracy {accuracy:.4f}")

    alone = Evaluator(devices("cpu", n=1)[0], weights)
    alone.enter()
    expected = [alone.correct(*batch) for batch in batches]
    assert sum(score.items for score in scores) == len(test_images) == 898
    # Devices round differently from the CPU.  So if two classes of an image are almost equal, the
    # device may choose the other one.
    may_differ = 0 if bound[0].kind == "cpu" else 1
    for found in (first, scores):
        differences = [abs(score.correct - want) for score, want in zip(found, expected)]
        assert max(differences) <= may_differ, "one process has other results"
    assert accuracy > 0.95, f"low accuracy: {accuracy}"
    print(f"checked: one process finds the same in each of the {len(batches)} batches")


if __name__ == "__main__":
    main()
