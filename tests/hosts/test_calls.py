"""A single call over hosts: which host gets it, who receives its answer, and what is sent."""

import pickle
import sys
import time
from collections import deque

import pytest
from support import work

from xpool._calls.results import exception_in
from xpool._calls.terms import ONCE, Limit, Terms
from xpool._engine.answers import Encoded, StartFailure
from xpool._engine.jobs.ranges import CALLS, TaskRange, name_of
from xpool._hosts import messages as m
from xpool._hosts.hosts_engine import HostEngine
from xpool.errors import HostLost, OptionError, PoolBroken, WorkerStartFailed
from xpool.pickle import encode

pytestmark = pytest.mark.xpool_only


# Without a cluster --------------------------------------------------------------------------------


class Fleet:
    """Two hosts whose calls wait until the test answers them.

    ``prompt``: `receive` gets the reply; else the caller's time passes, and an event follows.
    """

    def __init__(self):
        self.calls = deque()  # host, call, held
        self.received = []
        self.prompt = True

    def start(self, tell):
        self.tell = tell
        for host in 0, 1:
            tell(m.Joined(host, f"host{host}"))
        return [1, 1]

    def call(self, host, call, hold=False):
        if call.messages:
            self.calls.append((host, call, hold))

    def receive(self, host, number, seconds):
        self.received.append(host)
        if self.prompt:
            return self.reply()
        self.tell(self.reply())
        return None

    def reply(self):
        """Return the reply to the oldest call, with the answers to its tasks."""
        host, call, _ = self.calls.popleft()
        staged = [one for one in call.messages if type(one) is m.Stage]
        answers = [m.Answer(*name_of(one.job, one.first), 1, True, one.items[0]) for one in staged]
        return m.Replied(
            host, call.number, call.first + len(call.messages) - 1, call.got + 1, answers
        )

    def close(self):
        pass


@pytest.fixture
def fleet():
    return Fleet()


@pytest.fixture
def engine(fleet):
    engine = HostEngine(fleet, lambda job, index: f"task {index}")
    engine.start_missing()
    engine.wait(0)
    yield engine
    engine.close()


def call_of(number):
    return TaskRange(CALLS, 0, number, (b"%d" % number,))


def answers(engine):
    found = [(number, value) for number, _, (_, value) in engine.results]
    engine.results.clear()
    return found


def test_an_idle_host_is_not_late(engine):
    """A host that was late and has nothing to do may hold as much as before, and has no timer."""
    sched = engine.service.sched
    host = sched.hosts[0]
    host.pace = 3
    assert sched.look(0) == [] and host.pace is None and not host.watched


