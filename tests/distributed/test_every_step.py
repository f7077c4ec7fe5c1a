"""A rank is killed at a random line of xpool.distributed or xpool.server."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.distributed needs torch")

import torch
from support.limits import WAIT
from support.ranks import Ranks
from support.tiers import also
from torch import nn

import xpool
from xpool import WorkerDied
from xpool.distributed import GroupError, World
from xpool.server import PushPullGradServerImpl, PushPullModelServerImpl

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]

ROOMS = tuple(
    str(Path(xpool.__file__).parent / name) + os.sep for name in ("distributed", "server")
)
VICTIM = 1
DEEP = int(os.environ.get("XPOOL_TEST_DEEP", "1"))
STEPS = 1450
"""About how many lines rank 1 runs; torch's threads answer messages, so the number varies."""
JOINED = 350
"""At this line rank 1 has joined, and the others notice its death at once."""


class Steps:
    """Counts the lines of the two packages that this process runs, in all threads."""

    def __init__(self, last: int) -> None:
        self.count, self.last = 0, last
        threading.settrace(self.enter)
        sys.settrace(self.enter)

    def enter(self, frame: Any, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(ROOMS) else None

    def line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def work(world: World) -> None:
    """Run calls, barriers and collectives, push and pull a model, push gradients."""
    group = world.create_rpc_group("group", ["w0", "w1", "w2"])
    collective = world.create_collective_group([0, 1, 2], timeout=WAIT)
    for name in world.get_members():
        assert group.rpc_sync(name, abs, args=(-3,)) == 3
    if world.rank == VICTIM:
        PushPullModelServerImpl("models", group)
    gradients = None
    if world.rank == 0:
        gradients = PushPullGradServerImpl(
            "gradients", group, reduce_batch_size=3, secondary_reducers=["w0"]
        )
    group.barrier()
    model = nn.Linear(2, 1, bias=False)
    if gradients is not None:
        managed = nn.Linear(2, 1, bias=False)
        gradients.manage_model(managed, torch.optim.SGD(managed.parameters(), lr=1))
        gradients.start()
    group.barrier()
    access = group.get_paired("models").to_here()
    access.push(model)
    access.pull(model)
    collective.all_reduce(torch.ones(1000))
    collective.barrier()
    model.weight.grad = torch.ones_like(model.weight)
    group.get_paired("gradients").to_here().push(model)
    group.barrier()
    if gradients is not None:
        gradients.stop()
    collective.destroy()


def in_steps(rank: int, address: str, again: str, last: int) -> tuple[str, float, int]:
    """Work in a world, then in a second one without the victim; return error, sum and steps."""
    steps = Steps(last if rank == VICTIM else -1)
    error = ""
    limit = 30 if 0 < last < JOINED else WAIT  # the others notice only at this limit
    options = {"rpc_timeout": limit, "dist_timeout": limit, "dist_init_method": address}
    try:
        with World(f"w{rank}", rank, 3, **options) as world:
            work(world)
    except GroupError as exc:
        error = type(exc).__name__
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    total = torch.ones(1)
    if rank != VICTIM:
        # The other rank may have waited for both time limits of the first world. If a rank gives up
        # while connecting, gloo waits for five times the first limit.
        options = {"dist_timeout": 7 * limit, "dist_init_method": again}
        with World(f"w{rank}", rank // 2, 2, init_rpc=False, **options) as world:
            world.create_collective_group([0, 1]).all_reduce(total)
    return error, total.item(), steps.count


def run(ranks: Ranks, last: int) -> list[Any]:
    return ranks.run(3, in_steps, ranks.address(), ranks.address(), last)


@pytest.mark.exhaustive
def test_nobody_dies(ranks: Ranks):
    """Without a death the work succeeds, in about `STEPS` lines."""
    first, victim, last = run(ranks, -1)
    assert first[:2] == last[:2] == ("", 2)
    assert not victim[0] and 0.9 * STEPS < victim[2] < 1.2 * STEPS


@pytest.mark.parametrize("seed", [*also(*range(6 * DEEP))])
def test_death_at_a_step(ranks: Ranks, seed: int):
    """The other ranks report the loss, unless they need the victim no more, and continue
    together."""
    step = random.Random(seed).randint(1, STEPS)
    outcomes = run(ranks, step)
    print(f"killed at step {step}: {outcomes}")  # pytest shows it on failure
    assert isinstance(outcomes[VICTIM], WorkerDied) or step > 0.9 * STEPS
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, tuple), outcomes
        assert outcome[0] in ("", "PeerLost") or (outcome[0] == "GroupTimeout" and step < JOINED)
        assert outcome[1] == 2
