"""Pools over the hosts of a Ray cluster.  The guide is docs/hosts.md.

    import xpool.ray
    from xpool import Pool

    with Pool(hosts=xpool.ray.hosts()) as pool:     # every core of the cluster
        ...

Ray places an agent on each host, watches it and transfers data.  Each agent has an engine of xpool
with workers.  This module needs ``pip install xpool[ray]``, and imports Ray when it is first used.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from xpool._calls.options import check_count
from xpool._hosts.hosts_engine import HostEngine, make_engine
from xpool._pools.ctx_pools import CtxPool as _CtxPool
from xpool._pools.process import Pool as _Pool
from xpool._python.at_fork import at_fork
from xpool.devices._device_context import TABLE
from xpool.errors import OptionError

if TYPE_CHECKING:
    from xpool._hosts.ray_fleet import Node

__all__ = ["CtxPool", "Devices", "HostDevice", "Hosts", "Pool", "devices", "hosts"]

CONNECT_SECONDS = 5.0
"""Seconds within which a cluster must accept a connection."""

RESOURCES: dict[str | None, str] = {
    None: "CPU",
    **{kind: row.resource for kind, row in TABLE.items() if row.resource},
}
"""Ray's name of the resource of each kind of device."""


_of_parent: Any = None
"""Ray's connection that this process has inherited by a fork, without the threads that serve it."""


def _connection() -> Any:
    """Return the object that is the program's connection to a Ray cluster; None: there is none."""
    worker = getattr(sys.modules.get("ray._private.worker"), "global_worker", None)
    return getattr(worker, "core_worker", None)


def _after_fork_in_child() -> None:
    global _of_parent
    _of_parent = _connection()


at_fork(in_child=_after_fork_in_child)


def _ray_fleet() -> Any:
    """Return `xpool._hosts.ray_fleet`, whose import imports Ray."""
    try:
        from xpool._hosts import ray_fleet
    except ImportError as exc:
        raise ImportError(
            "Ray is not installed, and pools over hosts need it: pip install xpool[ray]"
        ) from exc
    return ray_fleet


class Hosts(NamedTuple):
    """The hosts of a cluster that a pool uses, and the resources of each.  `hosts` makes it."""

    address: str | None = None
    n: int | None = None
    per_host: int | None = None
    resources: Mapping[str, float] | None = None
    labels: Mapping[str, str] | None = None
    runtime_env: Mapping[str, Any] | None = None
    kind: str | None = None
    total: int | None = None

    @property
    def resource(self) -> str:
        """Ray's name of what each worker has one of."""
        return RESOURCES[self.kind]

    def find(self) -> list[Node]:
        """Connect to the cluster, and return the hosts with the wanted resources and labels."""
        fleet = _ray_fleet()
        ray = fleet.ray
        if ray.util.client.ray.is_connected():
            raise OptionError(
                "this program uses Ray Client (ray://), which is too slow for a pool, at 0.2 GB/s: "
                "run it on a host of the cluster (ray job submit), or connect without ray://"
            )
        if _of_parent is not None and _connection() is _of_parent:
            raise OptionError(
                "this process was forked from a program that is connected to Ray, and cannot use "
                "its connection: make the pool in that program, or in a process that is started "
                'with multiprocessing.get_context("spawn")'
            )
        if not ray.is_initialized():
            try:
                _look_for(self.address or os.environ.get("RAY_ADDRESS", ""))
                env = None if self.runtime_env is None else dict(self.runtime_env)
                ray.init(address=self.address, configure_logging=False, runtime_env=env)
                fleet.BEGUN_WITH.append(self.runtime_env)
            except OSError as exc:
                raise OptionError(
                    f"no Ray cluster is at address={self.address!r}: start one (ray start --head), "
                    "or leave address out for one on this machine alone"
                ) from exc
        return self.living()

    def make_engine(self, pool: Any, nodes: list[Node]) -> HostEngine:
        workers = [node.workers for node in nodes]
        fleet = functools.partial(_ray_fleet().RayFleet, self, nodes)
        return make_engine(pool, workers, fleet, self.kind)

    def driver_address(self) -> str:
        """Return the address at which hosts reach this program."""
        return str(_ray_fleet().ray.util.get_node_ip_address())

    def living(self) -> list[Node]:
        """Return the living hosts that fit.  Hosts with more workers come first."""
        fleet = _ray_fleet()
        every = [self._node(one) for one in fleet.named(fleet.ray.nodes()) if one["Alive"]]
        fit = sorted((one for one in every if one is not None), key=lambda one: -one.workers)
        if not every:
            raise OptionError("the Ray cluster has no living host: start one (ray start)")
        if not fit:
            raise OptionError(
                f"none of the {len(every)} hosts of the Ray cluster has {self.per_host or 1} "
                f"{self.resource}s, resources={dict(self.resources or {})} and "
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
                f"processes={self.total}: the Ray cluster has CPUs for {self.total - missing}; ask "
                "for as many, or leave processes out"
            )
        return found

    def _node(self, about: dict[str, Any]) -> Node | None:
        has, labels = about["Resources"], about.get("Labels") or {}
        there = int(has.get(self.resource, 0))
        workers = self.per_host or there
        wanted = dict(self.resources or {})
        if not 0 < workers <= there or any(has.get(k, 0) < v for k, v in wanted.items()):
            return None
        if any(labels.get(k) != v for k, v in (self.labels or {}).items()):
            return None
        cpus = min(workers, int(has.get("CPU", 0)))
        node: Node = _ray_fleet().Node(about["NodeID"], about["xpool_name"], workers, cpus)
        return node


