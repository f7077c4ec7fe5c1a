"""The search is exact if possible and never worse than greedy, with one cost function."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.assigner is about torch's models")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xpool.assigner import _assign as placing
from xpool.assigner._assign import (
    Problem,
    _changes,
    _descend,
    _polished,
    greedy,
    plain_torch,
    search,
)

pytestmark = [pytest.mark.pure, pytest.mark.torch]


def problem(
    sizes: Any,
    memory: Any,
    works: Any,
    power: Any,
    connection: Any,
    distance: Any,
    weights: tuple[float, float, float, float] = (2, 0.01, 1, 1),
) -> Problem:
    tensors = (
        torch.tensor(value, dtype=torch.double)
        for value in ([sizes], [memory], [works], [power], connection, distance)
    )
    return Problem(*tensors, *weights)


amounts = st.floats(0, 1000, allow_subnormal=False) | st.sampled_from([0.0, 1.0])


@st.composite
def problems(draw: Any, most_models: int = 7, most_devices: int = 4) -> Problem:
    n, m = draw(st.integers(1, most_models)), draw(st.integers(1, most_devices))

    def row(length: int) -> list[float]:
        return draw(st.lists(amounts, min_size=length, max_size=length))

    distance = [[0.0] * m for _ in range(m)]
    for i, j in itertools.combinations(range(m), 2):
        distance[i][j] = draw(amounts)
        distance[j][i] = draw(amounts)
    weights = tuple(draw(st.sampled_from([0.0, 0.01, 1.0, 5.0])) for _ in range(4))
    return problem(row(n), row(m), row(n), row(m), [row(n) for _ in range(n)], distance, weights)


def plain_cost(placement: list[int], given: Problem) -> float:
    """Return the cost by the documented formula, in plain Python."""
    n, m = len(placement), given.device_distance.shape[0]
    sent, way = given.model_connection.tolist(), given.device_distance.tolist()
    between = [(i, j) for i in range(n) for j in range(n) if i != j]
    all_sent = sum(sent[i][j] for i, j in between) or 1
    all_way = sum(map(sum, way)) or 1
    connection = sum(
        sent[i][j] / all_sent * way[placement[i]][placement[j]] / all_way for i, j in between
    )
    power = given.complexity_capacity[0].tolist()
    power = power if sum(power) else [1] * m
    size, work = given.model_size[0].tolist(), given.model_complexity[0].tolist()
    room, all_work = given.size_capacity[0].tolist(), sum(work) or 1
    over = part = 0.0
    for k in range(m):
        held = [i for i in range(n) if placement[i] == k]
        over += max(0.0, sum(size[i] for i in held) - room[k])
        part += (sum(work[i] for i in held) / all_work - power[k] / sum(power)) ** 2
    return (
        given.connection_weight * connection / n**2
        + given.size_match_weight * over / m
        + given.complexity_match_weight * part / m
    )


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


@given(given=problems(most_models=5, most_devices=3))
@settings(deadline=None, max_examples=40)
def test_the_exact_search_finds_the_least_cost(given: Problem):
    """The result is the same as that of a loop over all placements."""
    n, m = given.model_connection.shape[0], given.device_distance.shape[0]
    with plain_torch():
        found = search(given, 0, 0.01)
    least = min(plain_cost(list(p), given) for p in itertools.product(range(m), repeat=n))
    assert found.method == "exact"
    assert close(found.cost, least)
    assert close(plain_cost(found.placement, given), least)


@pytest.mark.exhaustive
@given(given=problems(), limit=st.sampled_from([0, 10**6]), iterations=st.sampled_from([0, 20]))
@settings(deadline=None, max_examples=40)
def test_never_worse_than_greedy(given: Problem, limit: int, iterations: int):
    """With either method and any number of steps, the cost is at most that of greedy."""
    with plain_torch():
        found = search(given, iterations, 0.1, limit)
        assert found.method == ("exact" if limit else "gradient")
        bound = plain_cost(greedy(given), given)
    assert close(plain_cost(found.placement, given), found.cost)
    assert found.cost <= bound or close(found.cost, bound)


@pytest.mark.exhaustive
@given(given=problems())
@settings(deadline=None, max_examples=40)
def test_no_move_or_swap_improves(given: Problem):
    """No move of one model and no swap of two lowers the cost of the result."""
    n, m = given.model_connection.shape[0], given.device_distance.shape[0]
    with plain_torch():
        found = search(given, 5, 0.1, limit=0)
    for i, k in itertools.product(range(n), range(m)):
        moved = list(found.placement)
        moved[i] = k
        assert plain_cost(moved, given) >= found.cost - 1e-9
    for i, j in itertools.combinations(range(n), 2):
        swapped = list(found.placement)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        assert plain_cost(swapped, given) >= found.cost - 1e-9


@given(given=problems(), data=st.data())
@settings(deadline=None, max_examples=40)
def test_changes_are_differences_of_costs(given: Problem, data: Any):
    """The computed changes of moves and swaps equal the differences of costs."""
    n, m = given.model_connection.shape[0], given.device_distance.shape[0]
    placement = data.draw(st.lists(st.integers(0, m - 1), min_size=n, max_size=n))
    now = plain_cost(placement, given)
    with plain_torch():
        moves, swaps = (t.tolist() for t in _changes(torch.tensor(placement), given))
    for i, k in itertools.product(range(n), range(m)):
        moved = list(placement)
        moved[i] = k
        assert close(now + moves[i][k], plain_cost(moved, given))
    for i, j in itertools.product(range(n), repeat=2):
        swapped = list(placement)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        assert close(now + swaps[i][j], plain_cost(swapped, given))


def random_problem(n: int, m: int, seed: int = 0) -> Problem:
    with plain_torch():
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Any:
            return torch.rand(*shape, generator=generator, dtype=torch.double)

        size, way = random(1, n) * 100, random(m, m)
        way = (way + way.T).fill_diagonal_(0)
        room = random(1, m) * size.sum() / m * 2.2
        sent = random(n, n) * (random(n, n) < 0.2)
        return Problem(size, room, random(1, n), random(1, m), sent, way, 2, 0.01, 1, 1)


@pytest.mark.parametrize("batch", [1, 100, 2**19])
def test_exact_search_in_batches(monkeypatch: pytest.MonkeyPatch, batch: int):
    """The batch size does not change the result of the exact search."""
    given = random_problem(6, 3)
    monkeypatch.setattr(placing, "BATCH", batch)
    with plain_torch():
        found = search(given, 0, 0.01)
    least = min(itertools.product(range(3), repeat=6), key=lambda p: plain_cost(list(p), given))
    assert found.placement == list(least)
    assert close(found.cost, plain_cost(list(least), given))


@pytest.mark.exhaustive
def test_the_better_of_two_starts():
    """The result is the better of the starts by greedy and by descent."""
    better = []
    with plain_torch():
        for seed in range(8):
            given = random_problem(20, 4, seed)
            from_greedy = _polished(greedy(given), given)[1]
            from_descent = _polished(_descend(given, 20, 4, 50, 0.01), given)[1]
            assert search(given, 50, 0.01).cost == min(from_greedy, from_descent)
            better.append(from_descent < from_greedy)
    assert set(better) == {True, False}


@pytest.mark.parametrize(("n", "m"), [(60, 8), (18, 2)])
def test_many_models(n: int, m: int):
    """Without exact search the result is better than greedy, and the same each time."""
    given = random_problem(n, m)
    with plain_torch():
        found = search(given, 30, 0.01)
        bound = float(plain_cost(greedy(given), given))
        assert found.method == "gradient"
        assert found.cost < bound
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        assert search(given, 30, 0.01) == found
        assert torch.equal(torch.random.get_rng_state(), before)


def test_where_exact_search_ends():
    """17 models on 2 devices are searched exactly in 131,072 placements, 18 are not."""
    with plain_torch():
        assert search(random_problem(17, 2), 0, 0.01).method == "exact"
        assert search(random_problem(18, 2), 0, 0.01).method == "gradient"
        alone = search(random_problem(500, 1), 0, 0.01)
        assert (alone.method, alone.placement) == ("exact", [0] * 500)


def test_threads_are_restored():
    """The search uses one thread, then restores the number of threads, also after an error."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(ZeroDivisionError), plain_torch():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
