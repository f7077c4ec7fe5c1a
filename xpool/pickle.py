"""Pickling for worker pools: fast for plain data, by value for what has no importable name.

    >>> from xpool import pickle
    >>> square = pickle.loads(pickle.dumps(lambda x: x * x))
    >>> square(7)
    49

`dumps` and `loads` are for users.  The pools use `encode` and `decode`, which keep large
buffers beside the pickle, and `encode_exception`.  Importing this imports neither torch nor
numpy nor dill; dill is imported when the C pickler has met something that it cannot do.
"""

from importlib import import_module
from types import ModuleType

from xpool._pickling import views
from xpool._pickling.by_value import classes, exceptions, functions, main_globals, typevars
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

# The codec knows no kind of object: each of these modules told it, when it was imported, what it
# can do.
_FAMILIES = (classes, exceptions, functions, main_globals, typevars, views)

# What a program without torch and numpy never needs.
LATE = {"torch": "xpool._pickling.tensors.dense", "numpy": "xpool._pickling.tensors.arrays"}
lazily(LATE["torch"], "torch", "torch.storage")  # where classes of theirs, or bases of these, are
lazily(LATE["numpy"], "numpy")


def load_late(module: ModuleType) -> None:
    """In a worker that has just imported a module of `LATE`: be ready for its objects.

    A task may have taken all descriptors by the time when it returns one.
    """
    import_module(LATE[module.__name__])
