"""The role of this process: the program itself, or a worker that follows it.

A *replica* is a process (a worker) whose ``__main__`` follows that of another process: messages of
its parent set its definitions and globals (`received`).  Nothing of the script runs there.
"""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

from xpool._pickling.by_value.origin import MISSING, namespace, program_modules

is_replica = is_forked = False
# In a fork of the program: the globals of its modules as they were at the fork.
_initial: dict[str, dict[str, Any]] = {}


def mark_worker(*, forked: bool = False) -> None:
    """Record that this process is a worker, whose ``__main__`` follows that of its parent.

    Args:
        forked: whether the process is a fork of its parent, with objects that cannot be pickled.
    """
    global is_replica, is_forked, _initial
    is_replica, is_forked = True, forked
    _initial = {name: dict(namespace(name)) for name in program_modules()} if forked else {}


def was_set_here(module: str, name: str) -> bool:
    """Whether code of this worker, and no message, has set a global of a module of the program."""
    values = namespace(module)
    if name not in values or name.startswith("__"):
        return False
    if not is_forked:
        return module == "__main__"  # an import has set the others
    inherited = _initial.get(module)  # None: an import has made it
    return inherited is not None and inherited.get(name, MISSING) is not values[name]


def forget_initial(module: str, name: str) -> None:
    """Drop the object to which a global referred when this process was forked."""
    _initial.get(module, {}).pop(name, None)


def install_main(package: str | None = None) -> None:
    """Install a fresh, empty ``__main__``, with the ``__package__`` of the program's.

    It has the same name as the program's, so a pickle that a task writes names ``__main__`` and can
    be loaded in the next run of the program.
    """
    module = types.ModuleType("__main__")
    module.__package__ = package
    module.__dict__["__builtins__"] = builtins  # as in every module; torch's C code reads it
    sys.modules["__main__"] = module
    # A child of `multiprocessing` has run the script under this name.
    sys.modules.pop("__mp_main__", None)
