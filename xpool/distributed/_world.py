"""`World`: the processes that work together, each with a rank and a name."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch.distributed import rpc
from torch.futures import Future

import xpool.distributed._current as current
import xpool.distributed._rendezvous as rendezvous
from xpool._python.starting import PromptThread
from xpool._worker.worker_context import current_worker
from xpool.distributed._collective import CollectiveGroup, explain
from xpool.distributed._current import GroupError, NotAMember, PeerLost
from xpool.distributed._remote_calls import (
    FAREWELL_SECONDS,
    Farewell,
    Meetings,
    leave,
    meet,
    watch,
)
from xpool.distributed._rpc_group import Register, RpcGroup
from xpool.errors import OptionError

_joined: dict[str, int] = {}  # number of worlds that this process has joined, by address


class World:
    """The processes that work together, and the place of this process among them.

    Each process of the world makes a `World`. The call returns when all have joined. A process can
    be in one world at a time. A ``with`` block calls `stop` at its end.

    Args:
        name: a unique name for this process: letters, digits, ``_``, ``-`` and ``:``.
        rank: the number of this process, from 0. -1 takes it from the environment variable
            ``RANK``, which torchrun sets. A process that joins several worlds with RPC, one after
            the other, needs the same rank in all.
        world_size: the number of processes. -1 takes it from ``WORLD_SIZE``.
        init_dist: whether the world has collective groups.
        init_rpc: whether the world has RPC groups. RPC also detects deaths at once; see `lost`.
        dist_backend: torch's backend for collective groups: ``"gloo"``, ``"nccl"``, ``"xla"``.
        dist_init_method: the address where the ranks meet: ``tcp://host:port`` (rank 0 listens
            there), ``file:///path`` of a new file that all can access, or ``env://``. Default:
            ``env://`` if ``MASTER_ADDR`` is set, else ``tcp://localhost:9100``.
        rpc_init_method: the same for RPC. Default: derived from ``dist_init_method``.
        dist_timeout: seconds for joining, and for each operation of `group`. If a rank dies or
            gives up while the others connect to it, gloo waits five times as long.
        rpc_timeout: seconds that a remote call may take unless it has its own ``timeout``.

    Raises:
        OptionError: an argument has a wrong value, or a rank or a name is taken.
        GroupTimeout: not all processes joined within ``dist_timeout``, or within ``rpc_timeout``
            in a world without collective groups.
        PeerLost: a process died or gave up while the others joined.
        GroupError: this process is in a world already.
    """

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int = -1,
        init_dist: bool = True,
        init_rpc: bool = True,
        dist_backend: str = "gloo",
        dist_init_method: str | None = None,
        rpc_init_method: str | None = None,
        dist_timeout: float = 60,
        rpc_timeout: float = 60,
    ) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_:-]{1,127}", name):
            raise OptionError(
                f"name must be 1 to 127 letters, digits, '_', '-' or ':', not {name!r}"
            )
        if not (init_dist or init_rpc):
            raise OptionError("a world needs init_dist or init_rpc, or both")
        dist_timeout = rendezvous.check_seconds("dist_timeout", dist_timeout)
        rpc_timeout = rendezvous.check_seconds("rpc_timeout", rpc_timeout)
        self.name = name
        self.rank, self.world_size = rendezvous.place(rank, world_size)
        # Checked first, because torch may wait for minutes at a wrong address.
        rendezvous.check_address("dist_init_method", dist_init_method)
        rendezvous.check_address("rpc_init_method", rpc_init_method)
        if init_dist:
            check_backend("dist_backend", dist_backend)
        self.rpc_timeout, self.dist_timeout = rpc_timeout, dist_timeout
        self.has_dist, self.has_rpc = init_dist, init_rpc
        self.started = False
        self._running: list[str] = []  # parts of torch that were started: "dist", "rpc"
        self._store: Any = None
        self.groups: dict[str, RpcGroup] = {}
        self.register, self.meetings = Register(), Meetings()
        self.left: Future[str] = Future()  # answers the calls that other ranks hold open
        self._lock = threading.Lock()
        # Guarded by _lock: the open collective groups, and how many were made of the same ranks.
        self._collective: list[CollectiveGroup] = []
        self._made: dict[tuple[int, ...], int] = {}
        self._everyone: CollectiveGroup | None = None

        if dist_init_method is None and rpc_init_method is not None:
            address = rendezvous.beside(rpc_init_method)
        else:
            address = dist_init_method or rendezvous.default_address()
        # Claimed before torch is called, because torch's state in this process serves one world.
        current.claim(self)
        try:
            self._join(address, rpc_init_method or rendezvous.beside(address), dist_backend)
        except BaseException:
            self._tear_down(graceful=False)
            raise

    def _join(self, address: str, rpc_address: str, backend: str) -> None:
        if self.has_rpc:
            check_agents_rank(self.rank)
        if self.has_dist and dist.is_initialized():
            raise OptionError(
                "this process has a default group of torch.distributed, and can have one: call "
                "torch.distributed.destroy_process_group() first, or use init_dist=False"
            )
        limit = self.dist_timeout if self.has_dist else self.rpc_timeout
        place = self.rank, self.world_size
        # A store may outlive a world, as torchrun's does.  So each world has its own prefix.
        earlier = _joined.get(address, 0)
        end = time.monotonic() + limit
        base = rendezvous.open_store(address, *place, limit)
        if self.has_rpc:
            # A rank that does not find RPC's store sends no name, so the others' errors name it.
            left = max(end - time.monotonic(), 0.1)
            rpc_store = rendezvous.open_store(rpc_address, *place, left)
        self._store = dist.PrefixStore(f"xpool/{earlier}", base)
        self.names = rendezvous.exchange_names(self._store, address, self.name, *place, limit)
        self.rank_name_map = dict(enumerate(self.names))
        self.peers = current.Peers(self.names, self.name, self._on_loss)
        try:
            if self.has_dist:
                # Appended before the start, because `_tear_down` also ends a failed start.
                self._running.append("dist")
                _forget_failed_starts()
                dist.init_process_group(
                    backend,
                    timeout=timedelta(seconds=limit),
                    rank=self.rank,
                    world_size=self.world_size,
                    store=dist.PrefixStore("dist", self._store),
                )
            if self.has_rpc:
                start_agent(self.name, *place, rpc_store, earlier, limit, self.rpc_timeout)
                self._running.append("rpc")
                # Watched before the meeting, so that a death ends the meeting.
                watch(self.peers, limit)
                # No rank may use the world, or leave it, while others still connect.
                meet(self.names[0], ("join", "the world"), tuple(self.names), limit)
        except GroupError:
            raise
        except RuntimeError as exc:
            error = explain(self, tuple(self.names), exc, limit)
            raise type(error)(f"{self.name!r} could not join the world: {error}.") from exc
        _joined[address] = earlier + 1
        self.started = True

    # -- ranks --------------------------------------------------------------------------------

    def get_ranks(self) -> list[int]:
        """Return the ranks of all processes: 0 to ``world_size - 1``."""
        return list(range(self.world_size))

    def get_members(self) -> list[str]:
        """Return the names of all processes, in the order of their ranks."""
        return list(self.names)

    def lost(self, rank: int, reason: str = "has died") -> None:
        """Report that a rank is lost. A world with RPC detects this itself.

        Pending operations with this rank raise `PeerLost`, and its text contains ``reason``. Raises
        `OptionError` if the rank is not in the world.
        """
        self._check_ranks([rank])
        self.peers.lose(self.names[rank], reason)

    def _on_loss(self, name: str, completed: dict[Any, int]) -> None:
        # Called without the lock: meetings have their own, and a group may close connections.
        self.meetings.lose(name)
        with self._lock:
            groups = list(self._collective)
        error = PeerLost(self.peers.describe(name))
        for group in groups:
            if self.names.index(name) in group.ranks:
                group.operations.break_for(error, completed=completed.get(group.key, 0))

    @property
    def group(self) -> CollectiveGroup:
        """The group of all ranks, with ``dist_timeout`` as its timeout.

        It uses torch's default process group, as all functions of `torch.distributed` do. Raises
        `GroupError` if the world was stopped, or was made without collective groups.
        """
        self._check_started(self.has_dist, "collective groups", "init_dist=True")
        with self._lock:
            everyone, first = self._everyone, self._everyone is None
            if everyone is None:
                ranks = self.get_ranks()
                everyone = CollectiveGroup(
                    self, ranks, dist.group.WORLD, self.dist_timeout, -1, self._forget_group
                )
                self._everyone = everyone
                self._collective.append(everyone)
        if first:
            # Called after the group is in `_collective`, so that no loss is missed between the two.
            self._tell_losses(everyone)
        return everyone

    def _tell_losses(self, made: CollectiveGroup) -> None:
        """Break a new group if one of its ranks is lost already."""
        lost = self.peers.lost()
        for rank in made.ranks:
            if self.names[rank] in lost:
                made.operations.break_for(PeerLost(self.peers.describe(self.names[rank])))

    # -- groups -------------------------------------------------------------------------------

    def create_collective_group(
        self, ranks: Sequence[int], timeout: float = 60, backend: str | None = None
    ) -> CollectiveGroup:
        """Make a group of these ranks.  Each of them must call this; it returns when all have.

        torch identifies a group by its ranks and by the number of open groups. So processes that
        make several groups together make them in the same order, and close the same ones. Other
        ranks may call this, too; their operations in the group raise `NotAMember`.

        Args:
            ranks: ranks of the world, in any order. The group sorts them.
            timeout: seconds for each operation of the group, and for making it.
            backend: a backend of torch, as ``dist_backend`` of `World`. None: the world's.

        Raises:
            OptionError: a rank is not in the world, or is given twice, or torch lacks the backend.
            PeerLost: a member has died.
            GroupTimeout: a member did not call this within the timeout.
            GroupError: the world was stopped, or was made without collective groups.
        """
        self._check_started(self.has_dist, "collective groups", "init_dist=True")
        ranks = sorted(self._check_ranks(ranks))
        timeout = rendezvous.check_seconds("timeout", timeout)
        if backend is not None:
            check_backend("backend", backend)
        group, number = None, 0
        if self.rank in ranks:
            with self._lock:
                number = self._made.get(tuple(ranks), 0)
                self._made[tuple(ranks)] = number + 1
            names = tuple(self.names[rank] for rank in ranks)
            # A death ends a meeting at once, but ends torch's call only at its timeout.
            if self.has_rpc:
                key = ("create_collective_group", f"ranks {', '.join(map(str, ranks))}", number)
                meet(names[0], key, names, timeout)
            limit = timedelta(seconds=timeout)
            try:
                group = dist.new_group(ranks, limit, backend, use_local_synchronization=True)
            except RuntimeError as exc:
                error = explain(self, names, exc, timeout)
                raise type(error)(
                    f"The group of {', '.join(names)} could not be made: {error}. All of them have "
                    "to make it, with as many other groups open as each other."
                ) from exc
        made = CollectiveGroup(self, ranks, group, timeout, number, self._forget_group)
        if group is not None:
            with self._lock:
                self._collective.append(made)
            self._tell_losses(made)
        return made

    def create_rpc_group(self, group_name: str, members: Sequence[str]) -> RpcGroup:
        """Make a group of these processes. All of them call this; it returns when all have.

        Args:
            group_name: a name that no other group of these processes has.
            members: names of processes, in the same order in all calls. The first member keeps the
                group's register: a table of which member holds each value and service.

        Raises:
            OptionError: a name is not in the world, or is given twice, or the calls differ.
            NotAMember: the calling process is not one of the members.
            GroupError: the calling process has a group of this name, or the world was stopped, or
                was made without RPC.
            PeerLost: a member has died.
            GroupTimeout: a member did not call this within ``rpc_timeout``.
        """
        self._check_started(self.has_rpc, "RPC groups", "init_rpc=True")
        members = list(members)
        for name in members:
            if name not in self.names:
                raise OptionError(
                    f"{name!r} is not in the world; its members: {', '.join(self.names)}."
                )
        if len(set(members)) < len(members):
            raise OptionError(f"a member is given twice: {', '.join(members)}.")
        if self.name not in members:
            raise NotAMember(
                f"{self.name!r} makes group {group_name!r}, but is not one of its members: "
                f"{', '.join(members) or 'none'}."
            )
        group = RpcGroup(group_name, members)
        # `setdefault` is atomic: if two threads use the same name, one of them fails.
        if self.groups.setdefault(group_name, group) is not group:
            there = ", ".join(self.groups)
            raise GroupError(
                f"Group {group_name!r} already exists in {self.name!r}; take another name, or "
                f"destroy() that one. Groups: {there}."
            )
        try:
            # The group is in `groups` already: members may call it right after the meeting.
            meet(members[0], ("create_rpc_group", group_name), tuple(members))
        except BaseException:
            self.groups.pop(group_name, None)
            raise
        return group

    def _forget_group(self, group: CollectiveGroup) -> None:
        with self._lock:
            if group in self._collective:
                self._collective.remove(group)

    def _check_started(self, has: bool, what: str, option: str) -> None:
        if not self.started:
            raise GroupError(f"The world of {self.name!r} has been stopped; make a new one.")
        if current.current() is not self:
            raise GroupError(f"{self.name!r} is the process from which this one was forked.")
        if not has:
            raise GroupError(f"This world has no {what}: make it with {option} in all processes.")

    def _check_ranks(self, ranks: Sequence[int]) -> list[int]:
        ranks = list(ranks)
        for rank in ranks:
            if rank not in range(self.world_size):
                raise OptionError(
                    f"rank {rank!r} is not in the world; its ranks: 0 to {self.world_size - 1}."
                )
        if not ranks or len(set(ranks)) < len(ranks):
            raise OptionError(f"give each rank once, and at least one: {ranks}.")
        return ranks

    # -- end ----------------------------------------------------------------------------------

    def stop(self, graceful: bool = True) -> None:
        """Leave the world. This process may then join another.

        With RPC this waits until all ranks that are not lost have called it, so that no call fails
        because its callee has left. It also waits, for a group's timeout at most, until the others
        have received all messages of collective groups. It emits a `ResourceWarning` for messages
        that were not received.

        With ``graceful=False`` it does not wait, and operations of the others with this process
        raise `PeerLost`. Raises `GroupError` if the world has been stopped already.
        """
        self._check_started(True, "", "")
        if graceful and self.has_rpc:
            # torch's graceful shutdown waits for all ranks, and would time out if one is lost.
            graceful = not self._last_meeting()
        try:
            if graceful:
                for group in list(self._collective):
                    # With RPC a short wait is enough: after the last meeting no rank receives.
                    operations = group.operations
                    operations.send_out(FAREWELL_SECONDS if self.has_rpc else operations.timeout)
        finally:
            self.started = False
            self._tear_down(graceful)

    def _last_meeting(self) -> list[str]:
        """Wait until all ranks that are not lost call `stop`.  Return the lost ones."""
        key = ("stop", "the world")
        while True:
            # All ranks learn of the same losses, so they finally choose the same host.
            lead = self.peers.lead()
            try:
                return meet(lead, key, tuple(self.names), timeout=0, of_survivors=True)
            except PeerLost:
                if lead == self.peers.lead():
                    raise
                # The host was lost, so the ranks meet at the next one.

    def _tear_down(self, graceful: bool) -> None:
        try:
            if "rpc" in self._running:
                # Called before the groups end, because the farewell contains their progress.
                leave(self.peers, self.left, None if graceful else self._farewell)
                shut_down_agent(graceful)
            for group in list(self._collective):  # each group removes itself from the list
                group.end()
            # If `World.group` was used, its end has destroyed torch's default group.
            if "dist" in self._running and dist.is_initialized():
                dist.destroy_process_group()
        finally:
            self._store = None
            current.free(self)

    def _farewell(self, name: str) -> Farewell:
        with self._lock:
            groups = list(self._collective)
        completed = {group.key: group.operations.completed() for group in groups}
        return completed, self.meetings.answers(name)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.started:
            self.stop(graceful=kind is None)

    def __reduce__(self) -> Any:
        raise TypeError("A World belongs to its process and cannot be sent; make one in each.")

    def __repr__(self) -> str:
        state = "" if self.started else ", not started"
        return f"<World {self.name!r}, rank {self.rank} of {self.world_size}{state}>"


def get_world() -> World | None:
    """Return the world that this process is in, or None."""
    return cast("World | None", current.current())


def is_world_initialized() -> bool:
    """Whether this process is in a world."""
    return get_world() is not None


def join(
    rank: int,
    world_size: int,
    address: str,
    *,
    name: str | None = None,
    backend: str = "gloo",
    init_rpc: bool = False,
    timeout: float = 60,
) -> World:
    """Join the world that meets at ``address`` as rank ``rank``, in a worker of a pool.

    If this process is in a world, it first leaves that one without waiting. So a pool can make its
    world again, at a new address, after it has replaced a worker. The arguments and errors are
    those of `World`; ``timeout`` is its ``dist_timeout`` and ``rpc_timeout``.
    """
    before = get_world()
    if before is not None:
        before.stop(graceful=False)
    return World(
        name or f"worker-{rank}",
        rank,
        world_size,
        init_rpc=init_rpc,
        dist_backend=backend,
        dist_init_method=address,
        dist_timeout=timeout,
        rpc_timeout=timeout,
    )


def _forget_failed_starts() -> None:
    """Reset torch's count of process groups to 0.

    The count is a part of a group's prefix in the store, and torch also counts failed starts.
    Without a reset, ranks with different numbers of failed starts would not find each other.
    """
    counts: Any = getattr(dist.distributed_c10d, "_world", None)
    if counts is not None:
        counts.group_count = 0


@atexit.register
def _leave() -> None:
    """Leave the world when the process ends, so that torch's threads end before Python does."""
    world = get_world()
    if world is not None and world.started:
        world.stop(graceful=False)


