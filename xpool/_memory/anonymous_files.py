"""Anonymous files that other processes open by their paths under /proc."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import multiprocessing
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from xpool._memory.system import fix_size, temporary_file
from xpool._python.descriptors import new_file
from xpool.errors import XPoolError

_GONE = (
    "the process that made this shared object has dropped it, or has ended; keep it there as long "
    "as workers use it"
)


class File:
    """An anonymous file.  Other processes can open it while its maker keeps this object.

    Args:
        content: what the file contains, as one piece or as several.
        name: shown by the system, for example in /proc/PID/maps.
    """

    def __init__(
        self, content: bytes | memoryview | Iterable[bytes] = b"", name: str = "xpool-shared"
    ) -> None:
        if hasattr(os, "memfd_create"):
            fd = new_file(name, os.MFD_ALLOW_SEALING)
            path, remove = f"/proc/{os.getpid()}/fd/{fd}", None
        else:
            fd, path = temporary_file()
            remove = path
        try:
            for piece in (content,) if isinstance(content, (bytes, memoryview)) else content:
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            facts = os.fstat(fd)
            if remove is None and facts.st_size:
                # Other processes map it.  An empty file is a lock, or a store of torch that grows.
                fix_size(fd)
        except BaseException:
            _close(fd, remove)
            raise
        self._at = path, facts.st_ino
        weakref.finalize(self, _close, fd, remove)

    @classmethod
    def at(cls, path: str, inode: int) -> File:
        """Return a file that another process keeps."""
        file = cls.__new__(cls)
        file._at = path, inode
        return file

    def __reduce__(self) -> Any:
        return File.at, self._at

    @property
    def key(self) -> tuple[str, int]:
        return self._at

    @property
    def is_here(self) -> bool:
        """Whether this process has made the file."""
        return self._at[0].startswith(f"/proc/{os.getpid()}/")

    def open(self) -> int:
        """Return a new descriptor, which the caller closes."""
        path, inode = self._at
        try:
            fd = os.open(path, os.O_RDWR)
        except (FileNotFoundError, ProcessLookupError) as exc:
            raise XPoolError(_GONE) from exc
        if os.fstat(fd).st_ino != inode:  # the descriptor's number belongs to another file now
            os.close(fd)
            raise XPoolError(_GONE)
        return fd

    def pages(self) -> memoryview:
        """Return the content, whose pages are the file's until this process writes to them."""
        fd = self.open()
        try:
            return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file's lock, which excludes other processes and other threads of this one."""
        fd = self.open()
        try:
            # The lock belongs to the open file (flock(2)).  Each turn opens the file anew, so the
            # lock excludes threads, too.
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            # Unlock explicitly: a process forked in between also has the open file.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


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


def _close(fd: int, remove: str | None) -> None:
    os.close(fd)
    if remove is not None:
        os.unlink(remove)
