"""Find hyper-parameters by cross-validation, with one trial at a time on each device.

A trial trains a small classifier of scikit-learn's handwritten digits on the worker's device, with
one setting and on all folds except one. When a worker has done a trial, it takes the next. The
result is the setting with the best accuracy on the folds left out.

    python examples/tpu_sweep.py                   # on the CPU
    python examples/tpu_sweep.py --device tpu      # a trial on each chip of a TPU VM
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from xpool import CtxPool, current_worker
from xpool.devices import DeviceContext, devices

SEED = 7
FOLDS = 3
EPOCHS = 10
BATCH = 64
RATES = (0.02, 0.1, 0.5)
WIDTHS = (16, 128)


class Setting(NamedTuple):
    rate: float
    width: int


class Trial(NamedTuple):
    setting: Setting
    fold: int


class Outcome(NamedTuple):
    """The result of a trial, and its worker."""

    trial: Trial
    correct: int
    items: int
    worker: int
    device: str


class Trainer:
    """The context of a worker: its device, and all images on it.

    The pool sets ``env`` in the worker before any import, and then calls ``enter`` there once.
    The successor of a dead worker gets both again.
    """

    def __init__(self, context: DeviceContext, images: Tensor, labels: Tensor) -> None:
        self.context = context
        self.env = context.env
        self.cpus = context.cpus
        self.data = images, labels

    def enter(self) -> None:
        self.context.enter()
        self.device = self.context.device
        torch.set_num_threads(1)  # the batches are too small for threads
        self.images, self.labels = (part.to(self.device) for part in self.data)

    def step_done(self) -> None:
        """Run the recorded graph, because torch_xla runs it only on request."""
        if self.context.framework == "torch_xla":
            import torch_xla

            torch_xla.sync()

    def fold(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the images and labels with indices number, number + FOLDS, ..."""
        return self.images[number::FOLDS], self.labels[number::FOLDS]

    def train(self, trial: Trial) -> nn.Module:
        """Train on all folds except one.  All workers get the same model."""
        generator = torch.Generator().manual_seed(SEED + trial.fold)
        torch.manual_seed(SEED)
        width = trial.setting.width
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        model.to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.setting.rate, momentum=0.9)
        folds = [self.fold(number) for number in range(FOLDS) if number != trial.fold]
        images, labels = (torch.cat(parts) for parts in zip(*folds))
        for _ in range(EPOCHS):
            order = torch.randperm(len(images), generator=generator)
            # All batches have one size, because torch_xla compiles each size anew.
            for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
                batch = batch.to(self.device)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                self.step_done()
        return model

    @torch.no_grad()  # torch_xla has no inference mode
    def correct(self, model: nn.Module, number: int) -> tuple[int, int]:
        """Return how many images of a fold the model classifies correctly, and their number."""
        images, labels = self.fold(number)
        return int((model(images).argmax(dim=1) == labels).sum()), len(labels)


def run(trainer: Trainer, trial: Trial) -> Outcome:
    """The task: one trial on the worker's device."""
    correct, items = trainer.correct(trainer.train(trial), trial.fold)
    return Outcome(trial, correct, items, current_worker().index, str(trainer.device))


def load() -> tuple[Tensor, Tensor]:
    """Return images of shape (1797, 64) and their labels, in random order."""
    # Imported here: workers run the top of this file and do not need it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    return images[order], torch.tensor(digits.target)[order]


def accuracies(outcomes: list[Outcome]) -> dict[Setting, float]:
    """Return the accuracy of each setting over all folds, the best first."""
    found: dict[Setting, Any] = {}
    for outcome in outcomes:
        found.setdefault(outcome.trial.setting, []).append(outcome)
    share = {
        setting: sum(o.correct for o in own) / sum(o.items for o in own)
        for setting, own in found.items()
    }
    return dict(sorted(share.items(), key=lambda entry: (-entry[1], entry[0])))


def report(outcomes: list[Outcome], workers: int) -> None:
    """Print a line for each setting and each worker."""
    for setting, accuracy in accuracies(outcomes).items():
        print(f"rate {setting.rate:<5} width {setting.width:<4} accuracy {accuracy:.4f}")
    for worker in range(workers):
        own = [outcome for outcome in outcomes if outcome.worker == worker]
        where = own[0].device if own else "the others were faster"
        print(f"worker {worker}: {where}, {len(own)} trials")


def main() -> None:
    parser = argparse.ArgumentParser(description="Cross-validate settings on all devices.")
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "xla", "cuda", "tpu"])
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
    print("\n".join(str(context) for context in bound))
    images, labels = load()
    settings = [Setting(*values) for values in itertools.product(RATES, WIDTHS)]
    # The folds of a setting are adjacent, so that a worker that has compiled it may get the next.
    trials = [Trial(setting, fold) for setting in settings for fold in range(FOLDS)]
    contexts = [Trainer(context, images, labels) for context in bound]
    begin = time.perf_counter()
    outcomes = []
    with CtxPool(worker_contexts=contexts) as pool:
        for outcome in pool.imap_unordered(run, trials, retries=1):
            outcomes.append(outcome)
            setting, fold = outcome.trial
            print(f"  {len(outcomes):2} of {len(trials)}: rate {setting.rate}, "
                  f"width {setting.width}, without fold {fold}: {outcome.correct} of "
                  f"{outcome.items} by worker {outcome.worker}")  # fmt: skip
    seconds = time.perf_counter() - begin
    print(f"{len(trials)} trials in {seconds:.1f} s, with the workers' start")
    report(outcomes, len(bound))

    assert sorted(outcome.trial for outcome in outcomes) == sorted(trials)
    best, accuracy = next(iter(accuracies(outcomes).items()))
    print(f"best: rate {best.rate}, width {best.width}, accuracy {accuracy:.4f}")
    alone = Trainer(devices("cpu", n=1)[0], images, labels)
    alone.enter()
    again = [run_alone(alone, Trial(best, fold)) for fold in range(FOLDS)]
    found = {o.trial.fold: o.correct for o in outcomes if o.trial.setting == best}
    # Devices round differently from the CPU, and training amplifies the differences.
    may_differ = 0 if bound[0].kind == "cpu" else 10
    differences = [abs(found[fold] - correct) for fold, correct in enumerate(again)]
    assert max(differences) <= may_differ, f"one process has other results: {differences}"
    assert accuracy > 0.95, f"low accuracy of the best setting: {accuracy}"
    print(f"checked: one process finds the same in each of the {FOLDS} folds")


def run_alone(trainer: Trainer, trial: Trial) -> int:
    """Run a trial in this process."""
    return trainer.correct(trainer.train(trial), trial.fold)[0]


if __name__ == "__main__":
    main()
