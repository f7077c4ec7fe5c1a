"""The agent of a host: an engine with its workers, and the messages to and from the driver.

The actor that holds the agent calls it, each call in a thread of its own.  The agent never
unpickles a user's payload: it passes payloads on as bytes, large ones through the arena.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xpool._engine.jobs.ranges import CALLS, WHOLE, TaskRange
from xpool._engine.launch import ForkServer
from xpool._hosts import messages as m
from xpool._memory.anonymous_files import File
from xpool._memory.system import default_processes
from xpool._pickling.frame import lodge
from xpool._pools.assembly import (
    Engine,
    EngineOptions,
    Main,
    Recipe,
    Relay,
    WorkerSpec,
    find_arena,
    worker_config,
)
from xpool._pools.ctx_pools import shared_processes
from xpool._python.starting import PromptThread
from xpool.devices import DeviceContext, devices
from xpool.devices._host import installed
from xpool.errors import OptionError
from xpool.pickle import encode

if TYPE_CHECKING:
    from xpool._engine.worker_process import WorkerProcess

MOST_WAITING = 2
"""The most calls that wait for a message at one time."""


class AgentSession:
    """What the driver has told a host, and the messages that the host has for the driver.

    Messages of the driver become calls of the engine.  Answers of the engine become messages, which
    leave with the next reply.  A session uses no network.

    The only time limit is the lease, which each call of the driver renews.  The lease begins when
    the agent has sent the last reply that the driver has received, by the agent's clock.

    A result of ``engine`` with ``ok=None`` is an item to try again, or, if its value is a
    `TaskRange`, the items in this range, which no worker has begun.
    """

    def __init__(self, engine: Engine, lease: float, now: float) -> None:
        self.engine = engine
        self.retiring = False
        self.locate_requests: list[int] = []  # their numbers; the agent answers them
        self.until = now + lease
        """When the lease ends unless a call renews it."""
        self._lease = lease
        self._waiting: list[int] = []  # calls without a reply, oldest first
        self._replied: dict[int, float] = {}  # when each call had its first reply
        self._heard = 0  # number of the last call whose reply the driver has
        self._link = m.Link()
        self._staged: dict[int, m.Stage] = {}
        self._kept = 0  # number of the last batch that this host has staged itself: below 0
        self._files: list[Any] = []  # broadcast objects: each exists as long as it is in this list
        self._functions: dict[int, int] = {}  # the engine's numbers, by the driver's
        self._failed = self._ended = False

    # -- messages of the driver --------------------------------------------------------------------

    def called(self, call: m.Call) -> tuple[WorkerProcess, int] | None:
        """Act on a call; the caller then asks for `reply` or `reply_to_beat`.

        Returns a worker and the number of a task, whose answer the calling thread is to receive by
        `Submission.await_briefly`.  This thread then calls `wait`, and asks for the reply.
        """
        replied = self._replied.get(call.heard)
        if replied is not None:
            self.until = max(self.until, replied + self._lease)
            self._replied = {k: when for k, when in self._replied.items() if k >= call.heard}
        self._heard = max(self._heard, call.heard)
        self._link.acknowledge(call.got)
        if call.again:
            self._link.send_again(call.got)
        messages = self._link.receive(call.first, call.messages)
        begun = None
        for message in messages:
            # `Go` must be the last message: the calling thread has to receive the answer at once.
            if type(message) is m.Go and message is messages[-1] and not call.beat:
                begun = self._begin(message.batches)
            else:
                self._do(message)
        if not call.beat and begun is None:
            self._waiting.append(call.number)
        return begun

    def wait(self, number: int) -> None:
        """Add a call that waits for messages; it gets them before all other waiting calls."""
        self._waiting.insert(0, number)

    def _begin(self, batches: list[int]) -> tuple[WorkerProcess, int] | None:
        """Submit permitted batches.

        If they are a single call, and an idle worker has got it, return the worker and the number
        of the call.
        """
        ranges = [self._range(batch) for batch in batches]
        one = ranges[0]
        if len(ranges) == 1 and one.job == CALLS and len(one.items) == 1:
            worker = self.engine.put_direct(one.first, one.items[0], one.bound, one.terms)
            return None if worker is None else (worker, one.first)
        self.engine.submit(*ranges)
        return None

    def _do(self, message: Any) -> None:
        kind, engine = type(message), self.engine
        if kind is m.Stage:
            self._staged[message.batch] = message
        elif kind is m.Go:
            engine.submit(*(self._range(batch) for batch in message.batches))
        elif kind is m.Drop:
            for batch in message.batches:
                del self._staged[batch]
        elif kind is m.Back:
            for _, job, first, tasks in message.batches:
                engine.give_back(job, range(first, first + tasks))
            self.say(m.Given([batch for batch, *_ in message.batches]))
        elif kind is m.Cancel:
            engine.withdraw(message.job, message.item)
        elif kind is m.Func:
            self._functions[message.number] = engine.learn(message.mode, message.payload)
        elif kind is m.Forget:
            engine.forget(self._functions.pop(message.number))
        elif kind is m.Blob:
            self._files.append(message.payload)
        elif kind is m.LocateWorkers:
            self.locate_requests.append(message.number)
        elif kind is m.Retire:
            self.retiring = True
            engine.retire_all()
        else:
            raise ValueError(f"a message of unknown kind {kind.__name__}")

    def _range(self, batch: int) -> TaskRange:
        _, job, func, first, items, bound, terms = self._staged.pop(batch)
        return TaskRange(job, self._function(func), first, items, bound, terms)

    def _function(self, number: int) -> int:
        if number and number not in self._functions:
            # The job has failed and its function was dropped.  Its staged items still need a
            # function, because an item without one is run as a call.  So they get a function that
            # no worker has.  Nobody waits for their answers.
            unknown = self.engine.learn(1, b"")
            self.engine.forget(unknown)
            return unknown
        return self._functions.get(number, 0)

    # -- messages to the driver --------------------------------------------------------------------

    def say(self, message: Any) -> None:
        """Queue a message for the driver."""
        self._link.queue(message)

    @property
    def has_news(self) -> bool:
        """Whether a queued message has not been sent yet."""
        return self._link.has_unsent

    def may_reply(self, number: int) -> bool:
        """Whether a call is to be answered now.

        Only the oldest waiting call is, if messages are queued or more than `MOST_WAITING` calls
        wait.
        """
        waiting = self._waiting
        return waiting[0] == number and (self.has_news or len(waiting) > MOST_WAITING)

    def reply(
        self, number: int, now: float, most: int = m.MOST_BYTES
    ) -> tuple[int, int, list[Any]]:
        """Return the reply to a call: ``taken``, ``first`` and ``messages`` of a `Replied`."""
        self._waiting.remove(number)
        if number > self._heard:
            # The time of the first reply counts.  If a call arrives twice, the driver may have
            # received only the first reply.
            self._replied.setdefault(number, now)
        return self._link.got, *self._link.take(most)

    def reply_to_beat(self, call: m.Call, now: float) -> tuple[int, int, list[Any]]:
        """Return the reply to a beat, which renews the lease and takes no messages."""
        self._replied[call.number] = now
        return self._link.got, call.got + 1, []

    def collect(self) -> bool:
        """Queue the engine's answers since the last call, oldest first; return whether any came."""
        found: list[Any] = []
        ended = self.engine.ended  # read before taking the results: an ended engine adds none
        results = self.engine.results
        while results:
            job, index, (ok, value) = results.popleft()
            if isinstance(value, TaskRange):
                found.append(self._keep(value))
            elif ok is None:
                found.append(m.Again(job, index, value))
            else:
                found.append(m.Answer(job, index, getattr(value, "count", 1), ok, value))
        failure = self.engine.failure
        if failure is not None and not self._failed:
            self._failed = True
            found.append(m.Failed(failure))
        if ended and not self._ended:
            self._ended = True
            found.append(m.Ended())
        for message in found:
            self.say(message)
        return bool(found)

    def _keep(self, items: TaskRange) -> m.Unbegun:
        """Stage items that no worker has begun, so that they need not be sent again."""
        self._kept -= 1
        job, first = items.job, items.first
        # -1: the function was dropped, see `_function`.
        func = next((mine for mine, its in self._functions.items() if its == items.func), -1)
        self._staged[self._kept] = m.Stage(
            self._kept, job, func if items.func else 0, first, list(items.items), None, items.terms
        )
        return m.Unbegun(self._kept, job, first, len(items.items))


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
    modules: tuple[str, ...]  # modules that the fork server imports
    options: EngineOptions
    memory_limit: int | None
    lease: float
    facts: dict[str, str]
    kind: str | None = None
    """The kind of device of this host that each worker is bound to; None: no devices."""


