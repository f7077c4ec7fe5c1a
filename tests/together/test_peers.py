"""Messages between workers: their contents, their order, and the effects of a death."""

from __future__ import annotations

import gc
import os
import signal
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch", reason="most messages have tensors")

import torch
from support import work
from support.tensor_work import arena_here
from support.tiers import also
from support.waiting import eventually, pass_gate, post, wait_gone

from xpool import (
    InternalError,
    OptionError,
    P2PPool,
    PeerLost,
    Pool,
    TaskCancelled,
    TaskNotPicklable,
    TimeoutError,
    WorkerDied,
    current_worker,
)
from xpool._python.interrupt import may_raise
from xpool._wire import packets
from xpool._wire.wire import Spin
from xpool._worker import peers

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]

LARGE = 1 << 18  # elements: 1 MiB
FAR = 30.0  # seconds: more than a busy machine needs, less than the time limit of a test


def ring(n: int, obj: Any) -> Any:
    """Send to the next worker, then receive from the previous one."""
    me = current_worker()
    me.send((me.index + 1) % n, (me.index, obj))
    return me.recv((me.index - 1) % n, FAR)


@pytest.mark.parametrize("options", [{}, {"memory_limit": 0}, {"is_copy_tensor": False}], ids=str)
def test_ring(make_pool, options):
    """Small and large objects arrive, in copy mode, in share mode and without the arena."""
    n = 4
    pool = make_pool(P2PPool, n, **options)
    for obj in (None, "text", b"x" * 300_000, list(range(50_000)), torch.ones(3)):
        for i, (sender, got) in enumerate(pool.run_all(ring, n, obj)):
            assert sender == (i - 1) % n
            assert torch.equal(got, obj) if isinstance(obj, torch.Tensor) else got == obj
    results = pool.run_all(ring, n, torch.arange(LARGE))
    assert all(torch.equal(got, torch.arange(LARGE)) for _, got in results)


def all_to_all(n: int, times: int) -> int:
    """Send to all other workers before receiving from any."""
    me = current_worker()
    others = [i for i in range(n) if i != me.index]
    for k in range(times):
        for other in others:
            me.send(other, (me.index, k, torch.full((LARGE,), float(k))), FAR)
    for k in range(times):
        for other in others:
            sender, number, tensor = me.recv(other, FAR)
            assert (sender, number) == (other, k)
            assert tensor[-1] == k
    return me.index


def test_all_send_before_any_receives(make_pool):
    """All workers send at once without a deadlock, because a waiting sender also receives."""
    pool = make_pool(P2PPool, 4)
    assert pool.run_all(all_to_all, 4, 20) == list(range(4))


def many_small(n: int, times: int) -> int:
    me = current_worker()
    others = [i for i in range(n) if i != me.index]
    for k in range(times):
        for other in others:
            me.send(other, k, FAR)
    return sum(me.recv(other, FAR) for _ in range(times) for other in others)


def send_invalid(data: bytes) -> None:
    """Send data to the pool's process that no worker sends."""
    control: Any = next(o for o in gc.get_objects() if type(o).__name__ == "Peers")._control
    control.send(data)
    work.sleep_long()


@pytest.mark.parametrize("data", [b"?", *(struct.pack("<IIQ", n, 0, 0) for n in (2, 1 << 20, 0))])
def test_an_invalid_message_on_the_control_socket(make_pool, data):
    """A worker that sends an invalid request for a channel is ended. The pool stays usable."""
    pool = make_pool(P2PPool, 2)
    with pytest.raises(InternalError, match="sent an invalid message"):
        pool.apply(send_invalid, (data,), worker=0)
    assert pool.map(abs, range(20)) == list(range(20))


def test_more_than_a_socket_holds(make_pool):
    """Thousands of small messages may be sent in both directions before the first is received."""
    pool = make_pool(P2PPool, 3)
    assert pool.run_all(many_small, 3, 3000) == [2 * sum(range(3000))] * 3


def produce(times: int) -> None:
    for k in range(times):
        current_worker().send(1, torch.full((LARGE,), float(k)))


