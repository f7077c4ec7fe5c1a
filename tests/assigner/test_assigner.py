"""`ModelAssigner`: where models are placed, what is refused, and that no runtime is started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.assigner is about torch's models")

import torch
from devices.hosts import gpu_host
from support import scripts
from support.tiers import also
from torch import nn

import xpool
from xpool.assigner import ModelAssigner, PlacementError, _assign
from xpool.devices import Host
from xpool.devices._host import Spare

pytestmark = [pytest.mark.pure, pytest.mark.torch]

GIB = 1024**3


def linear(megabytes: float = 1) -> nn.Module:
    """A model of this many MiB."""
    return nn.Linear(1024, int(256 * megabytes), bias=False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two idle GPUs of 10 GiB."""
    on_machine(monkeypatch, gpu_host(2), {"0": Spare(10 * GIB, 1), "1": Spare(10 * GIB, 1)})


def on_machine(monkeypatch: pytest.MonkeyPatch, host: Host, spare: dict[str, Spare]) -> None:
    monkeypatch.setattr(Host, "here", classmethod(lambda cls, **_: host))
    monkeypatch.setattr(_assign, "find_spare", lambda names: [spare[name] for name in names])
    monkeypatch.setattr(_assign, "available_memory", lambda: 4 * GIB)


def test_connected_models_share_a_device(two_gpus: None):
    """Of four models, each connected pair shares a device, and both devices are used."""
    models = [linear() for _ in range(4)]
    connection = {(0, 2): 10, (1, 3): 10}
    assigner = ModelAssigner(models, connection, move_models=False)
    a, b, c, d = assigner.assignment
    assert a == c != b == d
    assert {a, b} == {torch.device("cuda", 0), torch.device("cuda", 1)}
    assert assigner.method == "exact"
    assert assigner.devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert [assigner.devices[j] for j in assigner.placement] == assigner.assignment
    assert all(p.device.type == "cpu" for model in models for p in model.parameters())


@pytest.mark.exhaustive
def test_work_is_shared_by_power(monkeypatch: pytest.MonkeyPatch):
    """A half-busy GPU gets half the work; with inputs, the work is counted in operations."""
    host = gpu_host(2)
    on_machine(monkeypatch, host, {"0": Spare(10 * GIB, 0.5), "1": Spare(10 * GIB, 1)})
    equal = ModelAssigner([linear() for _ in range(6)], {}, move_models=False)
    assert sorted(equal.placement) == [0, 0, 1, 1, 1, 1]
    models = [linear() for _ in range(3)]
    inputs = [torch.zeros(batch, 1024) for batch in (1, 10, 9)]
    by_batch = ModelAssigner(models, {}, move_models=False, example_inputs=inputs)
    assert by_batch.placement in ([1, 1, 0], [0, 1, 0], [1, 0, 1])
    assert by_batch.placement[1] != by_batch.placement[2]