def check_backend(name: str, value: Any) -> None:
    """Raise `OptionError`, with ``name`` as the argument's name, unless torch has the backend.

    ``value`` may name a backend for each kind of device: ``"cpu:gloo,cuda:nccl"``.
    """
    known = [one for one in dist.Backend.backend_list if one != "undefined" and _is_built(one)]
    parts = value.split(",") if isinstance(value, str) else [value]
    for part in parts:
        backend = part.rpartition(":")[2].lower() if isinstance(part, str) else part
        if backend not in known:
            hint = ""
            if backend == "xla":
                hint = "; import torch_xla.distributed.xla_backend before, which registers that one"
            raise OptionError(
                f"{name}={value!r}: this torch has no backend {backend!r}; it has "
                f"{', '.join(known)}{hint}"
            )


def _is_built(backend: str) -> bool:
    """Whether this build of torch has a backend; True for a backend of another package."""
    ask = getattr(dist, f"is_{backend}_available", None)
    return ask is None or bool(ask())


# -- the world of a pool's workers -----------------------------------------------------------------

_INTERFACE = "GLOO_SOCKET_IFNAME"

_STORE_IS_THERE = "TORCHELASTIC_USE_AGENT_STORE"
"""With this variable set, torch opens no store at a TCP address: it expects that one exists."""

