"""Start and end torch's RPC agent, so that a process can have one again, and none waits for ever.

torch keeps some things of its RPC beyond the shutdown, and takes no word in others. They are set
right here, and only here; where a version of torch has them no more, nothing is set.

* Its ranks meet through a process group with a limit of half an hour, whatever its options say.
* It opens the store at its address itself, without a limit where a host's name has no address.
* It tells meetings apart by counts of its own, which a process that has replaced another has not.
* It lets a process have one rank only, for good: that can only be refused in time.
* It takes 57 descriptors for each connected rank, so that 16 ranks reach the usual limit.
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

DESCRIPTORS = 60  # that TensorPipe opens for each rank to which it has a connection, or nearly
LIMIT = 10  # seconds for the shutdown, when nobody has anything left to say

_rank: int | None = None  # of this process, once it has had an agent

_SCHEME = "xpool"
_offered: tuple[Any, int, int] | None = None  # store, rank and world size, while an agent starts


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store that `start` was given: torch takes an address only."""
    offered = _offered  # torch keeps this generator, and with it the store
    assert offered is not None
    yield offered


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


def check_rank(rank: int) -> None:
    """Raise `OptionError` when this process can have no agent of this rank."""
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
    """Start the agent; returns when all ranks have.

    ``earlier`` is the number of worlds that had this store before, ``timeout`` the seconds for all
    ranks to come, ``rpc_timeout`` the default limit of later calls.
    """
    global _rank, _offered
    # Before torch is called: it keeps the rank also where its start fails.
    _rank = rank
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://", rpc_timeout=rpc_timeout, **_transports(world_size)
    )
    # torch puts this number before the keys of its store; a replacement would count from 0.
    rpc._init_counter = earlier
    for counts in ("_all_gather_sequence_id", "_all_gather_sequence_id_to_states"):
        getattr(rpc.api, counts, {}).clear()
    constants: Any = rpc.backend_registry.rpc_constants
    limit = getattr(constants, "DEFAULT_PROCESS_GROUP_TIMEOUT", None)
    with warnings.catch_warnings():
        # torch's own doing: the class that its ranks meet through is one that it deprecates.
        warnings.filterwarnings("ignore", "You are using a Backend .*", UserWarning)
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout)
        _offered = store, rank, world_size
        try:
            rpc.init_rpc(name, rpc.BackendType.TENSORPIPE, rank, world_size, options)
        finally:
            constants.DEFAULT_PROCESS_GROUP_TIMEOUT = limit
            _offered = None


def _transports(world_size: int) -> dict[str, Any]:
    """Which ways of TensorPipe's to use: all, unless they take too many descriptors."""
    # The soft limit is the one that open(2) fails by, with EMFILE.
    room, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if room == resource.RLIM_INFINITY or (world_size + 4) * DESCRIPTORS < room:
        return {}
    return {"_transports": ["uv"], "_channels": ["basic"]}  # 7 to 9 for each rank


def shut_down(graceful: bool) -> None:
    """End the agent, if there is one; ``graceful`` when all ranks do, at this moment."""

    def end() -> None:
        try:
            rpc.shutdown(graceful, timeout=LIMIT)
        except RuntimeError:
            pass  # it was not up, or someone died in this very moment; it is down now

    # In a thread that can be left behind: torch's limit does not bound the wait for functions
    # that run here.
    thread = threading.Thread(target=end, name="xpool-rpc-shutdown", daemon=True)
    thread.start()
    # Graceful, torch waits twice: for all ranks to come, and for their calls to end.
    thread.join(2 * LIMIT if graceful else LIMIT)
    if thread.is_alive():
        warnings.warn(
            "This process has left its world while functions that other members had called still "
            "ran in it; it cannot join another world with RPC before they have returned.",
            ResourceWarning,
            stacklevel=4,
        )
