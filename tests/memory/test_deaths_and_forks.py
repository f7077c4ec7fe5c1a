"""The fate of blocks if processes are killed, forked, interrupted, or end."""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from support import tensor_work as tasks
from support.memory import is_free, own_arena
from support.scripts import run_ok, write
from support.waiting import eventually, together

import xpool
from xpool._python.interrupt import keeps_clear, may_raise, send_again

MIB = 1 << 20


@pytest.fixture(autouse=True)
def let_go(warm: None) -> Iterator[None]:
    yield
    gc.collect()
    eventually(lambda: own_arena().statistics()["held"] == 0, "blocks released")


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [False, True], ids=["copy", "share"])
def test_storm(make_pool: Callable[..., Any], share: bool) -> None:
    """Workers die at random moments. Every value that arrives is right, and no block stays."""
    before = own_arena().file.used()  # tables of workers that other tests have had
    pool = make_pool(xpool.Pool, 2, is_copy_tensor=not share)
    rng = random.Random(5)
    held: list[tuple[int, Any]] = []
    died = 0
    for i in range(60):
        sent = [torch.full((rng.randrange(1, 3 * MIB),), i, dtype=torch.uint8) for _ in range(3)]
        results = [pool.apply_async(tasks.same, (x,)) for x in sent]
        time.sleep(rng.random() * 0.004)  # a random moment
        victim = rng.choice([pid for pid in pool.statistics()["pids"] if pid] or [0])
        if victim:
            with contextlib.suppress(ProcessLookupError):  # it was idle when it was killed before
                os.kill(victim, signal.SIGKILL)
        for result in results:
            try:
                held.append((i, result.get()))
            except xpool.WorkerDied:
                died += 1
        del result, results, sent
        while len(held) > 8:
            held.pop(rng.randrange(len(held)))
        for value, x in held:
            assert (x == value).all()
    print(f"{died} tasks died")
    del x
    held.clear()
    pool.close()
    pool.join()
    assert own_arena().file.used() <= before + 2 * MIB


