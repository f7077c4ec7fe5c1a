"""What the processes of the tests do; importable by every start method."""

from __future__ import annotations

import os
from typing import Any

inherited: Any = None


def echo(inbox: Any, outbox: Any) -> None:
    """Pass everything on until None comes."""
    while (item := inbox.get()) is not None:
        outbox.put(item)


def put_all(queue: Any, items: Any) -> None:
    """Put the items, one after the other."""
    for item in items:
        queue.put(item)


def put_numbers(queue: Any, who: int, count: int) -> None:
    """Put (who, 0), (who, 1) ..."""
    for i in range(count):
        queue.put((who, i))


def collect(queue: Any, results: Any) -> None:
    """Get until None comes, then put what was got into `results`."""
    got = []
    while (item := queue.get()) is not None:
        got.append(item)
    results.put(got)


def get_one(queue: Any, results: Any) -> None:
    """Get one, and put it and the pid."""
    results.put((os.getpid(), queue.get()))


def remember(queue: Any) -> None:
    """An initializer."""
    global inherited
    inherited = queue


def put_remembered(item: Any) -> int:
    """Put into the queue that came with the initializer."""
    inherited.put(item)
    return os.getpid()


def get_remembered() -> Any:
    """Get from the queue that came with the initializer."""
    return inherited.get()


class Unloadable:
    """Can be pickled, and raises KeyError when it is unpickled."""

    def __reduce__(self) -> Any:
        return _raise, ("as asked",)


def _raise(text: str) -> None:
    raise KeyError(text)


# -- tensors -----------------------------------------------------------------------------------


def add_one(inbox: Any, outbox: Any, count: int) -> None:
    """Add one to each tensor, in place, and pass it on."""
    for _ in range(count):
        tensor = inbox.get()
        tensor += 1
        outbox.put(tensor)
        del tensor


def keep(inbox: Any, outbox: Any, go: Any) -> None:
    """Keep one tensor, say so, and when told, put what it has become."""
    tensor = inbox.get()
    outbox.put("kept")
    go.get()
    outbox.put(tensor.tolist())


def make_tensors(outbox: Any, count: int, nbytes: int) -> None:
    """Put tensors, each filled with its number."""
    import torch

    for i in range(count):
        outbox.put(torch.full((nbytes,), i % 251, dtype=torch.uint8))


def sums(inbox: Any, outbox: Any) -> None:
    """Put (first element, whether all are alike, bytes) for each tensor, until None comes."""
    while (tensor := inbox.get()) is not None:
        first = int(tensor[0])
        outbox.put((first, bool((tensor == first).all()), tensor.numel()))
        del tensor


def statistics(outbox: Any) -> None:
    """Tidy up, and put the arena's statistics."""
    from support.waiting import eventually

    from xpool.memory import guests
    from xpool.memory.arena import Arena

    eventually(lambda: not guests.tidy(float("inf")), "tidy")
    arena = Arena.own()
    assert arena is not None
    outbox.put(arena.statistics())
