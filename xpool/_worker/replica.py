"""The code of a worker of `xpool.spawn` or `xpool.xla.spawn`: it runs one function, once.

From their start, such workers share one copy of a model in the memory of the host.  They also share
a lock, by which they take turns.  Both use an anonymous file of the process that made them.  Other
processes open this file by its path under /proc.  The lock is the kernel's (``flock``), which
releases it when its holder dies.
"""

from __future__ import annotations

import copy
import os
import queue
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from xpool._memory.anonymous_files import File
from xpool._python.starting import PromptThread
from xpool.errors import WorkerDied, XPoolError
from xpool.pickle import decode, encode

T = TypeVar("T")

_what: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
_has_told = False  # whether this process has been asked for its id


def keep(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Store the function.  Called as initializer: `multiprocessing` sends locks only to that."""
    global _what
    _what = fn, args


def pid(*_: Any) -> int:
    """Return the process id; a worker with a context passes it as the argument."""
    global _has_told
    _has_told = True
    return os.getpid()


def _task(index: int = 0) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and its arguments, unless this process replaces one that has ended: the
    program knows the id of that process, and may have ended it itself."""
    assert _what is not None
    if not _has_told:
        raise WorkerDied(None, None, index, "the code before its function")
    return _what


def run(index: int) -> Any:
    fn, args = _task(index)
    return fn(index, *args)


def run_xla(context: Any) -> dict[int, Any]:
    """Run ``fn(ordinal, *args)`` on every device of this process; return the results by ordinal.

    As in torch_xla, each device has a thread, if there are several devices.
    """
    fn, args = _task()
    torch_xla = import_module("torch_xla")
    xm = import_module("torch_xla.core.xla_model")
    runtime = import_module("torch_xla.runtime")
    devices = xm.get_xla_supported_devices()
    xm.set_replication(torch_xla.device(), devices)

    def one(device: str) -> tuple[int, Any]:
        torch_xla._XLAC._xla_set_default_device(device)
        runtime._init_world_size_ordinal()
        ordinal = runtime.global_ordinal()
        return ordinal, fn(ordinal, *args)

    return dict([one(devices[0])] if len(devices) == 1 else _in_threads(one, devices))


def _in_threads(one: Callable[[str], tuple[int, Any]], devices: list[str]) -> list[tuple[int, Any]]:
    """Run ``one`` for each device; raise the first error at once, without waiting for the rest."""
    ends: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def guarded(device: str) -> None:
        try:
            ends.put((one(device), None))
        except BaseException as exc:
            ends.put((None, exc))

    for device in devices:
        # Daemon threads: if one fails, the process ends without waiting for the others.
        name = f"replica-{device}"
        PromptThread(target=guarded, args=(device,), name=name, daemon=True).start()
    results = []
    for _ in devices:
        result, error = ends.get()
        if error is not None:
            raise error
        results.append(result)
    return results


class MpSerialExecutor:
    """Runs functions one at a time across all processes and threads that have this object.

    It can be sent to workers as any argument, or inherited by fork.  The process that made it must
    keep it while workers use it.
    """

    def __init__(self) -> None:
        self._lock = File()

    def run(self, fn: Callable[[], T]) -> T:
        """Return ``fn()``; meanwhile, no other process or thread runs a function here.

        Raises:
            XPoolError: the process that made this object has released it.
        """
        with self._lock.locked():
            return fn()


class MpModelWrapper:
    """A model with one copy in host memory, from which each worker makes the copy on its device.

    It can be sent to workers as any argument, or inherited by fork.  The process that made it must
    keep it while workers use it.  All workers share one copy of the weights in host memory.  Its
    pages are written when the wrapper is first sent, and again when the weights have changed since.
    Workers move the weights to their devices one after the other.

    Args:
        model: a `torch.nn.Module` on the CPU.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._turn = MpSerialExecutor()
        self._moved: Any = None  # the device to which the model itself was moved
        self._sent: File | None = None
        self._sent_as: Any = None

    def to(self, device: Any) -> Any:
        """Return the model on a device.

        In the process that made the wrapper, and in forks of it, the first call moves and returns
        the model itself, as `torch.nn.Module.to` does; for a second device it returns a copy.  In
        other processes each call makes a new model.

        Raises:
            XPoolError: the process that made this object has released it.
        """
        return self._turn.run(lambda: self._to(device))

    def _to(self, device: Any) -> Any:
        if self._model is None:
            assert self._sent is not None
            return decode(self._sent.pages()).to(device)
        if self._moved is not None and self._moved != str(device):
            return copy.deepcopy(self._model).to(device)
        self._moved = str(device)
        return self._model.to(device)

    def _state(self) -> list[Any]:
        """Return a value that changes when the weights or the mode of the model change."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return [
            [(t.data_ptr(), t._version) for t in tensors],
            [m.training for m in self._model.modules()],
        ]

    def __reduce__(self) -> Any:
        if self._model is not None:
            if self._moved not in (None, "cpu"):
                raise XPoolError(
                    f"this MpModelWrapper's model is on {self._moved} already; make the workers, "
                    "or another wrapper, before it is moved"
                )
            state = self._state()
            if self._sent is None or state != self._sent_as:
                self._sent, self._sent_as = File(encode(self._model)), state
        return _received, (self._turn, self._sent)


def _received(turn: MpSerialExecutor, sent: File) -> MpModelWrapper:
    wrapper = MpModelWrapper.__new__(MpModelWrapper)
    wrapper._model, wrapper._moved = None, None
    wrapper._turn, wrapper._sent, wrapper._sent_as = turn, sent, None
    return wrapper
