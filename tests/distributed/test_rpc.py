"""RPC groups: calls, shared values and services."""

from __future__ import annotations

import math
import os
import threading
import traceback
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.distributed needs torch")

import torch
from support.limits import WAIT
from support.ranks import Ranks
from support.waiting import together

from xpool import TimeoutError
from xpool.distributed import (
    GroupError,
    GroupKeyError,
    GroupTimeout,
    NotAMember,
    PeerLost,
    RpcGroup,
    World,
    get_cur_name,
    get_cur_rank,
    get_world,
    is_world_initialized,
)
from xpool.distributed import _world as own_world
from xpool.errors import OptionError, RemoteTraceback, ResultNotPicklable, TaskNotPicklable

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]


class Stubborn(Exception):
    """Needs two arguments; torch would replace it by RuntimeError."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}: {text}")
        self.number, self.text = number, text


def stubborn() -> None:
    raise Stubborn(7, "no\n\\x")


def leave() -> None:
    raise SystemExit(3)


STOP = threading.Event()


def calls(world: World) -> None:
    """Functions, lambdas and methods run in the named process."""
    group = world.create_rpc_group("group", ["w0", "w1", "w2"])
    if world.rank == 0:
        assert group.rpc_sync("w1", get_cur_rank) == 1
        assert group.rpc_sync("w0", get_cur_name) == "w0"
        assert group.rpc_sync("w2", divmod, args=(7, 2), timeout=30) == (3, 1)
        assert group.rpc_sync("w2", int, args=("11",), kwargs={"base": 2}) == 3
        tensor = torch.arange(6.0).reshape(2, 3)
        future = group.rpc_async("w1", lambda one: one @ tensor.t(), args=(tensor,))
        assert torch.equal(future.wait(), tensor @ tensor.t())
        assert isinstance(future, torch.futures.Future)
        assert future.then(lambda done: done.value().sum().item()).wait() == 83
        both = [group.rpc_async(to, abs, args=(-1,)) for to in ("w1", "w2")]
        assert torch.futures.wait_all(both) == [1, 1]
        rref = group.remote("w1", torch.add, args=(tensor, 1))
        assert rref.owner_name() == "w1"
        assert group.rpc_sync("w2", lambda one: one.to_here().sum().item(), args=(rref,)) == 21
        assert rref.rpc_sync().size(0) == rref.rpc_async().size(0).wait() == 2
        assert rref.remote().size(1).to_here(timeout=30) == 3
        assert rref.confirmed_by_owner() and not rref.is_owner()
        assert repr(rref) == "<RRef to a value in 'w1'>"
    group.barrier()


def errors(world: World) -> None:
    """The caller gets the exception itself, with its fields and the remote traceback."""
    group = world.create_rpc_group("group", ["w0", "w1"])
    if world.rank == 0:
        for raised in (
            lambda: group.rpc_sync("w1", stubborn),
            lambda: group.rpc_async("w1", stubborn).wait(),
            lambda: group.registered_sync("stubborn"),
        ):
            if not group.is_registered("stubborn"):
                group.register("stubborn", stubborn)
            with pytest.raises(Stubborn, match=r"7: no\n\\x") as error:
                raised()
            assert (error.value.number, error.value.text) == (7, "no\n\\x")
            assert isinstance(error.value.__cause__, RemoteTraceback)
            assert "in stubborn" in str(error.value.__cause__)
        text = "".join(traceback.format_exception(error.value))
        assert "On 'w0' (rank 0):" in text  # the service runs here
        with pytest.raises(ValueError, match="invalid literal") as error:
            group.remote("w1", int, args=("x",)).to_here()
        assert "Traceback" in str(error.value)
        with pytest.raises(RuntimeError, match="of its own") as error:
            group.remote("w1", fail).to_here()
        assert type(error.value) is RuntimeError and error.value.__cause__ is None
        with pytest.raises(RuntimeError, match="^of its own$") as error:
            group.remote("w1", Counter).rpc_sync().fail()
        assert isinstance(error.value.__cause__, RemoteTraceback)
        with pytest.raises(GroupError, match=r"SystemExit\(3\)"):
            group.rpc_sync("w1", leave)
        with pytest.raises(TaskNotPicklable, match="a thread's lock"):
            group.rpc_sync("w1", abs, args=(threading.Lock(),))
        assert group.rpc_sync("w1", abs, args=(-1,)) == 1
    group.barrier()


def timeouts(world: World) -> str:
    group = world.create_rpc_group("group", ["w0", "w1"])
    texts = []
    if world.rank == 1:
        group.register("wait", wait_for_stop)
    group.barrier()
    if world.rank == 0:
        for waiting in (
            lambda: group.rpc_sync("w1", wait_for_stop, timeout=0.2),
            lambda: group.rpc_async("w1", wait_for_stop, timeout=0.2).wait(),
            lambda: group.registered_sync("wait", timeout=0.2),
        ):
            with pytest.raises(GroupTimeout) as error:
                waiting()
            assert isinstance(error.value, TimeoutError)
            texts.append(str(error.value))
        patient = group.rpc_async("w1", wait_for_stop, timeout=0)
        group.rpc_sync("w1", set_stop)
        assert patient.wait() is True
    group.barrier()
    return "\n".join(texts)


def wait_for_stop() -> bool:
    return STOP.wait()


def set_stop() -> None:
    STOP.set()


def test_timeouts(ranks: Ranks):
    """A call may take as long as its timeout; the error names the remedy."""
    text = ranks.good_world(2, timeouts)[0]
    assert "wait_for_stop did not answer from 'w1' within 0.2 s. It may still be running" in text


def values(world: World) -> None:
    """Any process finds a value by key; only its holder may withdraw it."""
    group = world.create_rpc_group("group", ["w0", "w1"])
    if world.rank == 0:
        group.pair("value", {"tensor": torch.ones(2)})
        with pytest.raises(GroupKeyError, match="already paired to Group"):
            group.pair("value", 1)
    group.barrier()
    if world.rank == 1:
        assert group.is_paired("value")
        assert not group.is_paired("other")
        with pytest.raises(KeyError, match="already paired to Group .* by 'w0'"):
            group.pair("value", 1)
        with pytest.raises(KeyError, match="not paired to Group .*its own: none"):
            group.unpair("value")
        with pytest.raises(KeyError, match="not found on Group .*paired to it: 'value'"):
            group.get_paired("other")
        rref = group.get_paired("value")
        assert rref.to_here()["tensor"].tolist() == [1, 1]
        assert rref.owner_name() == "w0"
        group.pair(("any", "key"), 5)
        assert group.get_paired(("any", "key")).to_here() == 5
    group.barrier()
    if world.rank == 0:
        group.unpair("value")
    group.barrier()
    assert not group.is_paired("value")
    group.barrier()
    if world.rank == 1:  # a withdrawn key is free for others
        group.pair("value", 2)
    group.barrier()
    assert group.get_paired("value").to_here() == 2
    group.barrier()


def fail() -> None:
    raise RuntimeError("of its own")


class Counter:
    """An object with state, whose methods are services."""

    def __init__(self) -> None:
        self.count = 20

    def fail(self) -> None:
        fail()

    def add(self, n: int = 1) -> int:
        self.count += n
        return self.count


def services(world: World) -> None:
    """A service runs in the process that registered it."""
    counter = Counter()
    group = world.create_rpc_group("group", ["w0", "w1", "w2"])
    if world.rank == 1:
        group.register("add", counter.add)
        with pytest.raises(GroupKeyError, match="already registered in Group"):
            group.register("add", counter.add)
    group.barrier()
    if world.rank == 2:
        assert group.is_registered("add")
        assert group.registered_sync("add") == 21
        assert group.registered_async("add", (2,)).wait() == 23
        assert group.registered_remote("add", kwargs={"n": 7}).to_here() == 30
        with pytest.raises(KeyError, match=r"already registered in Group .* by 'w1'"):
            group.register("add", counter.add)
        with pytest.raises(KeyError, match="not registered in Group .* by 'w2'"):
            group.deregister("add")
        for unknown in (group.registered_sync, group.registered_async, group.registered_remote):
            with pytest.raises(KeyError, match="not found on Group .*registered in it: 'add'"):
                unknown("sub")
    group.barrier()
    if world.rank == 1:
        group.deregister("add")
    group.barrier()
    assert not group.is_registered("add")
    assert counter.count == (30 if world.rank == 1 else 20)


def membership(world: World) -> Any:
    name = world.name
    assert (get_world(), is_world_initialized()) == (world, True)
    assert (get_cur_name(), get_cur_rank()) == (name, world.rank)
    assert world.get_ranks() == [0, 1, 2]
    assert world.get_members() == ["w0", "w1", "w2"]
    everyone = world.create_rpc_group("everyone", world.get_members())
    with pytest.raises(OptionError, match="'w7' is not in the world; its members: w0, w1, w2"):
        world.create_rpc_group("group", ["w0", "w7"])
    with pytest.raises(OptionError, match="twice: w0, w1, w0"):
        world.create_rpc_group("group", ["w0", "w1", "w0"])
    with pytest.raises(NotAMember, match=f"'{name}' makes group 'group', but is not one"):
        world.create_rpc_group("group", [one for one in world.get_members() if one != name])
    with pytest.raises(GroupError, match="'everyone' already exists"):
        world.create_rpc_group("everyone", [name])
    if world.rank < 2:
        group = world.create_rpc_group("pair", ["w1", "w0"])
        assert group.get_group_name() == "pair"
        assert group.get_group_members() == ["w1", "w0"]
        assert (group.size(), group.is_member(), group.is_member("w2")) == (2, True, False)
        with pytest.raises(NotAMember, match="'w2' is not a member of group 'pair'; .* w1, w0"):
            group.rpc_sync("w2", abs, args=(-1,))
        if world.rank == 0:
            group.register("here", get_cur_name)
            everyone.rpc_sync("w2", use_from_outside, args=(group,))
            assert everyone.rpc_sync("w1", is_own_group, args=(group,))
        group.barrier()
        group.destroy()
        group.destroy()
        assert list(world.groups) == ["everyone"]
        again = world.create_rpc_group("pair", ["w0", "w1"])
        assert not again.is_registered("here")
        again.barrier()
    everyone.barrier()
    return repr(everyone)


def use_from_outside(group: RpcGroup) -> None:
    """A non-member may look up and call, but not register."""
    assert not group.is_member()
    assert group.registered_sync("here") == "w0"
    for refused in (lambda: group.register("x", abs), lambda: group.pair("x", 1), group.barrier):
        with pytest.raises(NotAMember, match="'w2' is not a member"):
            refused()


def is_own_group(group: RpcGroup) -> bool:
    """A received group is this process's group of the same name."""
    return group is get_world().groups["pair"]


