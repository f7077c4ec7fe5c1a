"""What is done when this process forks: nothing else in the package tells Python of it.

A child has a copy of all memory and one thread, the one that forked.  So it must not wait for a
lock that another thread of its parent had, nor keep what the parent counts for itself (`renew`),
nor hold descriptors open that tell others of the parent's end (`at_fork`).  Before a fork, what was
registered last is called first; after it, all is called in the order of registration.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["at_fork", "fork_unused", "renew"]

_unused = False  # the fork under way is one of `fork_unused`


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    in_parent: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Have these called by the thread that forks; where there is no fork, never."""
    if not hasattr(os, "register_at_fork"):
        return
    # Python keeps these as long as the process lives, and with them all that they hold.  Each by
    # itself: it goes on with the next when a signal handler has raised in one.
    given = {"before": before, "after_in_parent": in_parent, "after_in_child": in_child}
    for when, call in given.items():
        if call is not None:
            os.register_at_fork(**{when: _unless_unused(call)})


def _unless_unused(call: Callable[[], object]) -> Callable[[], object]:
    return lambda: _unused or call()


def renew(namespace: dict[str, Any], **makers: Callable[[], Any]) -> None:
    """Have globals of a module (``namespace``) made anew in each child: locks, above all."""

    def in_child() -> None:
        for name, make in makers.items():
            namespace[name] = make()

    at_fork(in_child=in_child)


def fork_unused() -> int:
    """Fork a process of one thread that has only imported this package: nothing is called.

    All that is called would find nothing to do, and takes a tenth of a worker's start.
    """
    global _unused
    _unused = True
    try:
        return os.fork()
    finally:
        _unused = False
