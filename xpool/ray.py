"""Pools over the hosts of a Ray cluster.  docs/hosts.md.

    import xpool.ray
    from xpool import Pool

    with Pool(hosts=xpool.ray.hosts()) as pool:     # every core of the cluster
        ...

Ray places an agent on each host, watches it, and carries the bytes; each agent has an engine of
xpool's with its workers.  Needs ``pip install xpool[ray]``; nothing of Ray is imported before it is
used.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import queue
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from xpool.errors import OptionError, XPoolError
from xpool.hosts import fleet as f
from xpool.hosts.agent import Charge, packed, unpacked
from xpool.hosts.assembly import make_engine
from xpool.hosts.conversation import CALLS_IN_FLIGHT
from xpool.hosts.engine import HostEngine
from xpool.hosts.messages import Blob
from xpool.hosts.ray_actor import HostAgent, as_one, parts_of
from xpool.options import check_count
from xpool.pool.context import CtxPool as _CtxPool
from xpool.pool.process import Pool as _Pool

__all__ = ["CtxPool", "Devices", "HostDevice", "Hosts", "Pool", "devices", "hosts"]

LISTENS = 5.0
"""Seconds in which a cluster answers a connection."""

INLINE = 64 * 1024
"""Bytes of a call from which on Ray may put it into its store: it does from 100 KiB on, and a call
has a few more than it says."""

LOOK = 1.0
"""Seconds between two looks at which hosts the cluster has."""

REPLACED = 3
"""Agents that a host gets in place of others, at most: what they die of may be the host's."""


_begun_with: list[Any] = []
"""What `ray.init` was given as runtime_env, where it was called here: all actors have that, and
only there it may name a folder of this host."""


class Hosts(NamedTuple):
    """Which hosts of which cluster a pool uses, and how much of each.  Made by `hosts`."""

    address: str | None = None
    n: int | None = None
    per_host: int | None = None
    resources: Mapping[str, float] | None = None
    labels: Mapping[str, str] | None = None
    runtime_env: Mapping[str, Any] | None = None
    kind: str | None = None
    total: int | None = None

    def find(self) -> list[Node]:
        """Connect to the cluster, and return the hosts that fit.

        Raises:
            OptionError: there is no Ray, no cluster, or no host in it that fits.
        """
        ray = _ray()
        if ray.util.client.ray.is_connected():
            raise OptionError(
                "this program is a Ray Client driver, which carries 0.2 GB/s: run it on a host of "
                "the cluster (ray job submit), or connect without ray://"
            )
        if not ray.is_initialized():
            try:
                _look_for(self.address or os.environ.get("RAY_ADDRESS", ""))
                env = None if self.runtime_env is None else dict(self.runtime_env)
                ray.init(address=self.address, configure_logging=False, runtime_env=env)
                _begun_with.append(self.runtime_env)
            except OSError as exc:
                raise OptionError(
                    f"no Ray cluster is at address={self.address!r}: start one (ray start --head), "
                    "or leave address out for one on this machine alone"
                ) from exc
        return self.living()

    def make_engine(self, pool: Any, nodes: list[Node]) -> HostEngine:
        """Return the engine of a pool on these hosts."""
        workers = [node.workers for node in nodes]
        return make_engine(pool, workers, functools.partial(RayFleet, self, nodes), self.kind)

    def driver_address(self) -> str:
        """Return the address under which hosts reach this program."""
        return str(_ray().util.get_node_ip_address())

    def living(self) -> list[Node]:
        """Return the hosts that fit and are there now, those with the most workers first."""
        every = [self._node(one) for one in _ray().nodes() if one["Alive"]]
        fit = sorted((one for one in every if one is not None), key=lambda one: -one.workers)
        if not every:
            raise OptionError("the Ray cluster has no living host")
        if not fit:
            raise OptionError(
                f"none of the {len(every)} hosts of the Ray cluster has {self.per_host or 1} "
                f"{_RESOURCES[self.kind]}s, resources={dict(self.resources or {})} and "
                f"labels={dict(self.labels or {})}: ask for less, or add a host"
            )
        if self.total is None:
            return fit[: self.n]
        found = []
        missing = self.total
        for node in fit[: self.n]:
            workers = min(missing, node.workers)
            if workers:
                found.append(node._replace(workers=workers, cpus=min(workers, node.cpus)))
                missing -= workers
        if missing:
            raise OptionError(
                f"processes={self.total}: the Ray cluster has CPUs for {self.total - missing}"
            )
        return found

    def _node(self, about: dict[str, Any]) -> Node | None:
        has, labels = about["Resources"], about.get("Labels") or {}
        there = int(has.get(_RESOURCES[self.kind], 0))
        workers = self.per_host or there
        wanted = dict(self.resources or {})
        if not 0 < workers <= there or any(has.get(k, 0) < v for k, v in wanted.items()):
            return None
        if any(labels.get(k) != v for k, v in (self.labels or {}).items()):
            return None
        name = about["NodeManagerHostname"]
        cpus = min(workers, int(has.get("CPU", 0)))
        return Node(about["NodeID"], f"{name} ({about['NodeManagerAddress']})", workers, cpus)


