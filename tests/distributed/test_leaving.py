"""A rank that leaves right after a common operation does not fail it for others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.distributed needs torch")

import torch
from support.ranks import Ranks
from support.tiers import also
from torch.distributed import rpc
from torch.futures import Future

from xpool.distributed import GroupError, PeerLost, World
from xpool.distributed._current import LEFT
from xpool.distributed._remote_calls import Meetings
from xpool.testing._test_tasks import eventually

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]

SECONDS = 20.0
TIMEOUT = 600
came = threading.Semaphore(0)  # in rank 0: how many others are ready


def come() -> None:
    came.release()


def part_of(rank: int, address: str, body: Any) -> Any:
    """Run one of three ranks, which leaves without waiting for the others."""
    options = {"dist_init_method": address, "dist_timeout": TIMEOUT, "rpc_timeout": TIMEOUT}
    world = World(f"w{rank}", rank, 3, **options)
    try:
        return body(world)
    finally:
        if world.started:
            world.stop(graceful=False)


def gathers(world: World) -> list[float]:
    """Rank 0 finishes its part of the first gather before rank 1 begins."""
    group = world.create_collective_group([0, 1, 2], timeout=TIMEOUT)
    group.barrier()
    mine, outputs = torch.full((1,), float(world.rank)), [torch.zeros(1) for _ in range(3)]
    if world.rank == 0:
        group.gather(mine, None, 2)
        return []
    pending = group.gather(mine, outputs, 2, async_op=True) if world.rank == 2 else None
    assert world.peers.wait_lost(["w0"], SECONDS) == ["w0"]
    if pending is None:
        group.gather(mine, None, 2)
    else:
        pending.wait()
    with pytest.raises(PeerLost, match="has left the world"):
        group.barrier()
    return [output.item() for output in outputs]


def test_leaving_after_a_collective(ranks: Ranks):
    """If a rank leaves after its part of an operation, the operation completes; later ones raise
    `PeerLost`."""
    outcomes = ranks.run(3, part_of, ranks.address(), gathers)
    assert outcomes == [[], [0, 0, 0], [0, 1, 2]], outcomes


def hears_first(world: World) -> str:
    """The report that rank 0 leaves arrives before its data for the barrier."""
    group = world.create_collective_group([0, 1, 2], timeout=TIMEOUT)
    group.barrier()
    if world.rank != 0:
        pending = group.barrier(async_op=True)
        after = group.irecv(torch.ones(1), 3 - world.rank)
        world.peers.lose("w0", LEFT, {group.key: 2})
        rpc.rpc_sync("w0", come)  # by torch, because a group does not call a rank that has left
        pending.wait()
        with pytest.raises(PeerLost, match="'w0' has left the world"):
            after.wait()  # connections are closed after the barrier
        return "went on"
    assert all(came.acquire(timeout=SECONDS) for _ in (1, 2))
    group.barrier()
    return "left"


def test_news_before_the_barrier_ends(ranks: Ranks):
    """A barrier under way completes, although a rank that did its part has left."""
    assert ranks.run(3, part_of, ranks.address(), hears_first) == ["left", "went on", "went on"]


def barrier_without_answer(world: World) -> str:
    """The barrier's host leaves, and its answers are lost with the connections."""
    group = world.create_rpc_group("group", world.get_members())
    if world.rank == 0:
        before = Meetings.arrive

        def arrive(self: Meetings, key: Any, name: str, *rest: Any) -> Future[Any]:
            future = before(self, key, name, *rest)
            return future if name == "w0" else Future()  # never completes

        Meetings.arrive = arrive
        try:
            group.barrier()
            world.stop(graceful=False)
        finally:
            Meetings.arrive = before
        return "left"
    group.barrier()
    with pytest.raises(PeerLost, match="'w0' has left the world"):
        group.barrier()
    return "went on"


def test_answers_lost_with_the_host(ranks: Ranks):
    """A member whose answer was lost gets it from the leaving process's farewell message."""
    outcomes = ranks.run(3, part_of, ranks.address(), barrier_without_answer)
    assert outcomes == ["left", "went on", "went on"], outcomes


def kept_answers(world: World) -> int:
    group = world.create_rpc_group("group", world.get_members())
    for _ in range(50):
        group.barrier()
    return sum(len(world.meetings.answers(name)) for name in world.names)


@pytest.mark.exhaustive
def test_answers_are_not_kept_for_ever(ranks: Ranks):
    """A host keeps an answer until its receiver comes to the next meeting."""
    # Only answers of the last barrier, for ranks that have not yet left the world.
    host, *others = ranks.good_world(3, kept_answers)
    assert 1 <= host <= 3
    assert others == [0, 0]


@pytest.mark.exhaustive
def test_many_leave_after_a_barrier(ranks: Ranks):
    """No barrier of either kind fails, whichever rank leaves first."""
    for _ in range(5):
        assert ranks.run(3, part_of, ranks.address(), both_barriers) == [None] * 3


def both_barriers(world: World) -> None:
    collective = world.create_collective_group([0, 1, 2], timeout=TIMEOUT)
    group = world.create_rpc_group("group", world.get_members())
    collective.barrier()
    group.barrier()


def sends_and_leaves(
    rank: int, address: str, init_rpc: bool, how: str, leaving: str
) -> list[float]:
    """Rank 0 drops the tensors that it sent, and leaves before rank 1 receives."""
    world = World(f"w{rank}", rank, 2, dist_init_method=address, init_rpc=init_rpc)
    group = world.create_collective_group([0, 1], timeout=TIMEOUT)
    group.barrier()
    if rank == 0:
        for i in range(3):
            group.isend(torch.full((100_000,), float(i)), 1)
        Path(leaving).touch()
        if how == "destroy":
            group.destroy()
        world.stop()
        return []
    eventually(Path(leaving).exists, "rank 0 is leaving")
    received = [torch.zeros(100_000) for _ in range(3)]
    for tensor in received:
        group.recv(tensor, 0)
    world.stop()
    return [tensor[-1].item() for tensor in received]


@pytest.mark.parametrize("init_rpc", [False, *also(True)])
@pytest.mark.parametrize("how", ["stop", *also("destroy")])
def test_leaving_after_isend(ranks: Ranks, tmp_path: Path, init_rpc: bool, how: str):
    """Tensors that a rank sent without waiting are received before the rank is gone."""
    told = str(tmp_path / "leaving")
    outcomes = ranks.run(2, sends_and_leaves, ranks.address(), init_rpc, how, told)
    assert outcomes == [[], [0, 1, 2]], outcomes


def sends_in_vain(world: World) -> None:
    everyone = world.create_rpc_group("everyone", world.get_members())
    group = world.create_collective_group([0, 1], timeout=1 if world.rank == 0 else TIMEOUT)
    if world.rank == 0:
        for _ in range(2):
            group.isend(torch.ones(1), 1)
        with pytest.warns(ResourceWarning, match="2 messages to rank 1 were received"):
            group.destroy()
        with pytest.raises(GroupError):
            group.isend(torch.ones(1), 1)
    everyone.barrier()


@pytest.mark.exhaustive
def test_unreceived_messages(ranks: Ranks):
    """A group that ends with unreceived messages reports it in time."""
    ranks.good_world(2, sends_in_vain)
