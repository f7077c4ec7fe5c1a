"""The part of `xpool.ray` on each host: the actor that holds the agent, and how Ray carries bytes.

Ray is imported at its first use.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
from collections.abc import Sequence
from typing import Any

from xpool._hosts.agent import Agent

MONITOR_EVERY, MONITOR_FROM = "RAY_memory_monitor_refresh_ms", "RAY_memory_usage_threshold"
"""Ray's variables for its memory monitor: the interval (0: no monitor), and the part of the memory
(0 to 1) at which it kills."""


class HostAgent:
    """The actor on a host.  Calls wait in Ray's threads; the agent's engine has its own thread."""

    def __init__(self) -> None:
        self._agent: Agent | None = None

    def begin(self, config: bytes, host: str, first: int, workers: int) -> None:
        _drop_thread_limit()
        ended = functools.partial(os._exit, 0)
        self._agent = Agent(
            pickle.loads(config), host, first, workers, ended, _before_rays_monitor()
        )
        self._agent.start()

    def call(self, said: Any, refs: Sequence[Any] = ()) -> Any:
        import ray

        assert self._agent is not None
        return as_one(self._agent.call(parts_of(said), lambda i: memoryview(ray.get(refs[i]))))


def _before_rays_monitor() -> float | None:
    """Return the part of the memory (0 to 1) at which the largest worker is ended; None: never.

    It is a little less than the part at which Ray's monitor ends this agent with all its workers.
    """
    if os.environ.get(MONITOR_EVERY) == "0":
        return None
    return float(os.environ.get(MONITOR_FROM, "0.95")) - 0.02


def _drop_thread_limit() -> None:
    """Unset OMP_NUM_THREADS if Ray has set it: its value does not fit workers."""
    import ray

    given = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/environ", "rb") as file:
        if b"\0OMP_NUM_THREADS=" not in b"\0" + file.read() and "OMP_NUM_THREADS" not in given:
            os.environ.pop("OMP_NUM_THREADS", None)


def as_one(parts: list[Any]) -> Any:
    """Return packed parts in the form that Ray carries best: bytes, or bytes and arrays.

    Ray does not copy arrays into its pickles.
    """
    if len(parts) == 1:
        return parts[0]
    import numpy

    return [parts[0], *(numpy.frombuffer(one, "uint8") for one in parts[1:])]


def parts_of(said: Any) -> list[Any]:
    """Return the parts that `as_one` was given."""
    return [said] if type(said) is bytes else [said[0], *(memoryview(one) for one in said[1:])]
