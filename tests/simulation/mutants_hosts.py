"""Mutants of pools over many hosts, which the simulated world of hosts must find."""

from xpool._engine.jobs.ranges import CALLS, piece
from xpool._engine.jobs.scheduler import Scheduler
from xpool._engine.jobs.waiting import RangeQueue
from xpool._hosts import messages as m
from xpool._hosts import service
from xpool._hosts.agent import AgentSession
from xpool._hosts.hosts_scheduler import HostScheduler, Quotas
from xpool._hosts.messages import Link
from xpool._hosts.service import Conversation, HostService

from .mutants import during, false, nothing, of_world, stays_in_front, swapped

hosts = of_world("hosts")


# -- what a host is permitted ----------------------------------------------------------------------


@hosts("tasks staged at a lost host count as permitted", HostScheduler, "lost")
def _(original, sched, number):
    host = sched.hosts[number]
    for batch in host.staged:
        for i in range(batch.items.first, batch.items.first + batch.left):
            host.permitted[(i, 0) if batch.items.job == CALLS else (batch.items.job, i)] = batch
    host.staged.clear()
    return original(sched, number)


@hosts("staged tasks begin without permission", AgentSession, "_do")
def _(original, session, message):
    original(session, message)
    if type(message) is m.Stage:
        session.engine.submit(session._range(message.batch))
        session._staged[message.batch] = message._replace(items=[])


hosts("more long tasks are permitted than a host has workers", Quotas, "extra")(
    lambda original, *given: max(1, original(*given))
)


@hosts("permitted bytes are not bounded", Quotas, "room")
def _(original, quotas, host):
    with swapped(host, "nbytes", 0):
        return original(quotas, host)


@hosts("permitted bytes of bound tasks are not bounded", HostScheduler, "_next_bound")
def _(original, sched, host, found):
    nbytes, host.nbytes = host.nbytes, 0
    batch = original(sched, host, found)
    host.nbytes += nbytes
    return batch


@hosts("a draining host is permitted more tasks", HostScheduler, "drain")
def _(original, sched, number):
    sched.hosts[number].leaving = True
    return []


@hosts("tasks staged at other hosts are not looked for")
def _(patch):
    patch.setattr(HostScheduler, "update_donors", nothing)
    patch.setattr(HostScheduler, "_from_another", nothing)


@hosts("a host is not told which tasks to drop", HostScheduler, "_drop")
def _(original, sched, host, batches, found):
    original(sched, host, batches, found)
    found.pop()


@hosts("tasks that are given back are queued, too", HostScheduler, "unbegun")
def _(original, sched, number, kept, *which):
    found = original(sched, number, kept, *which)
    for batch in sched.hosts[number].staged:
        if batch.number == kept:
            sched.put_back(piece(batch.items, 0, batch.left))
    return found


@hosts("a host keeps tasks that were withdrawn while it gave them back", HostScheduler, "unbegun")
def _(original, sched, *which):
    return [one for one in original(sched, *which) if type(one[1]) is not m.Drop]


@hosts("tasks that are given back also begin", Scheduler, "take_out")
def _(original, sched, job, items):
    found = [one for one in sched.shared if one.job == job and one.first in items]
    return [piece(one, 0, len(one.items)) for one in found if one.items]


hosts(
    "tasks that a host has not begun in time are not requested",
    HostScheduler,
    "look",
    lambda *_: [],
)
hosts("the driver does not wake up to check a host", HostService, "__init__")(
    lambda original, *args: original(*args[:-1], nothing)
)


@hosts("a host that has begun no task in time is permitted as many again", Quotas, "most_ahead")
def _(original, quotas, host):
    with swapped(host, "pace", None):
        return original(quotas, host)


@hosts("a host keeps requested tasks", AgentSession, "_do")
def _(original, session, message):
    if type(message) is m.Back:
        session.say(m.Given([batch for batch, *_ in message.batches]))
    else:
        original(session, message)


hosts("an endless stream stays in front of jobs that wait for a host", RangeQueue, "take")(
    stays_in_front
)
hosts(
    "staged tasks of a stream are permitted before waiting jobs", RangeQueue, "pass_streams", false
)


@hosts(
    "staged tasks are permitted before waiting ones of a higher priority",
    HostScheduler,
    "_overtakes",
)
def _(original, sched, batch):
    return batch.of_stream and sched.shared.pass_streams()


