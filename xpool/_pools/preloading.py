"""`preload`: the fork server starts before there is a pool, and imports while the program does."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings

from xpool._engine.launch import start_early

__all__ = ["preload"]


def preload(*modules: str) -> None:
    """Start the fork server now, in the background, and have it import these modules.

    Call it first of all in a program that will import what takes long: the server, from which all
    workers are forked, imports the same at the same time, and the first pool need not wait for it.
    Without this the server is started with the first pool, and has torch, or numpy, if the program
    has imported it.  Workers share the memory of what the server has imported.

        import xpool

        if __name__ == "__main__":
            xpool.preload("torch")
            import torch

    Args:
        modules: names, as in an ``import`` statement, of modules that start no threads and open no
            devices when they are imported; the program need not import them.  An import that
            fails is reported on stderr, and raised in the workers that need the module.

    Warns:
        RuntimeWarning: a module does not exist.

    Raises:
        TypeError: something is not a name.
        OSError: no process can be started.
    """
    for name in modules:
        if not isinstance(name, str) or not all(map(str.isidentifier, name.split("."))):
            raise TypeError(f"preload takes names of modules, such as 'torch', not {name!r}")
        package = name.partition(".")[0]
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            warnings.warn(f"preload: there is no module {name!r}", RuntimeWarning, stacklevel=2)
    start_early(modules)
    # What a pool needs, before the program has the objects of torch: importing it afterwards starts
    # a collection of garbage, which looks at all of these for 150 ms.
    for needed in "xpool._pools.process", "xpool._pools.assembly", "xpool._pickling.by_value.units":
        importlib.import_module(needed)
