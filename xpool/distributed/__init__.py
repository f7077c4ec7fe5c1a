"""Processes that work together: a world of ranks, collective groups and RPC groups.

The public names are those of ``machin.parallel.distributed``. The guide is docs/distributed.md.
Importing this package imports torch.
"""

from xpool.distributed._collective import CollectiveGroup, Pending
from xpool.distributed._current import (
    GroupError,
    GroupKeyError,
    GroupTimeout,
    NotAMember,
    PeerLost,
    get_cur_name,
    get_cur_rank,
)
from xpool.distributed._rpc_group import RpcGroup
from xpool.distributed._world import World, get_world, is_world_initialized, join

__all__ = [
    "CollectiveGroup",
    "GroupError",
    "GroupKeyError",
    "GroupTimeout",
    "NotAMember",
    "PeerLost",
    "Pending",
    "RpcGroup",
    "World",
    "get_cur_name",
    "get_cur_rank",
    "get_world",
    "is_world_initialized",
    "join",
]
