"""What a pool over hosts is put together from, in the driver."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from xpool.byvalue.main_globals import Book
from xpool.codec.policy import BY_PIPE
from xpool.errors import OptionError
from xpool.hosts.agent import Charge, facts
from xpool.hosts.engine import LEASE, HostEngine
from xpool.pool import assembly
from xpool.workers.launch import wanted_modules

if TYPE_CHECKING:
    from xpool.pool.process import Pool

__all__ = ["check_options", "make_engine"]


def check_options(pool: Pool, processes: int | None, context: Any) -> list[Any]:
    """Return the hosts that a pool will have.

    Raises:
        OptionError: an option is not for pools over hosts, or there are none.
    """
    if processes is not None:
        raise OptionError("processes: a pool over hosts has per_host= workers on each")
    if context is not None:
        raise OptionError("context: workers on other hosts start through xpool's fork server")
    if not pool._copy_tensor:
        raise OptionError("is_copy_tensor=False: hosts do not share memory; leave it out")
    nodes: list[Any] = pool._hosts.find()
    return nodes


def make_engine(pool: Pool, hosts: Any, nodes: list[Any]) -> HostEngine:
    """Return the engine of a pool over hosts.

    Raises:
        TaskNotPicklable: the initializer or a context cannot be pickled.
    """
    pool._token, pool._arena, pool._memory_limit = os.urandom(8).hex(), None, 0
    pool._packer = assembly.Packer(pool._recurse, BY_PIPE._replace(book=Book()))
    pool._collect, pool._exports = assembly.cuda_ipc.collect, assembly.cuda_ipc.exports
    initializer = pool._packer.pack_option(
        "initializer or initargs", (pool.initializer, pool.initargs)
    )
    spec = assembly.WorkerSpec.of(pool, initializer)
    most = max(node.workers for node in nodes)
    main, script = assembly.Main.now(), None
    if main.location is not None and main.location[0] == "path":
        with open(main.location[1], "rb") as file:
            script = file.read()
    modules = wanted_modules()
    charge = Charge(
        spec=spec,
        main=main,
        script=script,
        modules=modules,
        lifetime=pool.maxtasksperchild,
        restart_budget=pool._restart_budget or max(100, 4 * most),
        initializer_timeout=pool._initializer_timeout,
        memory_limit=pool._wanted_limit,
        worker_memory=pool._memory[0],
        memory_high=pool._memory[1],
        lease=LEASE,
        facts=facts(modules),
    )
    describe = functools.partial(_describe, pool._jobs)
    return HostEngine(hosts.fleet(nodes, charge), describe)


def _describe(jobs: dict[int, Any], number: int, index: int) -> str:
    job = jobs.get(number)
    return f"task {index}" if job is None else str(job.describe(index))
