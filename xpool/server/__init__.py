"""Values, models and gradients that processes share through a server of theirs.

The names are those of ``machin.parallel.server``; docs/server.md is the guide.  Importing this
imports torch.
"""

from xpool.server.gradient import ModelNotManaged, PushPullGradServer, PushPullGradServerImpl
from xpool.server.model import PushPullModelServer, PushPullModelServerImpl
from xpool.server.ordered import (
    OrderedServerBase,
    OrderedServerSimple,
    OrderedServerSimpleImpl,
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
