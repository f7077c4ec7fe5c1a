"""The role of this process: the program itself, or a worker that follows it.

A *replica* is a process (a worker) whose ``__main__`` follows that of another process: messages of
its parent set its definitions and globals (`received`).
"""

from __future__ import annotations

from typing import Any

from xpool._pickling.by_value.origin import MISSING, namespace, program_modules


class _State:
    replica: bool = False
    forked: bool = False
    # In a fork of the program: the globals of its modules as they were at the fork.
    initial: dict[str, dict[str, Any]] = {}


_state = _State()


def mark_worker(*, forked: bool = False) -> None:
    """Record that this process is a worker, whose ``__main__`` follows that of its parent.

    Args:
        forked: whether the process is a fork of its parent, with objects that cannot be pickled.
    """
    _state.replica, _state.forked = True, forked
    _state.initial = {}
    if forked:
        _state.initial = {name: dict(namespace(name)) for name in program_modules()}


def is_replica() -> bool:
    return _state.replica


def is_forked() -> bool:
    return _state.forked


def was_set_here(module: str, name: str) -> bool:
    """Whether code of this worker, and no message, has set a global of a module of the program."""
    values = namespace(module)
    if name not in values or name.startswith("__"):
        return False
    if not _state.forked:
        return module == "__main__"  # an import has set the others
    return _state.initial.get(module, {}).get(name, MISSING) is not values[name]


def forget_initial(module: str, name: str) -> None:
    """Let the object go that a global of a fork referred to at first."""
    _state.initial.get(module, {}).pop(name, None)
