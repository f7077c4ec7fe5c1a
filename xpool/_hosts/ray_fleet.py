"""The fleet of a Ray cluster: the driver places actors with agents on its hosts and calls them.

Importing this module imports Ray: `xpool.ray` does so at its first use.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import queue
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import ray
import ray.util.client
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    RayActorError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from xpool._hosts import messages as m
from xpool._hosts.agent import Agent, AgentConfig
from xpool._hosts.service import CALLS_IN_FLIGHT
from xpool._python.starting import PromptThread
from xpool.errors import XPoolError

MONITOR_EVERY, MONITOR_FROM = "RAY_memory_monitor_refresh_ms", "RAY_memory_usage_threshold"
"""Ray's variables for its memory monitor: the interval (0: no monitor), and the part of the memory
(0 to 1) at which it kills."""


class HostAgent:
    """The actor on a host.  Calls wait in Ray's threads; the agent's engine has its own thread."""

    def __init__(self) -> None:
        self._agent: Agent | None = None

    def begin(self, config: bytes, host: str, first: int, workers: int) -> None:
        _drop_thread_limit()
        ended = functools.partial(os._exit, 0)
        self._agent = Agent(
            pickle.loads(config), host, first, workers, ended, _before_rays_monitor()
        )
        self._agent.start()

    def call(self, said: Any, refs: Sequence[Any] = ()) -> Any:
        assert self._agent is not None
        return as_one(self._agent.call(parts_of(said), lambda i: memoryview(ray.get(refs[i]))))


def _before_rays_monitor() -> float | None:
    """Return the part of the memory (0 to 1) at which the largest worker is ended; None: never.

    It is a little less than the part at which Ray's monitor ends this agent with all its workers.
    """
    if os.environ.get(MONITOR_EVERY) == "0":
        return None
    return float(os.environ.get(MONITOR_FROM, "0.95")) - 0.02


def _drop_thread_limit() -> None:
    """Unset OMP_NUM_THREADS if Ray has set it: its value does not fit workers."""
    given = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/environ", "rb") as file:
        if b"\0OMP_NUM_THREADS=" not in b"\0" + file.read() and "OMP_NUM_THREADS" not in given:
            os.environ.pop("OMP_NUM_THREADS", None)


def as_one(parts: list[Any]) -> Any:
    """Return packed parts in the form that Ray carries best: bytes, or bytes and buffers.

    Ray does not copy buffers into its pickles.  They are no arrays: to load one, Ray's thread would
    import a part of numpy, and a thread that imports numpy meanwhile would get half a module.
    """
    return parts[0] if len(parts) == 1 else [parts[0], *map(pickle.PickleBuffer, parts[1:])]


def parts_of(said: Any) -> list[Any]:
    """Return the parts that `as_one` was given."""
    return [said] if type(said) is bytes else [said[0], *(memoryview(one) for one in said[1:])]


STORE_BYTES = 64 * 1024
"""Calls of at least this many bytes are treated as ones that Ray puts into its store.  Ray does so
from 100 KiB on, and a call has other parts besides the messages."""

QUERY_SECONDS = 1.0
"""Seconds between two queries of the cluster's hosts."""

BEGIN_SECONDS = 5.0
"""Seconds after which a warning says that a host has not begun."""

SHUT_DOWN = "the program has shut Ray down"

REPLACED = 3
"""The most agents that replace others on one host, because the host itself may cause their ends."""


BEGUN_WITH: list[Any] = []
"""The runtime_env given to `ray.init`, if xpool called it.  All actors have it already.  Only there
may it name a folder of this host."""


class Node(NamedTuple):
    """A host of the cluster, with the number of its workers and the number of CPUs for them."""

    id: str
    name: str
    workers: int
    cpus: int