class HostDevice(NamedTuple):
    """A device of a host, as the driver describes it.  The device's worker gets a
    `xpool.devices.DeviceContext` with this ``host``."""

    kind: str
    host: str
    ordinal: int


class Devices(list[HostDevice]):
    """The result of `devices`: contexts for `CtxPool`, and the hosts that have the devices."""

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
    """Return the hosts of a Ray cluster for a pool: ``Pool(hosts=xpool.ray.hosts())``.

    Args:
        address: the cluster's address, as for `ray.init`.  None: the cluster to which the program
            is connected, else that of RAY_ADDRESS, else a new one on this machine.
        n: the largest number of hosts.  None: all, including those that join while the pool works.
        per_host: number of workers on each host.  None: its number of CPUs.
        resources: Ray's resources that each host must have besides CPUs, such as ``{"GPU": 4}``.
            The pool reserves them.
        labels: labels that each host must have.
        runtime_env: code, packages and variables for the hosts, as for `ray.init`.

    Raises:
        OptionError: ``n`` or ``per_host`` is below 1.
        TypeError: ``n`` or ``per_host`` is not an int.
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
    """Return a context for each device of a Ray cluster, for ``CtxPool(worker_contexts=...)``.

    The worker gets a `xpool.devices.DeviceContext` of a device that Ray has reserved on its host.

    Args:
        kind: "cpu", "cuda", "rocm", "xpu", "npu", "neuron" or "tpu", as for
            `xpool.devices.devices`.  Ray counts GPUs of all makers together, so ``labels`` must
            select the hosts if the cluster has several.
        address, n, labels, runtime_env: as for `hosts`.
        per_host: number of devices of each host.  None: all.

    Raises:
        OptionError: the kind does not exist, or no host has such devices.
        ImportError: Ray is not installed.
    """
    if kind is None or kind not in RESOURCES:
        raise OptionError(
            f"devices(kind={kind!r}): Ray has no resource for it; use one of "
            f"{sorted(known for known in RESOURCES if known)}"
        )
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
    """Raise `OSError` if no process listens at an address, because Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in host:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


class Pool(_Pool):
    """`xpool.Pool` on the cores of a Ray cluster, for programs that only change their imports.

    Args:
        processes: number of cores.  None: all.
        ray_address: the cluster's address, as for `ray.util.multiprocessing.Pool`.
        ray_remote_args: options of actors, as there.  It may contain ``runtime_env``, and
            ``num_cpus``, which must be 1.
        initializer, initargs, maxtasksperchild, context, options: as for `xpool.Pool`.

    Raises:
        OptionError: ``ray_remote_args`` has another option, or ``hosts=`` is given, too.
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
        # None is the default of `initargs` in Ray's own pool.
        super().__init__(None, initializer, initargs or (), maxtasksperchild, context, **options)


class CtxPool(_CtxPool[Any]):
    """`xpool.CtxPool` on the hosts of a Ray cluster.

    ``ray_address`` and ``ray_remote_args`` are as for `Pool`, but only by keyword.  They cannot be
    given with contexts of `devices`, which already belong to a cluster.
    """

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
    """Return the hosts for a pool with the arguments of Ray's own pool."""
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
        del options["num_cpus"]  # each worker has one CPU anyway
    if options:
        raise OptionError(
            f"ray_remote_args={{{sorted(options)[0]!r}: ...}}: workers are not actors; to reserve "
            "resources of each host, use Pool(hosts=xpool.ray.hosts(resources=..., "
            "labels=..., per_host=...))"
        )
    return hosts(address, runtime_env=env)._replace(total=processes)
