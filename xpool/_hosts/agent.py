"""The agent of a host: an engine with its workers, and the messages to and from the driver.

The actor that holds the agent calls it, each call in a thread of its own.  The agent never
unpickles a user's payload: it passes payloads on as bytes, large ones through the arena.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xpool._engine.jobs.ranges import WHOLE
from xpool._engine.launch import ForkServer
from xpool._hosts import messages as m
from xpool._hosts.agent_session import AgentSession
from xpool._hosts.fleet import Call
from xpool._memory.anonymous_files import File
from xpool._memory.system import default_processes
from xpool._pickling.frame import lodge
from xpool._pools.assembly import (
    Engine,
    EngineOptions,
    Main,
    Recipe,
    Relay,
    WorkerConfig,
    WorkerSpec,
    find_arena,
)
from xpool._pools.ctx_pools import shared_processes
from xpool.devices import DeviceContext, devices
from xpool.errors import OptionError
from xpool.pickle import encode

REPLY_BYTES = 8 * 1024 * 1024
"""The most bytes of a reply, not counting its first message."""

REPLY_SECONDS = 1.0
"""Seconds after which a call is answered although there is no message: an eighth of the lease, if
that is shorter."""

DIRECT_MILLISECONDS = 5
"""Milliseconds for which the thread of a call waits for the answer of the call's only task.  After
that the engine's thread waits for it."""

STATUS_SECONDS = 0.05
"""The fewest seconds between two `Status` messages."""


class AgentConfig(NamedTuple):
    """The configuration of an agent, made by the driver."""

    spec: WorkerSpec
    main: Main
    modules: tuple[str, ...]  # what the fork server imports
    options: EngineOptions
    memory_limit: int | None
    lease: float
    facts: dict[str, str]
    kind: str | None = None
    """The kind of device of this host that each worker is bound to; None: no devices."""