def consume(times: int) -> tuple[float, int]:
    total = 0.0
    for _ in range(times):
        total += float(current_worker().recv(0, FAR)[0])
    return total, arena_here().statistics()["bytes"]


def test_memory_is_reused(make_pool):
    """A stream of 400 MiB needs only the memory of the messages in flight."""
    pool = make_pool(P2PPool, 2)
    sent = pool.apply_async(produce, (400,), worker=0)
    total, used = pool.apply(consume, (400,), worker=1)
    sent.get()
    assert total == sum(range(400))
    assert used < 330 << 20


def keep_and_write(value: float) -> list[float]:
    """Send a tensor, and write to it in the receiver. Return both workers' first two elements."""
    me = current_worker()
    if me.index == 0:
        mine = torch.full((LARGE,), value)
        me.send(1, mine)
        me.recv(1, FAR)
        return [float(mine[0]), float(mine[1])]
    got = me.recv(0, FAR)
    got[0] = -1.0
    me.send(0, None)
    return [float(got[0]), float(got[1])]


def test_copy_and_share(make_pool):
    """In copy mode the receiver gets its own tensor, in share mode the sender's."""
    assert make_pool(P2PPool, 2).run_all(keep_and_write, 5.0) == [[5, 5], [-1, 5]]
    shared = make_pool(P2PPool, 2, is_copy_tensor=False)
    assert shared.run_all(keep_and_write, 5.0) == [[-1, 5], [-1, 5]]


def closure_sent(n: int) -> Any:
    me = current_worker()
    base = 10 * me.index
    me.send((me.index + 1) % n, lambda x: base + x)
    return me.recv((me.index - 1) % n, FAR)(1)


def test_functions_go_by_value(make_pool):
    """Lambdas may be sent."""
    assert make_pool(P2PPool, 3).run_all(closure_sent, 3) == [21, 1, 11]


# -- mistakes -----------------------------------------------------------------------------------


def send_to(peer: Any, obj: Any = None) -> None:
    current_worker().send(peer, obj)


def receive_from(peer: Any, timeout: Any = FAR) -> Any:
    return current_worker().recv(peer, timeout)


def test_refused(make_pool):
    """The error of an invalid peer names the valid ones."""
    pool = make_pool(P2PPool, 3)
    for peer in (1, 3, -1, "0", None):
        with pytest.raises(OptionError, match=r"one of \[0, 2\]"):
            pool.apply(send_to, (peer,), worker=1)
        with pytest.raises(OptionError, match="this is worker 1"):
            pool.apply(receive_from, (peer,), worker=1)
    with pytest.raises(OptionError, match="timeout"):
        pool.apply(receive_from, (0, -1), worker=1)
    with pytest.raises(TaskNotPicklable):
        pool.apply(lambda: send_to(0, threading.Lock()), worker=1)
    with pytest.raises(OptionError, match="P2PPool"):
        make_pool(Pool, 2).apply(send_to, (0,))


def test_timeouts(make_pool):
    """A wait ends after its timeout. The next wait gets the late message."""
    pool = make_pool(P2PPool, 2)
    with pytest.raises(TimeoutError, match="worker 0 sent no message to worker"):
        pool.apply(receive_from, (0, 0.05), worker=1)
    pool.apply(send_to, (1, "late"), worker=0)
    assert pool.apply(receive_from, (0,), worker=1) == "late"
    with pytest.raises(TimeoutError, match="worker 0 sent no message to worker"):
        pool.apply(receive_from, (0, 0), worker=1)


def flood() -> int:
    me, sent = current_worker(), 1
    me.send(1, 0)  # opens the channel, however long that takes
    try:
        while True:
            me.send(1, sent, 0.05)
            sent += 1
    except TimeoutError:
        return sent


def test_a_full_channel(make_pool):
    """If the peer receives nothing, `send` times out. All sent messages arrive."""
    pool = make_pool(P2PPool, 2)
    sent = pool.apply(flood, worker=0)
    assert sent > 50
    assert [pool.apply(receive_from, (0,), worker=1) for _ in range(sent)] == list(range(sent))


