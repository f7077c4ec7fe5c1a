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

import functools
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from xpool._calls.options import check_count
from xpool._hosts.assembly import make_engine
from xpool._hosts.engine import HostEngine
from xpool._hosts.ray_fleet import BEGUN_WITH, RESOURCES, Node, RayFleet, named, ray_module
from xpool._pools.context import CtxPool as _CtxPool
from xpool._pools.process import Pool as _Pool
from xpool.errors import OptionError

__all__ = ["CtxPool", "Devices", "HostDevice", "Hosts", "Pool", "devices", "hosts"]

LISTENS = 5.0
"""Seconds in which a cluster answers a connection."""


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
            ImportError: Ray is not installed.
            OptionError: there is no cluster, or no host in it that fits.
        """
        ray = ray_module()
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
                BEGUN_WITH.append(self.runtime_env)
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
        return str(ray_module().util.get_node_ip_address())

    def living(self) -> list[Node]:
        """Return the hosts that fit and are there now, those with the most workers first."""
        every = [self._node(one) for one in named(ray_module().nodes()) if one["Alive"]]
        fit = sorted((one for one in every if one is not None), key=lambda one: -one.workers)
        if not every:
            raise OptionError("the Ray cluster has no living host")
        if not fit:
            raise OptionError(
                f"none of the {len(every)} hosts of the Ray cluster has {self.per_host or 1} "
                f"{RESOURCES[self.kind]}s, resources={dict(self.resources or {})} and "
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
        there = int(has.get(RESOURCES[self.kind], 0))
        workers = self.per_host or there
        wanted = dict(self.resources or {})
        if not 0 < workers <= there or any(has.get(k, 0) < v for k, v in wanted.items()):
            return None
        if any(labels.get(k) != v for k, v in (self.labels or {}).items()):
            return None
        cpus = min(workers, int(has.get("CPU", 0)))
        return Node(about["NodeID"], about["xpool_name"], workers, cpus)


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


class Pool(_Pool):
    """`xpool.Pool` on the cores of a Ray cluster, for programs that change the import line alone.

    Args:
        processes: how many cores; None: all.
        ray_address, ray_remote_args: as of `ray.util.multiprocessing.Pool`: the cluster's address,
            and options of its actors.  Of these, ``runtime_env`` is used; ``num_cpus`` may be 1.
        initializer, initargs, maxtasksperchild, options: as of `xpool.Pool`.

    Raises:
        OptionError: ``ray_remote_args`` has another option, or ``hosts=`` is given as well.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: Iterable[Any] | None = None,
        maxtasksperchild: int | None = None,
        context: Any = None,
        ray_address: str | None = None,
        ray_remote_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        options["hosts"] = _where(options.get("hosts"), processes, ray_address, ray_remote_args)
        # Ray's own has None where `multiprocessing` has an empty tuple.
        super().__init__(None, initializer, initargs or (), maxtasksperchild, context, **options)


class CtxPool(_CtxPool[Any]):
    """`xpool.CtxPool` on the hosts of a Ray cluster.  ``ray_address`` and ``ray_remote_args`` as of
    `Pool`, by keyword; where the contexts are `devices`, these say which cluster."""

    def __init__(
        self,
        processes: int | None = None,
        *args: Any,
        ray_address: str | None = None,
        ray_remote_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if options.get("worker_contexts") is None:
            given = options.get("hosts")
            options["hosts"] = _where(given, processes, ray_address, ray_remote_args)
        elif ray_address is not None or ray_remote_args:
            raise OptionError(
                "ray_address= and ray_remote_args= do not go with worker_contexts=: give address= "
                "and runtime_env= to xpool.ray.devices()"
            )
        super().__init__(None, *args, **options)


def _where(
    given: Hosts | None,
    processes: int | None,
    address: str | None,
    remote: Mapping[str, Any] | None,
) -> Hosts:
    """Return the hosts of a pool that was told of them as Ray's own is."""
    if given is not None:
        if address is not None or remote:
            raise OptionError(
                "ray_address= and ray_remote_args= do not go with hosts=: give address= and "
                "runtime_env= to xpool.ray.hosts()"
            )
        return given
    if processes is not None:
        check_count("processes", processes)
    options = dict(remote or {})
    env = options.pop("runtime_env", None)
    if options.get("num_cpus") == 1:
        del options["num_cpus"]  # as each worker has
    if options:
        raise OptionError(
            f"ray_remote_args={{{sorted(options)[0]!r}: ...}}: workers are not actors; to reserve "
            "resources of each host, use Pool(hosts=xpool.ray.hosts(resources=..., "
            "labels=..., per_host=...))"
        )
    return hosts(address, runtime_env=env)._replace(total=processes)
