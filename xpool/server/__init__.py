"""Servers of values, models and gradients, for the processes of an `RpcGroup`.

The public names are those of ``machin.parallel.server``.  The guide is docs/server.md.  Importing
this package imports torch.
"""

from xpool.server._models import (
    ModelNotManaged,
    OrderedServerBase,
    OrderedServerSimple,
    OrderedServerSimpleImpl,
    PushPullGradServer,
    PushPullGradServerImpl,
    PushPullModelServer,
    PushPullModelServerImpl,
    VersionError,
)

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