def facts(modules: Sequence[str]) -> dict[str, str]:
    """Return the versions that must agree on all hosts, by name: Python's and those of xpool and
    ``modules``, as far as they are installed."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, **installed(("xpool", *modules))}


class Agent:
    """An engine that works for a driver elsewhere.

    ``first``: the pool's index of the first worker here.  ``ended`` is called when the lease is
    over and the workers have ended.  ``memory_full``: the part of the host's memory (0 to 1) at
    which the largest worker is ended.  Raises `OptionError` if versions differ from the driver's,
    and `DeviceError` if this host has fewer devices than workers.
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
        first_message = worker_config(spec, launcher, arena, limit, lambda: main, first, host)
        self._engine = Engine(
            workers,
            Recipe(
                launcher,
                first_message,
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
        self._thread = PromptThread(target=self._run, name=f"{spec.pool}-agent", daemon=True)

    def start(self) -> None:
        """Start the workers."""
        self._engine.start_missing()
        self._thread.start()

    # -- called by the driver ----------------------------------------------------------------------

    def call(self, parts: Sequence[Any], fetch: Callable[[Any], Any]) -> list[Any]:
        """Act on a packed `Call`, wait for a message to the driver, and return the packed reply.

        ``fetch`` returns the bytes that the payload of a `Blob` refers to.
        """
        head, messages = m.unpacked(parts)
        call = m.Call._make([*head, [self._lodged(one, fetch) for one in messages]])
        if call.beat:
            with self._news:
                self._session.called(call)
                taken, first, found = self._session.reply_to_beat(call, time.monotonic())
            return m.packed((taken, first), found)
        session = self._session
        with self._news:
            begun = session.called(call)
            self._locate_workers()
            self._collect()
            self._news.notify_all()
        if begun is not None:
            # Without the lock, so that other calls of the driver can act meanwhile.
            self._engine.await_briefly(*begun, DIRECT_MILLISECONDS)
        with self._news:
            if begun is not None:
                session.wait(call.number)
                self._collect()
            seconds = min(REPLY_SECONDS, self._lease / 8)
            self._news.wait_for(lambda: session.may_reply(call.number), seconds)
            now = time.monotonic()
            if not session.has_news:
                self._say(now)
            taken, first, found = session.reply(call.number, now)
            if session.has_news:
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
            PromptThread(target=answer, args=(number,), daemon=True).start()
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
        cost = self._engine.sched.sizes.cost
        last = self._said
        near = last is not None and last.cost / 2 <= cost <= last.cost * 2
        if near and now < self._said_at + STATUS_SECONDS:
            return
        status = m.Status(cost, self._engine.statistics(), self._engine.report())
        if last is None or status != last:
            self._said, self._said_at = status, now
            self._session.say(status)


def _compare(host: str, wanted: dict[str, str]) -> None:
    here = facts([name for name in wanted if name not in ("Python", "xpool")])
    for name, version in wanted.items():
        found = here.get(name, "none")
        if found != version:
            raise OptionError(
                f"host {host} has {name} {found}, and the program has {name} {version}: all hosts "
                f"of a pool need the same; install it there, or give it in runtime_env="
            )
