"""Fixtures: queues, processes that use them, and a clean-up before the leak check."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiers import also

sys.path.insert(0, str(Path(__file__).parent))

import parts

from xpool._memory.arena import Arena
from xpool.queue import SimpleQueue


@pytest.fixture(scope="session", autouse=True)
def lasting() -> None:
    """Start what lasts until this process ends."""
    from multiprocessing import forkserver, resource_tracker

    resource_tracker.ensure_running()
    forkserver.ensure_running()
    Arena.own()
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)  # torch's threads do not survive a fork


@pytest.fixture(autouse=True)
def tidied(nothing_leaks: None) -> Iterator[None]:
    """Free the queues' memory after each test."""
    yield
    parts.settled()


@pytest.fixture
def make_queue(tidied: None) -> Iterator[Callable[..., SimpleQueue]]:
    """Make queues and close them after the test."""
    made = []

    def make(**options: Any) -> SimpleQueue:
        made.append(SimpleQueue(**options))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def start(make_queue: Callable[..., SimpleQueue]) -> Iterator[Callable[..., Any]]:
    """Start processes by ``start(method, function, *args)``, and end them after the test."""
    started = []

    def begin(method: str, function: Callable[..., object], *args: Any) -> Any:
        process = multiprocessing.get_context(method).Process(target=function, args=args)  # type: ignore[attr-defined]
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()
        process.close()


@pytest.fixture(params=["fork", *also("spawn", "forkserver")])
def method(request: pytest.FixtureRequest) -> str:
    """Every start method."""
    return request.param  # type: ignore[no-any-return]
