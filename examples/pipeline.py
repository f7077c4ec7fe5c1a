"""A three-stage pipeline in a `P2PPool`: workers send batches to each other.

The images are scikit-learn's handwritten digits (1,797 of 8 x 8 pixels).  Worker 0 normalises
batches, and workers 1 and 2 compute the two halves of a small convolutional network.  Worker 2 also
counts the correct classes.  Tensors pass between workers in shared memory, not through the parent,
and all stages work at the same time.  The count must equal that of one process.

    python examples/pipeline.py
    python examples/pipeline.py --workers 6        # two pipelines side by side
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xpool import P2PPool, current_worker

SEED = 7
BATCH = 32
EPOCHS = 12
STAGES = 3


class Model(NamedTuple):
    """The two halves of the network."""

    features: nn.Module
    classifier: nn.Module


class Done(NamedTuple):
    """The work of one worker."""

    stage: int
    batches: int
    correct: int
    items: int
    seconds: float


def make_model() -> Model:
    features = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
    )
    classifier = nn.Sequential(
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    return Model(features, classifier)


def prepare(images: Tensor) -> Tensor:
    """Add a channel dimension to a batch, and normalise it."""
    batch = images.unsqueeze(1) / 16
    return (batch - batch.mean(dim=(2, 3), keepdim=True)) / (batch.std() + 1e-6)


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels for training, and images and labels for the test: half each."""
    # Imported here: workers run the top of this file and do not need it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    train, test = order.tensor_split(2)
    return images[train], labels[train], images[test], labels[test]


def train(images: Tensor, labels: Tensor) -> Model:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the batches are too small for threads
    model = make_model()
    network = nn.Sequential(*model)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.003)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(prepare(images[batch])), labels[batch]).backward()
            optimizer.step()
    network.eval()
    return model


@torch.inference_mode()
def run_stage(model: Model, images: Tensor, labels: Tensor, pipelines: int) -> Done:
    """Run the worker's stage on all batches of its pipeline.  All workers run this at once."""
    me = current_worker()
    pipeline, stage = divmod(me.index, STAGES)
    begin = time.perf_counter()
    correct = items = 0
    mine = list(zip(images.split(BATCH), labels.split(BATCH)))[pipeline::pipelines]
    for batch, truth in mine:
        if stage == 0:
            me.send(me.index + 1, prepare(batch))
        elif stage == 1:
            me.send(me.index + 1, model.features(me.recv(me.index - 1)))
        else:
            classes = model.classifier(me.recv(me.index - 1)).argmax(dim=1)
            correct += int((classes == truth).sum())
            items += len(truth)
    return Done(stage, len(mine), correct, items, time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream batches from worker to worker.")
    parser.add_argument("--workers", type=int, default=STAGES, help="a multiple of 3 (default: 3)")
    args = parser.parse_args()
    if args.workers < STAGES or args.workers % STAGES:
        parser.error(f"--workers must be a multiple of {STAGES}: each pipeline has {STAGES} stages")

    images, labels, test_images, test_labels = load()
    model = train(images, labels)
    pipelines = args.workers // STAGES

    with P2PPool(args.workers) as pool:
        # All workers share one copy of these in memory.
        sent = pool.broadcast(model), pool.broadcast(test_images), pool.broadcast(test_labels)
        pool.run_all(run_stage, *sent, pipelines)  # starts the workers
        begin = time.perf_counter()
        done = pool.run_all(run_stage, *sent, pipelines)
        seconds = time.perf_counter() - begin

    for worker, one in enumerate(done):
        work = f"{one.batches} batches in {one.seconds:.3f} s"
        print(f"worker {worker}: pipeline {worker // STAGES}, stage {one.stage}, {work}")
    items = sum(one.items for one in done)
    correct = sum(one.correct for one in done)
    print(f"{pipelines} pipeline(s): {items} images in {seconds:.3f} s")
    print(f"accuracy {correct / items:.4f}")

    with torch.inference_mode():
        network = nn.Sequential(*model)
        expected = sum(
            int((network(prepare(batch)).argmax(dim=1) == truth).sum())
            for batch, truth in zip(test_images.split(BATCH), test_labels.split(BATCH))
        )
    assert items == len(test_images) == 898
    assert correct == expected, f"correct in one process: {expected}, in the pipeline: {correct}"
    assert correct / items > 0.95, f"low accuracy: {correct / items}"
    print(f"checked: one process finds the same {expected} of {items}")


if __name__ == "__main__":
    main()