def named(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Ray's descriptions of its hosts, each with a name for texts, ``xpool_name``.

    A machine with several raylets is several hosts of a cluster; their names include their port.
    """
    names = [f"{one['NodeManagerHostname']} ({one['NodeManagerAddress']})" for one in nodes]
    shared = Counter(name for name, one in zip(names, nodes, strict=True) if one["Alive"])
    return [
        {
            **one,
            "xpool_name": f"{name[:-1]}:{one['NodeManagerPort']})" if shared[name] > 1 else name,
        }
        for name, one in zip(names, nodes, strict=True)
    ]


class RayFleet:
    """The agents of one pool; `Fleet` describes the public methods.

    ``where``: which hosts the pool uses, a `xpool.ray.Hosts`.  ``nodes``: those that exist now.
    """

    def __init__(self, where: Any, nodes: list[Node], config: AgentConfig) -> None:
        self._where, self._first_nodes, self._config = where, nodes, pickle.dumps(config)
        self._tell: Callable[[Any], object] = id
        # Written by the thread that makes the pool, and later only by the thread that places
        # agents.
        self._actors: dict[int, Any] = {}
        self._nodes: dict[int, Node] = {}
        self._agents: Counter[str] = Counter()  # number of agents placed on each host, by Ray's id
        self._workers = 0
        self._over: set[int] = set()  # agents that were stopped or replaced
        self._held: dict[tuple[int, int], Any] = {}  # calls whose replies are held: Ray's objects
        self._waiting: dict[int, float] = {}  # agents that have not begun: when to warn of each
        # Agents that have died, and why; None: place no more.
        self._ends: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        # Calls that Ray puts into its store: host, number and arguments; None: the pool has ended.
        self._large: queue.SimpleQueue[tuple[int, int, tuple[Any, ...]] | None]
        self._large = queue.SimpleQueue()

    def start(self, tell: Callable[[Any], object]) -> list[int]:
        self._tell = tell
        for node in self._first_nodes:
            self._begin(self._place(node))
        for run, name in ((self._run, "xpool-hosts"), (self._send_large, "xpool-hosts-send")):
            PromptThread(target=run, name=name, daemon=True).start()
        return [node.workers for node in self._first_nodes]

    def _place(self, node: Node) -> int:
        where = self._where
        options: dict[str, Any] = {
            "num_cpus": node.cpus,
            "resources": dict(where.resources or {}),
            "max_concurrency": 2 * CALLS_IN_FLIGHT,  # room for beats and lost calls
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
        }
        if where.kind not in (None, "cpu"):
            options["resources"][where.resource] = node.workers
        gpus = options["resources"].pop("GPU", None)
        if gpus is not None:
            options["num_gpus"] = gpus
        if where.runtime_env is not None and where.runtime_env not in BEGUN_WITH:
            options["runtime_env"] = dict(where.runtime_env)
        number = len(self._actors)
        self._actors[number] = ray.remote(HostAgent).options(**options).remote()
        self._nodes[number] = node
        self._agents[node.id] += 1
        return number

    def _begin(self, number: int) -> None:
        node = self._nodes[number]
        first, self._workers = self._workers, self._workers + node.workers
        self._waiting[number] = time.monotonic() + BEGIN_SECONDS
        began = self._actors[number].begin.remote(self._config, node.name, first, node.workers)
        self._when_done(began, functools.partial(self._began, number, node.name))

    def _add(self, node: Node) -> None:
        number = self._place(node)
        # Before `_begin`: the agent must not join before the engine expects it.
        self._tell(m.Coming(number, node.workers))
        try:
            self._begin(number)
        except Exception as exc:  # an error of Ray itself
            self._tell(m.Dead(number, _why(exc)))

    def _run(self) -> None:
        """Place agents on hosts that join, and on living hosts that have lost their agent."""
        while True:
            try:
                ended = self._ends.get(timeout=QUERY_SECONDS)
            except queue.Empty:
                if ray.is_initialized():  # else a query would connect to a cluster anew
                    with contextlib.suppress(Exception):  # the cluster does not answer: ask again
                        self._say_who_waits()
                        self._look_at_hosts()
                continue
            if ended is None:
                return
            number, reason = ended
            with contextlib.suppress(Exception):  # the cluster does not answer: no replacement
                self._replace(number)
            self._tell(m.Dead(number, reason))

    def _say_who_waits(self) -> None:
        """Warn of each agent that waits for CPUs, but not of one that only starts slowly."""
        now = time.monotonic()
        late = [number for number, when in list(self._waiting.items()) if when <= now]
        free = _free_cpus() if late else {}
        for number in late:
            node = self._nodes[number]
            has = free.get(node.id)
            if has is not None and has >= node.cpus:
                continue
            if self._waiting.pop(number, None) is not None and number not in self._over:
                logging.getLogger("xpool").warning(
                    "the agent on host %s has not started after %g s: it needs %d CPUs, and %s are "
                    "free there. It waits until other pools or actors release theirs; pass "
                    "per_host= to ask for fewer",
                    node.name, BEGIN_SECONDS, node.cpus,
                    "an unknown number" if has is None else f"{has:g}",
                )  # fmt: skip

    def _look_at_hosts(self) -> None:
        draining = _draining()
        for number, node in self._nodes.items():
            if node.id in draining and number not in self._over:
                self._tell(m.Draining(number))
        if self._where.n is None and self._where.total is None:
            for node in self._where.living():
                if not self._agents[node.id] and node.id not in draining:
                    self._add(node)

    def _replace(self, number: int) -> None:
        node = self._nodes[number]
        if not ray.is_initialized() or number in self._over or self._agents[node.id] > REPLACED:
            return
        if any(one["NodeID"] == node.id and one["Alive"] for one in ray.nodes()):
            self._add(node)
        # After `Coming`: another failed call of this agent must not report its end before that.
        self._over.add(number)

    def _dead(self, number: int, reason: str) -> None:
        """Report the end of an agent after its replacement was placed.

        Otherwise the pool could see no host left, and fail.
        """
        if number in self._over:
            self._tell(m.Dead(number, reason))
        else:
            self._ends.put((number, reason))

    def _when_done(self, ref: Any, call: Callable[[Any, BaseException | None], object]) -> None:
        def done(future: Any) -> None:
            error = future.exception()
            try:
                call(None if error is not None else future.result(), error)
            except Exception as exc:  # such as no memory for a result; Ray would only log it
                self._tell(m.Refused(exc))

        ref.future().add_done_callback(done)

    def _began(self, number: int, name: str, result: Any, error: BaseException | None) -> None:
        self._waiting.pop(number, None)
        if error is None:
            self._tell(m.Joined(number, name))
        elif self._is_dead(error):
            self._dead(number, _reason(error))
        else:
            cause = getattr(error, "cause", None) or error
            wrong = cause if isinstance(cause, XPoolError) else _not_there(name, cause)
            self._tell(m.Refused(wrong))
            self.stop(number)
            self._tell(m.Dead(number, str(wrong)))  # no call under way will fail and report it

    def _is_dead(self, error: BaseException) -> bool:
        if isinstance(error, ActorUnavailableError):
            return False
        return isinstance(error, (RayActorError, ActorUnschedulableError))

    def call(self, host: int, call: m.Call, hold: bool = False) -> None:
        refs: list[Any] = []
        messages = []
        for one in call.messages:
            if type(one) is m.Blob:
                refs.append(one.payload)
                one = one._replace(payload=len(refs) - 1)
            messages.append(one)
        said = as_one(m.packed(call[:-1], messages))
        # No empty list: each argument costs Ray as much as the rest of a small call.
        arguments = said, *([refs] if refs else ())
        if type(said) is bytes and len(said) < STORE_BYTES:
            self._send(host, call.number, arguments, hold)
        else:
            self._large.put((host, call.number, arguments))

    def _send_large(self) -> None:
        """Send the calls that go through Ray's store.  While it is full, this thread waits."""
        while (large := self._large.get()) is not None:
            self._send(*large)
            del large  # else its memory in the store stays in use until the next call

    def _send(self, host: int, number: int, arguments: tuple[Any, ...], hold: bool = False) -> None:
        actor = self._actors.get(host)
        if actor is None:  # the pool is over
            return
        if not ray.is_initialized():  # a call would connect to a cluster anew
            self._tell(m.Dead(host, SHUT_DOWN))
            return
        try:
            ref = actor.call.remote(*arguments)
            if hold:
                self._held[host, number] = ref
            else:
                self._when_done(ref, functools.partial(self._replied, host, number))
        except Exception as exc:  # an error of Ray itself, for example while it shuts down
            self._tell(m.Dead(host, _why(exc)))

    def receive(self, host: int, number: int, seconds: float) -> m.Replied | None:
        ref = self._held.pop((host, number), None)
        if ref is not None:
            try:
                return _reply(host, number, ray.get(ref, timeout=seconds))
            except BaseException as exc:  # also one that a signal handler raises
                self._when_done(ref, functools.partial(self._replied, host, number))
                if not isinstance(exc, Exception):
                    raise
        return None

    def _replied(self, host: int, number: int, found: Any, error: BaseException | None) -> None:
        if error is None:
            self._tell(_reply(host, number, found))
        elif self._is_dead(error):
            self._dead(host, _reason(error))
        elif isinstance(error, RayTaskError):  # the agent raised: a bug of xpool
            self._tell(m.Refused(getattr(error, "cause", error)))
        else:
            self._tell(m.Unreached(host, number))

    def put(self, payload: bytes | memoryview) -> Any:
        """Put an object into Ray's store; hosts copy it from one another."""
        if not ray.is_initialized():
            raise XPoolError(SHUT_DOWN)
        return ray.put(pickle.PickleBuffer(payload))

    def stop(self, host: int, replace: bool = False) -> None:
        if not replace:
            self._over.add(host)
        actor = self._actors.get(host)
        if actor is None:  # the pool is over
            return
        if not ray.is_initialized():
            self._tell(m.Dead(host, SHUT_DOWN))
            return
        # Another thread calls `ray.kill`, which waits for Ray's callback thread: this one, perhaps.
        kill = PromptThread(target=_kill, args=(actor,), name="xpool-hosts-stop", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends; Ray then ends its actors
            kill.start()

    def close(self) -> None:
        self._ends.put(None)
        self._large.put(None)
        self._actors.clear()


def _reply(host: int, number: int, found: Any) -> m.Replied:
    data, *large = parts_of(found)
    # Copied, to free the memory of the object store; into writable memory, so that no further copy
    # is needed.
    (taken, first), messages = m.unpacked([data, *(memoryview(bytearray(one)) for one in large)])
    return m.Replied(host, number, taken, first, messages)


def _draining() -> Collection[str]:
    """Return the ids of hosts that will be removed, such as those of a spot market."""
    # No public function returns them, and older versions have none.
    return getattr(ray._private.state.state, "get_draining_nodes", dict)()


def _free_cpus() -> dict[str, float]:
    """Return the number of free CPUs of each host, by Ray's id."""
    # No public function returns it, and older versions have none.
    ask = getattr(ray._private.state.state, "available_resources_per_node", dict)
    return {node: has.get("CPU", 0.0) for node, has in ask().items()}


def _why(error: BaseException) -> str:
    """Return why Ray could not be called."""
    return f"{type(error).__name__}: {error}" if ray.is_initialized() else SHUT_DOWN


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # the actor has ended already
        ray.kill(actor, no_restart=True)


def _reason(error: BaseException) -> str:
    """Return Ray's reason for the end of an actor, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [
        line for line in lines if not line.startswith(("class_name", "actor_id", "pid", "name"))
    ]
    return " ".join(said)[:400] or type(error).__name__


def _not_there(host: str, cause: BaseException) -> XPoolError:
    return XPoolError(
        f"no agent could be started on host {host}: {type(cause).__name__}: {cause}. All hosts "
        "need xpool and the packages that the program imports; ray.init(runtime_env={'pip': [...], "
        "'working_dir': ...}) installs them there"
    )