class Node(NamedTuple):
    """A host of the cluster, how many workers it is to have, and CPUs for them."""

    id: str
    name: str
    workers: int
    cpus: int


_RESOURCES = {None: "CPU", "cpu": "CPU", "cuda": "GPU", "tpu": "TPU"}
"""What Ray calls the devices of a kind."""


class HostDevice(NamedTuple):
    """A device of a host, as the driver knows it; its worker gets a `xpool.devices.DeviceContext`,
    with the ``host``."""

    kind: str
    host: str
    ordinal: int


class Devices(list[HostDevice]):
    """What `devices` returns: contexts for `CtxPool`, and the hosts that they are on."""

    def __init__(self, found: Iterable[HostDevice], hosts: Hosts) -> None:
        super().__init__(found)
        self.hosts = hosts


def hosts(
    address: str | None = None,
    *,
    n: int | None = None,
    per_host: int | None = None,
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> Hosts:
    """Say which hosts of a Ray cluster a pool is to use: ``Pool(hosts=xpool.ray.hosts())``.

    Args:
        address: of the cluster, as `ray.init` takes it; None: the one that the program is connected
            to, or that RAY_ADDRESS names, or a new one on this machine alone.
        n: how many hosts, at most; None: all, and those that join while the pool works.
        per_host: workers on each; None: as many as it has CPUs.
        resources: what each host must have beside CPUs, as Ray names it, such as ``{"GPU": 4}``;
            that much is reserved.
        labels: what each host must be labelled with.
        runtime_env: as `ray.init` takes it: how code, packages and variables get to the hosts.

    Raises:
        OptionError: ``n`` or ``per_host`` is not a positive int.
    """
    if n is not None:
        check_count("n", n)
    if per_host is not None:
        check_count("per_host", per_host)
    return Hosts(address, n, per_host, resources, labels, runtime_env)


def devices(
    kind: str,
    *,
    address: str | None = None,
    n: int | None = None,
    per_host: int | None = None,
    labels: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> Devices:
    """Return a context for each device of a Ray cluster: for ``CtxPool(worker_contexts=...)``.

    What a worker gets as its context is a `xpool.devices.DeviceContext`, made on its host, inside
    what Ray has reserved there.

    Args:
        kind: "cpu", "cuda" or "tpu".
        address, n, labels, runtime_env: as of `hosts`.
        per_host: devices of each host; None: all that it has.

    Raises:
        OptionError: there is no such kind, or no host that has such devices.
    """
    if kind not in ("cpu", "cuda", "tpu"):
        raise OptionError(f"devices(kind={kind!r}): use 'cpu', 'cuda' or 'tpu'")
    where = hosts(address, n=n, per_host=per_host, labels=labels, runtime_env=runtime_env)._replace(
        kind=kind
    )
    nodes = where.find()
    ordinals = itertools.count()
    found = [
        HostDevice(kind, node.name, next(ordinals)) for node in nodes for _ in range(node.workers)
    ]
    return Devices(found, where)


def _look_for(address: str) -> None:
    """Raise `OSError` if nobody listens there: Ray would look for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in host:
        socket.create_connection((host.strip("[]"), int(port)), LISTENS).close()


def _ray() -> Any:
    try:
        import ray
        import ray.util.client
    except ImportError as exc:
        raise OptionError(
            "Ray is not installed, and pools over hosts need it: pip install xpool[ray]"
        ) from exc
    return ray


# -- in the driver -----------------------------------------------------------------------------


class RayFleet:
    """The agents of one pool.

    Args:
        where: which hosts.
        nodes: those that there are.
        charge: what each agent is to be.
    """

    def __init__(self, where: Hosts, nodes: list[Node], charge: Charge) -> None:
        self._where, self._first_nodes, self._charge = where, nodes, pickle.dumps(charge)
        self._tell: Callable[[Any], object] = id
        # Written by whoever makes the pool, and then by the thread that places agents alone.
        self._actors: dict[int, Any] = {}
        self._nodes: dict[int, Node] = {}
        self._agents: Counter[str] = Counter()  # how many each host has had, by Ray's id
        self._workers = 0
        self._over: set[int] = set()  # agents that were stopped, or have one in their place
        # Agents that have died, and why; None: no more are to be placed.
        self._ends: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        # Calls that Ray puts into its store: by host and number, with their arguments.
        self._large: queue.SimpleQueue[tuple[int, int, tuple[Any, ...]] | None]
        self._large = queue.SimpleQueue()

    def start(self, tell: Callable[[Any], object]) -> list[int]:
        """Place an agent on each host."""
        self._tell = tell
        for node in self._first_nodes:
            self._begin(self._place(node))
        for run, name in ((self._run, "xpool-hosts"), (self._send_large, "xpool-hosts-send")):
            threading.Thread(target=run, name=name, daemon=True).start()
        return [node.workers for node in self._first_nodes]

    def _place(self, node: Node) -> int:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = self._where
        options: dict[str, Any] = {
            "num_cpus": node.cpus,
            "resources": dict(where.resources or {}),
            "max_concurrency": 2 * CALLS_IN_FLIGHT,  # beats, and those that were lost
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
        }
        if where.kind in ("cuda", "tpu"):
            options["resources"][_RESOURCES[where.kind]] = node.workers
        gpus = options["resources"].pop("GPU", None)
        if gpus is not None:
            options["num_gpus"] = gpus
        if where.runtime_env is not None and where.runtime_env not in _begun_with:
            options["runtime_env"] = dict(where.runtime_env)
        number = len(self._actors)
        self._actors[number] = ray.remote(HostAgent).options(**options).remote()
        self._nodes[number] = node
        self._agents[node.id] += 1
        return number

    def _begin(self, number: int) -> None:
        node = self._nodes[number]
        first, self._workers = self._workers, self._workers + node.workers
        began = self._actors[number].begin.remote(self._charge, node.name, first, node.workers)
        self._when_done(began, functools.partial(self._began, number, node))

    def _add(self, node: Node) -> None:
        number = self._place(node)
        # It can be stopped from now on, and joins when this is known.
        self._tell(f.Coming(number, node.workers))
        try:
            self._begin(number)
        except Exception as exc:  # of Ray itself
            self._tell(f.Dead(number, f"{type(exc).__name__}: {exc}"))

    def _run(self) -> None:
        """Place an agent on each host that joins, and on one that has lost its agent and lives."""
        while True:
            try:
                ended = self._ends.get(timeout=LOOK)
            except queue.Empty:
                with contextlib.suppress(Exception):  # no cluster for a moment: it is looked again
                    self._look_at_hosts()
                continue
            if ended is None:
                return
            number, reason = ended
            with contextlib.suppress(Exception):  # no cluster: this host is lost, too
                self._replace(number)
            self._tell(f.Dead(number, reason))

    def _look_at_hosts(self) -> None:
        draining = _draining()
        for number, node in self._nodes.items():
            if node.id in draining and number not in self._over:
                self._tell(f.Draining(number))
        if self._where.n is None:
            for node in self._where.living():
                if not self._agents[node.id] and node.id not in draining:
                    self._add(node)

    def _replace(self, number: int) -> None:
        import ray

        node = self._nodes[number]
        if number in self._over or self._agents[node.id] > REPLACED:
            return
        self._over.add(number)
        if any(one["NodeID"] == node.id and one["Alive"] for one in ray.nodes()):
            self._add(node)

    def _dead(self, number: int, reason: str) -> None:
        """Tell that an agent is gone, after the one in its place: some host may be left by it."""
        if number in self._over:
            self._tell(f.Dead(number, reason))
        else:
            self._ends.put((number, reason))

    def _when_done(self, ref: Any, call: Callable[[Any, BaseException | None], object]) -> None:
        def done(future: Any) -> None:
            error = future.exception()
            call(None if error is not None else future.result(), error)

        ref.future().add_done_callback(done)

    def _began(self, number: int, node: Node, result: Any, error: BaseException | None) -> None:
        if error is None:
            self._tell(f.Joined(number, node.workers, node.name))
        elif self._is_dead(error):
            self._dead(number, _reason(error))
        else:
            cause = getattr(error, "cause", None) or error
            wrong = cause if isinstance(cause, XPoolError) else _not_there(node.name, cause)
            self._tell(f.Refused(wrong))
            self.stop(number)
            self._tell(f.Dead(number, str(wrong)))  # no call is under way that would say so

    def _is_dead(self, error: BaseException) -> bool:
        from ray import exceptions

        if isinstance(error, exceptions.ActorUnavailableError):
            return False
        gone = exceptions.RayActorError, exceptions.ActorUnschedulableError
        return isinstance(error, gone)

    def call(self, host: int, call: f.Call) -> None:
        """Call an agent."""
        refs: list[Any] = []
        messages = []
        for one in call.messages:
            if type(one) is Blob:
                refs.append(one.payload)
                one = one._replace(payload=len(refs) - 1)
            messages.append(one)
        said = as_one(packed(call._replace(messages=[]), messages))
        # Each argument costs Ray as much as all of a small call.
        arguments = said, *([refs] if refs else ())
        if type(said) is bytes and len(said) < INLINE:
            self._send(host, call.number, arguments)
        else:
            self._large.put((host, call.number, arguments))

    def _send_large(self) -> None:
        """Send what goes by way of Ray's store, which has this thread wait while it is full."""
        while (large := self._large.get()) is not None:
            self._send(*large)
            del large  # its room in the store is not ours to keep

    def _send(self, host: int, number: int, arguments: tuple[Any, ...]) -> None:
        actor = self._actors.get(host)
        if actor is None:  # the pool is over
            return

        def done(found: Any, error: BaseException | None) -> None:
            if error is not None:
                self._failed(host, number, error)
                return
            data, *large = parts_of(found)
            # Copied, so that the object store has its room again; to memory that may be written to,
            # so that this is the last copy.
            (taken, first), messages = unpacked(
                [data, *(memoryview(bytearray(one)) for one in large)]
            )
            self._tell(f.Replied(host, number, taken, first, messages))

        try:
            self._when_done(actor.call.remote(*arguments), done)
        except Exception as exc:  # of Ray itself, which the program may have shut down
            self._tell(f.Dead(host, f"{type(exc).__name__}: {exc}"))

    def _failed(self, host: int, number: int, error: BaseException) -> None:
        from ray import exceptions

        if self._is_dead(error):
            self._dead(host, _reason(error))
        elif isinstance(error, exceptions.RayTaskError):  # what the agent raised is a bug of ours
            self._tell(f.Refused(getattr(error, "cause", error)))
        else:
            self._tell(f.Unreached(host, number))

    def put(self, payload: bytes | memoryview) -> Any:
        """Put an object into Ray's store, which hosts copy from one another."""
        import numpy
        import ray

        return ray.put(numpy.frombuffer(payload, "uint8"))

    def stop(self, host: int) -> None:
        """End an agent and its workers."""
        import ray

        self._over.add(host)
        actor = self._actors.get(host)
        if actor is None:  # the pool is over
            return
        if not ray.is_initialized():
            self._tell(f.Dead(host, "the program has shut Ray down"))
            return
        # `ray.kill` waits for the thread of Ray's that calls back, and that may be this one.
        kill = threading.Thread(target=_kill, args=(actor,), name="xpool-hosts-stop", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and Ray ends its actors
            kill.start()

    def close(self) -> None:
        """Look for hosts no more, and let go of the agents."""
        self._ends.put(None)
        self._large.put(None)
        self._actors.clear()


def _draining() -> Collection[str]:
    """Return the ids of hosts that are about to go, such as those of a spot market."""
    from ray._private.state import state  # there is no public way to ask

    return getattr(state, "get_draining_nodes", dict)()  # older versions have none


def _kill(actor: Any) -> None:
    import ray

    with contextlib.suppress(Exception):  # it is gone already
        ray.kill(actor, no_restart=True)


def _reason(error: BaseException) -> str:
    """Return what Ray says of an actor's end, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [
        line for line in lines if not line.startswith(("class_name", "actor_id", "pid", "name"))
    ]
    return " ".join(said)[:400] or type(error).__name__


def _not_there(host: str, cause: BaseException) -> XPoolError:
    return XPoolError(
        f"no agent could be started on host {host}: {type(cause).__name__}: {cause}. All hosts "
        "need xpool and what the program imports; ray.init(runtime_env={'pip': [...], "
        "'working_dir': ...}) brings it there"
    )


class Pool(_Pool):
    """`xpool.Pool` on the cores of a Ray cluster: for who changes the import line alone.

    ``processes``: how many of them; None: all.  The other arguments are those of `xpool.Pool`.
    """

    def __init__(self, processes: int | None = None, *args: Any, **options: Any) -> None:
        options.setdefault("hosts", _so_many(processes))
        super().__init__(None, *args, **options)


class CtxPool(_CtxPool[Any]):
    """`xpool.CtxPool` on the hosts of a Ray cluster.  Arguments as of `Pool`."""

    def __init__(self, processes: int | None = None, *args: Any, **options: Any) -> None:
        if options.get("worker_contexts") is None:
            options.setdefault("hosts", _so_many(processes))
        super().__init__(None, *args, **options)


def _so_many(processes: int | None) -> Hosts:
    if processes is not None:
        check_count("processes", processes)
    return hosts()._replace(total=processes)
