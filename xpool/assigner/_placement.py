"""Searches for a placement of n models on m devices with the least cost.

A placement is a tensor ``p`` of shape ``[n, m]``: the probability that model i lies on device j.
A decided placement has a single 1 in each row.  `cost` takes both kinds, and batches of them, so
the exact search, the greedy search and the gradient descent use the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

EXACT_LIMIT = 2**17
"""Up to so many placements (m to the n), all are tried, which takes as long as the descent."""

BATCH = 2**19
"""Number of elements of the largest intermediate tensor."""


class Problem(NamedTuple):
    """The models, the devices and the weights of the cost, for n models and m devices."""

    model_size: Tensor
    """``[1, n]``, MiB."""
    size_capacity: Tensor
    """``[1, m]``, MiB."""
    model_complexity: Tensor
    """``[1, n]``, in any unit."""
    complexity_capacity: Tensor
    """``[1, m]``, in any unit."""
    model_connection: Tensor
    """``[n, n]``, in any unit."""
    device_distance: Tensor
    """``[m, m]``, in any unit."""
    connection_weight: float
    size_match_weight: float
    complexity_match_weight: float
    entropy_weight: float


class Found(NamedTuple):
    """A decided placement: the index of each model's device, its cost, and the search's name."""

    placement: list[int]
    cost: float
    method: str


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the block on the CPU, with gradients and in one thread, whatever modes the caller uses.

    One thread is enough, because the matrices are small.  On busy cores, threads that wait for each
    other at every product make the search 20 times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def _shares(amounts: Tensor) -> Tensor:
    """Return the amounts divided by their sum.  If all are 0, they stay 0."""
    total = amounts.sum()
    return amounts / total if total > 0 else amounts


def _connection(problem: Problem) -> Tensor:
    """Return each pair's share of the data between different models, ``[n, n]``."""
    amounts = problem.model_connection
    return _shares(amounts - amounts.diag().diag())


def _power(problem: Problem) -> Tensor:
    """Return the devices' shares of the computing power, ``[m]``: equal shares if all have 0."""
    power = problem.complexity_capacity[0]
    return _shares(power if power.sum() > 0 else torch.ones_like(power))


def cost(p: Tensor, problem: Problem) -> Tensor:
    """Return the cost of placements of shape ``[..., n, m]`` as a tensor of shape ``[...]``."""
    n, m = p.shape[-2:]
    # `way[i, k]`: the distances of device k to the models to which i sends data, times the amounts.
    way = _connection(problem) @ p @ _shares(problem.device_distance).T
    size = (problem.model_size @ p).squeeze(-2)
    excess = (_shares(problem.model_complexity) @ p).squeeze(-2) - _power(problem)
    # Clamped, because the logarithm of 0 has no gradient.
    entropy = -(p * p.clamp_min(1e-30).log()).sum((-1, -2))
    return (
        problem.connection_weight * (p * way).sum((-1, -2)) / n**2
        + problem.size_match_weight
        * torch.relu(size - problem.size_capacity.squeeze(0)).sum(-1)
        / m
        + problem.complexity_match_weight * (excess**2).sum(-1) / m
        + problem.entropy_weight * entropy / n
    )


def search(
    problem: Problem, iterations: int, update_rate: float, limit: int = EXACT_LIMIT
) -> Found:
    """Return the best placement if at most ``limit`` exist, else the best one that was found.

    The search is deterministic and does not use torch's global generator.
    """
    n, m = problem.model_connection.shape[0], problem.device_distance.shape[0]
    if m**n <= limit:
        return _exact(problem, n, m)
    best = _polished(greedy(problem), problem)
    descended = _polished(_descend(problem, n, m, iterations, update_rate), problem)
    placement, value = min(best, descended, key=lambda found: found[1])
    return Found(placement, value, "gradient")


def _decided(placements: Tensor, m: int) -> Tensor:
    return torch.nn.functional.one_hot(placements, m).double()


