"""Hyper-parameters by cross-validation: a trial on each device, and the next when it is free.

A trial trains a small classifier of scikit-learn's handwritten digits on all folds but one, with
one setting, on the worker's own device. There are many more trials than devices: each worker takes
the next when it has done one. The setting that is best on the folds left out is the result.

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
    """What a trial gave, and who ran it."""

    trial: Trial
    correct: int
    items: int
    worker: int
    device: str


class Trainer:
    """What each worker owns: its device, and all images there, by folds.

    The pool sets ``env`` in the worker before anything is imported, and calls ``enter``
    there once.  A worker that replaces a dead one gets both again.
    """

    def __init__(self, context: DeviceContext, images: Tensor, labels: Tensor) -> None:
        self.context = context
        self.env = context.env
        self.cpus = context.cpus
        self.data = images, labels

    def enter(self) -> None:
        self.context.enter()
        self.device = self.context.device
        torch.set_num_threads(1)  # batches are so small that threads cost more than they gain
        self.images, self.labels = (part.to(self.device) for part in self.data)

    def step_done(self) -> None:
        """Have what was recorded computed: torch_xla runs a graph when it is told to."""
        if self.context.framework == "torch_xla":
            import torch_xla

            torch_xla.sync()

    def fold(self, number: int) -> tuple[Tensor, Tensor]:
        """Images and labels number, number + FOLDS, ..."""
        return self.images[number::FOLDS], self.labels[number::FOLDS]

    def train(self, trial: Trial) -> nn.Module:
        """Train on all folds but one; the same on every worker."""
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
            # Batches of one size: each other one would be compiled anew.
            for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
                batch = batch.to(self.device)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                self.step_done()
        return model

    @torch.no_grad()  # torch_xla has no inference mode
    def correct(self, model: nn.Module, number: int) -> tuple[int, int]:
        """Images of one fold that the model puts into their class, and how many there are."""
        images, labels = self.fold(number)
        return int((model(images).argmax(dim=1) == labels).sum()), len(labels)


def run(trainer: Trainer, trial: Trial) -> Outcome:
    """The task: one trial, on the worker's own device."""
    correct, items = trainer.correct(trainer.train(trial), trial.fold)
    return Outcome(trial, correct, items, current_worker().index, str(trainer.device))


def load() -> tuple[Tensor, Tensor]:
    """Images of shape (1797, 64) and their labels, in random order."""
    # Imported here, since workers run the top of this file as well and have no use for it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    return images[order], torch.tensor(digits.target)[order]


def accuracies(outcomes: list[Outcome]) -> dict[Setting, float]:
    """Accuracy of each setting over all folds, the best first."""
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
    parser = argparse.ArgumentParser(description="Cross-validate settings, a trial on each device.")
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
    # The folds of one setting one after the other: a worker that has compiled it may get the next.
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
    print(f"{len(trials)} trials in {seconds:.1f} s, the workers being started")
    report(outcomes, len(bound))

    assert sorted(outcome.trial for outcome in outcomes) == sorted(trials)
    best, accuracy = next(iter(accuracies(outcomes).items()))
    print(f"best: rate {best.rate}, width {best.width}, accuracy {accuracy:.4f}")
    alone = Trainer(devices("cpu", n=1)[0], images, labels)
    alone.enter()
    again = [run_alone(alone, Trial(best, fold)) for fold in range(FOLDS)]
    found = {o.trial.fold: o.correct for o in outcomes if o.trial.setting == best}
    # A device rounds otherwise than the CPU, and training carries that on.
    may_differ = 0 if bound[0].kind == "cpu" else 10
    differences = [abs(found[fold] - correct) for fold, correct in enumerate(again)]
    assert max(differences) <= may_differ, f"one process finds otherwise: {differences}"
    assert accuracy > 0.95, f"the best setting is bad: {accuracy}"
    print(f"checked: one process finds the same in each of the {FOLDS} folds")


def run_alone(trainer: Trainer, trial: Trial) -> int:
    """A trial in this process."""
    return trainer.correct(trainer.train(trial), trial.fold)[0]


if __name__ == "__main__":
    main()
