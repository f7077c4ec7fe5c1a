"""When a rank dies, waiting operations of other ranks end at once with an error that names it."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

pytest.importorskip("torch", reason="xpool.distributed needs torch")

import torch
from support.ranks import Ranks, good, in_world
from support.tiers import also
from support.work import kill_oneself

from xpool import TimeoutError, WorkerDied
from xpool.distributed import (
    CollectiveGroup,
    GroupError,
    GroupTimeout,
    PeerLost,
    World,
    get_world,
    join,
)

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]

SECONDS = 20.0  # far below the timeouts below, far above the needs of a loaded machine
TIMEOUT = 600


def all_reduce(group: CollectiveGroup) -> None:
    group.all_reduce(torch.ones(100_000))


def barrier(group: CollectiveGroup) -> None:
    group.barrier()


def all_gather(group: CollectiveGroup) -> None:
    group.all_gather([torch.empty(1000) for _ in range(group.size())], torch.ones(1000))


def receive(group: CollectiveGroup) -> None:
    group.recv(torch.ones(1), group.size() - 1)


def receive_any(group: CollectiveGroup) -> None:
    group.recv(torch.ones(1))


def in_chain(group: CollectiveGroup) -> None:
    """Each rank waits for the next one; only the last but one waits for the dead rank."""
    group.recv(torch.ones(1), group.current_rank + 1)


def last_dies(world: World, operation: Any) -> tuple[float, str]:
    """Let the last rank die during an operation; return the time waited and the error."""
    group = world.create_collective_group(world.get_ranks(), timeout=TIMEOUT)
    group.all_reduce(torch.ones(1))  # makes all connections
    if world.rank == world.world_size - 1:
        kill_oneself()
    begin = time.monotonic()
    with pytest.raises(PeerLost) as error:
        operation(group)
    waited = time.monotonic() - begin
    with pytest.raises(PeerLost, match="The group is broken"):
        group.all_reduce(torch.ones(1))
    group.destroy()
    return waited, str(error.value)


@pytest.mark.parametrize(
    "operation", [in_chain, *also(barrier, receive_any, all_reduce, all_gather, receive)]
)
def test_collectives(ranks: Ranks, operation: Any):
    """Any operation of the survivors ends in `PeerLost`, which names the dead rank."""
    *alive, dead = ranks.world(3, last_dies, operation)
    assert isinstance(dead, WorkerDied)
    for waited, text in alive:
        assert waited < SECONDS
        assert "'w2' has died" in text or "a member (of w0, w1, w2) has died" in text, text


@pytest.mark.parametrize("operation", [in_chain, *also(all_reduce, barrier, all_gather)])
def test_collectives_without_rpc(ranks: Ranks, operation: Any):
    """Without RPC each rank passes the error to its neighbours."""
    *alive, _ = ranks.world(4, last_dies, operation, init_rpc=False)
    assert all(waited < SECONDS for waited, _ in alive), alive


def reports_a_loss(world: World) -> str:
    group = world.create_collective_group([0, 1, 2], timeout=TIMEOUT)
    group.barrier()
    if world.rank == 2:
        kill_oneself()
    pending = group.irecv(torch.ones(1))
    world.lost(2, "was killed, says the pool")
    with pytest.raises(PeerLost) as error:
        pending.wait()
    return str(error.value)


def test_reported_loss(ranks: Ranks):
    """Without RPC, a rank that knows of a death can report it."""
    for text in ranks.world(3, reports_a_loss, init_rpc=False)[:2]:
        assert "'w2' was killed, says the pool" in text
        assert "still there: w0, w1" in text


def world_group_after(world: World) -> str:
    if world.rank == 2:
        kill_oneself()
    assert world.peers.wait_lost(["w2"], SECONDS) == ["w2"]
    with pytest.raises(PeerLost) as error:
        world.group.irecv(torch.ones(1), 2)
    return str(error.value)


def test_world_group_after_a_loss(ranks: Ranks):
    """After a loss the group of all ranks fails at its first use, like older groups."""
    for text in ranks.world(3, world_group_after, rpc_timeout=TIMEOUT)[:2]:
        assert "'w2' has died" in text


def idle_survivor(world: World) -> str:
    """Rank 1 waits for rank 0, which takes no part; only a relayed report can end the wait."""
    group = world.create_collective_group([0, 1, 2], timeout=TIMEOUT)
    group.barrier()
    if world.rank == 2:
        kill_oneself()
    if world.rank == 1:
        with pytest.raises(PeerLost):
            group.recv(torch.ones(1), 0)
    assert world.peers.wait_lost(["w2"], SECONDS) == ["w2"]
    group.destroy()
    again = world.create_collective_group([0, 1])
    total = torch.ones(1)
    again.all_reduce(total)
    return f"{total.item():g}"


def test_survivors_go_on(ranks: Ranks):
    """A busy member does not delay the report of a death; the survivors make a new group."""
    assert ranks.world(3, idle_survivor)[:2] == ["2", "2"]


def first_ranks_die(world: World) -> list[str]:
    """Rank 0 dies, and then rank 1."""
    # Each rank dies when the others are ready. They meet at the last rank, which survives.
    world.create_rpc_group("all", world.get_members()[::-1])
    for rank in (0, 1):
        if world.rank == rank:
            kill_oneself()
        assert world.peers.wait_lost([f"w{rank}"], SECONDS) == [f"w{rank}"]
        world.create_rpc_group(f"after {rank}", world.get_members()[:rank:-1])
    return sorted(world.peers.lost())


@pytest.mark.exhaustive
def test_the_first_ranks_die(ranks: Ranks):
    """Reports of deaths do not depend on any one rank."""
    outcomes = ranks.world(4, first_ranks_die)
    assert outcomes[2:] == [["w0", "w1"]] * 2


def calls_to_the_dead(world: World) -> float:
    group = world.create_rpc_group("group", ["w1", "w0", "w2"])
    begin = time.monotonic()
    if world.rank == 2:
        group.register("sleep", time.sleep)
    group.barrier()
    if world.rank == 2:
        group.barrier()
        kill_oneself()
    pending = group.registered_async("sleep", (TIMEOUT,), timeout=0)
    group.barrier()
    with pytest.raises(PeerLost, match="'w2'"):
        pending.wait()
    with pytest.raises(PeerLost, match="still there: w0, w1"):
        group.rpc_sync("w2", abs, args=(-1,))
    with pytest.raises(PeerLost, match="'w2'"):
        group.registered_sync("sleep", (0,))
    with pytest.raises(PeerLost, match=r"barrier of 'group' cannot complete: 'w2' has died"):
        group.barrier()
    with pytest.raises(PeerLost, match="create_rpc_group of 'other'"):
        world.create_rpc_group("other", ["w0", "w1", "w2"])
    with pytest.raises(PeerLost, match="create_collective_group of 'ranks 0, 1, 2'"):
        world.create_collective_group([0, 1, 2])
    assert group.rpc_sync("w0", abs, args=(-1,)) == 1
    return time.monotonic() - begin


def test_calls(ranks: Ranks):
    """Calls, services, barriers and new groups with a dead process raise `PeerLost`."""
    *alive, dead = ranks.world(3, calls_to_the_dead, rpc_timeout=TIMEOUT)
    assert isinstance(dead, WorkerDied)
    assert all(isinstance(waited, float) and waited < SECONDS for waited in alive), alive


class Mortal:
    """An object whose process dies when its method is called."""

    def die(self) -> None:
        kill_oneself()


def by_reference(world: World, how: str) -> str:
    """Call a function held by rank 1, which dies while the function runs."""
    group = world.create_rpc_group("group", world.get_members())
    if world.rank == 1:
        threading.Event().wait()
    with pytest.raises(PeerLost) as error:
        if how == "to_here":
            group.remote("w1", kill_oneself).to_here()
        else:
            result = getattr(group.remote("w1", Mortal), how)().die()
            result.wait() if how == "rpc_async" else result.to_here()
    assert type(error.value.__cause__) is RuntimeError  # torch's own error
    return str(error.value)


@pytest.mark.parametrize("how", ["to_here", *also("rpc_sync", "rpc_async", "remote")])
def test_references(ranks: Ranks, how: str):
    """A call of an object in a dead process raises an error that names the process."""
    outcomes = ranks.world(2, by_reference, how, rpc_timeout=TIMEOUT)
    assert "no answer from 'w1': 'w1' has died" in outcomes[0], outcomes


def waits_while_one_dies(world: World, what: str) -> str:
    group = world.create_rpc_group("group", world.get_members())
    if world.rank == 1:
        group.rpc_sync("w0", abs, args=(-1,))
        kill_oneself()
    with pytest.raises(PeerLost) as error:
        if what == "barrier":
            group.barrier()
        else:
            world.create_rpc_group("next", world.get_members())
    return str(error.value)


@pytest.mark.parametrize("what", ["barrier", *also("create")])
def test_meetings(ranks: Ranks, what: str):
    """Ranks that wait for all members do not wait for a dead one."""
    outcomes = ranks.world(3, waits_while_one_dies, what, rpc_timeout=TIMEOUT)
    for text in (outcomes[0], *outcomes[2:]):
        assert "'w1' has died" in text, outcomes


def leaves_without_waiting(rank: int, address: str) -> str:
    world = World(f"w{rank}", rank, 2, dist_init_method=address, rpc_timeout=TIMEOUT)
    if rank == 1:
        world.stop(graceful=False)
        return ""
    world.peers.wait_lost(["w1"], SECONDS)
    text = world.peers.describe("w1")
    world.stop()  # the other rank has left
    return text


def test_leaving(ranks: Ranks):
    """If a process leaves without waiting, others report that it has left."""
    text = ranks.run(2, leaves_without_waiting, ranks.address())[0]
    assert text == "'w1' has left the world; still there: w0"


def never_joined(rank: int, address: str) -> None:
    if rank == 1:
        kill_oneself()
    World(f"w{rank}", rank, 3, dist_init_method=address, dist_timeout=1)


def test_a_rank_that_never_joins(ranks: Ranks):
    """The timeout error names the ranks that did not join."""
    outcomes = ranks.run(3, never_joined, ranks.address())
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, GroupTimeout)
        assert "rank 1 did not join" in str(outcome)
        assert "Those that joined: 0 (w0), 2 (w2)" in str(outcome)


def replaced(rank: int, n: int, address: str, init_rpc: bool) -> float:
    """A pool runs this in each worker, and again after a replacement."""
    total = torch.ones(1)
    world = join(rank, n, address, init_rpc=init_rpc)
    world.create_collective_group(range(n), timeout=TIMEOUT).all_reduce(total)
    return total.item()


def dies_in_a_group(rank: int, n: int) -> str:
    from xpool.distributed import get_world

    group = get_world().create_collective_group(range(n), timeout=TIMEOUT)
    group.barrier()
    if rank == 1:
        kill_oneself()
    with pytest.raises(PeerLost) as error:
        group.all_reduce(torch.ones(1))
    return str(error.value)


@pytest.mark.parametrize("init_rpc", [True, *also(False)])
def test_a_world_is_made_anew(ranks: Ranks, init_rpc: bool):
    """After a death the survivors and the replacement join again at another address."""
    n = 3
    results = ranks.start(n, replaced, n, ranks.address(), init_rpc)
    assert [result.get() for result in results] == [3] * n
    pool = ranks.pools[-1]
    results = [pool.apply_async(dies_in_a_group, (rank, n), worker=rank) for rank in range(n)]
    with pytest.raises(WorkerDied):
        results[1].get()
    assert "has died" in results[0].get()
    again = n, ranks.address(), init_rpc
    results = [pool.apply_async(replaced, (rank, *again), worker=rank) for rank in range(n)]
    assert [result.get() for result in results] == [3] * n


def late(world: World) -> tuple[str, str]:
    group = world.create_collective_group([0, 1], timeout=1)
    rpc_group = world.create_rpc_group("pair", ["w0", "w1"])
    if world.rank == 1:
        LATE.wait()
        return "", ""
    with pytest.raises(GroupTimeout) as first:
        group.all_reduce(torch.ones(1))
    with pytest.raises(GroupTimeout) as second:
        rpc_group.barrier()
    rpc_group.rpc_sync("w1", set_late)
    return str(first.value), str(second.value)


LATE = threading.Event()


def set_late() -> None:
    LATE.set()


@pytest.mark.exhaustive
def test_timeouts(ranks: Ranks):
    """The timeout error names the rank that did not take part."""
    first, second = ranks.good_world(2, late, rpc_timeout=1)[0]
    assert "not all of w0, w1 took part within 1 s" in first
    assert "barrier of 'pair': w1 did not come within 1 s. All of w0, w1 have to call it" in second


@pytest.mark.exhaustive
def test_all_ranks_are_ended(ranks: Ranks):
    """If all ranks of a world are ended together, nothing is left."""
    results = ranks.start(3, in_world, 3, ranks.address(), {}, sleeps, ())
    with pytest.raises(TimeoutError):
        results[0].get(1)
    ranks.close()


def sleeps(world: World) -> None:
    world.create_collective_group(range(3)).barrier()
    signal.pause()


# Replaced by MonkeyPatch: a task with an assignment to them, or with a `setattr` of a name that it
# computes, would carry globals of other tests, and theirs this one, to workers without torch.
STAGES = [
    "torch.distributed.init_process_group",
    "torch.distributed.rpc.init_rpc",
    "xpool.distributed._world.watch",
]


def dies_while_joining(rank: int, address: str, stage: str, later: str) -> tuple[str, str, float]:
    if rank == 1:
        pytest.MonkeyPatch().setattr(stage, kill_oneself)
    limits = {"dist_timeout": 3, "rpc_timeout": 3}
    try:
        with World(f"w{rank}", rank, 3, dist_init_method=address, **limits) as world:
            world.create_rpc_group("group", world.get_members())
        error = ""
    except GroupError as exc:
        error = str(exc)
        if rank == 1:
            kill_oneself()  # it has given up before the stage, as another rank was late
    assert get_world() is None
    total = torch.ones(1)
    with World(f"w{rank}", rank // 2, 2, init_rpc=False, dist_init_method=later) as world:
        world.create_collective_group([0, 1]).all_reduce(total)
        names = ", ".join(world.get_members())
    return error, names, total.item()


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [STAGES[0], *also(*STAGES[1:])])
def test_death_while_joining(ranks: Ranks, stage: str):
    """If a rank dies while joining, the others get an error and may join again."""
    later = ranks.address()
    outcomes = ranks.run(3, dies_while_joining, ranks.address(), stage, later)
    assert isinstance(outcomes[1], WorkerDied)
    for error, names, total in good([outcomes[0], outcomes[2]]):
        assert error
        assert (names, total) == ("w0, w2", 2)


def pauses_while_joining(rank: int, address: str, pause: str, later: str) -> tuple[str, float]:
    """Rank 2 pauses in torch's `init_rpc` until the others have given up."""
    over = [Path(f"{urlparse(address).path}.over.{number}") for number in range(2)]

    def wait_for_others() -> None:
        while not all(file.exists() for file in over):
            time.sleep(0.01)

    exchange = torch.distributed.all_gather_object
    make_agent = torch.distributed.rpc.TensorPipeAgent

    def exchange_late(*args: Any, **kwargs: Any) -> None:
        wait_for_others()
        exchange(*args, **kwargs)

    def start_late(*args: Any) -> Any:
        agent = make_agent(*args)
        wait_for_others()
        return agent

    if rank == 2:
        late = exchange_late if pause == "all_gather_object" else start_late
        pytest.MonkeyPatch().setattr(f"torch.distributed.{pause}", late)
    with pytest.raises(GroupError) as raised:
        World(f"w{rank}", rank, 3, dist_init_method=address, dist_timeout=2, rpc_timeout=2)
    if rank < 2:
        over[rank].touch()
    assert get_world() is None
    total = torch.ones(1)
    with World(f"w{rank}", rank, 3, init_rpc=False, dist_init_method=later) as world:
        world.create_collective_group([0, 1, 2]).all_reduce(total)
    return type(raised.value).__name__, total.item()


