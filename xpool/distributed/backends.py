"""Which backends torch has for collective groups, asked before anybody waits for anybody."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from xpool.errors import OptionError


def check_backend(name: str, value: Any) -> None:
    """Raise `OptionError` unless torch has this backend; ``name`` is that of the argument.

    It may be one for each kind of device, as ``"cpu:gloo,cuda:nccl"``.
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
    """Whether this build of torch has a backend; those of others register themselves."""
    ask = getattr(dist, f"is_{backend}_available", None)
    return ask is None or bool(ask())
