"""`WorkerGroup`: the workers of a pool as one world of `torch.distributed`."""

from __future__ import annotations

from typing import Any, Protocol

from xpool._calls.options import check_seconds
from xpool._worker.launch_shared import File
from xpool.errors import OptionError, PeerLost, WorkerDied

__all__ = ["WorkerGroup"]

ATTEMPTS = 3
"""Times that workers may die while the group is made, one after the other."""

BACKENDS = ("gloo", "nccl", "xla")


class Workers(Protocol):
    """What a group asks of the workers of its pool: see `AllWorkers`."""

    name: str
    size: int
    hosts: Any

    def pids(self) -> list[int | None]: ...

    def call(self, func: Any, args: tuple[Any, ...]) -> list[Any]: ...


class WorkerGroup:
    """The workers of a pool as one world; `Pool.create_group` makes it.

    Worker i is rank i.  Functions that `run_all` runs have the world by
    `xpool.distributed.get_world`, its group of all ranks as ``get_world().group``, and may use the
    functions of `torch.distributed` as well, whose default group it is.

    When a worker has died, or a call has failed in any other way, the group is broken, and the next
    `run_all` of the pool makes it anew, at first; so does `rebuild`.

    Attributes:
        backend: torch's backend.
        timeout: seconds for making it, and for each collective operation.
        generation: how often it was made.
    """

    def __init__(
        self,
        workers: Workers,
        contexts: list[Any],
        share_processes: bool,
        backend: str,
        timeout: float,
    ) -> None:
        self.backend, self.generation = backend, 0
        seconds = check_seconds("timeout", timeout)
        if seconds is None:
            raise OptionError("timeout must be a number of seconds: torch waits for no longer")
        self.timeout = seconds
        self._check_backend(contexts, share_processes, workers.size)
        self._workers = workers
        self._members: list[int] = []  # by worker: the process id of the one that is a member
        self._failed = True
        self._store: Any = None  # where they have met

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
                "backend='nccl' takes workers with a GPU each: "
                "CtxPool(worker_contexts=devices('cuda')); on the CPU use 'gloo'"
            )
        if self.backend == "xla" and not (
            contexts and all(getattr(one, "group", 0) == size for one in contexts)
        ):
            raise OptionError(
                "backend='xla' takes the workers of one replica group, on this host: "
                "CtxPool(worker_contexts=devices('tpu', independent=False)); else use 'gloo'"
            )

    @property
    def broken(self) -> bool:
        """Whether a call has failed since it was made, or a worker was replaced."""
        return self._failed or self._members != self._workers.pids()

    def rebuild(self) -> None:
        """Make the group anew, of the workers that are there now.

        Raises:
            WorkerDied, PeerLost: workers die again and again meanwhile.
            xpool.distributed.GroupTimeout: they have not all come within ``timeout``.
            PoolClosed: the pool takes no more work.
        """
        from xpool.distributed.members import Join

        for attempt in range(ATTEMPTS):
            self._failed = True
            self.generation += 1
            address = self._meet()
            join = Join(self.generation, self._workers.size, address, self.backend, self.timeout)
            try:
                self._members = self._workers.call(join, ())
            # The next attempt is with the worker that replaces the dead one.
            except (WorkerDied, PeerLost):
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            self._failed = False
            return

    def _meet(self) -> str:
        """Open a store for the ranks, which lasts until the next; return its address."""
        hosts = self._workers.hosts
        if hosts is None:
            self._store = File()
            # One file may have the descriptor of an earlier one; worlds are told apart by address.
            return f"file://{self._store.key[0]}?generation={self.generation}"
        from torch.distributed import TCPStore

        # Here, and not at rank 0: of the driver it is known how hosts reach it.
        host = hosts.driver_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{host}:{self._store.port}"

    def wrap(self, func: Any) -> Any:
        """Return what runs a function in the group; make that anew before, if it is broken."""
        from xpool.distributed.members import InGroup

        if self.broken:
            self.rebuild()
        return InGroup(func, self.generation)

    def note_failure(self) -> None:
        """A call has failed: members may be anywhere in an operation."""
        self._failed = True

    def __repr__(self) -> str:
        state = ", broken" if self.broken else ""
        return (
            f"<WorkerGroup of {self._workers.name}, {self.backend}, generation {self.generation}"
            f"{state}>"
        )
