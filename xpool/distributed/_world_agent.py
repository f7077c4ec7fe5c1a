"""Starts and ends torch's RPC agent, so that a process can start another one later.

This module works around six properties of torch's RPC.  To do so, it sets private names of torch,
except those that torch's version lacks.

* The ranks meet through a process group with a timeout of half an hour, which no option changes.
* The agent opens the store at its address itself, without a timeout if a host name has no address.
* It numbers meetings by counters of the process, and a replacement process would count from 0.
* A process can only ever have one rank.  So this module refuses another rank early.
* The agent opens 57 descriptors for each connected rank, so 16 ranks reach the usual limit.
* Its shutdown waits for the functions that others have called here, even if they run for hours.
"""

from __future__ import annotations

import resource
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from xpool.errors import OptionError

DESCRIPTORS = 60  # about as many as TensorPipe opens for each connected rank
SHUTDOWN_SECONDS = 10

_rank: int | None = None  # the rank of this process; None before its first agent

_SCHEME = "xpool"
_offered: tuple[Any, int, int] | None = None  # store, rank and world size, while an agent starts


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store that `start` got, because torch accepts only an address."""
    offered = _offered  # torch keeps this generator, which keeps the store
    assert offered is not None
    yield offered


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


def check_rank(rank: int) -> None:
    """Raise `OptionError` if this process cannot have an agent of this rank."""
    if _rank not in (None, rank):
        raise OptionError(
            f"This process was rank {_rank} of a world with RPC, and torch lets it have no other "
            f"rank: give it that rank again, not {rank}, or use init_rpc=False."
        )


def start(
    name: str,
    rank: int,
    world_size: int,
    store: Any,
    earlier: int,
    timeout: float,
    rpc_timeout: float,
) -> None:
    """Start the agent.  Return when all ranks have started theirs.

    ``earlier`` is the number of worlds that have used this store, ``timeout`` the seconds in which
    all ranks must start, ``rpc_timeout`` the default timeout of later calls, in seconds.
    """
    global _rank, _offered
    # Set before torch is called, because torch keeps the rank even if the start fails.
    _rank = rank
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://", rpc_timeout=rpc_timeout, **_transports(world_size)
    )
    rpc._init_counter = earlier  # torch's prefix in the store contains it
    for counts in ("_all_gather_sequence_id", "_all_gather_sequence_id_to_states"):
        getattr(rpc.api, counts, {}).clear()
    constants: Any = rpc.backend_registry.rpc_constants
    limit = getattr(constants, "DEFAULT_PROCESS_GROUP_TIMEOUT", None)
    with warnings.catch_warnings():
        # torch itself uses a class here that it has deprecated.
        warnings.filterwarnings("ignore", "You are using a Backend .*", UserWarning)
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout)
        _offered = store, rank, world_size
        try:
            rpc.init_rpc(name, rpc.BackendType.TENSORPIPE, rank, world_size, options)
        finally:
            constants.DEFAULT_PROCESS_GROUP_TIMEOUT = limit
            _offered = None


def _transports(world_size: int) -> dict[str, Any]:
    """Return options for TensorPipe with fewer transports if all need too many descriptors."""
    room, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # at the soft limit, open(2) fails
    if room == resource.RLIM_INFINITY or (world_size + 4) * DESCRIPTORS < room:
        return {}
    return {"_transports": ["uv"], "_channels": ["basic"]}  # 7 to 9 descriptors for each rank


def shut_down(graceful: bool) -> None:
    """End the agent, if there is one.  ``graceful``: wait until all ranks end theirs, too."""

    def end() -> None:
        try:
            rpc.shutdown(graceful, timeout=SHUTDOWN_SECONDS)
        except RuntimeError:
            pass  # it was not running, or a rank has just died; it has ended now

    # This thread can be abandoned, because torch's timeout does not limit waits for functions here.
    thread = threading.Thread(target=end, name="xpool-rpc-shutdown", daemon=True)
    thread.start()
    # With ``graceful``, torch waits twice: for all ranks, and for the ends of their calls.
    thread.join(2 * SHUTDOWN_SECONDS if graceful else SHUTDOWN_SECONDS)
    if thread.is_alive():
        warnings.warn(
            "This process has left its world while functions that other members had called still "
            "ran in it; it cannot join another world with RPC before they have returned.",
            ResourceWarning,
            stacklevel=4,
        )
