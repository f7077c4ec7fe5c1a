"""The two sides of a comparison. Each has a pool for a batch of programs.

The standard library runs in a separate process, because it forks, and xpool has threads. If a
program hangs there, only that process is lost.

    python -m differential.sides processes     runs programs from stdin
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from differential.record import Outcome, run

__all__ = ["OurSide", "StandardSide"]


class OurSide:
    """xpool, in this process."""

    def __init__(self, processes: bool) -> None:
        import xpool

        self._make: Callable[..., Any] = xpool.Pool if processes else xpool.ThreadPool
        self._processes = processes
        self._pool = self._make(2)

    def run(self, source: str) -> list[Outcome]:
        done = run(source, self._pool, False, self._make, self._processes)
        return json.loads(json.dumps(done))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()


class StandardSide:
    """The standard library, in a separate process."""

    def __init__(self, processes: bool) -> None:
        tests = Path(__file__).parent.parent
        self._process = subprocess.Popen(
            [sys.executable, "-m", "differential.sides", "processes" if processes else "threads"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=tests,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
        )

    def send(self, source: str) -> None:
        assert self._process.stdin is not None
        _send(self._process.stdin.fileno(), source)

    def receive(self) -> list[Outcome]:
        """Return the outcomes of the earliest program without an answer."""
        assert self._process.stdout is not None
        answer = _receive(self._process.stdout.fileno())
        if not answer:
            raise EOFError("the process of the standard library's side has ended")
        return json.loads(answer)  # type: ignore[no-any-return]

    def run(self, source: str) -> list[Outcome]:
        self.send(source)
        return self.receive()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def serve(processes: bool) -> None:
    """Run programs from stdin. Write their outcomes to stdout."""
    import multiprocessing.pool

    # Workers may be forked at any time, and would copy the buffers of file objects.
    source, answers = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # a program's output is no answer
    make: Callable[..., Any] = (
        multiprocessing.get_context("fork").Pool if processes else multiprocessing.pool.ThreadPool
    )
    pool = make(2)
    while text := _receive(source):
        _send(answers, json.dumps(run(text, pool, True, make, processes)))


def _send(fd: int, text: str) -> None:
    data = text.encode()
    data = len(data).to_bytes(4, "little") + data
    while data:
        data = data[os.write(fd, data) :]


def _receive(fd: int) -> str:
    """Return the received text, or an empty one if the other side has ended."""
    return _exactly(fd, int.from_bytes(_exactly(fd, 4), "little")).decode()


def _exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            return b""
        data += part
    return data


if __name__ == "__main__":
    serve(sys.argv[1] == "processes")
