"""Functions that workers of the handle tests run, with a simulated device or torch_xla's."""

from __future__ import annotations

import os
from typing import Any

from support import work
from support.tensor_work import arena_here

from xpool import current_worker
from xpool._pickling.tensors.device_memory import Keeper

made: list[Any] = []
"""The last tensor that this worker made, to compare with received ones."""


class Stand:
    """The context of a worker whose device is simulated."""

    def put(self, tensor: Any) -> Any:
        from support.away import Away

        return Away(tensor)


def put(context: Any, tensor: Any) -> Any:
    """Return the tensor on the worker's device, and keep it in `made`."""
    there = context.put(tensor) if hasattr(context, "put") else tensor.to(context.device)
    made[:] = [there]
    return there


def make(context: Any, size: int = 4, start: int = 0) -> Any:
    """Return ``[start, start + 1, ...]`` on the device."""
    import torch

    return put(context, torch.arange(start, start + size, dtype=torch.float32))


def make_at_gate(context: Any, box: str, gate: str, size: int = 4) -> Any:
    work.post(box, str(os.getpid()))
    work.pass_gate(gate)
    return make(context, size)


def make_parameter(context: Any) -> Any:
    import torch

    parameter = torch.nn.Parameter(make(context))
    parameter.label = "weights"
    made[:] = [parameter]
    return parameter


def make_leaf(context: Any) -> Any:
    return make(context).requires_grad_()


def make_computed(context: Any) -> Any:
    return make_leaf(context) * 2


def stop_collecting(context: Any) -> None:
    import gc

    gc.disable()


def make_with_lock(context: Any) -> Any:
    import threading

    return [make(context), threading.Lock()]


def structure(context: Any) -> Any:
    import torch

    x = make(context, 6)
    model = torch.nn.Linear(6, 2)
    model.weight = torch.nn.Parameter(put(context, model.weight.detach()))
    return {"x": x, "again": x, "view": x.narrow(0, 1, 2), "host": torch.ones(3), "in": [(x * 2,)],
            "model": model, "empty": make(context, 0)}  # fmt: skip


def look_at_structure(context: Any, found: Any) -> dict[str, Any]:
    """Describe the received tensors and their devices."""
    x = found["x"]
    return {
        "pid": os.getpid(),
        "same": found["again"] is x,
        "sums": [t.sum().cpu().item() for t in (x, found["view"], found["in"][0][0])],
        "types": {t.device.type for t in (x, found["view"], found["model"].weight)},
        "parameter": type(found["model"].weight).__name__,
        "host": found["host"].device.type,
    }


def is_it(context: Any, tensor: Any, *others: Any) -> bool:
    return tensor is made[0]


def use(context: Any, *tensors: Any, **named: Any) -> tuple[int, float, list[str]]:
    """Return the pid, the sum of all tensors, and the tensors' devices."""
    every = [*tensors, *named.values()]
    return (
        os.getpid(),
        sum(t.sum().cpu().item() for t in every),
        [t.device.type for t in every],
    )


def add_one(context: Any, tensor: Any) -> Any:
    return tensor + 1


def pending(context: Any, tensor: Any) -> bool:
    import torch_xla

    return "add" in torch_xla._XLAC._get_xla_tensors_text([tensor])


def change(context: Any, tensor: Any) -> None:
    tensor.add_(1)


def kept(context: Any, *_: Any) -> int:
    keeper = Keeper.here.get()
    assert keeper is not None
    return len(keeper._kept)


def kept_and_blocks(context: Any, *_: Any) -> tuple[int, int]:
    keeper = Keeper.here.get()
    assert keeper is not None
    return len(keeper._kept), arena_here().statistics()["bytes"]


def fail_with(context: Any, tensor: Any) -> None:
    raise ValueError("with", tensor)


def plain_make(size: int = 4) -> Any:
    """Like `make`, for pools without contexts."""
    return make(Stand(), size)


def plain_use(*tensors: Any) -> Any:
    return current_worker().index, use(None, *tensors)


def plain_types(*tensors: Any) -> list[str]:
    return [type(t).__name__ for t in tensors]


def write_to(*tensors: Any) -> None:
    for tensor in tensors:
        tensor.add_(1)