def test_membership(ranks: Ranks):
    """Membership of a group, and refusal of invalid names."""
    outcomes = ranks.good_world(3, membership)
    assert outcomes[0] == "<RpcGroup 'everyone' of w0, w1, w2>"


def disagree(world: World) -> str:
    members = ["w0", "w1"] if world.rank == 0 else ["w0", "w1", "w2"]
    if world.rank == 2:
        return ""
    try:
        group = world.create_rpc_group("group", members)
    except OptionError as exc:
        return str(exc)
    return repr(group)


def test_members_disagree(ranks: Ranks):
    """If ranks name different members for a group, all of them get an error before the timeout."""
    texts = ranks.good_world(3, disagree, rpc_timeout=3600)
    assert ["give the same members" in text for text in texts] == [True, True, False]


def many_threads(world: World) -> int:
    group = world.create_rpc_group("group", ["w0", "w1", "w2"])
    counter, lock = Counter(), threading.Lock()

    def add() -> None:
        with lock:
            counter.add()

    group.register(f"add {world.name}", add)
    group.barrier()

    def work(_: int) -> None:
        for number in range(30):
            group.registered_sync(f"add w{number % 3}")

    together(work, 4)
    group.barrier()
    return counter.count


@pytest.mark.exhaustive
def test_threads(ranks: Ranks):
    """Each call from many concurrent threads is run once."""
    assert sum(ranks.good_world(3, many_threads)) == 3 * (20 + 120)


