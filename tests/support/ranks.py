"""Worlds of real processes: each rank is the worker of a `P2PPool` of that number."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xpool import P2PPool


class Ranks:
    """Starts ranks, has them run functions, and ends them with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pools: list[P2PPool] = []

    def address(self) -> str:
        """Return a place to meet that nobody has used."""
        return f"file://{self.folder}/{uuid.uuid4().hex}"

    def start(self, n: int, func: Callable[..., Any], *args: Any) -> list[Any]:
        """Have ``func(rank, *args)`` run in n processes; return their results."""
        pool = P2PPool(n)
        self.pools.append(pool)
        return [pool.apply_async(func, (rank, *args), worker=rank) for rank in range(n)]

    def run(self, n: int, func: Callable[..., Any], *args: Any) -> list[Any]:
        """As `start`, and return what each rank returned or raised."""
        outcomes = []
        for result in self.start(n, func, *args):
            try:
                outcomes.append(result.get())
            except Exception as exc:
                outcomes.append(exc)
        return outcomes

    def world(self, n: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Have ``body(world, *args)`` run in a world of n; return what each returned or raised."""
        return self.run(n, in_world, n, self.address(), options, body, args)

    def good_world(self, n: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """As `world`, and fail with the first error there is."""
        outcomes = self.world(n, body, *args, **options)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def close(self) -> None:
        """End all ranks, whatever they do."""
        while self.pools:
            pool = self.pools.pop()
            pool.terminate()
            pool.join()


def in_world(
    rank: int,
    n: int,
    address: str,
    options: dict[str, Any],
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Be one rank."""
    from xpool.distributed import World

    with World(f"w{rank}", rank, n, dist_init_method=address, **options) as world:
        return body(world, *args)


@pytest.fixture(scope="session", autouse=True)
def loopback() -> Iterator[None]:
    """All traffic stays on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("TP_SOCKET_IFNAME", "lo")
        yield


@pytest.fixture
def ranks(tmp_path: Path, nothing_leaks: None) -> Iterator[Ranks]:
    """Start processes that are ended after the test."""
    started = Ranks(tmp_path)
    yield started
    started.close()
