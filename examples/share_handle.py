"""Keep a model's activations on their device between two tasks: share mode.

Each worker has the trunk of a model on its device. A task runs a batch of scikit-learn's
handwritten digits through the trunk, and returns a handle to the activations, which stay on the
device. Ten more tasks for each batch, one for each digit, apply a head to the activations. They get
the handle, and the pool runs them on the worker with that device. On the CPU, all workers share the
memory of the activations, so any worker can run these tasks, also without a copy.

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
    """The context of a worker: its device, and the trunk on it.

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
        self.model = make_trunk()
        self.model.load_state_dict(self.weights)
        self.model.to(self.device)

    @torch.no_grad()  # torch_xla has no inference mode
    def activations(self, images: Tensor) -> Tensor:
        return self.model(images.to(self.device))


def make_trunk() -> nn.Module:
    """Return random features, which need no training: images (n, 64) to activations (n, WIDTH)."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU())


class Made(NamedTuple):
    """The activations of a batch, and the worker that computed them."""

    activations: Any  # in the worker a tensor; in the parent a TensorHandle, or a shared tensor
    worker: int
    device: str


class Judged(NamedTuple):
    """How many images of a batch a head judged correctly, and its worker."""

    correct: int
    worker: int


def activate(trunk: Trunk, images: Tensor) -> Made:
    """The first task: run a batch through the trunk."""
    return Made(trunk.activations(images), current_worker().index, str(trunk.device))


@torch.no_grad()
def judge(trunk: Trunk, activations: Tensor, head: Tensor, is_digit: Tensor) -> Judged:
    """The second task: judge for each image of a batch whether it is a certain digit."""
    assert activations.device == trunk.device
    says = activations @ head.to(trunk.device) > 0
    return Judged(int((says == is_digit.to(trunk.device)).sum()), current_worker().index)


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


@torch.no_grad()
def fit(trunk: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Fit heads of shape (10, WIDTH) by ridge regression to +1 (this digit) and -1 (another)."""
    features = trunk(images).double()
    targets = 2.0 * nn.functional.one_hot(labels, 10).double() - 1
    kernel = features @ features.T + torch.eye(len(features), dtype=torch.float64)
    return (features.T @ torch.linalg.solve(kernel, targets)).T.float().contiguous()


def report(made: list[Made], judged: list[list[Judged]], workers: int) -> None:
    """Print a line for each worker, and where the activations were used."""
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
        print("the activations are in shared memory: a CPU worker can use those of any other")
        print(f"{len(pairs)} tasks used them in place, {moved} of them in another worker")


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep activations on their device between tasks.")
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
        pool.run_all(activate, batches[0])  # all workers start and compile
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
            first = first.cpu()
    total = 10 * len(test_images)
    correct = sum(result.correct for results in judged for result in results)
    print(f"accuracy of the heads {correct / total:.4f}")

    with torch.no_grad():
        alone = trunk(test_images)
    torch.testing.assert_close(first, alone[:BATCH], rtol=1e-2, atol=1e-2)
    says = alone @ heads.T > 0
    expected = int((says == nn.functional.one_hot(test_labels, 10).bool()).sum())
    # Devices round differently from the CPU, so an image close to a head's border may cross it.
    assert abs(correct - expected) <= total // 1000, f"{correct}, one process: {expected}"
    assert correct / total > 0.97, "low accuracy of the heads"
    print(f"checked: one process finds the same for {len(test_images)} images and 10 heads")


if __name__ == "__main__":
    main()