def test_memory_decides(monkeypatch: pytest.MonkeyPatch):
    """A device with free memory is chosen before one with more power."""
    on_machine(monkeypatch, gpu_host(2), {"0": Spare(GIB // 4, 1), "1": Spare(9 * GIB, 0.01)})
    models = [nn.Linear(1024, 128 * 1024, device="meta") for _ in range(2)]
    assert ModelAssigner(models, {}, move_models=False).placement == [1, 1]
    careless = ModelAssigner(models, {}, move_models=False, size_match_weight=0)
    assert 0 in careless.placement


def test_cpu_weight(two_gpus: None):
    """With ``cpu_weight=0`` the CPU gets no model, with 1 its share."""
    models = [linear() for _ in range(4)]
    devices = ["cuda:0", "cpu"]
    assert ModelAssigner(models, {}, devices, move_models=False).placement == [0] * 4
    shared = ModelAssigner(models, {}, devices, move_models=False, cpu_weight=1)
    assert sorted(shared.placement) == [0, 0, 1, 1]


def test_distance_between_kinds(two_gpus: None):
    """Connected models go to near devices, if the connection weighs enough."""
    models = [linear(2), linear(1), linear(1)]
    options: dict[str, Any] = {"devices": ["cpu", "cuda:0", "cuda:1"], "cpu_weight": 1}
    near = ModelAssigner(models, {(0, 1): 1}, **options, connection_weight=50, move_models=False)
    assert near.assignment[0] == near.assignment[1]
    spread = ModelAssigner(
        [linear() for _ in range(3)], {(0, 1): 1}, **options, connection_weight=1, move_models=False
    )
    assert sorted(spread.placement) == [0, 1, 2]
    assert spread.assignment[2].type == "cpu"


def test_shares_of_one_device():
    """A device named several times counts as several workers, which share its power."""
    places = _assign.find_places(["cpu", "cpu"], 1, Host())
    assert [place.power for place in places] == [0.5, 0.5]
    assert places[0].memory > 0
    assigner = ModelAssigner([linear() for _ in range(6)], {}, ["cpu"] * 3, cpu_weight=1)
    assert sorted(assigner.placement) == [0, 0, 1, 1, 2, 2]
    assert assigner.assignment == [torch.device("cpu")] * 6


def test_default_devices(monkeypatch: pytest.MonkeyPatch, two_gpus: None):
    """By default all visible GPUs are used, or the CPU if there are none."""
    assert _assign.find_places(None, 0)[1].device == torch.device("cuda", 1)
    masked = gpu_host(2, environ={"CUDA_VISIBLE_DEVICES": "1"})
    on_machine(monkeypatch, masked, {"1": Spare(GIB, 0.5)})
    (place,) = _assign.find_places(None, 0)
    assert (place.device, place.memory, place.power) == (torch.device("cuda", 0), GIB, 0.5)
    assert place.binding.env["CUDA_VISIBLE_DEVICES"] == "1"
    hidden = replace(masked, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert [p.device for p in _assign.find_places(None, 0, hidden)] == [torch.device("cpu")]
    assert [p.device for p in _assign.find_places(None, 0, Host())] == [torch.device("cpu")]


def test_without_nvml(monkeypatch: pytest.MonkeyPatch):
    """Without NVML torch is asked for free memory, which starts the runtime."""
    host = replace(gpu_host(0, environ={"CUDA_VISIBLE_DEVICES": "0,1"}), gpus=None)
    monkeypatch.setattr(_assign, "find_spare", lambda names: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((i + 1) * GIB, 9 * GIB))
    places = _assign.find_places(["cuda:0", "cuda:1"], 0, host)
    assert [(place.memory, place.power) for place in places] == [(GIB, 1), (2 * GIB, 1)]


@pytest.mark.exhaustive
@pytest.mark.starts
def test_no_runtime_is_started():
    """Importing and placing does not start CUDA, and ``import xpool`` does not import torch."""
    code = (
        "import sys, xpool; assert 'torch' not in sys.modules\n"
        "import torch; from torch import nn\n"
        "from xpool.assigner import ModelAssigner\n"
        "ModelAssigner([nn.Linear(2, 2)], {}, move_models=False)\n"
        "print(torch.cuda.is_initialized())"
    )
    assert scripts.run_ok(["-c", code]) == "False\n"


def test_models_are_moved(monkeypatch: pytest.MonkeyPatch, two_gpus: None):
    """By default each model is moved to its device."""
    moved = []
    monkeypatch.setattr(nn.Module, "to", lambda self, device: moved.append((self, device)))
    models = [linear(), linear()]
    assigner = ModelAssigner(models, {})
    assert moved == list(zip(models, assigner.assignment))
    assert len({device for _, device in moved}) == 2


def test_shared_parameters_stay_together(two_gpus: None):
    """Models that share parameters must get the same device."""
    first, second = linear(), linear()
    second.weight = first.weight
    with pytest.raises(ValueError, match=r"models\[0\] and models\[1\] share a parameter"):
        ModelAssigner([first, second], {})
    assert first.weight.device.type == "cpu"
    assert ModelAssigner([first, second], {}, ["cpu"]).placement == [0, 0]


@pytest.mark.exhaustive
def test_any_mode_of_the_caller():
    """Inference mode, default device and default dtype of the caller have no effect."""
    models = [linear(i + 1) for i in range(4)]
    expected = ModelAssigner(models, {(0, 1): 2}, ["cpu"] * 20).placement
    with torch.inference_mode(), torch.device("meta"):
        assigner = ModelAssigner(models, {(0, 1): 2}, ["cpu"] * 20)
    assert assigner.method == "gradient"
    assert assigner.placement == expected


def test_any_iterable_and_index():
    """Generators, numpy's numbers and devices without an index are accepted."""
    numpy = pytest.importorskip("numpy", reason="uses numpy's integers")
    connection = {(numpy.int64(0), numpy.int32(1)): numpy.float32(2)}
    assigner = ModelAssigner((linear() for _ in range(2)), connection, iter([torch.device("cpu")]))
    assert assigner.placement == [0, 0]


def test_repr():
    """The repr shows devices, method and cost."""
    assigner = ModelAssigner([linear()], {}, ["cpu"])
    assert repr(assigner) == "<ModelAssigner cpu: [0]; exact, cost 0>"


def test_too_large(monkeypatch: pytest.MonkeyPatch, two_gpus: None):
    """If the models do not fit, the error has the sizes and the option to change."""
    on_machine(monkeypatch, gpu_host(1), {"0": Spare(2**20 * 10, 1)})
    with pytest.raises(
        RuntimeError, match=r"the 2 models need about 16\.0 MiB, but cuda:0 may"
    ) as info:
        ModelAssigner([linear(4), linear(4)], {}, move_models=False)
    assert isinstance(info.value, PlacementError)
    assert isinstance(info.value, xpool.XPoolError)
    assert "5.0 MiB" in str(info.value)
    assert "max_mem_ratio (now 0.5)" in str(info.value)
    ModelAssigner([linear(4)], {}, max_mem_ratio=1, move_models=False)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "models must be iterable", {"models": 3}),
        (TypeError, r"models\[1\] must be a torch.nn.Module, not 3", {"models": [linear(), 3]}),
        (ValueError, "models is empty", {"models": []}),
        (TypeError, "model_connection must be a dict", {"model_connection": [(0, 1)]}),
        (TypeError, "the key 1; keys are pairs", {"model_connection": {1: 1}}),
        (TypeError, "the key 'ab'; keys are pairs", {"model_connection": {"ab": 1}}),
        (ValueError, r"key \(0, 2\), but the models are 0 to 1", {"model_connection": {(0, 2): 1}}),
        (ValueError, r"\(-1, 0\), but the models are", {"model_connection": {(-1, 0): 1}}),
        (ValueError, r"\(0, 1\)\] must be at least 0, not -3", {"model_connection": {(0, 1): -3}}),
        (ValueError, "must be finite", {"model_connection": {(0, 1): float("inf")}}),
        (TypeError, r"must be a list of devices, such as \['cpu'\]", {"devices": "cpu"}),
        (ValueError, r"devices\[0\] is 'gpu', which is not a device", {"devices": ["gpu"]}),
        (ValueError, r"devices\[0\] is 1\.5, which is not a device", {"devices": [1.5]}),
        (ValueError, r"devices\[1\] is 'meta'; models go to", {"devices": ["cpu", "meta"]}),
        (ValueError, "devices is empty; leave it out", {"devices": []}),
        (RuntimeError, "may see cuda:0 to cuda:1; name those", {"devices": ["cpu", "cuda:2"]}),
        (ValueError, "model_size_multiplier|size_multiplier", {"model_size_multiplier": 0}),
        (ValueError, "max_mem_ratio must be above 0", {"max_mem_ratio": 0}),
        (ValueError, "max_mem_ratio must be at most 1, not 1.5", {"max_mem_ratio": 1.5}),
        (ValueError, "cpu_weight must be at least 0", {"cpu_weight": -1}),
        (TypeError, "entropy_weight must be a number, not None", {"entropy_weight": None}),
        (ValueError, "iterations must be at least 0", {"iterations": -1}),
        (TypeError, "iterations must be a whole number", {"iterations": 1.5}),
        (ValueError, "update_rate must be above 0", {"update_rate": 0}),
        (ValueError, "gpu_gpu_distance must be at least 0", {"gpu_gpu_distance": -1}),
        (ValueError, "one entry for each of the 2 models.*not 1", {"example_inputs": [None]}),
        (ValueError, r"example_inputs\[1\] is None", {"example_inputs": [torch.ones(1024), None]}),
        (ValueError, r"example_inputs\[0\]: the forward", {"example_inputs": [torch.ones(3)] * 2}),
    ],
)
def test_bad_arguments(two_gpus: None, error: Any, message: str, options: dict[str, Any]):
    """Errors name the argument and the possible values."""
    given = {"models": [linear(), linear()], "model_connection": {}, "move_models": False}
    with pytest.raises(error, match=message):
        ModelAssigner(**(given | options))


def test_the_same_model_twice():
    """One model cannot be placed twice."""
    model = linear()
    with pytest.raises(ValueError, match=r"models\[1\] is models\[0\] again"):
        ModelAssigner([model, model], {})


def test_no_gpu(monkeypatch: pytest.MonkeyPatch):
    """Without a GPU the error says what is missing."""
    monkeypatch.setattr(Host, "here", classmethod(lambda cls, **_: gpu_host(0)))
    with pytest.raises(xpool.DeviceError, match="no GPU that can be used"):
        ModelAssigner([linear()], {}, ["cuda"])


# optimize_placement ------------------------------------------------------------------------------


def arguments(n: int, m: int, dtype: Any = torch.float) -> list[Any]:
    """Return arguments of `optimize_placement`, as a direct caller passes them."""
    placement = torch.zeros(n, m, dtype=dtype, requires_grad=True)
    ring = torch.zeros(n, n, dtype=dtype)
    ring[range(n - 1), range(1, n)] = 1
    return [
        torch.optim.Adam([placement], lr=0.1), placement,
        torch.ones(1, n, dtype=dtype), torch.full((1, m), 10.0, dtype=dtype),
        torch.ones(1, n, dtype=dtype), torch.ones(1, m, dtype=dtype),
        ring, 1 - torch.eye(m, dtype=dtype), 2, 1e-2, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float, *also(torch.double)])
