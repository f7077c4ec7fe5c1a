"""Mutants of pools over many hosts, which the simulated world of hosts must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xpool._engine.jobs.ranges import CALLS, TaskRange, piece
from xpool._engine.jobs.scheduler import Scheduler
from xpool._engine.jobs.waiting import RangeQueue
from xpool._hosts import messages as m
from xpool._hosts.agent_session import AgentSession
from xpool._hosts.conversation import Conversation
from xpool._hosts.holdings import HostState, HostTable, Lost
from xpool._hosts.hosts_scheduler import HostScheduler
from xpool._hosts.link import Link
from xpool._hosts.quotas import Quotas
from xpool._hosts.service import HostService

from .mutants import PINNED, Mutant, Patch, nothing, stays_in_front, wrap

HOSTS: list[Mutant] = []


def mutant(name: str, pinned: int | None = None) -> Callable[[Callable[[Patch], None]], None]:
    def add(seed: Callable[[Patch], None]) -> None:
        one = Mutant(name, "hosts", seed)
        if pinned is None:
            HOSTS.append(one)
        else:
            PINNED[one] = pinned

    return add


# -- what a host is permitted ----------------------------------------------------------------------


@mutant("tasks staged at a lost host count as permitted")
def _(patch: Patch) -> None:
    def lost(original: Any, sched: HostScheduler, number: int) -> Any:
        host = sched.table.hosts[number]
        for batch in host.staged:
            for i in range(batch.items.first, batch.items.first + batch.left):
                host.permitted[(i, 0) if batch.items.job == CALLS else (batch.items.job, i)] = batch
        host.staged.clear()
        return original(sched, number)

    wrap(patch, HostScheduler, "lost", lost)


@mutant("staged tasks begin without permission")
def _(patch: Patch) -> None:
    def do(original: Any, session: AgentSession, message: Any) -> None:
        original(session, message)
        if type(message) is m.Stage:
            session.engine.submit(session._range(message.batch))
            session._staged[message.batch] = message._replace(items=[])

    wrap(patch, AgentSession, "_do", do)


@mutant("more long tasks are permitted than a host has workers")
def _(patch: Patch) -> None:
    wrap(patch, Quotas, "extra", lambda original, *given: max(1, original(*given)))


@mutant("permitted bytes are not bounded")
def _(patch: Patch) -> None:
    def room(original: Any, quotas: Quotas, host: HostState) -> int:
        nbytes, host.nbytes = host.nbytes, 0
        found: int = original(quotas, host)
        host.nbytes = nbytes
        return found

    wrap(patch, Quotas, "room", room)


@mutant("permitted bytes of bound tasks are not bounded")
def _(patch: Patch) -> None:
    def bound(original: Any, sched: HostScheduler, host: HostState, found: Any) -> Any:
        nbytes, host.nbytes = host.nbytes, 0
        batch = original(sched, host, found)
        host.nbytes += nbytes
        return batch

    wrap(patch, HostScheduler, "_next_bound", bound)


@mutant("a draining host is permitted more tasks")
def _(patch: Patch) -> None:
    def drain(original: Any, sched: HostScheduler, number: int) -> Any:
        sched.table.hosts[number].leaving = True
        return []

    wrap(patch, HostScheduler, "drain", drain)


@mutant("tasks staged at other hosts are not looked for")
def _(patch: Patch) -> None:
    patch.setattr(HostTable, "update_donors", nothing)
    patch.setattr(HostScheduler, "_from_another", nothing)


@mutant("a host is not told which tasks to drop")
def _(patch: Patch) -> None:
    def drop(
        original: Any, sched: HostScheduler, host: HostState, batches: Any, found: Any
    ) -> None:
        original(sched, host, batches, found)
        found.pop()

    wrap(patch, HostScheduler, "_drop", drop)


@mutant("tasks that are given back are queued, too")
def _(patch: Patch) -> None:
    def unbegun(original: Any, sched: HostScheduler, number: int, kept: int, *which: int) -> Any:
        found = original(sched, number, kept, *which)
        for batch in sched.table.hosts[number].staged:
            if batch.number == kept:
                sched.put_back(piece(batch.items, 0, batch.left))
        return found

    wrap(patch, HostScheduler, "unbegun", unbegun)


@mutant("a host keeps tasks that were withdrawn while it gave them back")
def _(patch: Patch) -> None:
    def unbegun(original: Any, sched: HostScheduler, *which: int) -> Any:
        return [one for one in original(sched, *which) if type(one[1]) is not m.Drop]

    wrap(patch, HostScheduler, "unbegun", unbegun)


@mutant("tasks that are given back also begin")
def _(patch: Patch) -> None:
    def take_out(original: Any, sched: Scheduler, job: int, items: range) -> list[TaskRange]:
        found = [one for one in sched.shared if one.job == job and one.first in items]
        return [piece(one, 0, len(one.items)) for one in found if one.items]

    wrap(patch, Scheduler, "take_out", take_out)


@mutant("tasks that a host has not begun in time are not requested")
def _(patch: Patch) -> None:
    patch.setattr(HostScheduler, "look", lambda sched, number: [])


@mutant("the driver does not wake up to check a host")
def _(patch: Patch) -> None:
    wrap(patch, HostService, "__init__", lambda original, *args: original(*args[:-1], nothing))


@mutant("a host that has begun no task in time is permitted as many again")
def _(patch: Patch) -> None:
    def most(original: Any, quotas: Quotas, host: HostState) -> int:
        pace, host.pace = host.pace, None
        n: int = original(quotas, host)
        host.pace = pace
        return n

    wrap(patch, Quotas, "most_ahead", most)


@mutant("a host keeps requested tasks")
def _(patch: Patch) -> None:
    def do(original: Any, session: AgentSession, message: Any) -> None:
        if type(message) is m.Back:
            session.say(m.Given([batch for batch, *_ in message.batches]))
        else:
            original(session, message)

    wrap(patch, AgentSession, "_do", do)


@mutant("an endless stream stays in front of jobs that wait for a host")
def _(patch: Patch) -> None:
    wrap(patch, RangeQueue, "take", stays_in_front)


@mutant("staged tasks of a stream are permitted before waiting jobs")
def _(patch: Patch) -> None:
    patch.setattr(RangeQueue, "pass_streams", lambda queue: False)


@mutant("staged tasks are permitted before waiting ones of a higher priority")
def _(patch: Patch) -> None:
    def overtakes(original: Any, sched: HostScheduler, batch: Any) -> bool:
        return batch.of_stream and sched.shared.pass_streams()

    wrap(patch, HostScheduler, "_overtakes", overtakes)


@mutant("staged tasks are permitted in the order in which they were staged")
def _(patch: Patch) -> None:
    def keep(original: Any, table: Any, host: Any, batch: Any, in_front: bool = False) -> None:
        original(table, host, batch, in_front)
        host.staged.remove(batch)
        (host.staged.appendleft if in_front else host.staged.append)(batch)

    wrap(patch, HostTable, "keep", keep)


@mutant("a host gets tasks while others of a higher priority are staged elsewhere")
def _(patch: Patch) -> None:
    patch.setattr(HostScheduler, "_fetch_higher", lambda sched, host, found: None)


@mutant("a task goes to the host that has waited longest")
def _(patch: Patch) -> None:
    def answered(original: Any, sched: HostScheduler, number: int, *which: Any) -> Any:
        return original(sched, number, *which[:3])  # not `ok`

    wrap(patch, HostScheduler, "answered", answered)


@mutant("a host that gave an error is used next")
def _(patch: Patch) -> None:
    def answered(original: Any, sched: HostScheduler, number: int, *which: Any) -> Any:
        return original(sched, number, *which[:3], True)

    wrap(patch, HostScheduler, "answered", answered)


# -- hosts that are lost ---------------------------------------------------------------------------


@mutant("a task is run again before the lost host's lease is over")
def _(patch: Patch) -> None:
    def put_again(original: Any, sched: HostScheduler, item: Any, killed: bool, _: float) -> None:
        original(sched, item, killed, 0.0)

    wrap(patch, HostScheduler, "put_again", put_again)


@mutant("the driver does not wait for the agent's end after the lease")
def _(patch: Patch) -> None:
    patch.setattr("xpool._hosts.service.END_SECONDS", 0.0)


@mutant("a lease counts as a little shorter than it is")
def _(patch: Patch) -> None:
    patch.setattr("xpool._hosts.service.DRIFT", 0.9)


@mutant("a retry on another host costs no retry")
def _(patch: Patch) -> None:
    def put_again(original: Any, sched: HostScheduler, item: TaskRange, *how: Any) -> None:
        item.terms = item.terms._replace(retries=item.terms.retries + 1)
        original(sched, item, *how)

    wrap(patch, HostScheduler, "put_again", put_again)


@mutant("tasks bound to a lost host are run again elsewhere")
def _(patch: Patch) -> None:
    def lost(original: Any, sched: HostScheduler, number: int) -> list[Lost]:
        found = original(sched, number)
        for one in found:
            one.item.bound = None
        return [Lost(one.item, one.again or one.item.terms.retries > 0) for one in found]

    wrap(patch, HostScheduler, "lost", lost)


@mutant("tasks bound to a lost host's worker wait for ever")
def _(patch: Patch) -> None:
    def lost(original: Any, sched: HostScheduler, number: int) -> list[Lost]:
        own, sched.own = sched.own, [RangeQueue(set()) for _ in sched.own]
        found: list[Lost] = original(sched, number)
        sched.own = own
        return found

    wrap(patch, HostScheduler, "lost", lost)


@mutant("a host that ended by itself counts as one that was told to end")
def _(patch: Patch) -> None:
    def heard(original: Any, service: HostService, host: int, agent: Any, message: Any) -> None:
        if type(message) is m.Ended:
            agent.ended = True
        else:
            original(service, host, agent, message)

    wrap(patch, HostService, "_heard", heard)


# -- the lease -------------------------------------------------------------------------------------


@mutant("an agent's reply renews its lease even if it is lost")
def _(patch: Patch) -> None:
    def reply(original: Any, session: AgentSession, number: int, now: float, *more: Any) -> Any:
        session.until = now + session._lease
        return original(session, number, now, *more)

    wrap(patch, AgentSession, "reply", reply)


@mutant("the lease is not renewed")
def _(patch: Patch) -> None:
    def called(original: Any, session: AgentSession, call: Any) -> None:
        original(session, call._replace(heard=0))

    wrap(patch, AgentSession, "called", called)


# -- messages --------------------------------------------------------------------------------------


@mutant("a failed call is not repeated")
def _(patch: Patch) -> None:
    def unreached(original: Any, agent: Conversation, number: int) -> None:
        agent._calls.pop(number, None)

    wrap(patch, Conversation, "unreached", unreached)


@mutant("a repeated message is handled twice")
def _(patch: Patch) -> None:
    def receive(original: Any, link: Link, first: int, messages: Any) -> list[Any]:
        if first <= link.got:
            link.got = max(link.got, first + len(messages) - 1)
            return list(messages)
        return list(original(link, first, messages))

    wrap(patch, Link, "receive", receive)


@mutant("messages that arrive too early are not put in order")
def _(patch: Patch) -> None:
    def receive(original: Any, link: Link, first: int, messages: Any) -> list[Any]:
        link.got = max(link.got, first - 1)
        return list(original(link, first, messages))

    wrap(patch, Link, "receive", receive)


@mutant("messages are acknowledged before they arrive")
def _(patch: Patch) -> None:
    def reply(original: Any, session: AgentSession, *how: Any) -> tuple[int, int, list[Any]]:
        taken, first, messages = original(session, *how)
        return taken + 1, first, messages

    wrap(patch, AgentSession, "reply", reply)


@mutant("news lost with a failed call are not sent again")
def _(patch: Patch) -> None:
    def replied(original: Any, agent: Conversation, *reply: Any) -> Any:
        lost = agent._lost
        found = original(agent, *reply)
        agent._lost, agent._overdue = lost, False
        return found

    wrap(patch, Conversation, "replied", replied)


@mutant("lost news wait until no call is under way", pinned=1021516)
def _(patch: Patch) -> None:
    def replied(original: Any, agent: Conversation, *reply: Any) -> Any:
        found = original(agent, *reply)
        agent._overdue = False
        return found

    wrap(patch, Conversation, "replied", replied)


@mutant("a driver repeats too late a part of its messages")
def _(patch: Patch) -> None:
    def send_again(original: Any, link: Any, after: int) -> None:
        original(link, after)
        link.after = after

    def take(original: Any, link: Any, *how: Any) -> Any:
        first, messages = original(link, *how)
        return link.__dict__.pop("after", first - 1) + 1, messages

    wrap(patch, Link, "send_again", send_again)
    wrap(patch, Link, "take", take)


@mutant("a late reply delays the next beat")
def _(patch: Patch) -> None:
    def replied(original: Any, agent: Conversation, reply: Any, now: float) -> Any:
        agent.beaten = now
        return original(agent, reply, now)

    wrap(patch, Conversation, "replied", replied)


# -- the end ---------------------------------------------------------------------------------------


@mutant("hosts that have not joined are waited for at the end")
def _(patch: Patch) -> None:
    def retire(original: Any, service: HostService) -> None:
        expected, service.expected = service.expected, set()
        original(service)
        service.expected = expected

    wrap(patch, HostService, "retire", retire)


@mutant("the driver does not wake up for a retry")
def _(patch: Patch) -> None:
    def pause(original: Any, service: HostService, tries: int) -> float:
        service.at = nothing  # type: ignore[method-assign]
        when: float = original(service, tries)
        del service.at
        return when

    wrap(patch, HostService, "_pause", pause)
