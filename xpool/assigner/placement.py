"""The search for a placement of n models on m devices: one cost, three ways to make it small.

A placement is a tensor ``p`` of shape ``[n, m]``: the probability that model i lies on device j.
A decided placement has a single 1 in each row.  `cost` is for both, and for a batch of either;
so what the exact search compares is what the gradient descends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["EXACT_LIMIT", "Found", "Problem", "cost", "greedy", "plain_torch", "search", "step"]

EXACT_LIMIT = 2**17
"""Placements (m to the n) up to which all are tried: about as long as the descent takes."""

BATCH = 2**19
"""Elements of the largest intermediate tensor."""


class Problem(NamedTuple):
    """What is to be placed, and how its cost is weighted.  Shapes for n models and m devices."""

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
    """A decided placement: the device of each model by its index, its cost, and what found it."""

    placement: list[int]
    cost: float
    method: str


@contextmanager
def plain_torch() -> Iterator[None]:
    """What the search is to run under, whatever modes the caller has set.

    One thread, since the matrices are small: where other processes keep the cores busy, threads
    that wait for each other at every product make it 20 times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def _shares(amounts: Tensor) -> Tensor:
    """Divide by the sum; all zeros stay zeros."""
    total = amounts.sum()
    return amounts / total if total > 0 else amounts


def _connection(problem: Problem) -> Tensor:
    """The shares of the data between different models, ``[n, n]``."""
    amounts = problem.model_connection
    return _shares(amounts - amounts.diag().diag())


def _power(problem: Problem) -> Tensor:
    """The shares of the devices in the computing power, ``[m]``; equal where none has any."""
    power = problem.complexity_capacity[0]
    return _shares(power if power.sum() > 0 else torch.ones_like(power))


def cost(p: Tensor, problem: Problem) -> Tensor:
    """Return the cost of placements of shape ``[..., n, m]``, shape ``[...]``."""
    n, m = p.shape[-2:]
    # Model i on device k has this far to the models that it sends to, times how much it sends.
    way = _connection(problem) @ p @ _shares(problem.device_distance).T
    size = (problem.model_size @ p).squeeze(-2)
    excess = (_shares(problem.model_complexity) @ p).squeeze(-2) - _power(problem)
    # The logarithm of a probability that has become 0 has no gradient to go by.
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
    """Return the best placement where there are at most ``limit``, else the best that is found.

    Deterministic, and it leaves torch's global generator alone.
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
    """Try all placements: the digits of the numbers below m to the n, in base m."""
    base = m ** torch.arange(n)
    # In batches, for the memory that their intermediate tensors take.
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
    """Place the models one by one, each where the cost of those placed so far grows least.

    The most complex first; of equally complex ones the largest, then the first.  Of equally
    good devices the first.
    """
    n, m = problem.model_connection.shape[0], problem.device_distance.shape[0]
    complexity, size = problem.model_complexity[0].tolist(), problem.model_size[0].tolist()
    placement = [0] * n
    # A model that is not placed yet has a row of zeros: no size, no work, no way to anybody.
    p = torch.zeros(n, m, dtype=torch.double)
    for i in sorted(range(n), key=lambda i: (-complexity[i], -size[i], i)):
        tried = p.repeat(m, 1, 1)
        tried[:, i] = torch.eye(m, dtype=p.dtype)
        placement[i] = int(cost(tried, problem).argmin())
        p[i, placement[i]] = 1
    return placement


def _polished(placement: Sequence[int], problem: Problem) -> tuple[list[int], float]:
    """Make the best move of a model, or swap of two, for as long as that helps.

    Returns where that ends, and its cost.
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
        # `_changes` is right to rounding only, which could go round in circles.
        if not value < least:
            return devices.tolist(), least
        devices, least = tried, value


def _changes(devices: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return by how much the cost changes with each move and each swap, to rounding.

    Of moves ``[n, m]``, model i to device k; of swaps ``[n, n]``, models i and j.  Worked out from
    what changes, so that all of them take about as long as one `cost`.
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
        """Of a device's part of the cost when so much is added to what it holds."""
        over = load[device] - room[device]
        return (
            problem.size_match_weight * (torch.relu(over + size) - torch.relu(over))
            + problem.complexity_match_weight * work * (work + 2 * excess[device])
        ) / m

    way = connection @ p @ distance.T + connection.T @ p @ distance  # of model i if on device k
    way = way - way.gather(1, devices[:, None])
    moves = way + change(torch.arange(m), size[:, None], work[:, None])
    moves += change(devices, -size, -work)[:, None]
    moves[range(n), devices] = 0

    way = way[:, devices]
    # The two have moved past each other: each way alone was counted to where the other was.
    between = distance[devices][:, devices]
    swaps = way + way.T + (connection + connection.T) * (between + between.T)
    more_size, more_work = size - size[:, None], work - work[:, None]
    swaps += change(devices[:, None], more_size, more_work)
    swaps += change(devices, -more_size, -more_work)
    swaps[devices[:, None] == devices] = 0
    return moves, swaps


def _descend(problem: Problem, n: int, m: int, iterations: int, update_rate: float) -> list[int]:
    """Follow the gradient of the cost from random probabilities, always the same; then decide."""
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
