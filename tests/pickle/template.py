"""A process that forks another one for each test, which is faster than a fresh interpreter."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

# With `_socket`, because tests import `socket` later.
_FORKS = """
import _socket, os, sys
ours = _socket.socket(fileno={descriptor})
while ancillary := ours.recvmsg(1, 64)[1]:
    descriptor = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
    if os.fork() == 0:
        ours.close()
        serve(descriptor)
        os._exit(0)
    os.close(descriptor)
ours.close()
try:
    while True:
        os.wait()
except ChildProcessError:
    os._exit(0)
"""


class Template:
    """Runs `code`, then calls its function ``serve(descriptor)`` in each fork.

    The descriptor is a socket, which is to stay open until the fork has ended.
    """

    def __init__(self, code: str, *arguments: str, **options: Any) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *arguments,
                    "-c",
                    code + _FORKS.format(descriptor=theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                **options,
            )

    def fork(self) -> socket.socket:
        """Start a fork; return this end of its socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        self._socket.close()
        self._process.wait()
