"""A model's activations stay on their device between two tasks: share mode.

Scikit-learn's handwritten digits go through a trunk, which every worker has on its device, in one
task for each batch. Heads, one for each digit, judge these activations in tasks of their own. What
the first kind of task returns is a handle: the activations stay where they are, and a task that is
given the handle goes there. On the CPU there is no such place: the activations lie in memory that
all workers share, so any of them can do the second task, and nothing is copied either.

    python examples/share_handle.py                  # on the CPU
    python examples/share_handle.py --device auto    # on every device that the machine has
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from xpool import CtxPool, TensorHandle, current_worker
from xpool.devices import DeviceContext, devices

SEED = 7
BATCH = 64
WIDTH = 2048


class Trunk:
    """What each worker owns: its device, and the trunk living there.

    The pool sets ``env`` in the worker before anything is imported, and calls ``enter``
    there once.  A worker that replaces a dead one gets both again.
    """

    def __init__(self, context: DeviceContext, weights: dict[str, Tensor]) -> None:
        self.context = context
        self.env = context.env
        self.cpus = context.cpus
        self.weights = weights

    def enter(self) -> None:
        self.context.enter()
        self.device = self.context.device
        self.model = make_trunk()
        self.model.load_state_dict(self.weights)
        self.model.to(self.device)

    @torch.no_grad()  # torch_xla has no inference mode
    def activations(self, images: Tensor) -> Tensor:
        return self.model(images.to(self.device))


def make_trunk() -> nn.Module:
    """Random features, which need no training: images (n, 64) to activations (n, WIDTH)."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU())


class Made(NamedTuple):
    """The activations of one batch, and who made them."""

    activations: Any  # a tensor in the worker; here a TensorHandle, or a shared tensor
    worker: int
    device: str


class Judged(NamedTuple):
    """How many images of a batch one head has put on the right side, and where it ran."""

    correct: int
    worker: int


def activate(trunk: Trunk, images: Tensor) -> Made:
    """The first task: a batch through the trunk."""
    return Made(trunk.activations(images), current_worker().index, str(trunk.device))


@torch.no_grad()
def judge(trunk: Trunk, activations: Tensor, head: Tensor, is_digit: Tensor) -> Judged:
    """The second task: is each image of a batch this digit?"""
    assert activations.device == trunk.device
    says = activations @ head.to(trunk.device) > 0
    return Judged(int((says == is_digit.to(trunk.device)).sum()), current_worker().index)


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels for training, images and labels for the test, half and half."""
    # Imported here, since workers run the top of this file as well and have no use for it.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))
    train, test = order.tensor_split(2)
    return images[train], labels[train], images[test], labels[test]


@torch.no_grad()
def fit(trunk: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Heads of shape (10, WIDTH): ridge regression of +1 (this digit) and -1 (another)."""
    features = trunk(images).double()
    targets = 2.0 * nn.functional.one_hot(labels, 10).double() - 1
    kernel = features @ features.T + torch.eye(len(features), dtype=torch.float64)
    return (features.T @ torch.linalg.solve(kernel, targets)).T.float().contiguous()


def report(made: list[Made], judged: list[list[Judged]], workers: int) -> None:
    """Print a line for each worker, and what became of the activations."""
    for worker in range(workers):
        own = [one for one in made if one.worker == worker]
        heads = sum(result.worker == worker for results in judged for result in results)
        where = own[0].device if own else "the others were faster"
        print(f"worker {worker}: {where}, {len(own)} batches through the trunk, {heads} judged")
    pairs = [(one, result) for one, results in zip(made, judged) for result in results]
    moved = sum(one.worker != result.worker for one, result in pairs)
    if isinstance(made[0].activations, TensorHandle):
        print(f"{made[0].activations!r}")
        print(f"{len(pairs)} tasks went to the device that had their activations")
        assert not moved
    else:
        print("the activations lie in shared memory: a CPU worker can use those of any other")
        print(f"{len(pairs)} tasks used them in place, {moved} of them in another worker")


def main() -> None:
    parser = argparse.ArgumentParser(description="Activations stay where they are between tasks.")
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
    images, labels, test_images, test_labels = load()
    trunk = make_trunk()
    heads = fit(trunk, images, labels)
    batches = test_images.split(BATCH)
    contexts = [Trunk(context, trunk.state_dict()) for context in bound]
    with CtxPool(worker_contexts=contexts, is_copy_tensor=False) as pool:
        pool.run_all(activate, batches[0])  # they have started, and compiled
        begin = time.perf_counter()
        made = pool.map(activate, batches, 1)
        pending = [
            [pool.apply_async(judge, (one.activations, heads[digit], truth == digit))
             for digit in range(10)]
            for one, truth in zip(made, test_labels.split(BATCH))
        ]  # fmt: skip
        judged = [[result.get() for result in results] for results in pending]
        seconds = time.perf_counter() - begin
        size = sum(one.activations.nbytes for one in made)
        print(f"{size / 2**20:.1f} MiB of activations, used 10 times in {seconds:.3f} s")
        report(made, judged, len(bound))
        first = made[0].activations
        if isinstance(first, TensorHandle):
            first = first.cpu()  # a copy, for this process
    total = 10 * len(test_images)
    correct = sum(result.correct for results in judged for result in results)
    print(f"accuracy of the heads {correct / total:.4f}")

    with torch.no_grad():
        alone = trunk(test_images)
    torch.testing.assert_close(first, alone[:BATCH], rtol=1e-2, atol=1e-2)
    says = alone @ heads.T > 0
    expected = int((says == nn.functional.one_hot(test_labels, 10).bool()).sum())
    # A device rounds otherwise than the CPU: an image near a head's border may cross it.
    assert abs(correct - expected) <= total // 1000, f"{correct}, alone {expected}"
    assert correct / total > 0.97, "the heads are bad"
    print(f"checked: one process finds the same for {len(test_images)} images and 10 heads")


if __name__ == "__main__":
    main()
