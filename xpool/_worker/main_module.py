"""The worker's ``__main__``: an empty module, in which messages of the program set its globals.

Nothing of the program's script runs in a worker.  The module has the same name as the program's, so
a pickle that a task writes names ``__main__`` and can be loaded in the next run of the program.
"""

from __future__ import annotations

import builtins
import sys
import types


def install(package: str | None = None) -> None:
    """Install a fresh ``__main__``.  ``package`` is the ``__package__`` of the program's."""
    module = types.ModuleType("__main__")
    module.__package__ = package
    module.__dict__["__builtins__"] = builtins  # as in every module; torch's C code reads it
    sys.modules["__main__"] = module
    # A child of `multiprocessing` has run the script under this name.
    sys.modules.pop("__mp_main__", None)
