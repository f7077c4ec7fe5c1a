"""Checks the backend of a collective group before any process waits for another."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from xpool.errors import OptionError


def check_backend(name: str, value: Any) -> None:
    """Raise `OptionError`, with ``name`` as the argument's name, unless torch has the backend.

    ``value`` may name a backend for each kind of device: ``"cpu:gloo,cuda:nccl"``.
    """
    known = [one for one in dist.Backend.backend_list if one != "undefined" and _is_built(one)]
    parts = value.split(",") if isinstance(value, str) else [value]
    for part in parts:
        backend = part.rpartition(":")[2].lower() if isinstance(part, str) else part
        if backend not in known:
            hint = ""
            if backend == "xla":
                hint = "; import torch_xla.distributed.xla_backend before, which registers that one"
            raise OptionError(
                f"{name}={value!r}: this torch has no backend {backend!r}; it has "
                f"{', '.join(known)}{hint}"
            )


def _is_built(backend: str) -> bool:
    """Whether this build of torch has a backend; True for a backend of another package."""
    ask = getattr(dist, f"is_{backend}_available", None)
    return ask is None or bool(ask())
