"""Evaluate a model on two hosts of a Ray cluster, while one of them is killed.

    pip install xpool[ray,examples]; python examples/cluster.py

The program makes a cluster of two hosts on this machine; for a real cluster, remove `Cluster`.  It
trains a classifier on half of scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels),
broadcasts it to all workers, and evaluates it on the other half in batches.  After a quarter of the
batches, one host is killed.  Because of ``retries=1``, the other host runs that host's unfinished
batches again.  No batch is missing in the result, and none is counted twice.
"""

from __future__ import annotations

import ray
import torch
from ray.cluster_utils import Cluster
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import xpool.ray
from xpool import Pool

BATCH = 8


def train(images: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    """Train a classifier of digits with scikit-learn, and convert it to torch."""
    trained = MLPClassifier((64,), max_iter=300, random_state=7).fit(images, labels)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
    for layer, weights, bias in zip(layers[::2], trained.coefs_, trained.intercepts_, strict=True):
        layer.weight.data = torch.tensor(weights.T, dtype=torch.float32)
        layer.bias.data = torch.tensor(bias, dtype=torch.float32)
    return torch.nn.Sequential(*layers).eval()


@torch.inference_mode()
def evaluate(batch: tuple[torch.nn.Module, torch.Tensor, torch.Tensor]) -> int:
    """Return how many images of a batch the model classifies correctly."""
    model, images, labels = batch
    return int((model(images).argmax(dim=1) == labels).sum())


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = train(images[::2], labels[::2])
    images, labels = images[1::2], labels[1::2]
    here = int((model(images).argmax(dim=1) == labels).sum())

    head = {"num_cpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")
    ray.init(
        address=cluster.address,
        _node_ip_address="127.0.0.2",
        log_to_driver=False,
        logging_level="ERROR",
    )
    with Pool(hosts=xpool.ray.hosts()) as pool:
        print(f"{pool.size()} workers, one on each of 2 hosts")
        ref = pool.broadcast(model)
        batches = [
            (ref, images[i : i + BATCH], labels[i : i + BATCH])
            for i in range(0, len(images), BATCH)
        ]
        right, done = 0, 0
        for correct in pool.imap_unordered(evaluate, batches, retries=1):
            right, done = right + correct, done + 1
            if done == len(batches) // 4:
                cluster.remove_node(other, allow_graceful=False)
                print(f"after {done} of {len(batches)} batches, one host was killed")
    print(f"{right} of {len(images)} digits are right, as in one process: {right == here}")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
