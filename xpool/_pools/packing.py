"""`Packer`: pickles the messages of one pool."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from xpool._calls.options import label
from xpool._memory.anonymous_files import File
from xpool._memory.arena import Arena
from xpool._memory.holds import Block
from xpool._pickling.by_value.broadcast import Broadcast, publish
from xpool._pickling.by_value.sent import Book
from xpool._pickling.diagnose import at, say_where
from xpool._pickling.frame import Leased
from xpool._pickling.pickler import encode_atoms
from xpool._pickling.policy import BY_PIPE, Layout, share
from xpool._pools.submitters import CALL, FUNCTION, ITEM
from xpool._python.interrupt import deliver, interruptible, pending
from xpool._worker.callables import TaskFunction, each, one, star, star_each
from xpool.errors import OptionError, TaskNotPicklable
from xpool.pickle import encode

Payload = bytes | memoryview
Told = frozenset[tuple[str, str]]


def _place(task: Any, role: str, path: str) -> str:
    """Return words for the place of an object in a task."""
    if role == ITEM:
        return f" in an item, at {path.lstrip('.')}" if path else " as an item"
    if role == FUNCTION:
        return _in_function(task, path)
    function, args, _ = task
    match = re.fullmatch(_IN_CALL, path, re.DOTALL)
    if match is None:
        return at(path)
    root, key, rest = match.groups()
    of_map = function in (one, each, star, star_each)
    if of_map:
        function = args[0]
    if root == "0" or (of_map and key == "0"):
        return _in_function(function, rest)
    if of_map:
        return _place(task, ITEM, rest)
    place = f"argument {key} of {label(function)}"
    return f" at {rest.lstrip('.')} in {place}" if rest else f" as {place}"


_IN_CALL = r"\[([012])\](?:\[(.*?)\])?(.*)"


def _in_function(function: Any, path: str) -> str:
    if type(function) is TaskFunction:
        function, path = function.func, path.removeprefix(".func")
    name = label(function)
    if not path:
        return ""  # the function itself, or something that it uses by name
    if path[0] not in ".[":
        path = f".{path}"
    # The name is in the path to a variable or a default of the function itself.
    known = path.startswith(f".{getattr(function, '__name__', '')}'s ")
    return f" at {path[1:]}" if known else f" at {name.removesuffix('()')}{path}"


class Packer:
    """Pickles the messages of the pool that ``token`` identifies.

    With an arena, the messages take at most ``memory_limit`` bytes of it.
    """

    def __init__(
        self,
        recurse: bool,
        token: str,
        layout: Layout,
        arena: Arena | None = None,
        memory_limit: int = 0,
    ) -> None:
        self.recurse, self.token, self.layout = recurse, token, layout
        self.arena, self.memory_limit = arena, memory_limit

    pack_atoms = staticmethod(encode_atoms)
    """Pickle each of many numbers or short texts; None: some items are of other types."""

    @interruptible
    def pack_task(
        self, task: Any, kept: bool, worker: int | None, told: Told = frozenset(), role: str = CALL
    ) -> tuple[Payload, int | None]:
        """Pickle a task for a worker (None: any, -1: the least loaded); return message and worker.

        ``kept``: the message may be sent more than once.  ``told``: the globals of the program that
        came with the task's function.  ``role``: what the task is, for errors.
        A task with handles to tensors on devices goes to their worker; if there are several, to the
        one with most of their bytes.  Tensors of other workers are copied.
        """
        if pending:
            deliver()
        layout = self.layout._replace(kept=True) if kept else self.layout
        try:
            payload = encode(task, recurse=self.recurse, layout=layout, told=told)
            # Handles to tensors on devices are blocks, so a message without blocks has no handles.
            if type(payload) is not Leased:
                return payload, worker
            owners = payload.owners
            if not owners:
                return payload, worker
            if worker is None or worker < 0:
                worker = min(owners, key=lambda i: (-owners[i], i))
            if owners.keys() - {worker}:
                # Pickle it again for the worker that was chosen.
                layout = self.layout._replace(target=worker, kept=kept)
                payload = encode(task, recurse=self.recurse, layout=layout, told=told)
            return payload, worker
        except (TaskNotPicklable, RuntimeError) as exc:  # also of pools, and of multiprocessing
            say_where(exc, functools.partial(_place, task, role))
            raise

    @interruptible
    def pack_option(self, name: str, obj: Any) -> bytes:
        """Pickle an object that every worker, including replacements, gets at its start."""
        if pending:
            deliver()
        layout = self.layout._replace(kept=True)  # all workers copy from one block
        try:
            payload = encode(obj, recurse=self.recurse, layout=layout)
        except TaskNotPicklable as exc:
            raise TaskNotPicklable(f"{name}: {exc}") from exc
        return payload if isinstance(payload, bytes) else bytes(payload)


def _publish(
    token: str,
    lessor: Callable[[int], Block | None] | None,
    write: Callable[[Layout], Payload],
    what: str,
) -> Broadcast:
    """Store a message for all workers: in a block, or else in an anonymous file."""
    if lessor is not None:
        try:
            return publish(write, token, lessor, what)
        except TaskNotPicklable:
            pass  # the arena has no memory left
    message = write(BY_PIPE)
    return Broadcast(token, File(message), len(message), None, what)


def find_arena(
    copy_tensor: bool, method: str | None, limit: int | None, token: str
) -> tuple[Arena | None, int, Layout]:
    """Return the arena of a pool, the bytes that it may use, and the layout of its messages."""
    arena = Arena.own()
    if arena is None:
        if not copy_tensor:
            raise OptionError(
                "is_copy_tensor=False: this process cannot have memory that it shares with workers "
                "(this needs Linux, and no limit on addresses, ulimit -v); leave it out"
            )
        publisher = functools.partial(_publish, token, None)
        return None, 0, BY_PIPE._replace(book=Book(), publisher=publisher)
    if limit is None:
        limit = arena.limit
    lessor = functools.partial(arena.lease, limit=limit)
    publisher = functools.partial(_publish, token, lessor if limit else None)
    layout = Layout(lessor=lessor, pool=token, book=Book(), publisher=publisher)
    if not copy_tensor:
        layout = share(layout, arena, method)._replace(gpus=method in (None, "cuda"))
    return arena, limit, layout
