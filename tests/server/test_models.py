"""Model servers and gradient servers."""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.server needs torch")

import torch
from support.limits import WAIT
from support.ranks import Ranks
from support.tiers import also
from support.waiting import eventually
from torch import nn

from xpool.distributed import GroupError, GroupKeyError, PeerLost, RpcGroup, World
from xpool.errors import OptionError
from xpool.server import (
    ModelNotManaged,
    OrderedServerSimpleImpl,
    PushPullGradServerImpl,
    PushPullModelServerImpl,
    VersionError,
)
from xpool.server._models import ReduceType

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]


def model(value: float = 0, out: int = 1) -> nn.Linear:
    made = nn.Linear(2, out, bias=False)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


def weight(of: nn.Linear) -> float:
    return of.weight[0, 0].item()


def with_gradient(of: nn.Linear, value: float) -> nn.Linear:
    of.weight.grad = torch.full_like(of.weight, value)
    return of


def models(world: World) -> Any:
    group = world.create_rpc_group("group", ["w0", "w1", "w2"])
    if world.rank == 0:
        PushPullModelServerImpl("server", group)
    group.barrier()
    access = group.get_paired("server").to_here()
    mine = model(world.rank)
    if world.rank == 1:
        assert not access.pull(mine)  # nothing has been pushed
        assert access.push(mine)
        assert mine.pp_version == 1
        with_gradient(mine, 5)
        mine.weight.data += 10
        assert access.push(mine)
    group.barrier()
    if world.rank == 2:
        assert not access.push(mine, pull_on_fail=False)
        assert (weight(mine), getattr(mine, "pp_version", 0)) == (2, 0)
        # Not the next version: pulls the newest instead.
        assert not access.push(with_gradient(mine, 5))
        assert (weight(mine), mine.pp_version, mine.weight.grad[0, 0]) == (11, 2, 5)
        mine.weight.data += 100
        assert access.push(mine)
        mine.pp_version = 9
        with pytest.raises(VersionError, match="prev_version 9 of 'model' has never existed"):
            access.push(mine)
        other = model(out=3)
        with pytest.raises(GroupError, match=r"'model' is not the given model.*differ in weight"):
            access.pull(other)
        assert weight(other) == 0
    group.barrier()
    newest = model()
    assert access.pull(newest)
    newest.weight.data.zero_()
    assert access.pull(newest)  # already the newest version: unchanged
    assert weight(newest) == 0
    mine = model()
    access.pull(mine)
    return weight(mine), mine.pp_version


def test_models(ranks: Ranks):
    """A version follows the newest one; a late push gets the newest model instead."""
    assert ranks.good_world(3, models) == [(111, 3)] * 3


class Counted:
    """A scheduler that signals each step, and may wrap another one."""

    def __init__(self, steps: threading.Semaphore, inner: Any = None) -> None:
        self.steps, self.inner = steps, inner

    def step(self) -> None:
        if self.inner is not None:
            self.inner.step()
        self.steps.release()


class Descent:
    """`torch.optim.SGD` with the rate 1, without the imports of a second that torch's makes."""

    def __init__(self, model: nn.Module) -> None:
        self.zero_grad, self.parameters = model.zero_grad, model.parameters

    @torch.no_grad()
    def step(self) -> None:
        for one in self.parameters():
            one -= one.grad


