"""Pickling for worker pools.  It is fast for plain data, and by value for objects without an
importable name.

    >>> from xpool import pickle
    >>> square = pickle.loads(pickle.dumps(lambda x: x * x))
    >>> square(7)
    49

`dumps` and `loads` are for users.  The pools use `encode` and `decode`, which keep large buffers
beside the pickle, and `encode_exception`.  Importing this module imports none of torch, numpy and
dill.  dill is imported when the C pickler meets an object that it cannot pickle.
"""

from importlib import import_module
from types import ModuleType

from xpool._pickling.by_value import (
    by_token,
    classes,
    exceptions,
    functions,
    own_objects,
    sent,
    standard,
)
from xpool._pickling.by_value.exceptions import encode_exception
from xpool._pickling.by_value.names import mark_static_module
from xpool._pickling.pickler import Pickler, decode, dumps, encode, loads
from xpool._pickling.reducers import lazily

__all__ = [
    "Pickler",
    "decode",
    "dumps",
    "encode",
    "encode_exception",
    "loads",
    "mark_static_module",
]

# When these modules are imported, they register their reducers with the codec.
_FAMILIES = (by_token, classes, exceptions, functions, own_objects, sent, standard)

# The modules of reducers that a program without torch or numpy never needs.
LATE = {"torch": "xpool._pickling.tensors.dense", "numpy": "xpool._pickling.tensors.arrays"}
# Modules of the classes, or of their bases.
lazily(LATE["torch"], "torch", "torch.storage", "torch.jit", "torch.jit._script", "torch._ops")
lazily(LATE["torch"], "torch.fx.graph_module", "torch.export.exported_program")
lazily(LATE["numpy"], "numpy")


def load_late(module: ModuleType) -> None:
    """Import the reducers for a module of `LATE` that this worker has just imported.

    They are imported now, because a task may later have used up all descriptors.
    """
    import_module(LATE[module.__name__])