def test_a_lost_host_leaves_no_arguments(engine, fleet):
    """The driver frees the arguments of the tasks of a lost host."""
    large = bytearray(m.MOST_BYTES)
    before = sys.getrefcount(large)
    engine.submit(TaskRange(1, 0, 0, (memoryview(large),)))
    lost = fleet.calls.popleft()[0]
    assert sys.getrefcount(large) > before
    fleet.tell(m.Dead(lost, "it is gone"))
    engine.wait(0)
    assert [type(value) for _, value in answers(engine)] == [HostLost]
    assert sys.getrefcount(large) == before


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerStartFailed(0, 3, "why"), "Worker 1 on host host1 could not be started"),
        (StartFailure(WorkerStartFailed(0, 3, "why"), encode(KeyError(1))), "Worker 1 on host"),
        (PoolBroken(5, 1.0, "worker 0, exit code 1"), "death: on host host1: worker 0, exit code"),
        (OptionError("as it is"), "as it is"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_the_failure_of_a_host_names_it(engine, fleet, error, text):
    """If a host's workers cannot be started, the pool's error has the host and the pool's index."""
    fleet.tell(m.Replied(1, 1, 0, 1, [m.Failed(error)]))
    engine.wait(0)
    failure = exception_in(engine.failure)
    assert text in str(failure) and text in str(pickle.loads(pickle.dumps(failure)))
    assert type(failure.__cause__) is (KeyError if type(error) is StartFailure else type(None))


def call(engine, number, payload):
    """Make a call whose caller waits."""
    to = engine.put_direct(number, payload, None, ONCE)
    if to is not None:
        engine.await_answer(to, number)


def test_a_call_that_is_too_large_for_one_message_leaves_at_once(engine, fleet):
    """Messages that do not fit into the held call follow without waiting for its reply."""
    function = engine.learn(1, b"function")
    engine.submit(TaskRange(1, function, 0, (b"1",)))
    used = fleet.calls[0][0]
    fleet.tell(fleet.reply())
    engine.wait(0)
    engine.forget(function)  # leaves with the next call
    large = bytes(m.MOST_BYTES + 1)
    call(engine, 2, large)
    assert [(host, held) for host, _, held in fleet.calls] == [(used, False)] * 2
    sent = [type(one) for _, call, _ in fleet.calls for one in call.messages]
    assert sent == [m.Forget, m.Stage, m.Go]


def test_the_caller_waits_once(engine, fleet):
    """A caller asks for its reply once; if that takes long, the engine's thread receives it."""
    call(engine, 1, b"1")
    assert answers(engine) == [(1, b"1")]
    fleet.prompt = False
    call(engine, 2, b"2")
    assert len(fleet.received) == 2
    assert not engine.results
    engine.wait(0)
    assert answers(engine) == [(2, b"2")]


def test_only_a_reply_to_one_call_is_held(engine, fleet):
    """A call that waits behind others, or leaves with them, is received by the engine's thread."""
    engine.submit(call_of(1), call_of(2))
    call(engine, 3, b"3")  # both hosts are busy
    assert [held for _, _, held in fleet.calls] == [False, False]
    for _ in range(3):
        fleet.tell(fleet.reply())
        engine.wait(0)
    assert sorted(answers(engine)) == [(1, b"1"), (2, b"2"), (3, b"3")]
    assert not fleet.received


MESSAGES = [
    m.Func(1, 2, b"function"),
    m.Func(1, 2, b"f" * 100_000),
    m.Forget(1),
    m.Blob("name", 0),
    m.Stage(1, CALLS, 0, 7, [b"item"]),
    m.Stage(1, 5, 2, 0, [b"item", b"i" * 100_000], 3, Terms(2, Limit(1.5, True))),
    m.Go([1, 2]),
    m.Drop([1]),
    m.Back([(1, 2, 3, 4)]),
    m.Cancel(1, None),
    m.Retire(),
    m.LocateWorkers(1),
    m.WorkerLocations(1, []),
    m.Answer(1, 2, 3, False, ValueError),
    m.Again(1, 2, True),
    m.Given([1]),
    m.Unbegun(-1, 1, 2, 3),
    m.Status(0.5, {"ready": 1}),
    m.Failed(ValueError),
    m.Ended(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_travel(message):
    """Each kind of message arrives as it was, with its large payloads beside the pickle."""
    head, (back,) = m.unpacked(m.packed((1, 2), [message]))
    assert head == (1, 2)
    assert back == message
    assert type(back) is type(message)


def test_no_kind_of_message_is_left_out():
    assert set(m._KINDS) == set(map(type, MESSAGES))


def test_a_small_call_names_no_class():
    """What one call sends is a pickle of plain values: nothing is imported to open it."""
    (data,) = m.packed(
        tuple(m.Call(1, 1, 0, False, 0, False, [])[:-1]),
        [m.Stage(1, CALLS, 0, 7, [b"item"]), m.Go([1])],
    )
    assert b"xpool" not in data


def test_answers_travel():
    answer = m.Answer(CALLS, 7, 1, True, Encoded(b"\x80\x05K\x07.", 1, False))
    _, (back,) = m.unpacked(m.packed((), [answer]))
    assert back.value.open() == [7]
    assert back[:-1] == answer[:-1]


# Over a cluster -----------------------------------------------------------------------------------


def takes(milliseconds, x):
    """Return after this time, in which the worker works."""
    until = time.perf_counter() + milliseconds / 1000
    while time.perf_counter() < until:
        pass
    return x


@pytest.mark.ray
@pytest.mark.parametrize("milliseconds", [0, 4, 6, 12])
def test_calls_of_any_length(pool, milliseconds, monkeypatch):
    """Calls that end before, with and after the wait of their caller: it asks Ray once for each."""
    fleet = pool._engine._fleet
    receive, asked = fleet.receive, []

    def count(host, number, seconds):
        asked.append(number)
        return receive(host, number, seconds)

    monkeypatch.setattr(fleet, "receive", count)
    for i in range(30):
        assert pool.apply(takes, (milliseconds, i)) == i
    assert len(asked) == len(set(asked)) <= 30
    assert asked
    assert not fleet._held


@pytest.mark.ray
def test_calls_of_changing_length(pool):
    """A long call after short ones, and a call after one that fails."""
    for i in range(40):
        assert pool.apply(takes, ((0, 12, 4, 6)[i % 4], i)) == i
    with pytest.raises(KeyError):
        pool.apply(work.fail, (1,))
    assert pool.apply(takes, (6, 1)) == 1
