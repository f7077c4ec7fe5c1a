"""Searches for a placement of n models on m devices: one cost, three ways to minimise it.

A placement is a tensor ``p`` of shape ``[n, m]``: the probability that model i lies on device j.
A decided placement has a single 1 in each row.  `cost` takes both kinds, and batches of them, so
the exact search and the gradient descent minimise the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

EXACT_LIMIT = 2**17
"""The most placements (m to the n) that are all tried; that takes about as long as the descent."""

BATCH = 2**19
"""Elements of the largest intermediate tensor."""


class Problem(NamedTuple):
    """The models, the devices and the weights of the cost.  Shapes for n models and m devices."""

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
    """Return a context for the search that does not depend on the modes of the caller.

    It uses one thread, since the matrices are small: on busy cores, threads that wait for each
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
    """Return the amounts divided by their sum; all zeros stay zeros."""
    total = amounts.sum()
    return amounts / total if total > 0 else amounts


def _connection(problem: Problem) -> Tensor:
    """Return the shares of the data between different models, ``[n, n]``."""
    amounts = problem.model_connection
    return _shares(amounts - amounts.diag().diag())


def _power(problem: Problem) -> Tensor:
    """Return the devices' shares of the computing power, ``[m]``; equal if no device has any."""
    power = problem.complexity_capacity[0]
    return _shares(power if power.sum() > 0 else torch.ones_like(power))


def cost(p: Tensor, problem: Problem) -> Tensor:
    """Return the cost of placements of shape ``[..., n, m]``, shape ``[...]``."""
    n, m = p.shape[-2:]
    # For model i on device k: the distances to the models that it sends to, times the amounts.
    way = _connection(problem) @ p @ _shares(problem.device_distance).T
    size = (problem.model_size @ p).squeeze(-2)
    excess = (_shares(problem.model_complexity) @ p).squeeze(-2) - _power(problem)
    # Clamped, since the logarithm of 0 has no gradient.
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
    """Return the best placement if there are at most ``limit``, else the best one found.

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
    """Try all placements: each is the digits, in base m, of a number below m to the n."""
    base = m ** torch.arange(n)
    # In batches, which limit the memory of intermediate tensors.
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

    The most complex model is first; of equally complex ones the largest, then the first.  Of
    equally good devices, the first is taken.
    """
    n, m = problem.model_connection.shape[0], problem.device_distance.shape[0]
    complexity, size = problem.model_complexity[0].tolist(), problem.model_size[0].tolist()
    placement = [0] * n
    # A model that is not placed has a row of zeros: no size, no work, no distances.
    p = torch.zeros(n, m, dtype=torch.double)
    for i in sorted(range(n), key=lambda i: (-complexity[i], -size[i], i)):
        tried = p.repeat(m, 1, 1)
        tried[:, i] = torch.eye(m, dtype=p.dtype)
        placement[i] = int(cost(tried, problem).argmin())
        p[i, placement[i]] = 1
    return placement


def _polished(placement: Sequence[int], problem: Problem) -> tuple[list[int], float]:
    """Move one model, or swap two, whichever is best, until the cost no longer falls.

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
        # The rounding errors of `_changes` could otherwise make this loop endless.
        if not value < least:
            return devices.tolist(), least
        devices, least = tried, value


def _changes(devices: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the change of the cost by each move and each swap, up to rounding.

    Moves: ``[n, m]``, model i to device k.  Swaps: ``[n, n]``, models i and j.  Only the terms that
    change are computed, so all of them together take about as long as one `cost`.
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
        """Return the change of a device's part of the cost if size and work are added to it."""
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
    # Corrects the distance between the two: each move was computed with the other at its old place.
    between = distance[devices][:, devices]
    swaps = way + way.T + (connection + connection.T) * (between + between.T)
    more_size, more_work = size - size[:, None], work - work[:, None]
    swaps += change(devices[:, None], more_size, more_work)
    swaps += change(devices, -more_size, -more_work)
    swaps[devices[:, None] == devices] = 0
    return moves, swaps


def _descend(problem: Problem, n: int, m: int, iterations: int, update_rate: float) -> list[int]:
    """Follow the gradient of the cost from fixed random probabilities; return the likeliest."""
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
