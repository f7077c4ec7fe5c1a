"""A task that damages a descriptor of its worker, as a wild pointer could.

``python hostile.py WAY`` damages the arena, which all pools of a program share, and prints the
outcomes of this task and of others.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from xpool._wire.wire import ANSWER, TO_PARENT, WANTED
from xpool.testing._test_tasks import pass_gate

WAYS = ("garbage", "empty", "closed", "truncated", "replayed")
DESCRIPTORS = (
    "tasks", "answers", "lifeline", "page", "log records", "status", "arena", "control",
)  # fmt: skip
JUNK = b"\xff" * 4096


def descriptor(name: str) -> int:
    """Return the worker's descriptor with this name."""
    memory = {"page": "xpool-outbox", "arena": "xpool-arena"}
    sockets: set[int] = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the descriptor that `listdir` used
        if name in memory and target.startswith(f"/memfd:{memory[name]}"):
            return fd
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            sockets.add(fd)
    known = _known()
    return known[name] if name in known else (sockets - set(known.values())).pop()


def _known() -> dict[str, int]:
    """Return the descriptors that the worker's objects have."""
    from multiprocessing import parent_process

    from xpool._wire.wire import BlockingFrameReader
    from xpool._worker import worker_relay as relay
    from xpool._worker.peers import Peers
    from xpool._worker.protocol import Replies

    parent = parent_process()
    assert parent is not None
    assert relay._relay is not None
    found = {
        "lifeline": parent.sentinel,
        "log records": relay._relay._default._sock.fileno(),
    }
    for one in gc.get_objects():
        if type(one) is Replies:
            found["answers"] = one._write.args[0]  # type: ignore[attr-defined]
        elif type(one) is BlockingFrameReader:
            found["tasks"] = one.fd
        elif type(one) is Peers:
            found["control"] = one._control.fileno()
    return found


def strike(name: str, way: str, stays: bool) -> str:
    """Damage a descriptor; ``stays``: wait for the consequences."""
    fd = descriptor(name)
    if way == "closed":
        os.close(fd)
    elif name in ("page", "arena"):
        _overwrite(fd, way)
    else:
        for message in _messages(name, way):
            os.write(fd, message)
    if stays:
        threading.Event().wait()
    return "done"


def _overwrite(fd: int, way: str) -> None:
    size = os.fstat(fd).st_size
    if way == "garbage":
        os.pwrite(fd, JUNK, 0)
    elif way == "empty":
        os.pwrite(fd, bytes(len(JUNK)), 0)
    elif way == "truncated":
        try:
            os.ftruncate(fd, 0)
        except PermissionError as exc:
            raise ValueError("the sabotage is refused") from exc
    else:  # a part of the memory at another part's place
        os.pwrite(fd, os.pread(fd, len(JUNK) - 64, 0), 64)
    assert os.fstat(fd).st_size == size


def _messages(name: str, way: str) -> list[bytes]:
    """Return what to write to a pipe or socket."""
    whole = {
        "answers": _answer(),
        "log records": _record(),
        "control": WANTED.pack(1 - _index(), 0, 0),
        "status": os.getpid().to_bytes(8, "little"),
    }[name]
    return {
        "garbage": [JUNK[:64]] * 3,
        "empty": [b""] * 3,
        "truncated": [_long_answer() if name == "answers" else whole[: len(whole) // 2]],
        "replayed": [whole] * 3,
    }[way]


def _answer() -> bytes:
    from xpool.pickle import encode

    body = bytes(encode("replayed"))
    return TO_PARENT.pack(_sent(), ANSWER, 0, len(body), 0, 0, 0) + body


def _long_answer() -> bytes:
    """Return the first bytes of an answer that has no end."""
    return _head(ANSWER, 0, 10**6, 0, 0, 0) + JUNK[:100]


def _sent() -> int:
    """Return the number of the worker's last message."""
    return _own("Replies")._sent


def _record() -> bytes:
    """Return the bytes of a log record as the worker sends it."""
    import logging

    from xpool._worker import worker_relay as relay

    assert relay._relay is not None
    sent: list[bytes] = []

    class Sock:
        @staticmethod
        def send(data: bytes, flags: int) -> None:
            sent.append(data)

    channel: Any = relay._relay._default
    sock, channel._sock = channel._sock, Sock
    try:
        logging.getLogger("hostile").warning("replayed")
    finally:
        channel._sock = sock
    return sent[0]


def _index() -> int:
    from xpool import current_worker

    return current_worker().index


def _own(kind: str) -> Any:
    """Return the worker's only object of this class."""
    (found,) = (one for one in gc.get_objects() if type(one).__name__ == kind)
    return found


def scribble(word: int, value: int) -> None:
    """Store a number in the page, and die."""
    _own("Outbox").words[word] = value
    os._exit(5)


def scribble_and_wait(word: int, value: int) -> None:
    """Store a number in the page, and wait for ever."""
    _own("Outbox").words[word] = value
    threading.Event().wait()


def write_to_the_parent(garbage: bytes | tuple[int, ...], gate: str | None = None) -> None:
    """Write bytes, or a head with these fields, to the pipe of the answers, and wait for ever."""
    if gate is not None:
        pass_gate(gate)
    os.write(descriptor("answers"), garbage if isinstance(garbage, bytes) else _head(*garbage))
    threading.Event().wait()


def _head(*fields: int) -> bytes:
    """Return the head of the worker's next message."""
    return TO_PARENT.pack(_sent() + 1, *fields)


def write_later(written: str, stray: bytes | None = None) -> None:
    """Write part of a message after the answer. Then make a file."""
    fd = descriptor("answers")

    def write() -> None:
        threading.Event().wait(0.3)  # the answer goes first
        os.write(fd, _head(ANSWER, 0, 2**20, 1, 0, 0) if stray is None else stray)
        os.close(os.open(written, os.O_CREAT))

    threading.Thread(target=write, daemon=True).start()


def invalid_once(flag: str) -> str:
    """Send an invalid message the first time."""
    if os.path.exists(flag):
        return "second"
    os.close(os.open(flag, os.O_CREAT))
    write_to_the_parent(b"\xff" * 64)
    return "first"


def log(text: str) -> str:
    """Log a text correctly."""
    import logging

    logging.getLogger("hostile").warning(text)
    return text


def send_code(path: str) -> str:
    """Send a log record that makes a folder when it is unpickled."""
    import pickle

    class Code:
        def __reduce__(self) -> Any:
            return os.mkdir, (path,)

    sock = socket.socket(fileno=os.dup(descriptor("log records")))
    with sock:
        for worker in range(2):
            sock.send(pickle.dumps(("log", worker, 0, (Code(),))))
    return "sent"


def main(way: str) -> None:
    """Damage the arena."""
    from support import cells, hostile, work
    from xpool import Pool

    with Pool(2) as pool:
        print(cells.outcome(pool.apply_async(hostile.strike, ("arena", way, False))), flush=True)
        print(pool.map(abs, range(8), 1) == list(range(8)), flush=True)
        large = [bytes([i]) * 10**6 for i in range(4)]
        try:
            print(pool.map(work.same, large, 1) == large, flush=True)
        except Exception as exc:  # the arena's tables may be lost, and large values with them
            print(type(exc).__name__, exc, flush=True)
        print(pool.map(abs, range(8), 1) == list(range(8)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
