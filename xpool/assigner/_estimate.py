"""Estimators of a model's memory and of the operations in its forward pass."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from xpool.errors import OptionError

MIB = 1024**2


class ModelSizeEstimator:
    """Estimates the memory that a model takes.

    Args:
        model: a `torch.nn.Module`, on any device, including "meta".
        size_multiplier: `estimate_size` multiplies the size of parameters and buffers by this, to
            leave room for inputs, activations and gradients.

    Raises:
        TypeError: ``model`` is not a module, or the multiplier is not a number.
        OptionError (a `ValueError`): the multiplier is not above 0.  The methods raise it if a
            parameter has no shape yet.
    """

    def __init__(self, model: nn.Module, size_multiplier: float = 2) -> None:
        self.model = check_model("model", model)
        self.size_multiplier = check_number("size_multiplier", size_multiplier, above=0)

    def get_parameter_sizes(self) -> float:
        """Return the size of all parameters in MiB.  A shared parameter counts once."""
        return _bytes(self.model.parameters()) / MIB

    def get_buffer_sizes(self) -> float:
        """Return the size of all buffers in MiB."""
        return _bytes(self.model.buffers()) / MIB

    def estimate_size(self) -> float:
        """Return the size of parameters and buffers in MiB, times the multiplier."""
        return (self.get_parameter_sizes() + self.get_buffer_sizes()) * self.size_multiplier


class ModelComplexityEstimator:
    """Estimates the floating-point operations of one forward pass.

    Args:
        model: a `torch.nn.Module`.
        inputs: the arguments of its ``forward``: a tensor, or a tuple of arguments, with the batch
            size of the real inputs.  None: count two operations for each element of a parameter.
            This is right for linear layers and one sample, and too few for models that use a weight
            more than once, such as convolutions.

    Raises:
        TypeError: ``model`` is not a module.
    """

    def __init__(self, model: nn.Module, inputs: Any = None) -> None:
        self.model = check_model("model", model)
        self.inputs = inputs

    def estimate_complexity(self) -> float:
        """Return the operations as `torch.utils.flop_counter.FlopCounterMode` counts them.

        It counts only the multiplications and additions of matrix products, convolutions and
        attention.  The pass runs on torch's "meta" device, which computes only shapes: the model,
        the inputs and the random generators do not change.  If this fails, for example because
        control flow depends on values, the pass runs once with values, on copies of the model's
        state.  Meanwhile the whole process uses no fused kernels that the counter does not know.

        Raises:
            OptionError (a `ValueError`): ``forward`` fails with these inputs (its error is the
                cause), or a parameter has no shape yet.
        """
        elements: int = sum(p.numel() for p in _shaped(self.model.parameters()))
        if self.inputs is None:
            return 2.0 * elements
        inputs = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
        with torch.inference_mode(False), torch.enable_grad():
            try:
                return float(_count(self.model, inputs))
            except Exception as exc:
                raise OptionError(
                    f"the forward pass of {type(self.model).__name__} fails with these inputs, a "
                    f"tuple of {len(inputs)}: {type(exc).__name__}: {exc}. Give the arguments of "
                    "its forward: a tensor, or a tuple of arguments."
                ) from exc


def check_model(name: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, not {model!r}")
    return model


def check_number(
    name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf
) -> float:
    """Return a finite number that is above ``above`` and at least ``least``.

    Raises:
        TypeError: it is not a number.
        OptionError (a `ValueError`): it is out of range.
    """
    try:
        if isinstance(value, (str, bytes)):  # `float` would accept texts
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {value!r}") from None
    if not math.isfinite(number):
        raise OptionError(f"{name} must be finite, not {value!r}")
    if number <= above:
        raise OptionError(f"{name} must be above {above:g}, not {value!r}")
    if number < least:
        raise OptionError(f"{name} must be at least {least:g}, not {value!r}")
    return number


def _shaped(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        if is_lazy(tensor):
            raise OptionError(
                "the model has a lazy parameter without a shape; run the model once first"
            )
        yield tensor


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in _shaped(tensors))


def _count(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    try:
        with torch.device("meta"):
            return _forward(model, inputs, lambda tensor: torch.empty_like(tensor, device="meta"))
    except Exception:
        # Either shapes are not enough, or the forward pass is wrong.  A run with values shows it.
        gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=sorted(gpus, key=str)), _plain_kernels():
            return _forward(model, inputs, torch.clone)


def _forward(model: nn.Module, inputs: tuple[Any, ...], copy: Callable[[Tensor], Tensor]) -> int:
    """Count the operations of a forward pass, on copies of all tensors that it could change."""

    def parameter(tensor: Tensor) -> Tensor:
        # Without gradients, encoder layers use a fused kernel that the counter does not know.
        return copy(tensor.detach()).requires_grad_(tensor.is_floating_point())

    state = {name: parameter(p) for name, p in model.named_parameters()}
    state |= {name: copy(b) for name, b in model.named_buffers()}
    args = tree_map(lambda x: copy(x) if isinstance(x, Tensor) else x, inputs)
    with FlopCounterMode(display=False) as counter:
        torch.func.functional_call(model, state, args)
    return int(counter.get_total_flops())


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Make recurrent layers and attention use matrix products, which the counter knows."""
    cuda, libraries = torch.backends.cuda, (torch.backends.mkldnn, torch.backends.cudnn)
    flash, efficient = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    enabled = [library.enabled for library in libraries]
    try:
        cuda.enable_flash_sdp(False)
        cuda.enable_mem_efficient_sdp(False)
        for library in libraries:
            library.enabled = False
        yield
    finally:
        cuda.enable_flash_sdp(flash)
        cuda.enable_mem_efficient_sdp(efficient)
        for library, was in zip(libraries, enabled):
            library.enabled = was
