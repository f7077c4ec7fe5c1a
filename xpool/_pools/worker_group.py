"""`WorkerGroup`: the workers of a pool as one world of `torch.distributed`."""

from __future__ import annotations

import functools
from typing import Any

from xpool._calls.options import check_seconds
from xpool._memory.anonymous_files import File
from xpool._worker.callables import task_function
from xpool.distributed._world import Join, in_group
from xpool.errors import OptionError, PeerLost, WorkerDied

ATTEMPTS = 3
"""Attempts to make the group while workers die."""

BACKENDS = ("gloo", "nccl", "xla")


class WorkerGroup:
    """The workers of a pool as one world; `Pool.create_group` makes it.

    Worker i is rank i.  In functions that `run_all` runs, `xpool.distributed.get_world` returns the
    world, and ``get_world().group`` is its group of all ranks.  It is also the default group of
    `torch.distributed`, whose functions may be used.

    A dead worker, or any other failure of a call, breaks the group.  The next `run_all` of the pool
    rebuilds it first; `rebuild` does so at once.

    Attributes:
        backend: torch's backend.
        timeout: seconds for making the group, and for each collective operation.
        generation: how often the group was made.
    """

    def __init__(
        self,
        workers: Any,  # the `AllWorkers` of the pool
        contexts: list[Any],
        share_processes: bool,
        backend: str,
        timeout: float,
    ) -> None:
        self.backend, self.generation = backend, 0
        seconds = check_seconds("timeout", timeout, "it must be finite")
        if seconds is None:
            raise OptionError("timeout must be finite: torch does not wait for ever")
        self.timeout = seconds
        self._check_backend(contexts, share_processes, workers.size)
        self._workers = workers
        self._members: list[int] = []  # the process ids of the members, by worker
        self._failed = True
        self._server: Any = None  # the store over hosts; that on one machine is a file

    def _check_backend(self, contexts: list[Any], share_processes: bool, size: int) -> None:
        if self.backend not in BACKENDS:
            raise OptionError(f"backend must be one of {BACKENDS}, not {self.backend!r}")
        if share_processes:
            raise OptionError(
                "these workers are threads of one process (TPU cores, or per_process=), and a "
                "process can have one rank in torch.distributed: use devices(..., per_process=1)"
            )
        if self.backend == "nccl" and not (
            contexts and all(getattr(one, "kind", "") == "cuda" for one in contexts)
        ):
            raise OptionError(
                "backend='nccl' needs workers with a GPU each: "
                "CtxPool(worker_contexts=devices('cuda')); on the CPU use 'gloo'"
            )
        if self.backend == "xla" and not (
            contexts and all(getattr(one, "group", 0) == size for one in contexts)
        ):
            raise OptionError(
                "backend='xla' needs the workers of one replica group, on this host: "
                "CtxPool(worker_contexts=devices('tpu', independent=False)); else use 'gloo'"
            )

    @property
    def broken(self) -> bool:
        """Whether a call has failed, or a worker was replaced, since the group was made."""
        return self._failed or self._members != self._workers.pids()

    def rebuild(self) -> None:
        """Make the group again, of the present workers.

        Raises:
            WorkerDied, PeerLost: a worker died in each of three attempts.
            xpool.distributed.GroupTimeout: some workers did not join within ``timeout``.
            PoolClosed: the pool takes no more work.
        """
        for attempt in range(ATTEMPTS):
            self._failed = True
            self.generation += 1
            address = self._meet()
            join = Join(self.generation, self._workers.size, address, self.backend, self.timeout)
            try:
                self._members = self._workers.call(join, ())
            # The next attempt includes the replacement of the dead worker.
            except (WorkerDied, PeerLost):
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            self._failed = False
            return

    def _meet(self) -> str:
        """Open a store for the ranks, which outlives at least the next call; return its address."""
        hosts = self._workers.hosts
        if hosts is None:
            file = File()
            self._workers.stores.append(file)
            # Include the generation: each world needs another address, but a file may get the
            # descriptor of an earlier one.
            return f"file://{file.key[0]}?generation={self.generation}"
        from torch.distributed import TCPStore

        # The store is in the driver, not at rank 0: only the driver's address is surely reachable.
        host = hosts.driver_address()
        self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{host}:{self._server.port}"

    def wrap(self, func: Any) -> Any:
        """Return a function that runs ``func`` in the group; rebuild the group if it is broken."""
        if self.broken:
            self.rebuild()
        return task_function(func, group=functools.partial(in_group, self.generation))

    def note_failure(self) -> None:
        """Break the group: after a failed call, members may be in the middle of an operation."""
        self._failed = True

    def __repr__(self) -> str:
        state = ", broken" if self.broken else ""
        return (
            f"<WorkerGroup of {self._workers.name}, {self.backend}, generation {self.generation}"
            f"{state}>"
        )