def bad_pickle() -> None:
    current_worker().send(1, Unloadable())


class Unloadable:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise ArithmeticError("at unpickling")


def test_a_message_that_does_not_unpickle(make_pool):
    """The receiver gets the error, and then the next message."""
    pool = make_pool(P2PPool, 2)
    pool.apply(bad_pickle, worker=0)
    pool.apply(send_to, (1, 2), worker=0)
    with pytest.raises(ArithmeticError):
        pool.apply(receive_from, (0,), worker=1)
    assert pool.apply(receive_from, (0,), worker=1) == 2


# -- deaths ---------------------------------------------------------------------------------------


def wait_for(peer: int, box: str) -> Any:
    post(box, "waits")
    return current_worker().recv(peer)


def greet(peer: int) -> None:
    current_worker().send(peer, "hello")
    assert current_worker().recv(peer, FAR) == "hello"


def greet_each_other(pool: Any) -> None:
    for result in [pool.apply_async(greet, (1 - i,), worker=i) for i in range(2)]:
        result.get()


def test_a_dead_peer_ends_a_receive(make_pool, mailbox):
    """`recv` from a worker that dies raises PeerLost. Its replacement can communicate."""
    pool = make_pool(P2PPool, 2)
    greet_each_other(pool)
    waiting = pool.apply_async(wait_for, (1, mailbox.path), worker=0)
    mailbox.line()
    os.kill(pool.apply(work.pid, worker=1), signal.SIGKILL)
    with pytest.raises(PeerLost, match="worker 1 ended while worker 0"):
        waiting.get()
    greet_each_other(pool)


def test_a_peer_that_dies_before_it_has_a_channel(make_pool):
    """If a worker dies before it has a channel, its replacement gets the channel."""
    pool = make_pool(P2PPool, 2)
    dead = pool.apply(work.pid, worker=1)
    os.kill(dead, signal.SIGKILL)
    # Until then, the dying worker could be given a channel.
    assert wait_gone([dead]) == []
    greet_each_other(pool)


def send_until_lost(box: str) -> int:
    me, sent = current_worker(), 1
    me.send(1, 0)  # opens the channel, however long that takes
    try:
        while True:
            me.send(1, torch.ones(LARGE))
            sent += 1
            if sent == 10:
                post(box, "goes on")
    except PeerLost:
        return sent


def test_a_dead_peer_ends_a_send(make_pool, mailbox):
    """`send` to a worker that dies raises PeerLost, and the memory is freed."""
    from xpool._memory.arena import Arena

    pool = make_pool(P2PPool, 2)
    sender = pool.apply_async(send_until_lost, (mailbox.path,), worker=0)
    mailbox.line()
    os.kill(pool.apply(work.pid, worker=1), signal.SIGKILL)
    assert sender.get() >= 10
    arena = Arena.own()
    assert arena is not None
    eventually(lambda: pool.apply(held_blocks, worker=0) <= 2, "the sender holds nothing more")


def held_blocks() -> int:
    return arena_here().statistics()["held"]


def send_and_die(gate: str) -> None:
    me = current_worker()
    me.send(0, "last words")
    me.send(0, torch.ones(LARGE))
    pass_gate(gate)
    os.kill(os.getpid(), signal.SIGKILL)


def hear_last_words(gate: str) -> Any:
    me = current_worker()
    words = me.recv(1, FAR)
    post(gate, "")
    with pytest.raises(PeerLost):
        while True:
            me.recv(1, FAR)
    return words


def test_messages_sent_before_a_death(make_pool, gate):
    """Messages sent before a death can be received. Then `recv` raises PeerLost."""
    pool = make_pool(P2PPool, 2)
    ends = pool.apply_async(send_and_die, (gate.path,), worker=1)
    assert pool.apply(hear_last_words, (gate.path,), worker=0) == "last words"
    with pytest.raises(WorkerDied):
        ends.get()


def chain(victim: int, n: int, rounds: int) -> int:
    """Pass tensors along a chain of workers. The victim dies half-way."""
    me = current_worker()
    for k in range(rounds):
        if me.index == victim and k == rounds // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.full((LARGE,), float(k)) if me.index == 0 else me.recv(me.index - 1, FAR)
        assert tensor[0] == k
        if me.index < n - 1:
            me.send(me.index + 1, tensor, FAR)
    return me.index