def facts(modules: Sequence[str]) -> dict[str, str]:
    """Return the versions that must agree on all hosts, by name: Python's and those of xpool and
    ``modules``, as far as they are installed."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("xpool", *modules):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Agent:
    """An engine that works for a driver elsewhere.

    Args:
        config: its configuration.
        host: name of this host.
        first: the pool's index of the first worker here.
        workers: number of workers here.
        ended: called when the lease is over and the workers have ended.
        memory_full: the part of the host's memory (0 to 1) at which the largest worker is ended.

    Raises:
        OptionError: the versions of Python or of a package differ from the driver's.
        DeviceError: this host has fewer devices than workers.
    """

    def __init__(
        self,
        config: AgentConfig,
        host: str,
        first: int,
        workers: int,
        ended: Callable[[], None],
        memory_full: float | None = None,
    ) -> None:
        _compare(host, config.facts)
        cores = max(1, default_processes() // workers)
        spec = config.spec._replace(threads=cores)
        bound: list[DeviceContext] = []
        if config.kind is not None:
            found = devices(config.kind, workers)
            bound = [
                dataclasses.replace(one, ordinal=first + i, host=host)
                for i, one in enumerate(found)
            ]
            spec = spec._replace(
                contexts=[b""] * first + [bytes(encode(one)) for one in bound],
                binds=[{}] * first + [dict(one.env) for one in bound],
                cpus=[()] * first + [tuple(one.cpus) for one in bound],
            )
        launcher = ForkServer.get(config.modules)
        launcher.start()
        arena, limit, layout = find_arena(True, None, config.memory_limit, os.urandom(8).hex())
        self._layout = layout._replace(book=None, publisher=None)
        main = config.main
        worker_config = WorkerConfig(spec, launcher, arena, limit, lambda: main, first, host)
        self._engine = Engine(
            workers,
            Recipe(
                launcher,
                worker_config,
                spec.pool,
                spec.options["is_daemon"],
                None,
                arena,
                Relay(spec.pool, first),
            ),
            lambda job, index: "" if index == WHOLE else f"task {index}",
            config.options._replace(
                processes=shared_processes(bound),
                memory=config.options.memory._replace(full=memory_full),
            ),
        )
        self._news = threading.Condition()  # guards the session and the fields below
        self._session = AgentSession(self._engine, config.lease, time.monotonic())
        self._said: m.Status | None = None
        self._said_at = 0.0
        self._at_end, self._host, self._lease = ended, host, config.lease
        self._thread = threading.Thread(target=self._run, name=f"{spec.pool}-agent", daemon=True)

    def start(self) -> None:
        """Start the workers.

        Raises:
            OSError: the system refuses a process.
        """
        self._engine.start_missing()
        self._thread.start()

    # -- called by the driver ----------------------------------------------------------------------

    def call(self, parts: Sequence[Any], fetch: Callable[[Any], Any]) -> list[Any]:
        """Act on a packed `Call`, wait for a message to the driver, and return the packed reply.

        ``fetch`` returns the bytes that the payload of a `Blob` refers to.
        """
        head, messages = m.unpacked(parts)
        call = Call._make([*head, [self._lodged(one, fetch) for one in messages]])
        if call.beat:
            with self._news:
                self._session.called(call)
                taken, first, found = self._session.reply_to_beat(call, time.monotonic())
            return m.packed((taken, first), found)
        with self._news:
            begun = self._session.called(call)
            self._locate_workers()
            self._collect()
            self._news.notify_all()
        if begun is not None:
            # Without the lock: other calls of the driver act meanwhile.
            self._engine.await_briefly(*begun, DIRECT_MILLISECONDS)
        with self._news:
            if begun is not None:
                self._session.wait(call.number)
                self._collect()
            until = time.monotonic() + min(REPLY_SECONDS, self._lease / 8)
            while (
                not self._session.may_reply(call.number) and (left := until - time.monotonic()) > 0
            ):
                self._news.wait(left)
            if not self._session.has_news:
                self._say(time.monotonic())
            taken, first, found = self._session.reply(
                call.number, time.monotonic(), REPLY_BYTES, _weight
            )
            if self._session.has_news:
                self._news.notify_all()
        return m.packed((taken, first), found)

    def _locate_workers(self) -> None:
        """Answer each `LocateWorkers` in a thread: reading the stacks takes half a second."""
        session = self._session

        def answer(number: int) -> None:
            found = self._engine.stacks(lambda job, index: f"{job} {index}")
            with self._news:
                session.say(m.WorkerLocations(number, found))
                self._news.notify_all()

        for number in session.locate_requests:
            threading.Thread(target=answer, args=(number,), daemon=True).start()
        session.locate_requests.clear()

    def _lodged(self, message: Any, fetch: Callable[[Any], Any]) -> Any:
        kind = type(message)
        if kind is m.Blob:
            return message._replace(payload=File(fetch(message.payload), message.name))
        if kind is m.Stage:
            return message._replace(items=[lodge(item, self._layout) for item in message.items])
        if kind is m.Func:
            kept = self._layout._replace(kept=True)
            return message._replace(payload=lodge(message.payload, kept))
        return message

    # -- the agent's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            # Nothing would be answered any more.  The driver notices the end of this process.
            traceback.print_exc()
            self._engine.close()
            self._at_end()

    def _serve(self) -> None:
        engine = self._engine
        over = False
        while not engine.ended:
            left = self._session.until - time.monotonic()
            if left <= 0 and not over:
                over = True
                print(
                    f"xpool: the agent of {self._host} ends: its driver has not called for "
                    f"{self._lease:g} s",
                    file=sys.stderr,
                    flush=True,
                )
                engine.terminate()
            engine.wait(None if over else min(left, REPLY_SECONDS))
            with self._news:
                self._collect()
        with self._news:
            self._collect()
        engine.close()
        if over:
            self._at_end()

    def _collect(self) -> None:
        """Queue the engine's answers as messages; the caller holds `_news`."""
        if self._session.collect():
            self._say(time.monotonic())
            self._news.notify_all()

    def _say(self, now: float) -> None:
        """Queue a `Status` if it differs from the last, at most one in `STATUS_SECONDS`.

        If the cost has changed by more than a factor of two, queue it at once.
        """
        cost = self._engine.cost
        last = self._said
        near = last is not None and last.cost / 2 <= cost <= last.cost * 2
        if near and now < self._said_at + STATUS_SECONDS:
            return
        status = m.Status(cost, self._engine.statistics(), self._engine.report())
        if last is None or status != last:
            self._said, self._said_at = status, now
            self._session.say(status)


def _weight(message: Any) -> int:
    return 64 + getattr(message.value, "nbytes", 0) if type(message) is m.Answer else 64


def _compare(host: str, wanted: dict[str, str]) -> None:
    here = facts([name for name in wanted if name not in ("Python", "xpool")])
    for name, version in wanted.items():
        found = here.get(name, "none")
        if found != version:
            raise OptionError(
                f"host {host} has {name} {found}, and the program has {name} {version}: all hosts "
                f"of a pool need the same; install it there, or give it in runtime_env="
            )
