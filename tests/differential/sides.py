"""The two sides of a comparison. Each has a pool for a batch of programs.

The standard library runs in a separate process, because it forks, and xpool has threads. If a
program hangs there, only that process is lost.
"""

from __future__ import annotations

import multiprocessing.pool
from multiprocessing.connection import Connection
from typing import Any

from differential.record import Outcome, run

__all__ = ["OurSide", "StandardSide"]


class OurSide:
    """xpool, in this process."""

    def __init__(self, processes: bool) -> None:
        import xpool

        self._make: Any = xpool.Pool if processes else xpool.ThreadPool
        self._processes = processes
        self._pool = self._make(2)

    def run(self, source: str) -> list[Outcome]:
        return run(source, self._pool, False, self._make, self._processes)

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()


class StandardSide:
    """The standard library, in a separate process."""

    def __init__(self, processes: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(there, processes))
        self._process.start()
        there.close()

    def send(self, source: str) -> None:
        self._here.send(source)

    def receive(self) -> list[Outcome]:
        """Return the outcomes of the earliest program without an answer."""
        return self._here.recv()  # type: ignore[no-any-return]

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._here.close()


def serve(programs: Connection, processes: bool) -> None:
    """Run programs, and send their outcomes."""
    make: Any = (
        multiprocessing.get_context("fork").Pool if processes else multiprocessing.pool.ThreadPool
    )
    pool = make(2)
    while True:
        programs.send(run(programs.recv(), pool, True, make, processes))