def test_optimize_placement(dtype: Any):
    """A step changes the logits by at most the learning rate, and many steps decide the
    placement."""
    given = arguments(4, 2, dtype)
    placement = given[1]
    with torch.no_grad():
        placement[:2, 0] += 0.01
        placement[2:, 1] += 0.01
    before = placement.detach().clone()
    assert ModelAssigner.optimize_placement(*given) is None
    assert 0 < float((placement.detach() - before).abs().max()) < 0.101
    for _ in range(80):
        ModelAssigner.optimize_placement(*given)
    assert placement.argmax(1).tolist() == [0, 0, 1, 1]
    assert float(placement.detach().softmax(-1).max(1).values.min()) > 0.95


def test_optimize_placement_without_connections_or_distances():
    """Without connections and distances the gradient is zero, not NaN."""
    given = arguments(2, 1)
    given[6] = torch.zeros(2, 2)
    for _ in range(3):
        ModelAssigner.optimize_placement(*given)
    assert given[1].isfinite().all()


@pytest.mark.parametrize(
    ("which", "shape", "message"),
    [
        (1, (4,), r"placement must have the shape \[n, m\], not \[4\]"),
        (2, (4,), r"model_size must have the shape \[1, 4\] for 4 models and 2 devices, not \[4\]"),
        (3, (1, 4), r"size_capacity must have the shape \[1, 2\]"),
        (6, (2, 2), r"model_connection must have the shape \[4, 4\]"),
        (7, (2, 1), r"device_distance must have the shape \[2, 2\]"),
    ],
)
def test_optimize_placement_with_other_shapes(which: int, shape: tuple[int, ...], message: str):
    """The error names the argument and its expected shape."""
    given = arguments(4, 2)
    given[which] = torch.zeros(shape, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        ModelAssigner.optimize_placement(*given)