def leaves_while_called(world: World) -> str:
    group = world.create_rpc_group("group", ["w0", "w1"])
    if world.rank == 0:
        pending = group.rpc_async("w1", wait_for_stop, timeout=0)
        group.barrier()
        with pytest.raises(PeerLost) as error:
            pending.wait()
        return str(error.value)
    group.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_world, "SHUTDOWN_SECONDS", 0.2)
        with pytest.warns(ResourceWarning, match="still ran in"):
            world.stop(graceful=False)
    set_stop()
    return ""


def test_leaving_while_called(ranks: Ranks):
    """A process can leave while a function that another rank called hangs in it."""
    assert "'w1'" in ranks.good_world(2, leaves_while_called)[0]


def dies_with_a_key(world: World) -> None:
    group = world.create_rpc_group("group", ["w0", "w1"])
    if world.rank == 1:
        group.pair("key", 1)
        group.register("service", abs)
    group.barrier()
    if world.rank == 1:
        os._exit(0)
    assert world.peers.wait_lost(["w1"], WAIT) == ["w1"]
    group.pair("key", 2)
    group.register("service", abs)
    assert group.get_paired("key").to_here() == 2
    assert group.registered_sync("service", (-1,)) == 1
    group.destroy()
    for call in (
        lambda: group.rpc_sync("w0", abs, args=(-1,)),
        lambda: group.pair("other", 3),
        lambda: group.get_paired("key"),
        lambda: group.registered_sync("service", (-1,)),
        group.barrier,
    ):
        with pytest.raises(GroupError, match="Group 'group' was destroyed in 'w0'; make a new one"):
            call()


