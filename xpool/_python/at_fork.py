"""Registers functions that Python calls when this process forks.  No other module does this.

A child has a copy of all memory, but only one thread: the one that forked.  So it must not wait for
a lock that another thread of the parent held, or keep the parent's counters (`renew`).  It must
close descriptors whose end tells others that the parent has ended (`at_fork`).  The functions for
`before` are called in reverse order of registration, and the others in that order, as Python does.
Signal handlers that come meanwhile are deferred (`interrupt`): Python only prints what they raise.
"""

from __future__ import annotations

import _imp
import contextlib
import functools
import mmap
import os
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

_unused = False  # whether `fork_unused` is forking

known = mmap.mmap(-1, 1, flags=mmap.MAP_PRIVATE)
"""1 in a process in which the functions ``in_child`` were called.  A child of a fork gets a 0."""
known[0] = 1
if sys.platform == "linux":
    with contextlib.suppress(OSError):  # a system without it, on which such a fork is not noticed
        known.madvise(18)  # MADV_WIPEONFORK (linux/mman.h)


def _nothing() -> None:
    """Stands for a function that is not given."""


_BEFORE, _IN_PARENT, _IN_CHILD = range(3)

_Hook = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]
"""The functions for these stages."""

_hooks: list[_Hook] = []
_forking: dict[int, tuple[_Hook, ...]] = {}  # by thread: those whose first function it calls
guards: list[Callable[[bool], object]] = []
"""Called with True before all functions of a fork, and with False after them, in the parent."""


def at_fork(
    *,
    before: Callable[[], object] = _nothing,
    in_parent: Callable[[], object] = _nothing,
    in_child: Callable[[], object] = _nothing,
) -> None:
    """Register functions that the forking thread calls.

    ``in_parent`` is called only if ``before`` was called at the same fork.  Otherwise it could be
    called alone, if a module registers both while another thread is in the middle of a fork.

    This module keeps these functions, with all objects to which they refer, until the process ends.
    """
    _hooks.append((before, in_parent, in_child))


def _fork(stage: int) -> None:
    """Call the functions for one stage of a fork, also if others fail: Python prints the error."""
    if _unused:
        return
    calls: list[Callable[[], object]] = []
    if stage == _BEFORE:
        hooks = _forking[get_ident()] = tuple(_hooks)
        calls = [hook[stage] for hook in reversed(hooks)]
        calls[:0] = [functools.partial(guard, True) for guard in guards]
    elif stage == _IN_PARENT:
        calls = [hook[stage] for hook in _forking.pop(get_ident(), ())]
        calls += [functools.partial(guard, False) for guard in guards]
    else:
        _forking.clear()
        calls = [hook[stage] for hook in tuple(_hooks)]
    errors = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


HOOK = _fork.__code__
"""Of a frame in which registered functions run: Python only prints what is raised in it."""

os.register_at_fork(
    before=functools.partial(_fork, _BEFORE),
    after_in_parent=functools.partial(_fork, _IN_PARENT),
    after_in_child=functools.partial(_fork, _IN_CHILD),
)


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