@pytest.mark.parametrize("victim", [1, *also(0, 2)])
def test_a_death_in_a_call_of_all(make_pool, victim):
    """If a worker dies, the call raises WorkerDied. The next call works."""
    pool = make_pool(P2PPool, 3)
    assert pool.run_all(chain, -1, 3, 10) == [0, 1, 2]
    with pytest.raises(WorkerDied) as caught:
        pool.run_all(chain, victim, 3, 20)
    assert caught.value.worker == victim
    assert pool.run_all(chain, -1, 3, 10) == [0, 1, 2]


def fails_half_way(n: int) -> None:
    me = current_worker()
    for k in range(5):
        me.send((me.index + 1) % n, ("stale", k, torch.ones(LARGE)))
    if me.index == 0:
        raise ValueError("half-way")
    me.recv((me.index + 1) % n)


def test_messages_of_a_failed_call_are_dropped(make_pool):
    """Messages of a failed call are dropped. Later calls and tasks do not receive them."""
    pool = make_pool(P2PPool, 3)
    for _ in range(5):
        with pytest.raises(ValueError, match="half-way"):
            pool.run_all(fails_half_way, 3)
        assert [sender for sender, _ in pool.run_all(ring, 3, None)] == [2, 0, 1]
        with pytest.raises(TimeoutError):
            pool.apply(receive_from, (0, 0.01), worker=1)


def test_calls_of_several_threads(make_pool):
    """Messages of several calls do not mix, although a worker may be one call ahead."""
    pool = make_pool(P2PPool, 3)
    with ThreadPoolExecutor(12) as threads:
        results = threads.map(lambda i: pool.run_all(ring, 3, i), range(12))
    assert list(results) == [[(2, i), (0, i), (1, i)] for i in range(12)]


