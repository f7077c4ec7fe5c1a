"""`preload`: starts the fork server before the first pool, so that it imports in parallel."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings

from xpool._engine.launch import start_early


def preload(*modules: str) -> None:
    """Start the fork server now, in the background, and have it import these modules.

    Call it at the beginning of a program whose imports take long.  The server, from which all
    workers are forked, imports the modules in parallel, so the first pool does not wait for them.
    Without this call the server starts with the first pool; it imports torch, or numpy, if the
    program has imported it.  Workers share the memory of the modules that the server has imported.

        import xpool

        if __name__ == "__main__":
            xpool.preload("torch")
            import torch

    Args:
        modules: names, as in an ``import`` statement, of modules that start no threads and open no
            devices when they are imported.  The program itself need not import them.  A failing
            import is reported on stderr, and raised in the workers that need the module.

    Warns:
        RuntimeWarning: a module does not exist.

    Raises:
        TypeError: an argument is not the name of a module.
        OSError: the system refuses a process.
    """
    for name in modules:
        if not isinstance(name, str) or not all(map(str.isidentifier, name.split("."))):
            raise TypeError(f"preload takes names of modules, such as 'torch', not {name!r}")
        package = name.partition(".")[0]
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            warnings.warn(f"preload: there is no module {name!r}", RuntimeWarning, stacklevel=2)
    start_early(modules)
    # Imported before the program has torch's objects: a later import would start a garbage
    # collection, which takes 150 ms with all of these objects.
    for needed in "_pools.process", "_pools.assembly", "_pickling.by_value.script_top":
        importlib.import_module(f"xpool.{needed}")
