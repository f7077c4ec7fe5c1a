"""`ModelAssigner`: places several models on several devices, with the least cost.

A placement is a tensor ``p`` of shape ``[n, m]``: the probability that model i lies on device j.
A decided placement has a single 1 in each row.  `cost` takes both kinds, and batches of them, so
the exact search, the greedy search and the gradient descent use the same function.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from xpool._calls.options import check_count, check_iterable
from xpool._memory.system import available_memory
from xpool.assigner._estimate import (
    MIB,
    ModelComplexityEstimator,
    ModelSizeEstimator,
    check_model,
    check_number,
)
from xpool.devices import DeviceContext, Host, devices
from xpool.devices._host import Spare, find_spare
from xpool.devices._kinds import best
from xpool.errors import DeviceError, OptionError, XPoolError

# -- the search ------------------------------------------------------------------------------------

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
    return min(best, descended, key=lambda found: found.cost)


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


def _polished(placement: Sequence[int], problem: Problem) -> Found:
    """Move one model or swap two, whichever lowers the cost more, until nothing lowers it."""
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
            return Found(devices.tolist(), least, "gradient")
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


# -- models on devices -----------------------------------------------------------------------------


class Place(NamedTuple):
    """A device, or a worker's share of a device: one for each entry of ``devices``."""

    device: torch.device
    """The device in this process; a CUDA device has an index."""

    binding: DeviceContext
    """The context that binds a worker to the device."""

    memory: float
    """Free memory, in bytes."""

    power: float
    """Computing power; an idle GPU has 1."""


def find_places(wanted: Any, cpu_weight: float, host: Host | None = None) -> list[Place]:
    """Return the places that ``wanted`` names.  None: all CUDA devices, or the CPU if none exist.

    Entries that name the same device share its memory and power equally.

    No device runtime is started.  CUDA's functions for free memory create a context on the device,
    which takes hundreds of megabytes, and the process can no longer be forked.  So NVML is asked,
    as by `xpool.devices`, and torch only if NVML is missing.
    """
    host = Host.here() if host is None else host
    if wanted is None:
        gpus = devices("cuda", host=host) if best(host) == "cuda" else []
        named = [torch.device("cuda", i) for i in range(len(gpus))] or [torch.device("cpu")]
    else:
        named = _named(wanted)
        gpus = devices("cuda", host=host) if any(d.type == "cuda" for d in named) else []
    for i, device in enumerate(named):
        if device.type == "cuda" and device.index >= len(gpus):
            raise DeviceError(
                f"devices[{i}] is '{device}', but this process may see cuda:0 to "
                f"cuda:{len(gpus) - 1}; name those, or 'cpu'"
            )
    # A GPU's workers get a mask with that GPU.  Workers on the CPU divide its cores.
    cpus = sum(device.type == "cpu" for device in named)
    bindings = iter(devices("cpu", cpus, host=host) if cpus else ())
    spare = _spare(gpus, sorted({d.index for d in named if d.type == "cuda"}))
    places = []
    for device in named:
        sharing = named.count(device)
        if device.type == "cpu":
            binding, left = next(bindings), Spare(available_memory(), cpu_weight)
        else:
            binding, left = gpus[device.index], spare[device.index]
        places.append(Place(device, binding, left.memory / sharing, left.idle / sharing))
    return places


def _named(wanted: Any) -> list[torch.device]:
    if isinstance(wanted, (str, torch.device)):
        raise TypeError(f"devices must be a list of devices, such as [{str(wanted)!r}]")
    found = []
    for i, given in enumerate(check_iterable("devices", wanted)):
        try:
            device = torch.device(given)
        except (RuntimeError, TypeError) as exc:
            raise OptionError(
                f"devices[{i}] is {given!r}, which is not a device; give 'cpu' or 'cuda:i'"
            ) from exc
        if device.type not in ("cpu", "cuda"):
            raise OptionError(f"devices[{i}] is '{device}'; models go to 'cpu' and 'cuda:i' only")
        is_gpu = device.type == "cuda"
        found.append(torch.device("cuda", device.index or 0) if is_gpu else torch.device("cpu"))
    if not found:
        raise OptionError(
            "devices is empty; leave it out for all GPUs of this machine, or else the CPU"
        )
    return found


def _spare(gpus: Sequence[DeviceContext], indices: Sequence[int]) -> dict[int, Spare]:
    if not indices:
        return {}
    found = find_spare([gpus[i].name for i in indices])
    if found is None:
        # NVML is missing, or does not know a device of the mask.
        found = [Spare(torch.cuda.mem_get_info(i)[0], 1.0) for i in indices]
    return dict(zip(indices, found))