def stream_until_stopped(box: str) -> None:
    me = current_worker()
    for k in range(10**9):
        me.send((me.index + 1) % 2, (k, torch.full((LARGE // 16,), float(k))))
        number, tensor = me.recv((me.index + 1) % 2)
        assert number == k == tensor[0]
        if k == 20:
            post(box, "runs")


def start_threads() -> None:
    for _ in range(3):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("rounds", [8, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_stopped_anywhere(make_pool, mailbox, rounds):
    """Tasks cancelled in the middle of a message leave workers and channels usable, also in workers
    with more threads, one of which may get the signal."""
    ends = []
    pool = make_pool(P2PPool, 2, on_worker_end=ends.append)
    pool.run_all(start_threads)
    for _ in range(rounds):
        running = threading.Thread(target=run_and_be_cancelled, args=(pool, mailbox.path))
        running.start()
        mailbox.lines(2)
        for job in list(pool._jobs.unanswered.values()):
            pool._submitter.cancel(job)
        running.join()
        assert [sender for sender, _ in pool.run_all(ring, 2, torch.ones(LARGE))] == [1, 0]
    assert ends == []


def places_of_stops() -> dict[str, bool]:
    """Return where in `send` and `recv` a task may be stopped."""
    found: dict[str, bool] = {}

    def noted(name: str, function: Any) -> Any:
        def whole(*args: Any) -> Any:
            found[name] = may_raise(sys._getframe())
            return function(*args)

        return whole

    class Item:
        def __reduce__(self) -> Any:
            found["__reduce__"] = may_raise(sys._getframe())
            return str, ("item",)

    me, other = current_worker(), (current_worker().index + 1) % 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers._Channel, "_packet", noted("sending", peers._Channel._packet))
        patch.setattr(packets, "receive", noted("receiving", packets.receive))
        patch.setattr(Spin, "look", noted("waiting", lambda spin, poll: poll(10)))
        if me.index:
            me.recv(other)
            me.send(other, "now")
        else:
            with pytest.raises(TimeoutError):
                me.recv(other, 0.01)  # there is no message yet, so this waits
            me.send(other, Item())
            me.recv(other)
    return found


def test_where_a_task_is_stopped(make_pool):
    """A task is stopped where it waits and in code of the program, not in the channels' records."""
    zero, one = make_pool(P2PPool, 2).run_all(places_of_stops)
    assert zero == {"__reduce__": True, "sending": False, "receiving": False, "waiting": True}
    assert {**one, "waiting": True} == {"sending": False, "receiving": False, "waiting": True}


def run_and_be_cancelled(pool: Any, box: str) -> None:
    with pytest.raises(TaskCancelled):
        pool.run_all(stream_until_stopped, box)


def use_descriptors() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))


def free_descriptors() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))


def test_no_descriptors(make_pool):
    """A worker without free descriptors raises an error. Later the channel is made."""
    pool = make_pool(P2PPool, 2)
    pool.apply(use_descriptors, worker=0)
    with pytest.raises(OSError, match="no channel to worker 1"):
        pool.apply(send_to, (1,), worker=0)
    pool.apply(free_descriptors, worker=0)
    sent = pool.apply_async(send_to, (1, "now"), worker=0)
    begin = time.monotonic()
    while True:
        try:
            assert pool.apply(receive_from, (0, FAR), worker=1) == "now"
            break
        except PeerLost:
            assert time.monotonic() - begin < FAR
    sent.get()


def test_no_descriptors_in_the_parent(make_pool):
    """If the parent has no free descriptors, workers get an error. Later they get a channel."""
    import resource

    pool = make_pool(P2PPool, 3)
    pool.run_all(work.pid)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        with pytest.raises(OSError, match="open"):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(OSError, match="no channel to worker"):
            pool.run_all(ring, 3, None)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [sender for sender, _ in pool.run_all(ring, 3, None)] == [2, 0, 1]


def fork_and_send() -> tuple[int, str]:
    """Try to send from a forked child. Return its exit code and the peer's answer."""
    me = current_worker()
    me.send(1, "from the parent")
    pid = os.fork()
    if pid == 0:
        try:
            me.send(1, "from the child")
        except OptionError:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), me.recv(1, FAR)


def test_a_forked_child(make_pool):
    """A forked child may not send. Its parent's channels work."""
    pool = make_pool(P2PPool, 2)
    other = pool.apply_async(greet_back, worker=1)
    assert pool.apply(fork_and_send, worker=0) == (7, "back")
    assert other.get() == "from the parent"


def greet_back() -> Any:
    got = current_worker().recv(0, FAR)
    current_worker().send(0, "back")
    return got


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["spawn", *also("fork")])
def test_start_methods(make_pool, method):
    """Channels work with every start method."""
    pool = make_pool(P2PPool, 2, context=method)
    assert [sender for sender, _ in pool.run_all(ring, 2, torch.ones(LARGE))] == [1, 0]


def churn(n: int, seed: int) -> str:
    """Send and receive at random. Sometimes die."""
    import random

    me, draw = current_worker(), random.Random(seed)
    for k in range(200):
        if draw.random() < 0.004:
            os.kill(os.getpid(), signal.SIGKILL)
        peer = draw.choice([i for i in range(n) if i != me.index])
        try:
            me.send(peer, torch.full((draw.choice((1, LARGE // 4)),), float(k)), 0.5)
            me.recv(draw.choice([i for i in range(n) if i != me.index]), 0.002)
        except (PeerLost, TimeoutError):
            continue
    return "done"


@pytest.mark.exhaustive
def test_deaths_at_random(make_pool):
    """Although workers die at random, every task gets an answer. Afterwards all workers
    communicate."""
    n = 4
    pool = make_pool(P2PPool, n)
    results = [
        pool.apply_async(churn, (n, 100 * turn + i), worker=i)
        for turn in range(4)
        for i in range(n)
    ]
    ends = []
    for result in results:
        try:
            ends.append(result.get())
        except WorkerDied:
            ends.append("died")
    assert set(ends) == {"done", "died"}
    assert [sender for sender, _ in pool.run_all(ring, n, None)] == [(i - 1) % n for i in range(n)]
