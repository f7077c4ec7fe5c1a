"""Objects that workers share at their start: one host copy of a model, and a lock to take turns.

Both use an anonymous file of the process that made them, which other processes open by its path
under /proc.  The lock is the kernel's (``flock``), which releases it when its holder dies.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
from collections.abc import Callable
from typing import Any, TypeVar

from xpool._memory.anonymous_files import File
from xpool.errors import XPoolError
from xpool.pickle import decode, encode

T = TypeVar("T")


class FileOfAgent:
    """A named `File` of a pool over hosts: the agent of each host keeps a copy."""

    def __init__(self, name: str) -> None:
        self.key = name

    def pages(self) -> memoryview:
        """Return the content of the file, as `File.pages` does.

        Raises:
            XPoolError: this process is not a worker on a host that has the file.
        """
        agent = multiprocessing.parent_process()
        if agent is not None:
            folder = f"/proc/{agent.pid}/fd"
            for fd in os.listdir(folder):
                path = f"{folder}/{fd}"
                # The agent may close descriptors now.  The link is "/memfd:NAME (deleted)".
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(path).startswith(f"/memfd:{self.key} "):
                        return File.at(path, os.stat(path).st_ino).pages()
        raise XPoolError(f"{self.key} can be opened only in workers of the pool that sent it")


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
