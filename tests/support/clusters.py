"""A Ray cluster of several hosts on this machine.

Each host is a raylet with its own loopback address and workers.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import scripts
from support.limits import WAIT
from support.waiting import eventually

HEAD = "127.0.0.2"
"""An address of the loopback net; Ray would replace 127.0.0.1 by the machine's address."""

CPUS = 16
"""CPUs of each host: enough for all pools of a test."""

SETTINGS = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "2",
    "RAY_worker_niceness": "0",
}
"""A lost host is noticed within two seconds. Agents get a normal share of a busy machine, because
Ray would give its workers the lowest priority."""


class Cluster:
    """The cluster to which the program is connected."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._addresses = iter(f"127.0.0.{i}" for i in range(3, 250))

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, beside: Any = None, **resources: float) -> Any:
        """Add a host with resources, wait until the cluster has it, and return it.

        The new host has the address of the host ``beside``.
        """
        at = next(self._addresses) if beside is None else beside.node_ip_address
        return self._cluster.add_node(
            num_cpus=CPUS, object_store_memory=200 << 20, node_ip_address=at, resources=resources
        )

    def remove(self, node: Any) -> None:
        """Kill a host's processes, unless they are dead, and wait until the cluster reports it."""
        if node in self._cluster.worker_nodes:
            self._cluster.remove_node(node, allow_graceful=False)
        eventually(lambda: not is_alive(node), "the host is gone", WAIT)


@contextlib.contextmanager
def started() -> Iterator[Cluster]:
    """Start a cluster of two hosts and connect to it."""
    # Hosts do not get this program's sys.path, but must import the tests' modules.
    settings = {**SETTINGS, "PYTHONPATH": scripts.environment()["PYTHONPATH"]}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    head = {
        "num_cpus": CPUS, "object_store_memory": 200 << 20, "include_dashboard": False,
        "node_ip_address": HEAD,
    }  # fmt: skip
    raw = RayCluster(initialize_head=True, head_node_args=head)
    try:
        cluster = Cluster(raw)
        cluster.add()
        connect(cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        raw.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def connect(address: str) -> None:
    """Connect this program to a cluster of `started`."""
    import ray

    ray.init(address=address, _node_ip_address=HEAD, log_to_driver=False, logging_level="ERROR")


def needs_runtime_env() -> None:
    """Skip the test if Ray cannot start workers with a `runtime_env` here."""
    if shlex.quote(sys.executable) != sys.executable:
        pytest.skip("Ray starts workers with a runtime_env by a shell, which rejects this path")


def is_connected() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def is_alive(node: Any) -> bool:
    import ray

    return any(one["NodeID"] == node.node_id and one["Alive"] for one in ray.nodes())


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def workers(pool: Any, node: Any) -> list[int]:
    """Return the process ids of a pool's workers on a host."""
    each = pool.statistics()["hosts"]
    return [
        pid for name, one in each.items() if address(node) in name for pid in one["pids"] if pid
    ]


def address(node: Any) -> str:
    return f"({node.node_ip_address})"


def agent(worker: int) -> int:
    """Return the agent's pid: the parent of the worker's fork server."""
    return parent(parent(worker))
