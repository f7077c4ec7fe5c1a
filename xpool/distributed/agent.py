"""Starts and ends torch's RPC agent, so that a process can have another one later.

This module works around six properties of torch's RPC.  If a version of torch lacks one of the
private names that are set here, nothing is set.

* The ranks meet through a process group whose timeout is half an hour, whatever the options say.
* It opens the store at its address itself, without a limit if a host's name has no address.
* It numbers meetings by counters of the process; a replacement process would count from 0.
* A process can only ever have one rank, so another rank is refused early.
* It opens 57 descriptors for each connected rank, so 16 ranks reach the usual limit.
* Its shutdown waits for the functions that others have called here, however long they run.
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

_rank: int | None = None  # of this process, once it has had an agent

_SCHEME = "xpool"
_offered: tuple[Any, int, int] | None = None  # store, rank and world size, while an agent starts


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store that `start` was given: torch takes only an address."""
    offered = _offered  # torch keeps this generator, and so the store
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
    """Start the agent; return when all ranks have started theirs.

    ``earlier``: the number of worlds that have used this store.  ``timeout``: seconds for all ranks
    to start.  ``rpc_timeout``: the default timeout of later calls, in seconds.
    """
    global _rank, _offered
    # Before torch is called: torch keeps the rank even if the start fails.
    _rank = rank
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://", rpc_timeout=rpc_timeout, **_transports(world_size)
    )
    # The prefix of torch's keys in the store.
    rpc._init_counter = earlier
    for counts in ("_all_gather_sequence_id", "_all_gather_sequence_id_to_states"):
        getattr(rpc.api, counts, {}).clear()
    constants: Any = rpc.backend_registry.rpc_constants
    limit = getattr(constants, "DEFAULT_PROCESS_GROUP_TIMEOUT", None)
    with warnings.catch_warnings():
        # torch uses a class here that it has deprecated.
        warnings.filterwarnings("ignore", "You are using a Backend .*", UserWarning)
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout)
        _offered = store, rank, world_size
        try:
            rpc.init_rpc(name, rpc.BackendType.TENSORPIPE, rank, world_size, options)
        finally:
            constants.DEFAULT_PROCESS_GROUP_TIMEOUT = limit
            _offered = None


def _transports(world_size: int) -> dict[str, Any]:
    """Return options that restrict TensorPipe's transports if all need too many descriptors."""
    # open(2) fails at the soft limit, with EMFILE.
    room, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if room == resource.RLIM_INFINITY or (world_size + 4) * DESCRIPTORS < room:
        return {}
    return {"_transports": ["uv"], "_channels": ["basic"]}  # 7 to 9 descriptors for each rank


def shut_down(graceful: bool) -> None:
    """End the agent, if there is one; ``graceful``: all ranks do so now."""

    def end() -> None:
        try:
            rpc.shutdown(graceful, timeout=SHUTDOWN_SECONDS)
        except RuntimeError:
            pass  # it was not up, or a rank has just died; it is down now

    # In a thread that can be abandoned: torch's timeout does not limit the wait for functions that
    # run here.
    thread = threading.Thread(target=end, name="xpool-rpc-shutdown", daemon=True)
    thread.start()
    # If graceful, torch waits twice: for all ranks, and for the ends of their calls.
    thread.join(2 * SHUTDOWN_SECONDS if graceful else SHUTDOWN_SECONDS)
    if thread.is_alive():
        warnings.warn(
            "This process has left its world while functions that other members had called still "
            "ran in it; it cannot join another world with RPC before they have returned.",
            ResourceWarning,
            stacklevel=4,
        )
