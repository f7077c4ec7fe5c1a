"""Functions that the tests' processes run; every start method can import them."""

from __future__ import annotations

import gc
import os
import signal
from queue import Empty
from typing import Any

from support.waiting import LIMIT, eventually

from xpool._memory import foreign

inherited: Any = None
made: Any = None


def echo(inbox: Any, outbox: Any) -> None:
    while (item := inbox.get()) is not None:
        outbox.put(item)


def put_all(queue: Any, items: Any) -> None:
    for item in items:
        queue.put(item)


def put_numbers(queue: Any, who: int, count: int) -> None:
    for i in range(count):
        queue.put((who, i))


def collect(queue: Any, results: Any) -> None:
    """Get items until None, then put the list of them into `results`."""
    got = []
    while (item := queue.get()) is not None:
        got.append(item)
    results.put(got)


def get_one(queue: Any, results: Any) -> None:
    results.put((os.getpid(), queue.get()))


def remember(queue: Any) -> None:
    """Keep the queue; an initializer."""
    global inherited
    inherited = queue


def put_remembered(item: Any) -> int:
    inherited.put(item)
    return os.getpid()


def get_remembered() -> Any:
    return inherited.get()


class Unloadable:
    """Can be pickled; unpickling it raises KeyError."""

    def __reduce__(self) -> Any:
        return _raise, ("as asked",)


def _raise(text: str) -> None:
    raise KeyError(text)


# -- tensors -----------------------------------------------------------------------------------


def add_one(inbox: Any, outbox: Any, count: int) -> None:
    """Add one to each tensor, in place, and pass the tensor on."""
    for _ in range(count):
        tensor = inbox.get()
        tensor += 1
        outbox.put(tensor)
        del tensor


def keep(inbox: Any, outbox: Any, go: Any) -> None:
    """Get a tensor, report it, wait for `go`, and put the tensor's values."""
    tensor = inbox.get()
    outbox.put("kept")
    go.get()
    outbox.put(tensor.tolist())


def make_tensors(outbox: Any, count: int, nbytes: int) -> None:
    """Put tensors, each filled with its number."""
    import torch

    for i in range(count):
        outbox.put(torch.full((nbytes,), i % 251, dtype=torch.uint8))


def _made(nbytes: int) -> Any:
    import torch

    return torch.full((nbytes,), 7, dtype=torch.uint8)


def pass_on_results(outbox: Any, count: int, nbytes: int, inbox: Any) -> None:
    """Put tensors that a pool's worker made; after one message, kill this process."""
    from xpool import Pool

    with Pool(1, is_copy_tensor=False) as pool:
        for tensor in pool.map(_made, [nbytes] * count, chunksize=1):
            outbox.put(tensor)
        inbox.get()
        os.kill(os.getpid(), signal.SIGKILL)


def sums(inbox: Any, outbox: Any) -> None:
    """Put (first element, whether all are equal, bytes) for each tensor, until None."""
    while (tensor := inbox.get()) is not None:
        first = int(tensor[0])
        outbox.put((first, bool((tensor == first).all()), tensor.numel()))
        del tensor


def statistics(outbox: Any) -> None:
    """Free all memory not in use, and put the arena's statistics."""
    from xpool._memory import foreign
    from xpool._memory.arena import Arena

    foreign.tidy(float("inf"))
    arena = Arena.own()
    assert arena is not None
    outbox.put(arena.statistics())


# -- deaths ------------------------------------------------------------------------------------


def report(inbox: Any, results: Any) -> None:
    """Get (number, array), check the array, and put the number, until None."""
    while (item := inbox.get()) is not None:
        number, data = item
        whole = data == bytes([number % 251]) * len(data)
        del item, data
        results.put(number if whole else f"spoilt {number}")


def put_for_ever(queue: Any, who: int, nbytes: int) -> None:
    """Put (who, i, bytes) without end."""
    i = 0
    while True:
        queue.put((who, i, bytearray([i % 251]) * nbytes))
        i += 1


def _found(where: str) -> tuple[Any, str]:
    """Return the owner of a function (``module:name``, ``module:class.name``), and its name."""
    import importlib

    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name


def die_at(where: str, function: Any, *args: Any) -> None:
    """Kill this process at its first call of the function `where`."""
    import signal

    owner, name = _found(where)
    setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    function(*args)


def stop_at(where: str, function: Any, *args: Any) -> None:
    """Stop this process (SIGSTOP) when it calls the function `where`."""
    import signal

    owner, name = _found(where)
    real = getattr(owner, name)

    def stop(*args: Any, **kwds: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **kwds)

    setattr(owner, name, stop)
    function(*args)


def juggle(queue: Any, faults: Any, seed: int) -> None:
    """Get tensors, check them, keep some for a while, put them back, add new ones."""
    import random

    import torch

    from xpool._memory import arena, foreign

    arena.IDLE_SECONDS = foreign.IDLE_SECONDS = 0.005  # type: ignore[attr-defined]  # tidy up all the time
    rng = random.Random(seed)
    kept: list[Any] = []
    while True:
        try:
            kept.append(queue.get(0 if rng.random() < 0.8 else 0.1))
        except Empty:
            size = rng.choice([3, 500, 20_000, 300_000])
            kept.append(torch.full((size,), rng.randrange(1, 2**20)))
        tensor = kept[-1]
        if not bool((tensor == tensor[0]).all()) or not int(tensor[0]):
            faults.put(f"{len(tensor)} elements: {tensor[:8].tolist()}")
        if len(kept) > 4:
            for _ in range(rng.randrange(1, 5)):
                one = kept.pop(rng.randrange(len(kept)))
                if rng.random() < 0.75:
                    queue.put(one)
                del one
        del tensor


def settled() -> None:
    """Wait until this process holds no foreign block and has no message in flight."""
    gc.collect()
    eventually(lambda: not foreign.tidy(float("inf")), "no foreign block is held")
    foreign._wake.set()
    thread = foreign._thread
    if thread is not None:
        thread.join(LIMIT)
