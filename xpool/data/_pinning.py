"""Copies batches into pinned memory, from which a device reads without the processor."""

from __future__ import annotations

import queue
import threading
import warnings
import weakref
from typing import Any

import torch
from torch.utils.data._utils import pin_memory as torch_pin_memory

from xpool._pools.base import at_exit
from xpool._python.waiters import Flag


def can_pin() -> bool:
    """Whether this machine has a device for which memory can be pinned."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return bool(torch.cuda.is_available())
    return bool(accelerator.is_available()) and accelerator.current_accelerator().type != "mps"


def pinned(batch: Any) -> Any:
    """Return the batch with its tensors in pinned memory, as torch's loader does."""
    return torch_pin_memory.pin_memory(batch)


def warn_of_pinning(device: str) -> None:
    """Warn if ``pin_memory=True`` or the device has no effect."""
    if device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device={device!r}.",
            stacklevel=4,
        )
    if not can_pin():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned "
            "memory won't be used.",
            stacklevel=4,
        )


_threads: weakref.WeakSet[PinThread] = weakref.WeakSet()


def _end_threads() -> None:
    """End the threads at the program's end, because torch's code in a daemon thread aborts it."""
    for thread in list(_threads):
        thread.end()
        thread.join()


at_exit.append(_end_threads)


class PinThread:
    """A thread that receives the batches of one epoch and copies them into pinned memory.

    It takes each batch as soon as a worker has made it, in any order.
    """

    def __init__(self) -> None:
        self._made: queue.SimpleQueue[PinnedResult | None] = queue.SimpleQueue()
        devices = torch.get_device_module() if hasattr(torch, "get_device_module") else torch.cuda
        self._thread = threading.Thread(
            target=_pin_all, args=(self._made, devices, devices.current_device()),
            name="xpool-DataLoader-pin", daemon=True,
        )  # fmt: skip
        self._thread.start()
        _threads.add(self)

    def pin(self, result: Any) -> PinnedResult:
        return PinnedResult(result, self._made)

    def end(self) -> None:
        """End the thread when it has copied the batches that it has received."""
        self._made.put(None)

    def join(self) -> None:
        self._thread.join()


def _pin_all(made: queue.SimpleQueue[PinnedResult | None], devices: Any, device: Any) -> None:
    torch.set_num_threads(1)  # only for this thread, whose copies must not use all processors
    devices.set_device(device)
    for result in iter(made.get, None):
        result.pin()
        del result


class PinnedResult:
    """The result of making a batch, ready when the batch is in pinned memory."""

    def __init__(self, result: Any, made: queue.SimpleQueue[PinnedResult | None]) -> None:
        self._result, self._made = result, made
        self._answer: Any = None
        self._error: BaseException | None = None
        self._flag = Flag()
        self._waiters = self._flag._waiters
        # Registered before the check, so that a wake between the two is not lost.
        result._waiters.append(self)
        if result.ready():
            self.release()

    def release(self) -> None:
        """Give the batch to the thread.  Called when a worker has made it, perhaps twice."""
        self._made.put(self)

    def pin(self) -> None:
        if self._flag.is_set():
            return
        try:
            answer = self._result.get()
            self._answer = answer._replace(batch=pinned(answer.batch))
        except BaseException as error:  # `get` raises it
            self._error = error
        self._result = None
        self._flag.set()

    def ready(self) -> bool:
        return self._flag.is_set()

    def wait(self, timeout: float | None = None) -> None:
        self._flag.wait(timeout)

    def get(self) -> Any:
        self._flag.wait()
        if self._error is not None:
            raise self._error
        return self._answer

    def cancel(self) -> bool:
        result = self._result  # read once: the thread sets it to None
        return result is not None and bool(result.cancel())
