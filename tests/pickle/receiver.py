"""A process that receives pickled calls, as a worker does."""

from __future__ import annotations

import struct
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from xpool._pickling.by_value import main
from xpool._pickling.by_value.sent import Book
from xpool._pickling.policy import BY_PIPE
from xpool.pickle import decode, encode, encode_exception

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
_SIZE = struct.Struct("<Q")


class Receiver:
    """A fresh interpreter in a worker's role."""

    def __init__(self) -> None:
        self._layout = BY_PIPE._replace(book=Book())
        code = f"import sys; sys.path[:] = {[str(ROOT), str(HERE), *sys.path]!r}\n"
        code += "import receiver; receiver.serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, message: bytes) -> Any:
        """Let the process call an encoded ``(function, args)``; return or raise its outcome."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(_SIZE.pack(len(message)) + message)
        self._process.stdin.flush()
        reply = _read(self._process.stdout)
        assert reply is not None, "the receiver ended"
        value = decode(reply[1:])
        if reply[:1] == b"e":
            raise value
        return value

    def call(self, function: Any, *args: Any, recurse: bool = False) -> Any:
        return self.send(encode((function, args), recurse=recurse, layout=self._layout))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _read(file: Any) -> bytearray | None:
    head = file.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    message = bytearray(_SIZE.unpack(head)[0])
    file.readinto(message)
    return message


def serve() -> None:
    """Receive and run calls in the other process."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    main.install_main()
    main.mark_worker()
    while (message := _read(source)) is not None:
        try:
            function, args = decode(message)
            reply = b"v" + encode(function(*args), home=True)
        except BaseException as exc:
            reply = b"e" + encode_exception(exc, traceback.format_exc())
        sink.write(_SIZE.pack(len(reply)) + reply)
        sink.flush()
