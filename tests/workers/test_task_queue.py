"""The queue from which the threads of a pool get their tasks."""

from __future__ import annotations

import threading

import pytest
from support.waiting import eventually

from xpool._python.waiters import TaskQueue


def test_the_last_thread_to_wait_is_next() -> None:
    """An item goes to the thread that began to wait last."""
    queue, taken = TaskQueue(), []

    def take() -> None:
        next_item = queue.taker()
        while (item := next_item()) is not None:
            taken.append((item, threading.get_ident()))

    threads = []
    for n in range(3):
        threads.append(threading.Thread(target=take, daemon=True))
        threads[-1].start()
        eventually(lambda n=n: len(queue._idle) == n + 1, "the thread waits")
    for item in range(20):
        queue.put(item)
        done = item + 1
        eventually(lambda done=done: len(taken) == done and len(queue._idle) == 3, "all wait again")
    for _ in threads:
        queue.put(None)
    for thread in threads:
        thread.join()
    assert taken == [(item, threads[-1].ident) for item in range(20)]


def test_several_puts_wake_several_threads() -> None:
    """Two items that come before a woken thread runs are taken by two threads."""
    queue = TaskQueue()
    both = threading.Barrier(2)

    def take() -> None:
        next_item = queue.taker()
        while next_item() is not None:
            both.wait()

    threads = [threading.Thread(target=take, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        eventually(lambda: len(queue._idle) == 2, "both wait")
        queue.put(1)
        queue.put(2)
    for _ in threads:
        queue.put(None)
    for thread in threads:
        thread.join()


def test_a_taken_item_cannot_be_removed() -> None:
    """`remove` says whether it was in time."""
    queue = TaskQueue()
    one, two = ("first", 1), ("last", 2)
    queue.put(one)
    queue.put(two, last=True)
    assert queue.remove(two)
    assert not queue.remove(two)
    assert queue.get_nowait() is one
    assert not queue.remove(one)
    with pytest.raises(IndexError):
        queue.get_nowait()
