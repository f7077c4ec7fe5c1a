"""Ordered servers: a version is taken only if it follows the newest."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.server needs torch")

import torch
from support.ranks import Ranks
from support.tiers import also

from xpool.distributed import GroupKeyError, NotAMember, PeerLost, World
from xpool.errors import OptionError
from xpool.server import OrderedServerBase, OrderedServerSimple, OrderedServerSimpleImpl
from xpool.server._models import VersionError

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]


class NoGroup:
    """Replaces a group for a server that is called directly."""

    def pair(self, *_: Any) -> None:
        pass

    register = pair


def server(**options: Any) -> OrderedServerSimpleImpl:
    return OrderedServerSimpleImpl("server", NoGroup(), **options)


def test_versions_follow_each_other():
    """A push is taken only if it names the newest version as the previous one."""
    one = server()
    assert one._push_service("a", "value", 1, None)
    assert not one._push_service("a", "other", 2, 0)
    assert one._push_service("a", "value2", 2, 1)
    assert one._push_service("a", "value3", -1, 2)
    assert one._pull_service("a") == ("value3", -1)
    assert one._pull_service("a", 2) == ("value2", 2)
    assert one._pull_service("a", 1) is None
    assert one._pull_service("b") is None
    assert one._push_service("a", "again", -1, -1)  # replaces the same version
    assert one._pull_service("a") == ("again", -1)


def test_impossible_versions():
    """An impossible next version is an error that lists the existing versions."""
    one = server(version_depth=3)
    for version in (1, 2, 3):
        assert one._push_service("a", version, version, version - 1)
    with pytest.raises(VersionError, match=r"Version 2 of 'a' cannot follow 3.*\[1, 2, 3\]"):
        one._push_service("a", "x", 2, 3)
    with pytest.raises(ValueError, match="7 of 'a' has never existed: the newest is 3"):
        one._push_service("a", "x", 8, 7)
    assert one._push_service("b", "x", "second", "first")
    assert not one._push_service("b", "x", 9, 8)  # versions without an order
    assert one._pull_service("a") == (3, 3)


@pytest.mark.parametrize("depth", [2, *also(1, 5)])
def test_depth(depth: int):
    """The server keeps `version_depth` versions before the newest."""
    one = server(version_depth=depth)
    for version in range(10):
        one._push_service("a", version, version, version - 1)
    kept = [version for version in range(10) if one._pull_service("a", version)]
    assert kept == list(range(9 - depth, 10))


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, None])
def test_bad_depth(depth: Any):
    """An invalid depth is refused."""
    with pytest.raises(OptionError, match="version_depth must be"):
        server(version_depth=depth)


def test_values_are_copies():
    """A pulled value is a copy."""
    one = server()
    one._push_service("a", tensor := torch.ones(2), 1, 0)
    one._pull_service("a")[0].zero_()
    assert one._pull_service("a")[0].tolist() == [1, 1]
    assert tensor.tolist() == [1, 1]


def test_base_is_abstract():
    """A subclass must define both methods."""
    with pytest.raises(TypeError, match="abstract"):
        OrderedServerBase()  # type: ignore[abstract]


def test_races(ranks: Ranks):
    """If several ranks push the same next version, one succeeds, and its value is kept."""
    outcomes = ranks.good_world(3, push_in_turn)
    for version in range(20):
        assert sum(won[version] for _, won in outcomes) == 1
    last = next(rank for rank, (_, won) in enumerate(outcomes) if won[19])
    assert [value for value, _ in outcomes] == [last] * 3


def push_in_turn(world: World) -> Any:
    """All ranks push the same version, then wait for each other."""
    group = world.create_rpc_group("group", ["w0", "w1", "w2"])
    if world.rank == 0:
        OrderedServerSimpleImpl("server", group)
    group.barrier()
    access = group.get_paired("server").to_here()
    won = []
    for version in range(1, 21):
        won.append(access.push("key", world.rank, version, version - 1))
        group.barrier()
    return access.pull("key")[0], won


def test_one_pusher(ranks: Ranks):
    """Another rank gets errors for taken names, missing services and impossible versions."""

    def body(world: World) -> Any:
        group = world.create_rpc_group("group", ["w0", "w1"])
        if world.rank == 0:
            OrderedServerSimpleImpl("server", group, version_depth=2)
            with pytest.raises(GroupKeyError, match="already registered"):
                OrderedServerSimpleImpl("server", group)
        group.barrier()
        if world.rank == 1:
            access = group.get_paired("server").to_here()
            assert isinstance(access, OrderedServerSimple)
            for version in range(1, 5):
                assert access.push("key", torch.full((3,), version), version, version - 1)
            value, version = access.pull("key")
            assert (value.tolist(), version) == ([4, 4, 4], 4)
            assert access.pull("key", 2)[1] == 2
            assert access.pull("key", 1) is None
            with pytest.raises(VersionError, match="has never existed"):
                access.push("key", 1, 100, 99)
            missing = OrderedServerSimple("other", group)
            with pytest.raises(GroupKeyError, match="not found on .*'server/_push_service'"):
                missing.push("key", 1, 1, 0)
            with pytest.raises(NotAMember):
                group.rpc_sync("w9", abs, args=(1,))
        group.barrier()

    ranks.good_world(2, body)


def server_dies(world: World) -> None:
    group = world.create_rpc_group("group", ["w1", "w0"])
    if world.rank == 0:
        OrderedServerSimpleImpl("server", group)
    group.barrier()
    if world.rank == 0:
        os.kill(os.getpid(), 9)
    access = OrderedServerSimple("server", group)
    world.peers.wait_lost(["w0"], 20)
    for lost in (lambda: access.push("key", 1, 1, 0), lambda: access.pull("key")):
        with pytest.raises(PeerLost, match="'w0' has died"):
            lost()


def test_server_dies(ranks: Ranks):
    """When the server's process dies, its clients get an error at once."""
    assert ranks.world(2, server_dies, rpc_timeout=600)[1] is None