@pytest.mark.parametrize("pause", ["all_gather_object", *also("rpc.TensorPipeAgent")])
def test_pause_while_joining(ranks: Ranks, pause: str):
    """If a rank pauses while joining, the others give up in time, and all may join again."""
    address, later = ranks.address(), ranks.address()
    outcomes = good(ranks.run(3, pauses_while_joining, address, pause, later))
    for error, total in outcomes:
        assert error in ("GroupTimeout", "PeerLost")  # PeerLost if another has given up before
        assert total == 3


def joins_a_newcomer(rank: int, address: str, later: str) -> float:
    """Rank 0 fails to join one world, then joins the next with a new process."""
    if rank == 1:
        pytest.MonkeyPatch().setattr(STAGES[0], kill_oneself)
    if rank < 2:
        with pytest.raises(GroupTimeout):
            World(f"w{rank}", rank, 2, init_rpc=False, dist_init_method=address, dist_timeout=1)
    total = torch.ones(1)
    with World(f"w{rank}", rank // 2, 2, init_rpc=False, dist_init_method=later) as world:
        world.create_collective_group([0, 1]).all_reduce(total)
    return total.item()


def test_joining_after_a_failure(ranks: Ranks):
    """After a failed join, a rank can join a world with a process that has never tried."""
    outcomes = ranks.run(3, joins_a_newcomer, ranks.address(), ranks.address())
    assert isinstance(outcomes[1], WorkerDied)
    assert (outcomes[0], outcomes[2]) == (2, 2)


def all_at_once(world: World, seconds: float) -> str:
    """Call and reduce without end; rank 1 kills itself after `seconds`."""
    group = world.create_rpc_group("group", world.get_members())
    collective = world.create_collective_group(world.get_ranks(), timeout=TIMEOUT)
    if world.rank == 1:
        threading.Timer(seconds, kill_oneself).start()

    def calls() -> None:
        while True:
            for name in world.get_members():
                group.rpc_sync(name, torch.add, args=(torch.ones(1000), 1))
            group.barrier()

    def reduces() -> None:
        while True:
            collective.all_reduce(torch.ones(1000))

    def ends(work: Any) -> None:
        try:
            work()
        except PeerLost as exc:
            ended.append(str(exc))

    ended: list[str] = []
    threads = [threading.Thread(target=ends, args=(work,)) for work in (calls, reduces)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    collective.destroy()
    return " ".join(ended)


@pytest.mark.parametrize("seconds", [0.1, *also(0.01, 0.3, 0.5)])
def test_death_in_the_middle(ranks: Ranks, seconds: float):
    """All operations under way end when a rank dies."""
    outcomes = ranks.world(4, all_at_once, seconds, rpc_timeout=TIMEOUT)
    assert isinstance(outcomes[1], WorkerDied)
    for text in (outcomes[0], *outcomes[2:]):
        assert isinstance(text, str), text
        assert "'w1' has died" in text, outcomes


def leaves_some_pending(world: World) -> float:
    group = world.create_collective_group([0, 1], timeout=TIMEOUT)
    group.barrier()
    begin = time.monotonic()
    if world.rank == 0:
        pending = [group.all_reduce(torch.ones(1), async_op=True), group.irecv(torch.ones(1))]
        group.destroy()
        for one in pending:
            with pytest.raises(GroupError, match="was destroyed"):
                one.wait()
    return time.monotonic() - begin


@pytest.mark.exhaustive
def test_destroying_with_work_pending(ranks: Ranks):
    """Destroying a group drops its pending operations."""
    assert ranks.good_world(2, leaves_some_pending)[0] < SECONDS