def _exact(problem: Problem, n: int, m: int) -> Found:
    """Try all placements.  The digits in base m of a number below m to the n are a placement."""
    base = m ** torch.arange(n)
    step = max(1, BATCH // (n * m))
    best, least = 0, float("inf")
    for first in range(0, m**n, step):
        numbers = torch.arange(first, min(first + step, m**n))
        costs = cost(_decided(numbers[:, None] // base % m, m), problem)
        k = int(costs.argmin())
        if costs[k] < least:
            best, least = first + k, float(costs[k])
    return Found((best // base % m).tolist(), least, "exact")


def greedy(problem: Problem) -> list[int]:
    """Place the models one by one, each on the device where the cost grows least.

    The most complex model is first.  Of equally complex models, the largest is first.  Of equally
    good devices, the first is taken.
    """
    n, m = problem.model_connection.shape[0], problem.device_distance.shape[0]
    complexity, size = problem.model_complexity[0].tolist(), problem.model_size[0].tolist()
    placement = [0] * n
    # A model that is not placed yet has a row of zeros, which adds nothing to the cost.
    p = torch.zeros(n, m, dtype=torch.double)
    for i in sorted(range(n), key=lambda i: (-complexity[i], -size[i], i)):
        tried = p.repeat(m, 1, 1)
        tried[:, i] = torch.eye(m, dtype=p.dtype)
        placement[i] = int(cost(tried, problem).argmin())
        p[i, placement[i]] = 1
    return placement


def _polished(placement: Sequence[int], problem: Problem) -> tuple[list[int], float]:
    """Move one model or swap two, whichever lowers the cost more, until nothing lowers it.

    Returns the placement and its cost.
    """
    devices = torch.tensor(placement)
    m = problem.device_distance.shape[0]
    least = float(cost(_decided(devices, m), problem))
    while True:
        moves, swaps = _changes(devices, problem)
        tried = devices.clone()
        if moves.min() <= swaps.min():
            i, k = divmod(int(moves.argmin()), m)
            tried[i] = k
        else:
            i, k = divmod(int(swaps.argmin()), len(devices))
            tried[i], tried[k] = devices[k], devices[i]
        value = float(cost(_decided(tried, m), problem))
        # Checked with the exact cost: rounding errors of `_changes` could make this loop endless.
        if not value < least:
            return devices.tolist(), least
        devices, least = tried, value


def _changes(devices: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return how much each move and each swap changes the cost, up to rounding errors.

    The moves ``[n, m]`` are of model i to device k, the swaps ``[n, n]`` of models i and j.  Only
    the terms that change are computed, so all together take about as long as one `cost`.
    """
    n, m = len(devices), problem.device_distance.shape[0]
    p = _decided(devices, m)
    connection = _connection(problem) * (problem.connection_weight / n**2)
    distance = _shares(problem.device_distance)
    size, room = problem.model_size[0], problem.size_capacity[0]
    load = size @ p
    work = _shares(problem.model_complexity)[0]
    excess = work @ p - _power(problem)

    def change(device: Tensor, size: Tensor, work: Tensor) -> Tensor:
        """Return how the device's part of the cost changes if it gets more size and work."""
        over = load[device] - room[device]
        return (
            problem.size_match_weight * (torch.relu(over + size) - torch.relu(over))
            + problem.complexity_match_weight * work * (work + 2 * excess[device])
        ) / m

    way = connection @ p @ distance.T + connection.T @ p @ distance  # of model i on device k
    way = way - way.gather(1, devices[:, None])
    moves = way + change(torch.arange(m), size[:, None], work[:, None])
    moves += change(devices, -size, -work)[:, None]
    moves[range(n), devices] = 0

    way = way[:, devices]
    # `way` assumes that the other model stays at its place, so correct the distance of the two.
    between = distance[devices][:, devices]
    swaps = way + way.T + (connection + connection.T) * (between + between.T)
    more_size, more_work = size - size[:, None], work - work[:, None]
    swaps += change(devices[:, None], more_size, more_work)
    swaps += change(devices, -more_size, -more_work)
    swaps[devices[:, None] == devices] = 0
    return moves, swaps


def _descend(problem: Problem, n: int, m: int, iterations: int, update_rate: float) -> list[int]:
    """Follow the cost's gradient from fixed random probabilities; return the likeliest devices."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, m, generator=generator, dtype=torch.double).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=update_rate)
    for _ in range(iterations):
        step(optimizer, logits, problem)
    devices: list[int] = logits.argmax(1).tolist()
    return devices


def step(optimizer: torch.optim.Optimizer, logits: Tensor, problem: Problem) -> None:
    """Take one step down the gradient of the cost of ``softmax(logits)``."""
    with torch.enable_grad():
        value = cost(logits.softmax(-1), problem)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
