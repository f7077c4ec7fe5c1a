"""Functions that workers of the sharing tests run, with a simulated GPU or a real one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from support import gpu
from support.work import kill_oneself, pid, same

__all__ = ["kill_oneself", "pid", "same"]

kept: dict[str, Any] = {}
"""Objects that tasks keep in this worker."""


def put(tensor: Any) -> Any:
    """Return a copy of the tensor, also of a view of a view, on this process's GPU."""
    if gpu.FOLDER in os.environ:
        return gpu.on_gpu(tensor)
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((count,), (1,), 0)
    return whole.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def view(x: Any, of: Callable[[Any], Any]) -> Any:
    """Return a view; the simulated GPU does not support every view itself."""
    return gpu.OnGpu(of(x.inner)) if isinstance(x, gpu.OnGpu) else of(x)


def make(name: str = "", size: int = 4) -> Any:
    """Return ``[0, 1, ...]`` on the GPU, and keep it under `name`."""
    import torch

    made = put(torch.arange(size, dtype=torch.float32))
    if name:
        kept[name] = made
    return made


def make_model() -> Any:
    import torch

    model = torch.nn.Linear(3, 2)
    model.weight = torch.nn.Parameter(put(torch.ones(2, 3)))
    model.weight.label = "weights"
    return model


def keep(name: str, x: Any) -> None:
    kept[name] = x


def forget() -> None:
    kept.clear()


def change(x: Any, by: float = 1) -> None:
    x.add_(by)


def slow_fill(x: Any, value: float) -> None:
    """Let the GPU write to a tensor after a delay."""
    import torch

    torch.cuda._sleep(50_000_000)
    x.fill_(value)


def change_kept(name: str, by: float = 1) -> None:
    kept[name].add_(by)


def values(*tensors: Any) -> Any:
    """Return the elements of each tensor, and whether it is on a GPU."""
    return [(x.cpu().tolist(), x.is_cuda) for x in tensors]


def kept_values(name: str) -> list[Any]:
    return kept[name].cpu().tolist()  # type: ignore[no-any-return]


def first_and_second(first: Any, second: Any) -> list[Any]:
    first.fill_(7)
    return second.cpu().tolist()  # type: ignore[no-any-return]


def model_facts(model: Any) -> tuple[str, bool, str, list[Any]]:
    weight = model.weight
    weight.data.fill_(5)
    return type(weight).__name__, weight.requires_grad, weight.label, weight.detach().cpu().tolist()


def waited() -> int:
    """How often this worker has waited for the simulated GPU."""
    return len(gpu.waited)


def set_variable(name: str, value: str) -> None:
    os.environ[name] = value


def with_context(context: Any, func: Any, *args: Any) -> Any:
    return func(*args)
