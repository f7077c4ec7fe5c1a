"""Makes the engine of a pool over hosts, in the driver."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xpool._engine.launch import wanted_modules
from xpool._hosts.agent import AgentConfig, facts
from xpool._hosts.fleet import Fleet
from xpool._hosts.hosts_engine import LEASE, HostEngine
from xpool._pickling.by_value.sent import Book
from xpool._pickling.policy import BY_PIPE
from xpool._pools import assembly
from xpool._pools.process import describe

if TYPE_CHECKING:
    from xpool._pools.process import Pool


def make_engine(
    pool: Pool,
    workers: Sequence[int],
    fleet: Callable[[AgentConfig], Fleet],
    kind: str | None = None,
) -> HostEngine:
    """Return the engine of a pool over hosts.

    Args:
        pool: the pool.
        workers: number of workers of each host.
        fleet: makes the fleet that places the agents, from their configuration.
        kind: of the devices that the workers are bound to; None: no devices.

    Raises:
        TaskNotPicklable: the initializer or a context cannot be pickled.
    """
    packer, options = pool._pack_by(BY_PIPE._replace(book=Book())), pool._options
    initializer = packer.pack_option("initializer or initargs", (pool.initializer, pool.initargs))
    spec = pool._worker_spec(initializer)
    if kind is not None:
        spec = spec._replace(contexts=None)  # each agent makes the contexts of its own workers
    modules = wanted_modules()
    config = AgentConfig(
        spec=spec._replace(peers=0),  # workers of different hosts cannot send each other messages
        main=assembly.Main.now(),
        modules=modules,
        options=assembly.engine_options(options, max(workers))._replace(hands_back=True),
        memory_limit=options.memory_limit,
        lease=LEASE,
        facts=facts(modules),
        kind=kind,
    )
    describing = functools.partial(describe, pool._jobs.unanswered)
    return HostEngine(fleet(config), describing, lease=LEASE)
