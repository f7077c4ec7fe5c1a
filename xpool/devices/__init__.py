"""What a worker is bound to: one device, as a context for `CtxPool` and `CtxThreadPool`.

::

    from xpool import CtxPool
    from xpool.devices import devices

    contexts = devices("cpu", n=4)             # one for each worker
    pool = CtxPool(worker_contexts=contexts)

A worker context is any object.  One that has these two attributes is a binding, for worker
*processes*:

``env``
    A mapping of environment variables.  The worker sets them before it imports anything
    else, since frameworks read theirs once, while they are imported.
``enter()``
    Called once in the worker, when the context has arrived and before the pool's
    initializer runs.  Whatever it raises counts as a failed start of the worker.

`DeviceContext` has both, and so can a class of your own; ``examples/evaluate.py`` wraps a
`DeviceContext` in a context that also holds a model.

This version binds workers to CPU cores only.  Importing this module imports no framework.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xpool.errors import OptionError

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceContext", "devices"]

_LATER = ("cuda", "tpu", "xla")


@dataclass(frozen=True, repr=False)
class DeviceContext:
    """One worker's device: which it is, and what to set so that the worker owns it.

    Picklable, and equal to its copies.  A replacement worker gets its predecessor's.
    """

    kind: str
    """``"cpu"`` in this version."""

    ordinal: int
    """Position among the contexts made together, from 0."""

    threads: int
    """Threads that one operation may use inside this worker."""

    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Variables the worker sets before it imports anything else."""

    @property
    def device(self) -> torch.device:
        """The `torch.device` to put tensors on.  Imports torch, if nothing else has."""
        import torch

        return torch.device(self.kind)

    def enter(self) -> None:
        """Bind the calling worker: called once in it, before the pool's initializer.

        A worker that starts from a preloaded server has torch imported already, too early
        for ``OMP_NUM_THREADS``; so the number is set there by hand.  A worker that has not
        imported torch is not made to: it will find the variable when it does.
        """
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(self.threads)

    def __repr__(self) -> str:
        return f"DeviceContext({self.kind}:{self.ordinal}, threads={self.threads})"


def devices(kind: str = "auto", n: int | None = None) -> list[DeviceContext]:
    """Contexts for ``n`` workers, each bound to a device of the kind.

    ``kind`` is ``"cpu"`` or ``"auto"`` (the best kind that there is: the CPU, in this
    version).  ``n`` is one for each core that this process may use when left out.  The
    cores are shared out: each worker's operations get ``cores // n`` threads, at least
    one, unless ``OMP_NUM_THREADS`` is set, which is then kept.

    Raises `OptionError` (a `ValueError`) for a kind that is unknown or not in this version
    and for ``n`` below 1, `TypeError` for an ``n`` that is no integer.
    """
    if kind in _LATER:
        raise OptionError(
            f"devices(kind={kind!r}): not in this version yet. Use kind='cpu', or give CtxPool "
            "contexts of your own whose `env` masks the device and whose `enter()` opens it."
        )
    if kind not in ("cpu", "auto"):
        raise OptionError(f"devices(kind={kind!r}): no such kind; use 'cpu' or 'auto'.")
    cores = _usable_cores()
    if n is None:
        n = cores
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"devices(n={n!r}): n is the number of workers, an int.")
    if n < 1:
        raise OptionError(f"devices(n={n}): there must be at least 1 worker.")
    chosen = _users_threads()
    if chosen is not None:
        return [DeviceContext("cpu", i, chosen) for i in range(n)]
    threads = max(1, cores // n)
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return [DeviceContext("cpu", i, threads, dict(env)) for i in range(n)]


def _usable_cores() -> int:
    """Cores that this process may run on, which in a container are fewer than there are."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _users_threads() -> int | None:
    """The number in ``OMP_NUM_THREADS`` (its first, when nested levels are given), or None."""
    match = re.match(r"\s*([1-9][0-9]*)", os.environ.get("OMP_NUM_THREADS", ""))
    return int(match.group(1)) if match else None