_generation = 0  # the generation of the group that this worker has joined; 0: none


class Join(NamedTuple):
    """A function that makes its worker a member of the pool's world, and returns its process id.

    `Pool.create_group` runs it in each worker.
    """

    generation: int
    size: int
    address: str
    backend: str
    timeout: float

    def __call__(self, *_: Any) -> int:
        global _generation
        if self.backend == "xla":
            import_module("torch_xla.distributed.xla_backend")  # registers the backend
        # A replacement has the index, and so the rank, of the worker that it replaces.
        rank = current_worker().index
        with _variables(self.address):
            join(rank, self.size, self.address, backend=self.backend, timeout=self.timeout)
        # Set after `join`, because a worker that could not join is in no group.
        _generation = self.generation
        return os.getpid()


@contextmanager
def _variables(address: str) -> Iterator[None]:
    """Set torch's environment variables in the block: over hosts, to use the driver's store; on one
    machine, to use the loopback interface, unless the environment names another interface."""
    wanted: dict[str, str] = {}
    if address.startswith("tcp:"):
        wanted[_STORE_IS_THERE] = "True"
    elif sys.platform == "linux" and _INTERFACE not in os.environ:
        wanted[_INTERFACE] = "lo"
    before = {name: os.environ.get(name) for name in wanted}
    # Torch reads the variables only when it makes a group, so they are restored for the tasks.
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def in_group(generation: int) -> Iterator[None]:
    """Run a block in all members.  If it fails in one member, the others do not wait for it."""
    world = get_world()
    # A replacement has not joined, and a group of an earlier generation has dead members.
    if world is None or _generation != generation:
        raise PeerLost(
            f"worker {current_worker().index} has replaced another since the group was made, "
            "and is not in it yet; the next run_all makes the group anew"
        )
    with world.group.together("run_all"):
        yield


