"""Share mode for memory of a GPU: a process exports what it has, and others see it by CUDA's IPC.

What travels is `Facts`, by which the receiver opens the memory, and the name of a **token**: a
block of the arena, a few bytes, that stands for the memory.  A message holds the token, and who has
opened the memory holds it as long as any tensor uses it; the exporter keeps the memory as long as
anybody else holds the token.  So the rules of CUDA's IPC, that the producer must keep what others
use, that it is not opened where it was made, and that who received it does not export it again,
are kept here, and a process that is killed holds nothing any more.

One who has imported memory sends on the facts that it has got, and the exporter's token: any number
of hops lead to the one memory, and back to the exporter's own storage.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import errno
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sized
from itertools import islice
from typing import Any, NamedTuple

from xpool._memory.arena import Arena, Block
from xpool._memory.layout import ENTRIES
from xpool._pickling.policy import Layout
from xpool._pickling.reducers import Context, builder, in_place
from xpool._pickling.tensors import cuda
from xpool._python import at_fork
from xpool._python.interrupt import shielded, uninterrupted
from xpool.errors import DeviceError, TaskNotPicklable

__all__ = [
    "Facts",
    "import_",
    "from_the_pool",
    "gpu_of",
    "export",
    "collect",
    "synchronize",
    "tensor_on_gpu",
]

WAY_OUT = (
    "Copies can always be sent: is_copy_tensor=True, or share_method='cpu', which shares only what "
    "lies in the host's memory."
)

_TOKEN = 64  # bytes: the least that a block has

_AT_ONCE = 64  # exports that are looked at before a task


class Facts(NamedTuple):
    """What another process opens memory of a GPU with."""

    version: str
    """Of torch: the form of its handles changes."""

    gpu: str
    """Its UUID."""

    pid: int
    """Of the exporter."""

    handle: bytes
    nbytes: int
    offset: int


class _Exported:
    """What a storage of this process is known by.  It is an attribute of the storage."""

    def __init__(self, facts: Facts, address: int) -> None:
        self.facts = facts
        self.address = address
        self.block: Block | None = None  # the token, while it is in `_lent`


class _Imported:
    """The hold of this process on somebody's memory.

    An attribute of the storage, so it lives as long as any tensor uses that.
    """

    def __init__(self, facts: Facts, block: Block, ordinal: int, storage: Any) -> None:
        self.facts, self.block, self.ordinal = facts, block, ordinal
        # Weak: the storage has this as its attribute.
        self.storage: Callable[[], Any] = cuda.calls.weak(storage)

    @uninterrupted
    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            try:
                # What was asked of the GPU with this memory comes before who gets it next.
                cuda.calls.synchronize(self.ordinal)
            except RuntimeError:
                pass  # CUDA has failed here: nothing runs any more


_Key = tuple[int, int]  # of a token: its arena's token, and its name

# Guarded by `_lock`, which a thread holds for moments; opening memory may take longer.
# Reentrant: a signal handler may share something while its thread has the lock.
_lock = threading.RLock()
_exported: dict[
    _Key, tuple[_Exported, Any]
] = {}  # with the storage; those looked at last come last
exports: Sized = _exported  # for others to see whether there are any
_imported: weakref.WeakValueDictionary[_Key, _Imported] = weakref.WeakValueDictionary()


def _after_fork_in_child() -> None:
    global _lock, _exported, _imported
    _lock = threading.RLock()  # some thread of the parent may have held it
    # CUDA does not survive a fork: these are the parent's, and not even to be let go of here.
    _of_parent.append((_exported, _imported))
    _exported, _imported = {}, weakref.WeakValueDictionary()


_of_parent: list[Any] = []

at_fork.at_fork(in_child=_after_fork_in_child)


# -- the exporter --------------------------------------------------------------------------------


class _Refused(Exception):
    pass


def export(pickler: Context, storage: Any, about: Callable[[], str]) -> Any:
    """Return the arguments of `import_` in a message; None: its layout has copies of such memory.

    Before, the GPU is waited for: what this process has asked of it so far has been done.

    Args:
        about: says whose storage it is, for the message.

    Raises:
        TaskNotPicklable: it cannot be shared; the message says why and what to do.
    """
    layout = pickler.layout
    arena = layout.exports
    if arena is None or not storage.nbytes():
        return None
    known = _known(storage)
    if layout.keep is not None and not _is_of_pool(known):
        return None  # this message is for the pool's process, which opens nothing unasked
    try:
        # The GPU is waited for without the lock.
        cuda.calls.synchronize(cuda.calls.ordinal(storage))
        with _lock:
            facts, block = _exported_again(arena, known) or _export_storage(arena, storage, known)
        _check_reach(layout, facts.gpu)
    except _Refused as exc:
        raise TaskNotPicklable(f"{about()} cannot be shared: {exc} {WAY_OUT}") from exc.__cause__
    block.gpu = facts.gpu  # type: ignore[misc]  # its subclass has it
    return in_place(pickler, block), facts


def _check_reach(layout: Layout, gpu: str) -> None:
    if layout.reach is None or layout.reach(gpu, layout.target):
        return
    who = "no worker sees" if layout.target is None else f"worker {layout.target} does not see"
    raise _Refused(f"{who} its GPU ({gpu}).")


def _known(storage: Any) -> _Exported | _Imported | None:
    found: _Exported | _Imported | None = getattr(storage, "xpool_ipc", None)
    return found


def _exported_again(arena: Arena, known: Any) -> tuple[Facts, Block] | None:
    if type(known) is not _Imported:
        return None
    if known.block.arena is not arena:
        raise _Refused(
            "it is shared with other processes already: those of another pool, in a worker of "
            "which this runs. Send a clone() of it instead."
        )
    # The exporter's token goes on: a message with it holds the memory as this process does.
    return known.facts, known.block


def _export_storage(arena: Arena, storage: Any, known: Any) -> tuple[Facts, Block]:
    # torch wraps a storage once more each time that it exports it: so that is done once.
    if known is None or known.address != storage.data_ptr():
        # Also where the storage has got other memory meanwhile, as by `resize_`.
        known = _Exported(_export(storage), storage.data_ptr())
    block: Block | None = known.block
    if block is None:
        block = arena.lease(_TOKEN)
        if block is None:
            raise _Refused("no shared memory is left for what stands for it.")
        known.block = block
        storage.xpool_ipc = known
        # The table keeps the storage, and so the memory, as long as others hold the token.
        _exported[arena.token, block.name] = known, storage
    return known.facts, arena.adopt(block.name)  # the message's own hold, beside the table's


def _export(storage: Any) -> Facts:
    calls = cuda.calls
    try:
        gpu = calls.identity(calls.ordinal(storage))
        return Facts(calls.version(), gpu, os.getpid(), *calls.export(storage))
    except AttributeError as exc:
        raise _Refused(f"torch {calls.version()} does not tell GPUs apart; 2.4 does.") from exc
    except RuntimeError as exc:
        raise _Refused(f"CUDA's IPC cannot be had here ({exc}).") from exc


def collect(everything: bool = False) -> bool:
    """Let go of memory that nobody else has any more; return whether any is exported.

    Looks at some exports in turn, or at ``everything``.
    """
    if _exported and _take_back(everything) and not _exported:
        cuda.calls.collect()
    return bool(_exported)


@shielded
def _take_back(everything: bool) -> bool:
    found = False
    with _lock:
        for key in list(islice(_exported, len(_exported) if everything else _AT_ONCE)):
            # Put back, it is the last: the next look begins with those after it.
            exported, storage = _exported.pop(key)
            block = exported.block
            assert block is not None
            # The table's own hold is the last one.
            if block.arena.alone(block):
                # The storage may be exported again, with another token and the same facts.
                exported.block = None
                found = True
            else:
                _exported[key] = exported, storage
    return found


# -- the receiver --------------------------------------------------------------------------------


@builder
def import_(buffer: Any, facts: tuple[Any, ...]) -> Any:
    """Return the storage that a token stands for: the exporter's own there, opened elsewhere.

    Raises:
        DeviceError: it cannot be opened; the message says why and what to do.
    """
    block: Block = buffer.obj
    key = block.arena.token, block.name
    with _lock:
        # CUDA does not open memory in the process that made it.
        if key in _exported:
            return _exported[key][1]
        known = _imported.get(key)
        # None: its last tensor has just gone, and the entry goes with it.
        storage = None if known is None else known.storage()
        if storage is None:
            storage = _open(Facts(*facts), key, block)
        return storage


@builder
def tensor_on_gpu(buffer: Any, facts: Any, offset: int, name: str, shape: Any, strides: Any) -> Any:
    """Return a tensor that uses a storage as `import_` does."""
    return cuda.calls.tensor(import_(buffer, facts), offset, name, shape, strides)


def _open(facts: Facts, key: _Key, block: Block) -> Any:
    calls = cuda.calls
    what = f"{facts.nbytes} bytes on the GPU {facts.gpu}, shared by the process {facts.pid},"
    if facts.version != calls.version():
        raise DeviceError(
            f"{what} cannot be opened: that process has torch {facts.version}, this one "
            f"{calls.version()}. Start both from one environment; one has changed since the "
            f"program began. {WAY_OUT}"
        )
    if not _lives(facts.pid):
        raise DeviceError(
            f"{what} are lost: that process has ended. Make the tensor again, or keep a copy."
        )
    seen = calls.identities()
    if facts.gpu not in seen:
        raise DeviceError(
            f"{what} cannot be opened: this process sees {seen or 'no GPU'}. Do not change "
            f"CUDA_VISIBLE_DEVICES in an initializer; `xpool.devices` binds workers. {WAY_OUT}"
        )
    ordinal = seen.index(facts.gpu)
    try:
        storage = calls.open(ordinal, facts.handle, facts.nbytes, facts.offset)
    except RuntimeError as exc:
        raise DeviceError(f"{what} cannot be opened: {exc}. {WAY_OUT}") from exc
    # The storage keeps it, and that keeps the token: the table's own reference is weak.
    storage.xpool_ipc = _imported[key] = _Imported(facts, block, ordinal, storage)
    return storage


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as exc:
        # EPERM: it is there, and another user's; ESRCH: it is not (kill(2)).
        return exc.errno == errno.EPERM
    return True


# -- both ----------------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait for the GPUs whose memory this process has exported or imported, if it has any.

    So an answer comes after the writes of its task.
    """
    # Without the lock: most processes have neither, and each answer comes by here.
    if _exported or _imported:
        with _lock:
            ordinals = {cuda.calls.ordinal(storage) for _, storage in _exported.values()}
        for ordinal in ordinals | {one.ordinal for one in list(_imported.values())}:
            cuda.calls.synchronize(ordinal)


def gpu_of(tensor: Any) -> str | None:
    """Return the UUID of the GPU that a tensor lies on; None: on none, or it is not known."""
    if not tensor.is_cuda:
        return None
    try:
        return cuda.calls.identity(tensor.device.index)
    except AttributeError:
        return None


def from_the_pool(tensor: Any) -> bool:
    """Whether a tensor uses memory that the pool's own process has exported to this one."""
    if not _imported or not tensor.is_cuda:
        return False
    try:
        return _is_of_pool(_known(tensor.untyped_storage()))
    except RuntimeError:
        return False  # a layout without a storage


def _is_of_pool(known: Any) -> bool:
    # The tokens of the process that made the arena come first in its table.
    return type(known) is _Imported and known.block.number < ENTRIES
