"""Worlds of real processes: each rank is a worker of a `P2PPool` with the same number."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xpool import P2PPool


class Ranks:
    """Starts ranks, runs functions in them, and ends them with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pools: list[P2PPool] = []

    def address(self) -> str:
        """Return an unused meeting place."""
        return f"file://{self.folder}/{uuid.uuid4().hex}"

    def start(self, n: int, func: Callable[..., Any], *args: Any) -> list[Any]:
        pool = P2PPool(n)
        self.pools.append(pool)
        return [pool.apply_async(func, (rank, *args), worker=rank) for rank in range(n)]

    def run(self, n: int, func: Callable[..., Any], *args: Any) -> list[Any]:
        """Like `start`, but return what each rank returned or raised."""
        outcomes = []
        for result in self.start(n, func, *args):
            try:
                outcomes.append(result.get())
            except Exception as exc:
                outcomes.append(exc)
        return outcomes

    def world(self, n: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run ``body(world, *args)`` in a world of n; return what each rank returned or raised."""
        return self.run(n, in_world, n, self.address(), options, body, args)

    def good_world(self, n: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Like `world`, but raise the first error."""
        return good(self.world(n, body, *args, **options))

    def good_bodies(self, n: int, *bodies: Callable[..., Any]) -> None:
        """Run each ``body(world)`` in one world of n; raise the first error, whose traceback names
        the body."""
        self.good_world(n, one_by_one, *bodies)

    def close(self) -> None:
        """End all ranks at once."""
        while self.pools:
            pool = self.pools.pop()
            pool.terminate()
            pool.join()


def good(outcomes: list[Any]) -> list[Any]:
    """Return what ranks returned; raise the first error, a timeout only if there is no other."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, TimeoutError))
    return outcomes


def in_world(
    rank: int,
    n: int,
    address: str,
    options: dict[str, Any],
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Run one rank."""
    from xpool.distributed import World

    with World(f"w{rank}", rank, n, dist_init_method=address, **options) as world:
        return body(world, *args)


def one_by_one(world: Any, *bodies: Callable[..., Any]) -> None:
    """Run the bodies, each without the groups of the others."""
    for body in bodies:
        body(world)
        world.group.barrier()
        for group in list(world.groups.values()):
            group.destroy()


@pytest.fixture(scope="session", autouse=True)
def loopback() -> Iterator[None]:
    """Keep all traffic on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("TP_SOCKET_IFNAME", "lo")
        yield


@pytest.fixture
def ranks(tmp_path: Path, nothing_leaks: None) -> Iterator[Ranks]:
    """Start processes and end them after the test."""
    started = Ranks(tmp_path)
    yield started
    started.close()
