"""What workers share for starting up: a model's one host copy, and a turn that each waits for.

Both stand on an anonymous file of the process that made them, which the others open by its path
under /proc.  The lock is the kernel's (``flock``): whoever dies lets go of it.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import mmap
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from xpool._memory.system import fix_size
from xpool.errors import XPoolError
from xpool.pickle import decode, encode

__all__ = ["File", "FileOfAgent", "MpModelWrapper", "MpSerialExecutor"]

T = TypeVar("T")


class File:
    """An anonymous file that other processes can open as long as who made it keeps this."""

    def __init__(self, content: bytes | memoryview = b"", name: str = "xpool-shared") -> None:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            path, remove = f"/proc/{os.getpid()}/fd/{fd}", None
        else:
            import tempfile

            fd, path = tempfile.mkstemp(prefix="xpool-shared-")
            remove = path
        left = memoryview(content)
        # write(2) takes at most 0x7ffff000 bytes at a time.
        while left:
            left = left[os.write(fd, left) :]
        if remove is None and len(content):
            fix_size(
                fd
            )  # others map it; an empty one is a lock, or a store of torch's, which grows
        facts = os.fstat(fd)
        self._at = path, facts.st_ino
        weakref.finalize(self, _close, fd, remove)

    @classmethod
    def _from(cls, path: str, inode: int) -> File:
        file = cls.__new__(cls)
        file._at = path, inode
        return file

    def __reduce__(self) -> Any:
        return File._from, self._at

    @property
    def key(self) -> tuple[str, int]:
        """What it is known by: its path and inode."""
        return self._at

    def open(self) -> int:
        """Return a descriptor of its own, for the caller to close."""
        path, inode = self._at
        try:
            fd = os.open(path, os.O_RDWR)
        except (FileNotFoundError, ProcessLookupError) as exc:
            raise XPoolError(_GONE) from exc
        if os.fstat(fd).st_ino != inode:  # its number is another file's by now
            os.close(fd)
            raise XPoolError(_GONE)
        return fd

    def load(self) -> Any:
        """Return the object in it; its tensors use the file's pages until they are written to."""
        fd = self.open()
        try:
            pages = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        return decode(memoryview(pages))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file's lock: against other processes and against threads of this one."""
        fd = self.open()
        try:
            # The lock belongs to the open file (flock(2)): one that is opened for each turn keeps
            # threads apart, too.
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            # Not by closing alone: a process forked meanwhile has the open file, too.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


class FileOfAgent:
    """A `File` with a name, of which the agent of each host of a pool keeps one."""

    def __init__(self, name: str) -> None:
        self.key = name

    def load(self) -> Any:
        """Return the object in it, as `File.load`.

        Raises:
            XPoolError: this is no worker of a host that has it.
        """
        agent = multiprocessing.parent_process()
        if agent is not None:
            folder = f"/proc/{agent.pid}/fd"
            for fd in os.listdir(folder):
                path = f"{folder}/{fd}"
                # The agent may close descriptors meanwhile.  The link is "/memfd:NAME (deleted)".
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(path).startswith(f"/memfd:{self.key} "):
                        return File._from(path, os.stat(path).st_ino).load()
        raise XPoolError(f"there is no {self.key} here: it is for workers of the pool that sent it")


_GONE = (
    "the process that made this MpModelWrapper or MpSerialExecutor has let go of it; keep it there "
    "as long as workers use it"
)


def _close(fd: int, remove: str | None) -> None:
    os.close(fd)
    if remove is not None:
        os.unlink(remove)


class MpSerialExecutor:
    """Runs functions one at a time across all processes and threads that have it.

    Goes to workers as any argument, or by fork.  The process that made it must keep it meanwhile.
    """

    def __init__(self) -> None:
        self._lock = File()

    def run(self, fn: Callable[[], T]) -> T:
        """Return ``fn()``, run while no one else runs one.

        Raises:
            XPoolError: who made this has let go of it.
        """
        with self._lock.locked():
            return fn()


class MpModelWrapper:
    """A model of which there is one copy in host memory, and from which each device gets its own.

    Goes to workers as any argument, or by fork; the process that made it must keep it meanwhile.
    However many workers there are, the weights are in host memory once, in shared pages that are
    written when the wrapper is first sent and when the weights have changed since, and workers move
    them to their devices one after the other.

    Args:
        model: a `torch.nn.Module` on the CPU.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._turn = MpSerialExecutor()
        self._moved: Any = None  # the device that the model itself is on, once it was moved
        self._sent: File | None = None
        self._sent_as: Any = None

    def to(self, device: Any) -> Any:
        """Return the model on a device.

        In the process that made the wrapper, and in those that it forked, that is the model itself
        the first time, as `torch.nn.Module.to` moves it, and a copy for a second device.  In others
        each call makes a model of its own.

        Raises:
            XPoolError: who made this has let go of it.
        """
        return self._turn.run(lambda: self._to(device))

    def _to(self, device: Any) -> Any:
        if self._model is None:
            assert self._sent is not None
            return self._sent.load().to(device)
        if self._moved is not None and self._moved != str(device):
            return copy.deepcopy(self._model).to(device)
        self._moved = str(device)
        return self._model.to(device)

    def _state(self) -> list[Any]:
        """What changes when the weights or the mode of the model do."""
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