def test_keys_of_the_dead(ranks: Ranks):
    """Keys of a dead process are free again; a destroyed group refuses calls."""
    survivor, _ = ranks.world(2, dies_with_a_key)
    assert survivor is None


def wrong_timeouts(world: World) -> None:
    """A timeout must be a finite number of seconds, 0 or -1."""
    group = world.create_rpc_group("group", ["w0", "w1"])
    rref = group.remote("w0", abs, args=(-1,))
    for timeout in (-5, math.inf, math.nan, None):
        for call in (
            lambda t: group.rpc_sync("w0", abs, t, (-1,)),
            lambda t: group.remote("w0", abs, t, (-1,)),
            rref.to_here,
        ):
            with pytest.raises(OptionError, match="timeout must be a number of seconds above 0"):
                call(timeout)


def unusual_arguments(world: World) -> None:
    """Arguments that torch cannot pickle go by value; a lock is refused by name."""
    group = world.create_rpc_group("group", ["w0", "w1"])
    group.register(f"apply{world.rank}", lambda func, x: func(x))
    group.barrier()
    if world.rank == 0:
        number = group.remote("w1", abs, args=(-3,))

        class Local:
            value = 4

        calls = (
            lambda *args: group.rpc_sync("w1", divmod_of, args=args),
            lambda *args: group.remote("w1", divmod_of, args=args).to_here(),
            lambda *args: group.rpc_sync("w1", divmod_of, kwargs=dict(zip("abc", args))),
        )
        for call in calls:
            assert call(lambda: 7, Local(), number) == (7, 4, 3)
            with pytest.raises(TaskNotPicklable, match="a thread's lock"):
                call(threading.Lock(), Local(), number)
        assert group.registered_sync("apply1", (lambda x: x + 1, 1)) == 2
        assert group.registered_remote("apply1", (lambda x: x + 1, 1)).to_here() == 2
        assert group.rpc_sync("w1", lambda x: lambda: x, args=(5,))() == 5
    group.barrier()


def divmod_of(a: Any, b: Any, c: Any) -> tuple[int, int, int]:
    return a(), b.value, c.to_here()


class Locked:
    """Has a lock, so it cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        return "<a Locked>"

    def itself(self) -> Locked:
        return self

    def square(self) -> Any:
        return lambda x: x * x


class Hopeless(Exception):
    """Its ``__reduce__`` raises."""

    def __reduce__(self) -> Any:
        raise ValueError("is not pickled")


def raise_hopeless() -> None:
    raise Hopeless(Locked())


def unusual_results(world: World) -> None:
    """Results go by value; an unpicklable one is refused with the names of function and object."""
    group = world.create_rpc_group("group", ["w0", "w1"])
    if world.rank == 1:
        group.register("locked", Locked)
        group.pair("value", Locked())
    group.barrier()
    if world.rank == 0:
        there = group.remote("w1", Locked)
        for what, call in (
            ("Locked", lambda: group.rpc_sync("w1", Locked)),
            ("Locked", lambda: group.rpc_async("w1", Locked).wait()),
            ("service 'locked'", lambda: group.registered_sync("locked")),
            ("a reference", there.to_here),
            ("a reference", group.get_paired("value").to_here),
            ("method itself", there.rpc_sync().itself),
            ("method itself", lambda: there.rpc_async().itself().wait()),
            ("a reference", lambda: there.remote().itself().to_here()),
        ):
            with pytest.raises(ResultNotPicklable, match=f"<a Locked> of {what}") as error:
                call()
            assert "lock" in error.value.exc
        with pytest.raises(Hopeless) as raised:  # arrives without the lock
            group.rpc_sync("w1", raise_hopeless)
        assert raised.value.args == ("<a Locked>",)
        made = group.rpc_sync("w1", lambda: {"square": lambda x: x * x, "tensor": torch.ones(2)})
        assert made["square"](3) == 9 and made["tensor"].tolist() == [1, 1]
        assert there.rpc_sync().square()(4) == 16
        assert group.remote("w1", lambda: lambda x: -x).to_here()(5) == -5
        both = group.rpc_sync("w1", lambda: [torch.arange(3), {"two": torch.ones(1)}])
        assert both[0].tolist() == [0, 1, 2] and both[1]["two"].item() == 1
    group.barrier()


def test_two_ranks(ranks: Ranks):
    """Exceptions, values by key, timeouts, arguments and results, as each function says."""
    ranks.good_bodies(2, errors, values, wrong_timeouts, unusual_arguments, unusual_results)


def test_three_ranks(ranks: Ranks):
    """Calls and services, as each function says."""
    ranks.good_bodies(3, calls, services)