@hosts("staged tasks are permitted in the order in which they were staged", HostScheduler, "keep")
def _(original, table, host, batch, in_front=False):
    original(table, host, batch, in_front)
    host.staged.remove(batch)
    (host.staged.appendleft if in_front else host.staged.append)(batch)


hosts(
    "a host gets tasks while others of a higher priority are staged elsewhere",
    HostScheduler,
    "_fetch_higher",
    nothing,
)
hosts("a task goes to the host that has waited longest", HostScheduler, "answered")(
    lambda original, sched, number, *which: original(sched, number, *which[:3])
)
hosts("a host that gave an error is used next", HostScheduler, "answered")(
    lambda original, sched, number, *which: original(sched, number, *which[:3], True)
)


# -- hosts that are lost ---------------------------------------------------------------------------


hosts("a task is run again before the lost host's lease is over", HostScheduler, "put_again")(
    lambda original, sched, item, killed, _: original(sched, item, killed, 0.0)
)
hosts("the driver does not wait for the agent's end after the lease", service, "END_SECONDS", 0.0)
hosts("a lease counts as a little shorter than it is", service, "DRIFT", 0.9)


@hosts("a retry on another host costs no retry", HostScheduler, "put_again")
def _(original, sched, item, *how):
    item.terms = item.terms._replace(retries=item.terms.retries + 1)
    original(sched, item, *how)


@hosts("tasks bound to a lost host are run again elsewhere", HostScheduler, "lost")
def _(original, sched, number):
    found = original(sched, number)
    for one in found:
        one.bound = None
    return found


@hosts("tasks bound to a lost host's worker wait for ever", HostScheduler, "lost")
def _(original, sched, number):
    with swapped(sched, "own", [RangeQueue(set()) for _ in sched.own]):
        return original(sched, number)


@hosts("a host that ended by itself counts as one that was told to end", HostService, "_heard")
def _(original, service, host, agent, message):
    if type(message) is m.Ended:
        agent.ended = True
    else:
        original(service, host, agent, message)


# -- the lease -------------------------------------------------------------------------------------


@hosts("an agent's reply renews its lease even if it is lost", AgentSession, "reply")
def _(original, session, number, now, *more):
    session.until = now + session._lease
    return original(session, number, now, *more)


hosts("the lease is not renewed", AgentSession, "called")(
    lambda original, session, call: original(session, call._replace(heard=0))
)


# -- messages --------------------------------------------------------------------------------------


@hosts("a failed call is not repeated", Conversation, "unreached")
def _(original, agent, number):
    agent._calls.pop(number, None)


@hosts("a repeated message is handled twice", Link, "receive")
def _(original, link, first, messages):
    if first <= link.got:
        link.got = max(link.got, first + len(messages) - 1)
        return list(messages)
    return list(original(link, first, messages))


@hosts("messages that arrive too early are not put in order", Link, "receive")
def _(original, link, first, messages):
    link.got = max(link.got, first - 1)
    return list(original(link, first, messages))


@hosts("messages are acknowledged before they arrive", AgentSession, "reply")
def _(original, session, *how):
    taken, first, messages = original(session, *how)
    return taken + 1, first, messages


@hosts("news lost with a failed call are not sent again", Conversation, "replied")
def _(original, agent, *reply):
    lost = agent._lost
    found = original(agent, *reply)
    agent._lost, agent._overdue = lost, False
    return found


@hosts("lost news wait until no call is under way", Conversation, "replied", pinned=1021516)
def _(original, agent, *reply):
    found = original(agent, *reply)
    agent._overdue = False
    return found


@hosts("a driver repeats too late a part of its messages")
def _(patch):
    send, taken = Link.send_again, Link.take

    def send_again(link, after):
        send(link, after)
        link.after = after

    def take(link, *how):
        first, messages = taken(link, *how)
        return link.__dict__.pop("after", first - 1) + 1, messages

    patch.setattr(Link, "send_again", send_again)
    patch.setattr(Link, "take", take)


@hosts("a late reply delays the next beat", Conversation, "replied")
def _(original, agent, reply, now):
    agent.beaten = now
    return original(agent, reply, now)


# -- the end ---------------------------------------------------------------------------------------


hosts("hosts that have not joined are waited for at the end", HostService, "retire")(
    during("expected", set())
)


@hosts("the driver does not wake up for a retry", HostService, "__init__")
def _(original, service, *args, **keywords):
    original(service, *args, **keywords)
    service.sched.alarm = nothing