# -- forks -----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_keeps_its_view(make_pool: Callable[..., Any]) -> None:
    """A forked child keeps the blocks that its parent drops. They are released when it ends."""
    pool = make_pool(xpool.Pool, 1)
    held = [pool.apply(tasks.filled, (i, MIB)) for i in range(4)]
    unopened = pool.apply_async(tasks.filled, (9, MIB))
    unopened.wait()
    parents = own_arena()
    go_r, go_w = os.pipe()
    said_r, said_w = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(go_w)
            os.read(go_r, 1)
            # By numpy, because torch's threads do not survive a fork.
            right = all((x.numpy() == i).all() for i, x in enumerate(held))
            right = right and bool((unopened.get().numpy() == 9).all())
            # The child has no holds of its own, so it cannot lease.
            right = right and parents.lease(100_000) is None
            held.clear()
            gc.collect()
            os.write(said_w, b"y" if right else b"n")
            os.read(go_r, 1)
            code = 0
        finally:
            os._exit(code)
    os.close(go_r)
    names = [x.data_ptr() for x in held]
    held.clear()
    del unopened
    for i in range(60):
        assert int(pool.apply(tasks.same, (torch.full((MIB,), i),)).sum()) == i * MIB
        new = pool.apply(tasks.filled, (i, MIB))
        assert new.data_ptr() not in names
        del new
    assert own_arena().statistics()["held"] == 5
    os.write(go_w, b".")
    assert os.read(said_r, 1) == b"y"
    os.close(go_w)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(said_r)
    os.close(said_w)
    assert own_arena().statistics()["held"] == 0
    places = {pool.apply(tasks.filled, (1, MIB)).data_ptr() for _ in range(20)}
    assert len(places) <= 10


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_writes_after_a_fork(make_pool: Callable[..., Any]) -> None:
    """A child's writes to received values stay in the child, and the program's in the program."""
    pool = make_pool(xpool.Pool, 1)
    held = [pool.apply(tasks.filled, (i, MIB)).numpy() for i in range(3)]
    place = held[2].ctypes.data
    held[1][:] = 5
    for turn in range(2):  # at the second fork, the pages are the program's own
        go_r, go_w = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                os.close(go_w)
                held[0] += 100
                os.read(go_r, 1)
                code = [int(x[7]) for x in held] != [100 + turn, 5, 2 + turn]
            finally:
                os._exit(code)
        os.close(go_r)
        held[2] += 1
        held[0] += 1
        os.close(go_w)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [int(x[-1]) for x in held] == [1 + turn, 5, 3 + turn]
    held.clear()
    assert own_arena().statistics()["held"] == 0
    for i in range(20):  # other values lie in the same memory
        new = pool.apply(tasks.filled, (i, MIB))
        assert (new == i).all()
        if new.data_ptr() == place:
            break
    else:
        raise AssertionError("the memory was not used again")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_shared_after_a_fork(make_pool: Callable[..., Any]) -> None:
    """A received tensor that was changed after a fork can be shared, also with later children."""
    x = make_pool(xpool.Pool, 1).apply(tasks.filled, (1, MIB))
    for _ in range(2):
        child = os.fork()
        if not child:
            x.numpy()[:] += 2
            os._exit(0)
        os.waitpid(child, 0)
        x += 1  # the second time, the child has added two
        sharing = make_pool(xpool.Pool, 1, is_copy_tensor=False)
        assert sharing.apply(tasks.total, (x,)) == int(x.sum(dtype=torch.int64))
        sharing.apply(tasks.write, (x, 7))
        assert (x == 7).all()
        sharing.terminate()
    child = os.fork()
    if not child:
        x.numpy()[:] = 9
        os._exit(0)
    os.waitpid(child, 0)
    assert (x == 9).all()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_that_executes(make_pool: Callable[..., Any]) -> None:
    """A child that executes another program holds no block."""
    pool = make_pool(xpool.Pool, 1)
    held = pool.apply(tasks.filled, (1, MIB))
    read, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(read, 0)
        os.close(write_end)
        os.execvp("cat", ["cat"])
    os.close(read)
    del held
    try:
        eventually(lambda: own_arena().statistics()["held"] == 0, "the block is released")
    finally:
        os.close(write_end)
        os.waitpid(child, 0)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forks_from_many_threads(make_pool: Callable[..., Any]) -> None:
    """Several threads fork at once, and no lock stays locked."""
    pool = make_pool(xpool.Pool, 1)
    held = [pool.apply(tasks.filled, (1, MIB))]
    codes: list[int] = []

    def fork(_: int) -> None:
        for _ in range(20):
            child = os.fork()
            if not child:
                try:
                    os._exit(0 if held[0][0] == 1 else 1)
                finally:
                    os._exit(2)
            codes.append(os.waitpid(child, 0)[1])
            assert own_arena().lease(100_000) is not None

    together(fork, 4)
    assert codes == [0] * 80
    assert pool.apply(tasks.total, (held[0],)) == MIB
    held.clear()


def test_worker_forks(make_pool: Callable[..., Any]) -> None:
    """A task may fork. Its child sees the task's argument."""
    pool = make_pool(xpool.Pool, 1, is_daemon=False)
    for i in range(5):
        assert pool.apply(tasks.fork_and_share_parts, (torch.full((MIB,), i),)) == i * MIB % 100


@pytest.mark.exhaustive
def test_own_pool_in_forked_child(tmp_path: Path) -> None:
    """A forked child does not use its parent's arena. It makes one for its own pools."""
    script = write(
        tmp_path / "program.py",
        """
        import os, torch, xpool
        from support import tensor_work as tasks
        from xpool._memory.arena import Arena
        if __name__ == "__main__":
            pool = xpool.Pool(1)
            held = pool.apply(tasks.filled, (1, 1 << 20))
            child = os.fork()
            if not child:
                parents = held
                with xpool.Pool(1) as mine:
                    back = mine.apply(tasks.add_one, (parents,))
                    assert (back == 2).all() and (parents == 1).all()
                mine.join()
                with xpool.Pool(1, is_copy_tensor=False) as mine:
                    x = torch.zeros(1 << 20)
                    mine.apply(tasks.write, (x, 3.0))
                    assert (x == 3).all()
                mine.join()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert (pool.apply(tasks.same, (held,)) == 1).all()
            pool.close()
            pool.join()
            print("well")
        """,
    )
    assert run_ok(["-W", "ignore::DeprecationWarning", script]) == "well\n"


# -- places where a block may be dropped -----------------------------------------------------------


