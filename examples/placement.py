"""Place the models of an ensemble on workers, and evaluate it there: `xpool.assigner`.

Two networks extract features of scikit-learn's handwritten digits: one by convolutions, one row by
row. Each network feeds two classifiers. The assigner places these six models on workers by the
number of operations that torch counts for a batch, and by the amount of data between the models.
Each worker of a pool holds its models and runs them. The mean of the four classifiers is the
ensemble's result.

    python examples/placement.py --workers 2
    python examples/placement.py --device auto     # every GPU that the machine has
"""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xpool import CtxPool, P2PPool
from xpool.assigner import (
    ModelAssigner,
    ModelComplexityEstimator,
    ModelContext,
    ModelSizeEstimator,
)

SEED = 7
EPOCHS = 8
BATCH = 64


class AddressedPool(CtxPool, P2PPool):
    """A pool in which each worker has a context, and each task names its worker."""


class Rows(nn.Module):
    """A network that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.lstm(images.squeeze(1))[0].flatten(1)


class Ensemble(NamedTuple):
    """The models and their names; a chain lists the models, by number, that process an image."""

    names: list[str]
    models: list[nn.Module]
    chains: list[tuple[int, int]]


def make_ensemble() -> Ensemble:
    torch.manual_seed(SEED)
    convolutions = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    models: list[nn.Module] = []
    for network in (convolutions, Rows()):
        models += [
            network,
            nn.Linear(256, 10),
            nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)),
        ]
    names = [
        "convolutions", "convolutions, linear", "convolutions, two layers",
        "rows", "rows, linear", "rows, two layers",
    ]  # fmt: skip
    return Ensemble(names, models, [(0, 1), (0, 2), (3, 4), (3, 5)])


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels for training, and images and labels for the test: half each."""
    # Imported here: workers run the top of this file and do not need it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    train, test = order.tensor_split(2)
    return images[train], labels[train], images[test], labels[test]


def train(ensemble: Ensemble, images: Tensor, labels: Tensor) -> None:
    torch.set_num_threads(1)  # the batches are too small for threads
    models = nn.ModuleList(ensemble.models).train()
    optimizer = torch.optim.Adam(models.parameters(), lr=0.005)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            for network, chains in groupby(ensemble.chains, key=lambda chain: chain[0]):
                seen = models[network](images[batch])
                opinions = [models[classifier](seen) for _, classifier in chains]
                sum(nn.functional.cross_entropy(o, labels[batch]) for o in opinions).backward()
            optimizer.step()
    models.eval()


def place(ensemble: Ensemble, images: Tensor, devices: list[str] | None) -> ModelAssigner:
    """Place the models by their operations and their output for these images."""
    with torch.no_grad():
        seen = {network: ensemble.models[network](images) for network, _ in ensemble.chains}
    inputs = [images] * len(ensemble.models)
    for network, classifier in ensemble.chains:
        inputs[classifier] = seen[network]
    assigner = ModelAssigner(
        ensemble.models,
        {chain: seen[chain[0]].nbytes for chain in ensemble.chains},
        devices,
        example_inputs=inputs,
        move_models=False,  # the workers move them
    )
    print(assigner)
    for i, name in enumerate(ensemble.names):
        size = ModelSizeEstimator(ensemble.models[i], size_multiplier=1).estimate_size()
        operations = ModelComplexityEstimator(ensemble.models[i], inputs[i]).estimate_complexity()
        where = f"worker {assigner.placement[i]} ({assigner.assignment[i]})"
        print(f"{name:24}  {size:5.2f} MiB {operations / 1e6:7.2f} MFLOP  {where}")
    there = {chain: seen[chain[0]].nbytes for chain in ensemble.chains}
    away = [n for (a, b), n in there.items() if assigner.placement[a] != assigner.placement[b]]
    total = sum(there.values())
    print(f"{sum(away) // 1024} of {total // 1024} KiB a batch go from one worker to another")
    return assigner


@torch.no_grad()
def run(context: ModelContext, numbers: list[int], inputs: Tensor) -> Tensor:
    """The task: run a batch through one or more models of this worker."""
    for number in numbers:
        inputs = context.models[number](inputs.to(context.device))
    return inputs.cpu()


def opinions_of(
    pool: AddressedPool, assigner: ModelAssigner, chain: tuple[int, int], batches: list[Tensor]
) -> Tensor:
    """Run all batches through a chain, with one task for each worker of the chain."""
    values = batches
    for worker, numbers in groupby(chain, key=lambda number: assigner.placement[number]):
        own = list(numbers)
        pending = [pool.apply_async(run, (own, value), worker=worker) for value in values]
        values = [result.get() for result in pending]
    return torch.cat(values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Place models on workers, and run them there.")
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu"])
    parser.add_argument("--workers", type=int, default=2, help="CPU workers (default: 2)")
    options = parser.parse_args()

    images, labels, test_images, test_labels = load()
    ensemble = make_ensemble()
    train(ensemble, images, labels)
    devices = ["cpu"] * options.workers if options.device == "cpu" else None
    assigner = place(ensemble, images[:BATCH], devices)

    batches = list(test_images.split(BATCH))
    with AddressedPool(worker_contexts=assigner) as pool:
        found = [opinions_of(pool, assigner, chain, batches) for chain in ensemble.chains]
    with torch.no_grad():
        for (network, classifier), opinion in zip(ensemble.chains, found):
            alone = ensemble.models[classifier](ensemble.models[network](test_images))
            assert torch.allclose(opinion, alone, rtol=1e-3, atol=1e-3), "one process differs"
    for (_, classifier), opinion in zip(ensemble.chains, found):
        right = (opinion.argmax(1) == test_labels).double().mean().item()
        print(f"{ensemble.names[classifier]}: accuracy {right:.4f}")
    together = torch.stack([opinion.softmax(1) for opinion in found]).mean(0)
    accuracy = (together.argmax(1) == test_labels).double().mean().item()
    print(f"ensemble: accuracy {accuracy:.4f}")
    assert accuracy > 0.95, f"low accuracy: {accuracy}"
    print(f"checked: one process finds the same for all {len(test_images)} images")


if __name__ == "__main__":
    main()
