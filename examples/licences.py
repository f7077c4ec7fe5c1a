"""Workers that each hold a licence, which is free again however a worker ends.

A worker is killed, and a task takes too long. The program frees their licences, and the workers
that replace them take these.

    python examples/licences.py
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import xpool


class Licence:
    """A file that exists while a worker holds the licence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def enter(self) -> None:
        """In the worker, before its tasks: take the licence, or raise FileExistsError."""
        with self.path.open("x") as file:
            file.write(str(os.getpid()))

    def exit(self) -> None:
        """In the worker, at its orderly end: give it back."""
        self.path.unlink()


ended: list[xpool.WorkerEnd] = []


def free(end: xpool.WorkerEnd) -> None:
    """In the program, after each end of a worker: free the licence if the worker still has it."""
    path = end.context.path
    if path.exists() and path.read_text() == str(end.pid):
        path.unlink()
    ended.append(end)


def simulate(licence: Licence, i: int) -> int:
    assert licence.path.read_text() == str(os.getpid())
    if i == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    if i == 11:
        time.sleep(1000)
    return i * i


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    workers = parser.parse_args().workers
    with tempfile.TemporaryDirectory() as folder:
        licences = [Licence(Path(folder) / f"licence{i}") for i in range(workers)]
        with xpool.CtxPool(
            worker_contexts=licences, on_worker_end=free, maxtasksperchild=10
        ) as pool:
            results = pool.map(simulate, range(40), 1, timeout=1, on_error="return")
            pool.close()
            pool.join()
        for i, result in enumerate(results):
            if isinstance(result, Exception):
                print(f"item {i}: {type(result).__name__}")
        assert not list(Path(folder).iterdir())
    reasons = Counter(end.reason for end in ended)
    print(f"a worker was killed by {next(end.signal for end in ended if end.signal)}")
    print(f"{reasons['died']} died; all licences are free")