def test_dropped_in_many_threads(make_pool: Callable[..., Any]) -> None:
    """One thread takes results while others drop them."""
    pool = make_pool(xpool.Pool, 2)
    values = list(pool.imap(tasks.numbered, range(400)))

    def drop() -> None:
        while values:
            try:
                value = values.pop()
            except IndexError:
                return
            del value

    threads = [threading.Thread(target=drop) for _ in range(6)]
    for thread in threads:
        thread.start()
    for i, value in enumerate(pool.imap(tasks.numbered, range(200))):
        assert (value == i).all()
    del value
    for thread in threads:
        thread.join()
    assert own_arena().statistics()["held"] == 0


def test_dropped_by_the_collector(make_pool: Callable[..., Any]) -> None:
    """The garbage collector and its callbacks may drop blocks, also in cycles."""
    pool = make_pool(xpool.Pool, 2)
    kept: list[Any] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and kept:
            kept.pop()

    gc.callbacks.append(callback)
    threshold = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        for i, value in enumerate(pool.imap(tasks.numbered, range(600))):
            assert (value == i).all()
            circle: list[Any] = [value]
            circle.append(circle)
            kept.append(value)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)
    del value, circle
    kept.clear()
    gc.collect()
    assert own_arena().statistics()["held"] == 0


@contextlib.contextmanager
def signals(handler: Callable[[int, Any], None], seconds: float) -> Iterator[None]:
    """Send SIGUSR1 to the main thread again and again, which calls this handler."""
    keeps_clear(handler)
    before = signal.signal(signal.SIGUSR1, handler)
    stop = threading.Event()

    def shoot() -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not stop.wait(seconds):
            signal.pthread_kill(main, signal.SIGUSR1)

    shooter = threading.Thread(target=shoot)
    shooter.start()
    try:
        yield
    finally:
        stop.set()
        shooter.join()
        # A pending signal must not reach the default handler.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, before)


def test_dropped_and_used_in_a_signal_handler(make_pool: Callable[..., Any]) -> None:
    """A handler that drops, leases and adopts blocks may run between any two instructions."""
    make_pool(xpool.Pool, 1)  # keeps free blocks' memory
    one = own_arena()
    kept: list[Any] = []
    wrong: list[Any] = []
    calls = [0]

    def handler(signum: int, frame: Any) -> None:
        calls[0] += 1
        if kept:
            block = kept.pop()
            if bytes(block.view(8)) != b"%08d" % block.number:
                wrong.append(block.number)
            again = one.adopt(block.name)
            del block
            if is_free(one, again.number):
                wrong.append("not held")
        mine = one.lease(70_000)
        if mine is not None:
            mine.view(8)[:] = b"handler!"

    with signals(handler, 0.0002):
        while calls[0] < 200:
            block = one.lease(66_000)
            assert block is not None
            block.view(8)[:] = b"%08d" % block.number
            other = one.adopt(block.name)
            del block
            kept.append(other)
            del other
            if len(kept) > 5000:
                kept.clear()
    assert wrong == []
    kept.clear()
    assert one.statistics()["held"] == 0


def test_postponed_exceptions(make_pool: Callable[..., Any]) -> None:
    """A handler that raises only where `may_raise` allows it loses no block."""
    make_pool(xpool.Pool, 1)  # keeps free blocks' memory
    one = own_arena()
    armed: list[bool] = []
    postponed: list[int] = []
    came: list[int] = []

    class Stop(Exception):
        pass

    def handler(signum: int, frame: Any) -> None:
        if not armed:
            return
        if may_raise(frame):
            armed.clear()  # until the loop below sets it again
            raise Stop
        postponed.append(signum)
        _thread.start_new_thread(once_more, ())

    def once_more() -> None:
        send_again(signal.SIGUSR1)
        came.append(signal.SIGUSR1)

    raised = 0
    with signals(handler, 0.0005):
        while raised < 20:
            try:
                armed.append(True)
                while armed:
                    block = one.lease(66_000)
                    assert block is not None
                    other = one.adopt(block.name)
                    del block
                    del other
            except Stop:
                raised += 1
                block = other = None  # type: ignore[assignment]
                del block, other
        armed.clear()
        # `_thread._count()` does not count a thread before it runs.
        eventually(lambda: len(came) == len(postponed), "postponed signals have come")
    assert one.statistics()["held"] == 0
