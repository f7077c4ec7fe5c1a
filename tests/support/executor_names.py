"""Private names of other executors, mapped to `xpool.Executor`."""

from __future__ import annotations

import os
import select
import time
import types
from typing import Any

import xpool


class Process:
    """A worker with the methods that other executors' tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def join(self, timeout: float | None = None) -> None:
        select.select([self._fd], [], [], timeout)

    def terminate(self) -> None:
        os.kill(self.pid, 15)

    def kill(self) -> None:
        os.kill(self.pid, 9)

    def __del__(self) -> None:
        os.close(self._fd)


class PrivateNames(xpool.Executor):
    """An executor with private names of other executors."""

    _call_queue = types.SimpleNamespace(join_thread=lambda: None)

    @property
    def _processes(self) -> dict[int, Process]:
        while None in (pids := self._pool.statistics()["pids"]):
            time.sleep(0.001)  # the server has not forked it yet
        return {pid: Process(pid) for pid in pids}

    @property
    def _executor_manager_thread(self) -> Any:
        return self._pool._life.thread
