"""What of `xpool.ray` is on each host: the actor that has the agent, and how Ray carries bytes.

Nothing of Ray is imported before it is used.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
from collections.abc import Sequence
from typing import Any

from xpool._hosts.agent import Agent

__all__ = ["HostAgent", "as_one", "parts_of"]

MONITOR_EVERY, MONITOR_FROM = "RAY_memory_monitor_refresh_ms", "RAY_memory_usage_threshold"
"""Ray's variables: its memory monitor's interval, 0: there is none; and the part of the memory."""


class HostAgent:
    """The actor on a host.  Its calls wait in threads of Ray's; the engine has one of its own."""

    def __init__(self) -> None:
        self._agent: Agent | None = None

    def begin(self, config: bytes, host: str, first: int, workers: int) -> None:
        """Start the workers."""
        _drop_thread_limit()
        ended = functools.partial(os._exit, 0)
        self._agent = Agent(
            pickle.loads(config), host, first, workers, ended, _before_rays_monitor()
        )
        self._agent.start()

    def call(self, said: Any, refs: Sequence[Any] = ()) -> Any:
        """Do what a call says; return the reply when there is something to say."""
        import ray

        assert self._agent is not None
        return as_one(self._agent.call(parts_of(said), lambda i: memoryview(ray.get(refs[i]))))


def _before_rays_monitor() -> float | None:
    """Return the part of the memory in use at which the largest worker is to be ended.

    A little later Ray's own monitor would end this agent, and all workers with it.
    """
    if os.environ.get(MONITOR_EVERY) == "0":
        return None
    return float(os.environ.get(MONITOR_FROM, "0.95")) - 0.02


def _drop_thread_limit() -> None:
    """Forget OMP_NUM_THREADS if Ray has set it, to the CPUs of the agent: it is for no worker."""
    import ray

    given = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/environ", "rb") as file:
        if b"\0OMP_NUM_THREADS=" not in b"\0" + file.read() and "OMP_NUM_THREADS" not in given:
            os.environ.pop("OMP_NUM_THREADS", None)


def as_one(parts: list[Any]) -> Any:
    """Return what is said as Ray carries it best: bytes, and buffers as arrays, which it does not
    copy into its pickles."""
    if len(parts) == 1:
        return parts[0]
    import numpy

    return [parts[0], *(numpy.frombuffer(one, "uint8") for one in parts[1:])]


def parts_of(said: Any) -> list[Any]:
    """Undo `as_one`."""
    return [said] if type(said) is bytes else [said[0], *(memoryview(one) for one in said[1:])]
