"""Makes anonymous files (memfd_create(2))."""

from __future__ import annotations

import errno
import os


def new_file(name: str, flags: int = 0) -> int:
    """Return the descriptor of a new anonymous file, which is closed in programs that are executed.

    Raises:
        OSError: no descriptor is left, or the system refuses such files.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | flags)
    except OSError as exc:
        if exc.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise OSError(
                exc.errno,
                f"memfd_create(2) is refused ({exc.strerror}), perhaps by a seccomp filter; it "
                "makes the memory that pools of processes share: allow it, or use ThreadPool",
            ) from exc
        raise
