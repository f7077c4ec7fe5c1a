"""Registers functions that Python calls when this process forks.  No other module does this.

A child has a copy of all memory, but only one thread: the one that forked.  So it must not wait for
a lock that another thread of the parent held, or keep the parent's counters (`renew`).  It must
close descriptors whose end tells others that the parent has ended (`at_fork`).  Python calls the
functions for `before` in reverse order of registration, and the others in that order.
"""

from __future__ import annotations

import _imp
import contextlib
import mmap
import os
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

_unused = False  # whether `fork_unused` is forking

known = mmap.mmap(-1, 1, **({"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}))
"""1 in a process in which the functions ``in_child`` were called.  A child of a fork gets a 0."""
known[0] = 1
if sys.platform == "linux":
    with contextlib.suppress(OSError):  # a system without it, on which such a fork is not noticed
        known.madvise(18)  # MADV_WIPEONFORK (linux/mman.h)


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    in_parent: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Register functions that the forking thread calls.  Do nothing on systems without fork.

    ``in_parent`` is called only if ``before`` was called at the same fork.  Otherwise it could be
    called alone, if a module registers both while another thread is in the middle of a fork.

    Python keeps these functions, with all objects to which they refer, until the process ends.
    """
    if not hasattr(os, "register_at_fork"):
        return
    if before is not None and in_parent is not None:
        before, in_parent = _paired(before, in_parent)
    # Registered separately: if a signal handler raises in one, Python still calls the next.
    given = {"before": before, "after_in_parent": in_parent, "after_in_child": in_child}
    for when, call in given.items():
        if call is not None:
            os.register_at_fork(**{when: _unless_unused(call)})


def _paired(
    before: Callable[[], object], in_parent: Callable[[], object]
) -> tuple[Callable[[], object], Callable[[], object]]:
    forking: set[int] = set()  # threads that have called `before`

    def first() -> None:
        forking.add(get_ident())
        before()

    def last() -> None:
        if get_ident() in forking:
            forking.discard(get_ident())
            in_parent()

    return first, last


def _unless_unused(call: Callable[[], object]) -> Callable[[], object]:
    return lambda: _unused or call()


HOOK = _unless_unused(int).__code__
"""Of a frame in which a registered function runs: Python only prints what is raised in it."""


def notice_fork() -> None:
    """If C code has forked this process, let Python do what it does in a child of `os.fork`.

    Some servers fork in this way, such as uWSGI.  Then no registered function was called, and
    threads of the parent would be waited for.  Verbs call this before they lock or wait.
    """
    if not known[0]:
        import ctypes  # imported here because few programs need it

        _imp.acquire_lock()  # as before a fork; the call releases the lock
        ctypes.pythonapi.PyOS_AfterFork_Child()


def _after_fork_in_child() -> None:
    known[0] = 1


def renew(namespace: dict[str, Any], **makers: Callable[[], Any]) -> None:
    """Give globals of a module, for example locks, new values in each child.

    ``namespace`` is the module's ``globals()``.
    """

    def in_child() -> None:
        for name, make in makers.items():
            namespace[name] = make()

    at_fork(in_child=in_child)


def fork_unused() -> int:
    """Fork without calling the registered functions.

    Called by a process that has one thread, and has imported xpool but not used it.  In such a
    process the functions would have nothing to do, and would take a tenth of a worker's start.
    """
    global _unused
    _unused = True
    try:
        pid = os.fork()
    finally:
        _unused = False
    if not pid:
        _after_fork_in_child()
    return pid


at_fork(in_child=_after_fork_in_child)
