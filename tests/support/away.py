"""A simulated tensor on a device that this machine does not have.

Its values are in a CPU tensor, but torch takes it for a tensor on ``xla:0``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["Away"]


class Away(torch.Tensor):
    """A wrapper whose operations run on the wrapped tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Away:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride(), device="xla:0"
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        to = kwargs.get("device")
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(_unwrapped, args), **tree_map(_unwrapped, kwargs))
        if to is not None and torch.device(to).type == "cpu":
            return out
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)


def _unwrapped(x: Any) -> Any:
    return x.inner if isinstance(x, Away) else x