# -- torch's RPC agent -----------------------------------------------------------------------------
# A process can start an agent after it has ended another one.  For this, the functions work around
# seven properties of torch's RPC, and set private names of torch, except those that torch's version
# lacks.
#
# * The ranks meet through a process group with a timeout of half an hour, which no option changes.
# * The agent opens the store at its address itself, without a timeout if a host name has no
#   address.
# * It numbers meetings by counters of the process, and a replacement process would count from 0.
# * A process can only ever have one rank.  So another rank is refused early.
# * TensorPipe's transport "shm" keeps a lock in shared memory for each rank.  A rank that is killed
#   while it holds the lock of another stops all others that write there, for ever.  So it is left
#   out, and also the channel "mpt_uv", which opens many connections to each rank.
# * Its shutdown waits for the functions that others have called here, even if they run for hours.
# * An agent whose start has failed is there, but its calls have no timeout.  So it calls nobody.

SHUTDOWN_SECONDS = 10

_agents_rank: int | None = None  # the rank of this process; None before its first agent

_SCHEME = "xpool"
_offered: tuple[Any, int, int] | None = None  # store, rank and world size, while an agent starts


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store that `start_agent` got, because torch accepts only an address."""
    offered = _offered  # torch keeps this generator, which keeps the store
    assert offered is not None
    yield offered


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


def check_agents_rank(rank: int) -> None:
    """Raise `OptionError` if this process cannot have an agent of this rank."""
    if _agents_rank not in (None, rank):
        raise OptionError(
            f"This process was rank {_agents_rank} of a world with RPC, and torch lets it have no "
            f"other rank: give it that rank again, not {rank}, or use init_rpc=False."
        )


def start_agent(
    name: str,
    rank: int,
    world_size: int,
    store: Any,
    earlier: int,
    timeout: float,
    rpc_timeout: float,
) -> None:
    """Start the agent.  Return when all ranks have started theirs.  If this fails, none is left.

    ``earlier`` is the number of worlds that have used this store, ``timeout`` the seconds in which
    all ranks must start, ``rpc_timeout`` the default timeout of later calls, in seconds.
    """
    global _agents_rank, _offered
    # Set before torch is called, because torch keeps the rank even if the start fails.
    _agents_rank = rank
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://",
        rpc_timeout=rpc_timeout,
        _transports=["ibv", "uv"],
        _channels=["cma", "basic"],
    )
    rpc._init_counter = earlier  # torch's prefix in the store contains it
    for counts in ("_all_gather_sequence_id", "_all_gather_sequence_id_to_states"):
        getattr(rpc.api, counts, {}).clear()
    constants: Any = rpc.backend_registry.rpc_constants
    limit = getattr(constants, "DEFAULT_PROCESS_GROUP_TIMEOUT", None)
    with warnings.catch_warnings():
        # torch itself uses a class here that it has deprecated.
        warnings.filterwarnings("ignore", "You are using a Backend .*", UserWarning)
        constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=timeout)
        _offered = store, rank, world_size
        try:
            rpc.init_rpc(name, rpc.BackendType.TENSORPIPE, rank, world_size, options)
        except BaseException as exc:
            shut_down_agent(graceful=False)
            # In its report of an error, torch looks for a group that it has not registered.
            if isinstance(exc, ValueError) and isinstance(exc.__context__, RuntimeError):
                raise exc.__context__ from None
            raise
        finally:
            constants.DEFAULT_PROCESS_GROUP_TIMEOUT = limit
            _offered = None


def shut_down_agent(graceful: bool) -> None:
    """End the agent, if there is one.  ``graceful``: wait until all ranks end their agents."""

    def end() -> None:
        try:
            rpc.shutdown(graceful, timeout=SHUTDOWN_SECONDS)
        except RuntimeError:
            pass  # RPC was not running, or a rank has just died; RPC has ended now

    # This thread can be abandoned, because torch's timeout does not limit waits for functions here.
    thread = PromptThread(target=end, name="xpool-rpc-shutdown", daemon=True)
    thread.start()
    # With ``graceful``, torch waits twice: for all ranks, and for the ends of their calls.
    thread.join(2 * SHUTDOWN_SECONDS if graceful else SHUTDOWN_SECONDS)
    if thread.is_alive():
        warnings.warn(
            "This process has left its world while functions that other members had called still "
            "ran in it; it cannot join another world with RPC before they have returned.",
            ResourceWarning,
            stacklevel=4,
        )