class PlacementError(XPoolError, RuntimeError):
    """The models together need more memory than all devices may give."""

    __module__ = "xpool.assigner"  # the public name, in pickles and tracebacks


class ModelAssigner:
    """Places models on devices so that they fit, share the work, and are close if connected.

    ``docs/assigner.md`` defines the cost.  The search is exact for at most 131,072 placements (17
    models on 2 devices, 8 on 4, 5 on 8).  For more it follows the gradient of the cost with respect
    to the probabilities of a placement, and its result is never worse than a greedy search's.  The
    same arguments on the same machine in the same state give the same placement.

    Iterating over an assigner gives a `ModelContext` for each of `devices`, for the workers of a
    pool: ``CtxPool(worker_contexts=assigner)``.

    Args:
        models: the `torch.nn.Module` objects, numbered from 0.
        model_connection: how much data goes from model i to model j, as ``{(i, j): amount}``.
            Amounts are at least 0, in any unit.
        devices: "cpu" and "cuda" devices.  None: all CUDA devices that this process can see, or the
            CPU if none exist.  A device that is given n times (``["cpu"] * 3`` for three workers on
            the CPU) counts as n devices that share its memory and power.
        model_size_multiplier: the memory that a model needs, as a multiple of the size of its
            parameters and buffers.
        max_mem_ratio: the share of each device's free memory that models may take, at most 1.
        cpu_weight: the computing power of the CPU; an idle GPU has 1.
        connection_weight: weight of the data between models, times the distance of their devices.
        size_match_weight: weight of each MiB that a device's models need beyond ``max_mem_ratio``.
            A higher weight makes a placement beyond this limit less likely.
        complexity_match_weight: weight of the difference between a device's share of the work and
            its share of the power.
        entropy_weight: weight of the entropy of the probabilities, which only the descent has.
        iterations, update_rate: number of steps of the descent, and its learning rate (Adam).
        gpu_gpu_distance: distance of two devices of one kind, or of two workers on the CPU.
        cpu_gpu_distance: distance of the CPU and a GPU.
        move_models: whether to move each model to its device in this process.  Give False if
            workers hold the models: then this process starts no device runtime.
        example_inputs: for each model a tensor, or a tuple of arguments, with which the operations
            of a forward pass are counted.  None: they are estimated from the number of parameters.

    Raises:
        TypeError, OptionError (a `ValueError`): an argument has a wrong type or value.  The text
            names it.
        DeviceError (a `RuntimeError`): a CUDA device does not exist or cannot be used.
        PlacementError (a `RuntimeError`): the models need more memory than all devices may give.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        model_connection: Mapping[tuple[int, int], float],
        devices: Iterable[torch.device | str] | None = None,
        model_size_multiplier: float = 2,
        max_mem_ratio: float = 0.5,
        cpu_weight: float = 0,
        connection_weight: float = 2,
        size_match_weight: float = 1e-2,
        complexity_match_weight: float = 1,
        entropy_weight: float = 1,
        iterations: int = 500,
        update_rate: float = 0.01,
        gpu_gpu_distance: float = 1,
        cpu_gpu_distance: float = 10,
        move_models: bool = True,
        example_inputs: Iterable[Any] | None = None,
    ) -> None:
        self._models = _check_models(models)
        check_count("iterations", iterations, least=0)
        check_number("update_rate", update_rate, above=0)
        weights = [
            check_number(name, value, least=0)
            for name, value in (
                ("connection_weight", connection_weight),
                ("size_match_weight", size_match_weight),
                ("complexity_match_weight", complexity_match_weight),
                ("entropy_weight", entropy_weight),
            )
        ]
        if check_number("max_mem_ratio", max_mem_ratio, above=0) > 1:
            raise OptionError(f"max_mem_ratio must be at most 1, not {max_mem_ratio!r}")
        check_number("gpu_gpu_distance", gpu_gpu_distance, least=0)
        check_number("cpu_gpu_distance", cpu_gpu_distance, least=0)
        sizes = [ModelSizeEstimator(m, model_size_multiplier).estimate_size() for m in self._models]
        works = _complexities(self._models, example_inputs)
        self._places = find_places(devices, check_number("cpu_weight", cpu_weight, least=0))
        memory = [place.memory / MIB * max_mem_ratio for place in self._places]
        if sum(sizes) > sum(memory):
            named = ", ".join(map(str, self.devices))
            raise PlacementError(
                f"the {len(sizes)} models need about {sum(sizes):,.1f} MiB, but {named} may give "
                f"{sum(memory):,.1f} MiB: add devices, raise max_mem_ratio (now "
                f"{max_mem_ratio:g}), or lower model_size_multiplier (now "
                f"{model_size_multiplier:g})"
            )
        with plain_torch():
            problem = Problem(
                _row(sizes),
                _row(memory),
                _row(works),
                _row(place.power for place in self._places),
                _connections(model_connection, len(self._models)),
                _distances(self.devices, gpu_gpu_distance, cpu_gpu_distance),
                *weights,
            )
            self._found = search(problem, iterations, update_rate)
        if move_models:
            self._move()

    @property
    def assignment(self) -> list[torch.device]:
        """The device of each model, in the order of the models."""
        return [self._places[j].device for j in self._found.placement]

    @property
    def placement(self) -> list[int]:
        """For each model the index of its device in `devices`, and of its worker in a pool."""
        return list(self._found.placement)

    @property
    def devices(self) -> list[torch.device]:
        """The devices, in the given order."""
        return [place.device for place in self._places]

    @property
    def cost(self) -> float:
        """The cost of the placement.  Lower is better, among assigners of the same models."""
        return self._found.cost

    @property
    def method(self) -> str:
        """The search that found the placement: "exact" or "gradient"."""
        return self._found.method

    def __iter__(self) -> Iterator[ModelContext]:
        for j, place in enumerate(self._places):
            yield ModelContext(place.binding, {i: self._models[i] for i in self._held(j)})

    @staticmethod
    def optimize_placement(
        optimizer: torch.optim.Optimizer,
        placement: Tensor,
        model_size: Tensor,
        size_capacity: Tensor,
        model_complexity: Tensor,
        complexity_capacity: Tensor,
        model_connection: Tensor,
        device_distance: Tensor,
        connection_weight: float,
        size_match_weight: float,
        complexity_match_weight: float,
        entropy_weight: float,
    ) -> None:
        """Take one step down the gradient of the cost, for n models and m devices.

        Args:
            optimizer: an optimizer of ``placement``.  Its ``step`` is called once.
            placement: logits, ``[n, m]``, a leaf tensor that requires a gradient.  The probability
                that model i lies on device j is ``softmax(placement[i])[j]``.
            model_size: MiB, ``[1, n]``.
            size_capacity: MiB, ``[1, m]``.
            model_complexity: ``[1, n]``, in any unit.
            complexity_capacity: ``[1, m]``, in any unit.  All zeros mean equal power.
            model_connection: ``[n, n]``, in any unit.
            device_distance: ``[m, m]``, in any unit.
            connection_weight, size_match_weight, complexity_match_weight, entropy_weight: the
                weights of the parts of the cost.

        Raises:
            OptionError (a `ValueError`): a tensor has another shape.
        """
        if placement.dim() != 2:
            raise OptionError(f"placement must have the shape [n, m], not {list(placement.shape)}")
        n, m = placement.shape
        problem = Problem(
            model_size, size_capacity, model_complexity, complexity_capacity,
            model_connection, device_distance,
            connection_weight, size_match_weight, complexity_match_weight, entropy_weight,
        )  # fmt: skip
        shapes = [(1, n), (1, m), (1, n), (1, m), (n, n), (m, m)]
        for name, tensor, shape in zip(Problem._fields, problem, shapes):
            if tuple(tensor.shape) != shape:
                raise OptionError(
                    f"{name} must have the shape {list(shape)} for {n} models and {m} devices, "
                    f"not {list(tensor.shape)}"
                )
        step(optimizer, placement, problem)

    def _held(self, device: int) -> list[int]:
        return [i for i, j in enumerate(self._found.placement) if j == device]

    def _move(self) -> None:
        """Move the models to their devices.  First raise `OptionError` if models of different
        devices share a parameter."""
        owners: dict[int, int] = {}
        for i, model in enumerate(self._models):
            for tensor in (*model.parameters(), *model.buffers()):
                first = owners.setdefault(id(tensor), i)
                if self.assignment[first] != self.assignment[i]:
                    raise OptionError(
                        f"models[{first}] and models[{i}] share a parameter, but the first goes to "
                        f"{self.assignment[first]} and the other to {self.assignment[i]}; make "
                        "one model of them (torch.nn.ModuleList), or connect them more strongly"
                    )
        for model, device in zip(self._models, self.assignment):
            model.to(device)

    def __repr__(self) -> str:
        placed = ", ".join(f"{d}: {self._held(j)}" for j, d in enumerate(self.devices))
        return f"<ModelAssigner {placed}; {self.method}, cost {self.cost:.4g}>"


class ModelContext:
    """The context of a pool's worker: its device, and the models that were placed there.

    ``models`` maps a model's number in the assigner's list to the module.  Each worker has copies
    of its models.  Models that share parameters still do so in the worker.  A replacement worker
    gets the models in the state that they had when the pool was made.
    """

    def __init__(self, binding: DeviceContext, models: dict[int, nn.Module]) -> None:
        self.binding = binding
        self.env, self.cpus = binding.env, binding.cpus
        self.models = models

    @property
    def device(self) -> torch.device:
        """The `torch.device` of the models in the worker, where its only GPU is "cuda:0"."""
        return self.binding.device

    def enter(self) -> None:
        """Bind the worker to the device and move the models there.  The worker calls this once."""
        self.binding.enter()
        for model in self.models.values():
            model.to(self.device)

    def __getstate__(self) -> dict[str, Any]:
        for i, model in self.models.items():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.device.type != "cpu":
                    raise OptionError(
                        f"model {i} is on {tensor.device} in this process, and cannot be sent to "
                        "a worker, which has another runtime: use move_models=False, and have the "
                        "models on the CPU when the pool is made"
                    )
        return self.__dict__

    def __repr__(self) -> str:
        return f"ModelContext({self.binding!r}, models {list(self.models)})"


def _check_models(models: Any) -> list[nn.Module]:
    found = [check_model(f"models[{i}]", m) for i, m in enumerate(check_iterable("models", models))]
    if not found:
        raise OptionError("models is empty: give at least one torch.nn.Module")
    numbers: dict[int, int] = {}
    for i, model in enumerate(found):
        if (first := numbers.setdefault(id(model), i)) != i:
            raise OptionError(
                f"models[{i}] is models[{first}] again; a model can be on one device only"
            )
    return found


def _connections(connection: Any, n: int) -> Tensor:
    """Return the amounts as a matrix of shape ``[n, n]``."""
    if not isinstance(connection, Mapping):
        raise TypeError(
            f"model_connection must be a dict {{(i, j): amount}}, not {connection!r}; "
            "an empty dict if no model sends data to another"
        )
    matrix = torch.zeros(n, n, dtype=torch.double)
    for key, amount in connection.items():
        try:
            i, j = (operator.index(number) for number in key)
        except (TypeError, ValueError):
            raise TypeError(
                f"model_connection has the key {key!r}; keys are pairs of models' numbers"
            ) from None
        if not (0 <= i < n and 0 <= j < n):
            raise OptionError(
                f"model_connection has the key {key!r}, but the models are 0 to {n - 1}"
            )
        matrix[i, j] = check_number(f"model_connection[{key!r}]", amount, least=0)
    return matrix


def _distances(devices: list[torch.device], alike: float, apart: float) -> Tensor:
    kinds = [device.type for device in devices]
    rows = [[float(alike if a == b else apart) for b in kinds] for a in kinds]
    return torch.tensor(rows, dtype=torch.double).fill_diagonal_(0)


def _row(values: Iterable[float]) -> Tensor:
    return torch.tensor([list(values)], dtype=torch.double)


def _complexities(models: list[nn.Module], example_inputs: Any) -> list[float]:
    if example_inputs is None:
        return [ModelComplexityEstimator(model).estimate_complexity() for model in models]
    inputs = check_iterable("example_inputs", example_inputs)
    if isinstance(example_inputs, Tensor) or len(inputs) != len(models):
        raise OptionError(
            f"example_inputs must have one entry for each of the {len(models)} models, a tensor "
            f"or a tuple of arguments, not {len(inputs)}"
        )
    works = []
    for i, (model, given) in enumerate(zip(models, inputs)):
        if given is None:
            raise OptionError(
                f"example_inputs[{i}] is None; give inputs for all models, or leave them out "
                "for all: the two ways of counting cannot be compared"
            )
        try:
            works.append(ModelComplexityEstimator(model, given).estimate_complexity())
        except OptionError as exc:
            raise OptionError(f"example_inputs[{i}]: {exc}") from exc.__cause__
    return works
