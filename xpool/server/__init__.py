"""Servers of values, models and gradients, for the processes of an `RpcGroup`.

The public names are those of ``machin.parallel.server``.  The guide is docs/server.md.  Importing
this package imports torch.
"""

from xpool.server._gradient import ModelNotManaged, PushPullGradServer, PushPullGradServerImpl
from xpool.server._ordered import (
    OrderedServerBase,
    OrderedServerSimple,
    OrderedServerSimpleImpl,
    VersionError,
)
from xpool.server._served_model import PushPullModelServer, PushPullModelServerImpl

__all__ = [
    "ModelNotManaged",
    "OrderedServerBase",
    "OrderedServerSimple",
    "OrderedServerSimpleImpl",
    "PushPullGradServer",
    "PushPullGradServerImpl",
    "PushPullModelServer",
    "PushPullModelServerImpl",
    "VersionError",
]
