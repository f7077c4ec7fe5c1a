"""Pools over thousands of hosts: the real policy, hosts as queues, virtual time.

`HostScheduler` is real. A host is a queue in front of its workers. A message takes half a round
trip, and the arguments of tasks leave the driver through one network at `UPLINK`. The driver is
busy for `CALL` seconds with each call and for `ITEM` seconds with each task, as measured with real
hosts. See docs/dev/scale.md::

    python -m tests.simulation.scale 1000 10000
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from xpool._calls.terms import Terms
from xpool._engine.jobs.ranges import TaskRange
from xpool._hosts import messages as m
from xpool._hosts.hosts_scheduler import HostScheduler, Message
from xpool._hosts.service import BEAT_SECONDS, CALLS_IN_FLIGHT

__all__ = ["Cluster", "Outcome", "UPLINK"]

ITEM = 5e-6
"""Seconds that the driver needs for each task (200,000 a second)."""

CALL = 150e-6
"""Seconds that the driver needs for each call of an agent and its reply."""

UPLINK = 1.25e9
"""Bytes a second from the driver to all hosts."""

WORKERS = 64


class Outcome(NamedTuple):
    """The result of a run.

    ``seconds``: from the beginning to the last answer; ``busy``: the share of time that workers
    work until no task waits; ``tail``: seconds from then to the end; ``lost``: tasks that were
    permitted to the lost host and not answered; ``begun``: those of them that it had begun;
    ``sent``: how often a task was sent to a host, on average; ``policy``: seconds of the real
    scheduler for a task.
    """

    seconds: float
    busy: float
    tail: float
    lost: int
    begun: int
    sent: float
    policy: float


class Sized(bytes):
    """Arguments of a task, of which only the number of bytes matters."""

    def __new__(cls, nbytes: int) -> Sized:
        one = super().__new__(cls)
        one.nbytes = nbytes
        return one

    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


class _Host:
    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.free = cluster.workers
        self.staged: dict[int, m.Stage] = {}
        self.kept = 0
        self.waiting: deque[tuple[int, int]] = deque()  # batch, and index of a task
        self.news: list[Any] = []
        self.may_reply = 0.0  # when there is a call to reply to
        self.replying = self.gone = False
        self.begun: dict[int, float] = {}  # running tasks, and since when
        self.arrives = 0.0  # when the last message arrives here

    def told(self, messages: list[Any]) -> None:
        for message in messages:
            if type(message) is m.Stage:
                self.staged[message.batch] = message
            elif type(message) is m.Drop:
                for batch in message.batches:
                    del self.staged[batch]
            elif type(message) is m.Back:
                self.say(m.Given([batch for batch, *_ in message.batches]))
                for batch, *_ in message.batches:
                    self.keep(batch)
            elif type(message) is m.Go:
                for batch in message.batches:
                    stage = self.staged.pop(batch)
                    for i in range(stage.first, stage.first + len(stage.items)):
                        self.waiting.append((batch, i))
        self.begin()

    def keep(self, batch: int) -> None:
        """Give back the tasks of a batch that no worker has begun, and stage them."""
        mine = [index for one, index in self.waiting if one == batch]
        if mine:
            self.waiting = deque(one for one in self.waiting if one[0] != batch)
            self.kept -= 1
            self.staged[self.kept] = m.Stage(self.kept, 1, 0, mine[0], mine)
            self.say(m.Unbegun(self.kept, 1, mine[0], len(mine)))

    def begin(self) -> None:
        cluster = self.cluster
        while self.free and self.waiting and not self.gone:
            index = self.waiting.popleft()[1]
            self.free -= 1
            self.begun[index] = cluster.now
            takes = cluster.takes()
            cluster.at(cluster.now + takes, self.end, index, takes)

    def end(self, index: int, takes: float) -> None:
        if self.gone:
            return
        self.free += 1
        del self.begun[index]
        self.cluster.worked(takes)
        self.say(index)
        self.begin()

    def say(self, message: Any) -> None:
        self.news.append(message)
        if not self.replying:
            self.replying = True
            self.cluster.at(max(self.cluster.now, self.may_reply), self.reply)

    def reply(self) -> None:
        self.replying = False
        if not self.gone:
            cluster, news, self.news = self.cluster, self.news, []
            self.may_reply = cluster.now + cluster.trip / CALLS_IN_FLIGHT
            cluster.at(cluster.now + cluster.trip / 2, cluster.heard, self.number, news)


class Cluster:
    """One driver and its hosts, with one job of tasks.

    Args:
        hosts: how many.
        length: seconds of a task, on average.
        trip: seconds of a round trip.
        each: tasks for each worker.
        loses: the part of the tasks (0 to 1) after which a host goes; None: none goes.
        cost: seconds of a task that the driver expects, if not the average.
        workers: of each host.
        nbytes: of the arguments of a task.
    """

    def __init__(
        self,
        hosts: int,
        length: float,
        trip: float,
        each: float,
        loses: float | None = 0.5,
        cost: float | None = None,
        workers: int = WORKERS,
        nbytes: int = 0,
    ) -> None:
        self.length, self.trip, self.loses = length, trip, loses
        self.workers, self.nbytes = workers, nbytes
        self.draw = random.Random(hosts)
        self.now = self.driver_free = self.uplink_free = 0.0
        self.tasks = int(hosts * workers * each)
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.serial = itertools.count()
        self.hosts = [_Host(self, number) for number in range(hosts)]
        self.inbox: list[tuple[int, list[Any]]] = []
        self.awake = False
        self.done = 0
        self.work = 0.0
        self.drained_at = self.worked_then = 0.0
        self.lost = self.begun = self.sent = 0
        self.policy = 0.0
        self.sched = HostScheduler()
        self.sched.quotas.cost = cost or length
        for number in range(hosts):
            self.sched.expect(number, workers)
            self.sched.join(number)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (when, next(self.serial), call, args))

    def takes(self) -> float:
        return self.length * (0.5 + self.draw.random())

    def run(self) -> Outcome:
        """Run the job; return the result."""
        items = [Sized(self.nbytes)] * self.tasks
        self.sched.put(TaskRange(1, 0, 0, items, terms=Terms(retries=1)))
        self.at(0.0, self.turn)
        if len(self.hosts) * CALL < BEAT_SECONDS:
            self.at(BEAT_SECONDS, self.beat)
        while self.done < self.tasks:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)
        all_of_it = len(self.hosts) * self.workers * self.drained_at
        return Outcome(
            self.now,
            self.worked_then / all_of_it,
            self.now - self.drained_at,
            self.lost,
            self.begun,
            self.sent / self.tasks,
            self.policy / self.tasks,
        )

    def worked(self, seconds: float) -> None:
        """A worker has finished a task."""
        self.work += seconds

    def heard(self, number: int, news: list[Any]) -> None:
        """A reply arrives; the driver handles it when it has time."""
        self.inbox.append((number, news))
        if not self.awake:
            self.awake = True
            self.at(max(self.now, self.driver_free), self.turn)

    def beat(self) -> None:
        """The driver calls all hosts regularly."""
        self.driver_free = max(self.now, self.driver_free) + CALL * len(self.hosts)
        self.at(self.now + BEAT_SECONDS, self.beat)

    def look(self, number: int) -> None:
        """The driver checks whether a host is late."""
        self.turn(self.sched.look(number))

    def turn(self, looked: Iterable[Message] = ()) -> None:
        """The driver handles all messages that have arrived, then sends waiting tasks."""
        self.awake = False
        inbox, self.inbox = self.inbox, []
        given: list[Message] = []
        busy = 0.0
        began = time.thread_time()
        for number, news in inbox:
            for message in news:
                if type(message) is m.Given:
                    self.sched.given(number, message.batches)
                elif type(message) is m.Unbegun:
                    given += self.sched.unbegun(number, *message)
                elif self.sched.answered(number, 1, message, 1):
                    self.done += 1
            busy += ITEM * len(news)
        if self.loses is not None and self.done >= self.tasks * self.loses:
            self.lose()
        messages: dict[int, list[Any]] = {}
        for number, message in itertools.chain(looked, given, self.sched.give()):
            messages.setdefault(number, []).append(message)
            if type(message) is m.Stage:
                self.sent += len(message.items)
        while self.sched.unwatched:
            number = self.sched.unwatched.popitem()[0]
            self.at(self.now + self.sched.quotas.look_seconds + 2 * self.trip, self.look, number)
        self.policy += time.thread_time() - began
        self.driver_free = max(self.now, self.driver_free) + busy
        for number, its in messages.items():
            self.send(self.hosts[number], its)
        if not self.drained_at and not self.sched.queued and not self.sched.with_staged:
            running = (self.now - at for host in self.hosts for at in host.begun.values())
            self.drained_at, self.worked_then = self.now, self.work + sum(running)

    def send(self, host: _Host, messages: list[Any]) -> None:
        """Send messages in order, in calls as `Conversation` makes them."""
        link = m.Link()
        for one in messages:
            link.queue(one)
        while link.has_unsent:
            its = link.take()[1]
            self.driver_free += CALL
            leaves = self.driver_free
            if any(map(self.weight, its)):
                leaves = max(leaves, self.uplink_free) + sum(map(self.weight, its)) / UPLINK
                self.uplink_free = leaves
            host.arrives = max(host.arrives, leaves + self.trip / 2)
            self.at(host.arrives, host.told, its)

    def weight(self, message: Any) -> int:
        return len(message.items) * self.nbytes if type(message) is m.Stage else 0

    def lose(self) -> None:
        """Lose a host."""
        self.loses = None
        host = self.hosts[-1]
        host.gone = True
        lost = self.sched.lost(host.number)
        self.lost, self.begun = len(lost), len(host.begun)
        for one in lost:
            self.sched.put_back(one)


def main() -> None:
    """Print a table for docs/dev/scale.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.scale", description=__doc__)
    parser.add_argument("hosts", type=int, nargs="+", help="how many hosts")
    parser.add_argument("--tasks", type=float, default=4.0, help="for each worker (default 4)")
    parser.add_argument("--trips", type=float, nargs="+", default=[0.002, 0.020])
    parser.add_argument("--lengths", type=float, nargs="+", default=[0.01, 0.1, 1.0, 10.0, 100.0])
    options = parser.parse_args()
    columns = "hosts", "a task takes, s", "round trip, ms", "busy, %", "tail, s", "lost", "begun"
    print("|", " | ".join(columns), "| policy, us |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for hosts, trip, length in itertools.product(options.hosts, options.trips, options.lengths):
        one = Cluster(hosts, length, trip, options.tasks).run()
        print(
            f"| {hosts:,} | {length:g} | {trip * 1e3:g} | {one.busy * 100:.1f} | {one.tail:.2f} "
            f"| {one.lost} | {one.begun} | {one.policy * 1e6:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
