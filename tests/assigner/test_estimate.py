"""Estimates of models' sizes and operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.assigner is about torch's models")

import torch
from torch import Tensor, nn

from xpool.assigner import ModelComplexityEstimator, ModelSizeEstimator

pytestmark = [pytest.mark.pure, pytest.mark.torch]

MIB = 1024**2


def operations(model: nn.Module, inputs: Any = None) -> float:
    return ModelComplexityEstimator(model, inputs).estimate_complexity()


# Size --------------------------------------------------------------------------------------------


def test_sizes_in_mebibytes():
    """The estimate is two times the bytes of parameters and buffers."""
    model = nn.Sequential(nn.Linear(1023, 1024), nn.BatchNorm1d(1024))
    estimator = ModelSizeEstimator(model)
    assert estimator.get_parameter_sizes() == 4 + 2 * 1024 * 4 / MIB
    assert estimator.get_buffer_sizes() == (2 * 1024 * 4 + 8) / MIB
    total = estimator.get_parameter_sizes() + estimator.get_buffer_sizes()
    assert estimator.estimate_size() == 2 * total
    assert ModelSizeEstimator(model, size_multiplier=3).estimate_size() == 3 * total


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float16", 2), ("bfloat16", 2), ("float64", 8), ("complex64", 8), ("float8_e4m3fn", 1)],
)
def test_every_dtype_has_a_size(dtype: str, size: int):
    """Every dtype has a size, new ones too."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(MIB, dtype=getattr(torch, dtype)), requires_grad=False)
    assert ModelSizeEstimator(model).get_parameter_sizes() == size


def test_shared_weights_count_once():
    """Tied weights count once."""
    first, second = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)
    second.weight = first.weight
    assert ModelSizeEstimator(nn.Sequential(first, second)).get_parameter_sizes() == 4


def test_no_parameters_and_meta():
    """A model without parameters has size 0; a model on "meta" has its size on a real device."""
    assert ModelSizeEstimator(nn.ReLU()).estimate_size() == 0
    assert ModelSizeEstimator(nn.Linear(1023, 1024, device="meta")).get_parameter_sizes() == 4


def test_bad_sizes():
    """A class instead of a model, an invalid multiplier and lazy parameters are refused."""
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not <class"):
        ModelSizeEstimator(nn.ReLU)
    with pytest.raises(TypeError, match="size_multiplier must be a number, not '2'"):
        ModelSizeEstimator(nn.ReLU(), "2")
    with pytest.raises(ValueError, match="size_multiplier must be above 0, not -1"):
        ModelSizeEstimator(nn.ReLU(), -1)
    with pytest.raises(ValueError, match="size_multiplier must be finite"):
        ModelSizeEstimator(nn.ReLU(), float("nan"))
    with pytest.raises(ValueError, match="run the model once first"):
        ModelSizeEstimator(nn.LazyLinear(3)).estimate_size()


# Complexity --------------------------------------------------------------------------------------


def lstm_operations(length: int, batch: int, features: int, hidden: int) -> int:
    return 2 * length * batch * 4 * hidden * (features + hidden)


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (nn.Linear(8, 16), torch.zeros(4, 8), 2 * 4 * 8 * 16),
        (nn.Conv2d(3, 8, 3), torch.zeros(2, 3, 16, 16), 2 * 2 * 8 * 14 * 14 * 3 * 9),
        (nn.LSTM(8, 16), torch.zeros(5, 3, 8), lstm_operations(5, 3, 8, 16)),
        (nn.Embedding(10, 4), torch.tensor([1, 2]), 0),
        (nn.Bilinear(3, 4, 5).eval(), (torch.zeros(2, 3), torch.zeros(2, 4)), 0),
    ],
    ids=["linear", "convolution", "recurrent", "lookup", "two arguments"],
)
def test_operations(model: nn.Module, inputs: Any, expected: int):
    """Operations are counted as by hand: two for each multiplication in a matrix product."""
    assert operations(model, inputs) == expected