def reduced(world: World, method: str) -> Any:
    group = world.create_rpc_group("group", ["w0", "w1", "w2"])
    steps = threading.Semaphore(0)
    if world.rank == 0:
        impl = PushPullGradServerImpl(
            "server", group, "model", "w0", ["w0"], None, method, reduce_batch_size=2
        )
        managed = model(100)
        optimizer = torch.optim.SGD(managed.parameters(), lr=1)
        scheduler = Counted(steps, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        with pytest.raises(ModelNotManaged, match=r"call manage_model\(model, optimizer\) before"):
            impl.start()
        impl.manage_model(managed, optimizer, scheduler)
        group.barrier()
        impl.start()
        impl.start()
        assert steps.acquire(timeout=WAIT)
        impl.watch()
        impl.stop()
        impl.stop()
        assert (managed.pp_version, optimizer.param_groups[0]["lr"], impl.dropped) == (1, 0.5, 0)
        group.barrier()
        return weight(managed)
    group.barrier()
    access = group.get_paired("server").to_here()
    mine = with_gradient(model(), world.rank)
    access.push(mine)
    access.push(with_gradient(mine, world.rank))
    group.barrier()
    assert access.pull(with_gradient(mine, 1))
    assert mine.weight.grad is None
    return weight(mine)


@pytest.mark.parametrize(("method", "expected"), [("sum", 100 - 6), *also(("mean", 100 - 1.5))])
def test_gradients(ranks: Ranks, method: str, expected: float):
    """Four gradients of two clients are reduced in two steps, and each is applied once."""
    assert ranks.good_world(3, reduced, method) == [expected] * 3


def tree(world: World) -> Any:
    group = world.create_rpc_group("group", world.get_members())
    impl = PushPullGradServerImpl(
        "server", group, secondary_reducers=["w1", "w2"], reduce_batch_size=1
    )
    steps = threading.Semaphore(0)
    if world.rank == 0:
        managed = model(0)
        impl.manage_model(managed, Descent(managed), Counted(steps))
    else:
        with pytest.raises(ModelNotManaged, match="'w0', does"):
            impl.manage_model(model(), None)
    impl.start()
    group.barrier()
    access = group.get_paired("server").to_here()
    if world.rank == 3:
        for _ in range(12):
            access.push(with_gradient(model(), -1))
        with pytest.raises(ModelNotManaged, match=r"weight \(pushed: \[3, 2\].* weight \[1, 2\]"):
            access.push(with_gradient(model(out=3), 1))
        with pytest.raises(GroupError, match="No gradient to push for weight"):
            access.push(model())
    if world.rank == 0:
        assert all(steps.acquire(timeout=WAIT) for _ in range(12))
        impl.stop()
    group.barrier()
    mine = model()
    access.pull(mine)
    impl.watch()
    impl.stop()
    return weight(mine)


def test_tree(ranks: Ranks):
    """Secondary reducers run in other processes than the primary, and each gradient counts once."""
    assert ranks.good_world(4, tree) == [12] * 4


def reducer_dies(world: World) -> Any:
    group = world.create_rpc_group("group", ["w0", "w1", "w2"])
    impl = PushPullGradServerImpl("server", group, "m", "w0", ["w1", "w2"], reduce_batch_size=1)
    group.barrier()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    world.peers.wait_lost(["w2"], 20)
    if world.rank == 1:
        impl.start()
        group.rpc_sync("w0", abs, args=(-1,))
        world.create_rpc_group("stay", ["w1", "w0"])
        # When the primary dies, the reducer stops and keeps the reason.
        thread = impl._thread
        world.peers.wait_lost(["w0"], 20)
        push = functools.partial(impl._push_service, {"weight": torch.ones(1, 2)})
        try:
            push(ReduceType.REDUCE_SECONDARY)
        except GroupError:
            pass  # the primary died during this call
        thread.join(WAIT)
        with pytest.raises(PeerLost, match="'w0' has died"):
            impl.watch()
        with pytest.raises(GroupError, match="has stopped: PeerLost"):
            push(ReduceType.REDUCE_SECONDARY)
        impl.stop()
        return "watched"
    access = group.get_paired("server").to_here()
    for _ in range(8):
        access.push(with_gradient(model(), 1))
    world.create_rpc_group("stay", ["w1", "w0"])  # w1 answers, w0 dies
    return os.kill(os.getpid(), signal.SIGKILL)


def test_reducers_die(ranks: Ranks):
    """Gradients go to the remaining reducers; a reducer that must stop reports why."""
    assert ranks.world(3, reducer_dies)[1] == "watched"


def bad_options(group: RpcGroup) -> None:
    for options, message in (
        ({"reduce_method": "max"}, "'sum' or 'mean'"),
        ({"reduce_batch_size": 0}, "reduce_batch_size must be"),
        ({"reduce_batch_size": 8, "max_queue_size": 8}, "less than max_queue_size"),
        ({"primary_reducer": "w7"}, "'w7' is not in the group: w0"),
        ({"secondary_reducers": ["w0", "w7"]}, "'w7' is not in the group"),
        ({"secondary_reducers": []}, "at least one"),
    ):
        with pytest.raises(OptionError, match=message):
            PushPullGradServerImpl("server", group, **options)
    impl = PushPullGradServerImpl("server", group, reduce_batch_size=2, max_queue_size=4)
    access = group.get_paired("server").to_here()
    for value in range(7):  # nobody reduces: the oldest are dropped and counted
        access.push(with_gradient(model(), value))
    assert impl.dropped == 3
    strange = [with_gradient(model().double(), 1), with_gradient(model(), 1)]
    strange[1].weight.grad = strange[1].weight.grad.to_sparse()
    for kind, one in zip(("float64", "sparse_coo"), strange):
        with pytest.raises(ModelNotManaged, match=rf"weight \(pushed: \[1, 2\].*{kind}"):
            access.push(one)  # compared with the gradients pushed before
    managed = model(0)
    impl.manage_model(managed, Descent(managed))
    for one in strange:
        with pytest.raises(ModelNotManaged, match=r"It takes weight \[1, 2\] float32"):
            access.push(one)
    impl.start()
    impl.stop()
    impl.watch()


def half_made(group: RpcGroup) -> None:
    group.pair("server", "another's")
    for make in PushPullModelServerImpl, PushPullGradServerImpl:
        with pytest.raises(GroupKeyError, match="'server' is already paired"):
            make("server", group)
    assert group.offers == {"service": {}, "value": {"server": ("another's",)}}
    group.register("server/_pull_service", abs)
    with pytest.raises(GroupKeyError, match="'server/_pull_service' is already registered"):
        OrderedServerSimpleImpl("server", group)
    assert list(group.offers["service"]) == ["server/_pull_service"]
    group.deregister("server/_pull_service")
    group.unpair("server")
    PushPullGradServerImpl("server", group)


def misfit_waits(world: World) -> int:
    group = world.create_rpc_group("group", ["w0", "w1"])
    impl = PushPullGradServerImpl("server", group, "m", "w0", ["w1"], reduce_batch_size=2)
    group.barrier()
    access = group.get_paired("server").to_here()
    if world.rank == 0:
        access.push(with_gradient(model().double(), 1))  # waits for a second gradient of its kind
        managed = model(0)
        steps = threading.Semaphore(0)
        impl.manage_model(managed, Descent(managed), Counted(steps))
    group.barrier()
    impl.start()
    for _ in range(2):
        access.push(with_gradient(model(), 1))
    group.barrier()
    if world.rank == 0:
        assert steps.acquire(timeout=WAIT)
    group.barrier()
    impl.stop()
    impl.watch()
    return impl.refused


def test_a_gradient_that_does_not_fit(ranks: Ranks):
    """An unfit gradient that was pushed too early does not block later ones."""
    assert ranks.good_world(2, misfit_waits) == [0, 1]


def pushes_first(group: RpcGroup) -> None:
    impl = PushPullGradServerImpl("server", group, reduce_batch_size=1)
    access = group.get_paired("server").to_here()
    access.push(with_gradient(model().double(), 1))
    managed = model(0)
    steps = threading.Semaphore(0)
    impl.manage_model(managed, Descent(managed), Counted(steps))
    impl.start()
    eventually(lambda: impl.refused == 1, "the gradient pushed too early is refused")
    group.get_paired("server").to_here().push(with_gradient(model(), 1))
    assert steps.acquire(timeout=WAIT)
    impl.stop()
    impl.watch()
    assert managed.pp_version == 1

    # Another model is managed: its versions go on from those of the first.
    second = model(100)
    impl.manage_model(second, Descent(second), Counted(steps))
    impl.start()
    access.push(with_gradient(model(), 1))
    assert steps.acquire(timeout=WAIT)
    impl.stop()
    impl.watch()
    pulled = model()
    assert access.pull(pulled) and weight(pulled) == weight(second)
    impl.start()
    impl.o_server.push("model", second.state_dict(), 9, second.pp_version)
    access.push(with_gradient(model(), 1))
    assert steps.acquire(timeout=WAIT)
    impl.stop()
    with pytest.raises(GroupError, match="another process has pushed one since version 2"):
        impl.watch()


def alone(world: World) -> None:
    for number, body in enumerate((half_made, pushes_first, bad_options)):
        body(world.create_rpc_group(f"group{number}", ["w0"]))


def test_one_rank(ranks: Ranks):
    """A failed constructor leaves no name in the group. Unfit gradients pushed before the model was
    managed are dropped and counted. Invalid options and gradients are refused. A second model can
    be managed after the first."""
    ranks.good_world(1, alone)
