"""A process that receives pickled calls, as a worker does."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

from template import Template

from xpool._pickling.by_value import main
from xpool._pickling.by_value.sent import Book
from xpool._pickling.frame import BY_PIPE
from xpool.pickle import decode, dumps, encode, encode_exception

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
_SIZE = struct.Struct("<Q")


def trip(obj: Any) -> Any:
    """Return the object after its trip in a message that its buffers use in place."""
    return decode(bytearray(encode(obj)))


def again(obj: Any) -> Any:
    """Return the object after its trip in a message; as a plain pickle, it has the same type."""
    assert type(pickle.loads(dumps(obj))) is type(obj)
    return decode(encode(obj))


def code() -> str:
    """Return what the template of receivers runs."""
    # The path is that of now: pytest adds the folders of tests while it collects them.
    path = [str(ROOT), str(HERE), *sys.path]
    return f"import sys; sys.path[:] = {path!r}\nfrom receiver import serve\n"


class Receiver:
    """A process in a worker's role: like a worker, a fork of a process that has imported xpool."""

    def __init__(self, template: Template | None = None) -> None:
        self._layout = BY_PIPE._replace(book=Book())
        self._own = None if template else Template(code(), "-W", "error")
        self._socket = (template or self._own).fork()  # type: ignore[union-attr]
        self._file = self._socket.makefile("rwb")

    def send(self, message: bytes) -> Any:
        """Let the process call an encoded ``(function, args)``; return or raise its outcome."""
        self._file.write(_SIZE.pack(len(message)) + message)
        self._file.flush()
        reply = _read(self._file)
        assert reply is not None, "the receiver ended"
        value = decode(reply[1:])
        if reply[:1] == b"e":
            raise value
        return value

    def call(self, function: Any, *args: Any, recurse: bool = False) -> Any:
        return self.send(encode((function, args), recurse=recurse, layout=self._layout))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        self._file.read()  # until the process has ended
        self._file.close()
        self._socket.close()
        if self._own:
            self._own.close()

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


def serve(descriptor: int) -> None:
    """Receive and run calls in the other process."""
    source, sink = (os.fdopen(descriptor, mode, closefd=False) for mode in ("rb", "wb"))
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