class Attention(nn.Module):
    def forward(self, query: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query)


class Hesitant(nn.Module):
    """Its control flow depends on values, so shapes are not enough to count."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if x.sum() >= 0 else x


@pytest.mark.parametrize("wrap", [nn.Sequential, Hesitant])
def test_attention_is_counted(wrap: Any):
    """Fused attention counts as two matrix products, by shapes and in a real run."""
    assert operations(wrap(Attention()), torch.zeros(2, 2, 64, 32)) == 2 * 2 * 4 * 64 * 64 * 32


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.LSTM(8, 16, 2), torch.ones(5, 3, 8)),
        (nn.GRU(8, 16), torch.ones(5, 3, 8)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), torch.ones(2, 3, 16, 16)),
    ],
    ids=["lstm", "gru", "batchnorm"],
)
def test_control_flow_that_depends_on_values(model: nn.Module, inputs: Tensor):
    """If control flow depends on values, the model is run, and only the branch taken is counted."""
    assert operations(Hesitant(model), inputs) == operations(model, inputs) > 0
    assert operations(Hesitant(model), -inputs) == 0


def test_encoders_count_the_same_when_evaluated():
    """The fused path of an encoder layer in eval mode counts the same."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    inputs = torch.zeros(3, 5, 16)
    with torch.no_grad():
        assert operations(layer.eval(), inputs) == operations(layer.train(), inputs) > 0


@pytest.mark.parametrize("wrap", [nn.Sequential, Hesitant])
def test_counting_changes_nothing(wrap: Any):
    """Counting changes no buffer, gradient, input, generator state or choice of kernels."""
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(True)))
    before, seed = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    inputs = torch.ones(4, 8)
    libraries = torch.backends.mkldnn, torch.backends.cudnn
    enabled = [library.enabled for library in libraries], torch.backends.cuda.flash_sdp_enabled()
    assert operations(model, inputs) == 2 * 4 * 8 * 8
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert torch.equal(inputs, torch.ones(4, 8))
    now = [library.enabled for library in libraries], torch.backends.cuda.flash_sdp_enabled()
    assert now == enabled


def test_without_inputs():
    """Without inputs each parameter counts as two operations, as for one sample of a linear
    layer."""
    assert operations(nn.Linear(8, 16, bias=False)) == 2 * 8 * 16
    assert operations(nn.Linear(8, 16, bias=False), torch.zeros(1, 8)) == 2 * 8 * 16
    assert operations(nn.ReLU()) == 0


def test_inputs_in_containers():
    """Tensors in lists and dicts are used."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def forward(self, batch: dict[str, list[Tensor]]) -> Tensor:
            return sum(self.linear(x) for x in batch["x"])

    assert operations(Sum(), {"x": [torch.zeros(3, 8)] * 2}) == 2 * 2 * 3 * 8 * 2


def test_inputs_that_do_not_fit():
    """The error has the model's own error as its cause, and says what to pass."""
    with pytest.raises(
        ValueError, match="forward pass of Linear fails.*tuple of arguments"
    ) as info:
        operations(nn.Linear(8, 16), torch.zeros(4, 9))
    assert isinstance(info.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match="a tuple of 2: TypeError"):
        operations(nn.Linear(8, 16), (torch.zeros(4, 8), 1))
    with pytest.raises(TypeError, match="must be a torch"):
        ModelComplexityEstimator(None)
    with pytest.raises(ValueError, match="run the model once first"):
        operations(nn.LazyLinear(3), torch.zeros(4, 8))


def test_under_inference_mode():
    """Counting works in inference mode."""
    with torch.inference_mode():
        assert operations(nn.Linear(8, 16), torch.zeros(4, 8)) == 2 * 4 * 8 * 16
        assert operations(Hesitant(nn.Linear(8, 16)), torch.zeros(4, 8)) == 2 * 4 * 8 * 16
