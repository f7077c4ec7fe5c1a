"""The works of `bench.peers`: the rows of its tables.

A work is a function that gets a `Peer` and the sizes, and returns an `Outcome`.  Works of the
groups "plain" and "tensors" share a pool; the others open their own.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench import tasks
from bench.adapters import Peer


@dataclass(frozen=True)
class Sizes:
    """The sizes of the works, which are the same for all peers."""

    tasks: int = 5_000
    items: int = 200_000
    round_trips: int = 1_000
    big_floats: int = 16 * 2**20
    big_repeats: int = 5
    small_floats: int = 256
    small_count: int = 300
    seconds: float = 0.25
    """A batch is repeated for this time, and the median counts."""


QUICK = Sizes(tasks=2_000, items=50_000, round_trips=300, big_repeats=3, small_count=200)


class Outcome(NamedTuple):
    """A figure, with an optional remark."""

    value: float
    note: str = ""


class Broken(Exception):
    """The pool does not work any more; the message says why."""


Run = Callable[[Peer, Sizes], Outcome]


class Work(NamedTuple):
    """One row of the table."""

    key: str
    title: str
    unit: str
    higher_is_better: bool
    floors: tuple[str, ...]
    """The figures of `bench.floor` with which the work is compared."""
    group: str
    run: Run
    seconds: float = 60.0
    """After this time the work counts as hanging."""


def _rate(batch: Callable[[], int], seconds: float) -> Outcome:
    """Median rate of `batch`, which returns its number of items and is repeated for `seconds`."""
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while not rates or (time.perf_counter() < end and len(rates) < 50):
        begin = time.perf_counter()
        count = batch()
        rates.append(count / (time.perf_counter() - begin))
    return Outcome(statistics.median(rates))


def _count(results: Any, expected: int) -> int:
    """Take all results one by one, as a user's loop does."""
    count = 0
    for _result in results:
        count += 1
    if count != expected:
        raise AssertionError(f"{count} results for {expected} tasks")
    return count


def _unordered(peer: Peer, func: Callable[..., Any], sizes: Sizes) -> Outcome:
    items = range(sizes.tasks)
    _count(peer.imap_unordered(func, items[:200]), 200)
    return _rate(
        lambda: _count(peer.imap_unordered(func, items), sizes.tasks),
        sizes.seconds,
    )


def imap_noop(peer: Peer, sizes: Sizes) -> Outcome:
    """Tasks a second, with one message for each task."""
    return _unordered(peer, tasks.noop, sizes)


def imap_lambda(peer: Peer, sizes: Sizes) -> Outcome:
    """As `imap_noop`, with a lambda, which plain pickle cannot send."""
    return _unordered(peer, lambda _item: None, sizes)


def apply_noop(peer: Peer, sizes: Sizes) -> Outcome:
    """Median microseconds of a round trip."""
    for _ in range(30):
        peer.apply(tasks.noop)
    times = []
    for _ in range(sizes.round_trips):
        begin = time.perf_counter()
        peer.apply(tasks.noop)
        times.append(time.perf_counter() - begin)
    return Outcome(statistics.median(times) * 1e6)


def map_noop(peer: Peer, sizes: Sizes) -> Outcome:
    """Items a second, in chunks of the default size."""
    items = range(sizes.items)
    _count(peer.map(tasks.noop, items[:1000]), 1000)
    return _rate(lambda: _count(peer.map(tasks.noop, items), sizes.items), sizes.seconds)


def to_parent(peer: Peer, sizes: Sizes) -> Outcome:
    """Median milliseconds to get a large tensor from a worker, without the time to make it."""
    from bench import tensor_tasks

    times = []
    for _ in range(2 + sizes.big_repeats):
        begin = time.perf_counter()
        tensor, making = peer.apply(tensor_tasks.make, sizes.big_floats)
        total = tensor_tasks.touch(tensor)
        times.append(time.perf_counter() - begin - making)
        if total != sizes.big_floats / tensor_tasks.FLOATS_A_PAGE:
            raise AssertionError(f"the tensor's pages sum to {total}")
        del tensor
    return Outcome(statistics.median(times[2:]) * 1e3)


def to_worker(peer: Peer, sizes: Sizes) -> Outcome:
    """Median milliseconds until a worker has read a large tensor of the parent."""
    from bench import tensor_tasks

    times = []
    for _ in range(2 + sizes.big_repeats):
        tensor, _making = tensor_tasks.make(sizes.big_floats)
        begin = time.perf_counter()
        total = peer.apply(tensor_tasks.touch, tensor)
        times.append(time.perf_counter() - begin)
        if total != sizes.big_floats / tensor_tasks.FLOATS_A_PAGE:
            raise AssertionError(f"the tensor's pages sum to {total}")
        del tensor
    return Outcome(statistics.median(times[2:]) * 1e3)


def small_tensors(peer: Peer, sizes: Sizes) -> Outcome:
    """Small tensors a second to a worker and back, with one task for each tensor."""
    import torch

    from bench import tensor_tasks

    def batch(count: int) -> float:
        # New tensors each time: see `tensor_tasks.make`.
        items = [torch.full((sizes.small_floats,), float(i)) for i in range(count)]
        begin = time.perf_counter()
        _count(peer.imap_unordered(tensor_tasks.same, items), count)
        return time.perf_counter() - begin

    batch(50)
    rates: list[float] = []
    end = time.perf_counter() + sizes.seconds
    while not rates or (time.perf_counter() < end and len(rates) < 50):
        rates.append(sizes.small_count / batch(sizes.small_count))
    return Outcome(statistics.median(rates))


def shared_handle(peer: Peer, sizes: Sizes) -> Outcome:
    """Median microseconds to send a large tensor that is in shared memory already."""
    from bench import tensor_tasks

    peer.open(with_torch=True)
    peer.share_tensors()
    tensor = tensor_tasks.make(sizes.big_floats)[0].share_memory_()
    for _ in range(20):
        if peer.apply(tensor_tasks.count, tensor) != sizes.big_floats:
            raise AssertionError("a wrong tensor arrived")
    times = []
    for _ in range(sizes.round_trips // 5):
        begin = time.perf_counter()
        peer.apply(tensor_tasks.count, tensor)
        times.append(time.perf_counter() - begin)
    return Outcome(statistics.median(times) * 1e6)


def few_descriptors(peer: Peer, sizes: Sizes) -> Outcome:
    """Tensors of 4 KiB a second: 5,000 that stay alive, in a program limited to 64 descriptors."""
    import resource

    from bench import tensor_tasks

    peer.open(with_torch=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        begin = time.perf_counter()
        live = list(peer.imap_unordered(tensor_tasks.small, range(5_000)))
        seconds = time.perf_counter() - begin
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if sorted(int(tensor[0]) for tensor in live) != list(range(5_000)):
        raise AssertionError("wrong results arrived")
    return Outcome(5_000 / seconds)


def private_memory(peer: Peer, _sizes: Sizes) -> Outcome:
    """Private megabytes of a worker that has used torch: the median of the workers."""
    from bench import tensor_tasks

    seen: dict[int, int] = {}
    end = time.monotonic() + 5
    rounds = 0
    # At least twenty tasks, because a new worker's memory still grows.
    while rounds < 10 or (len(seen) < 2 and time.monotonic() < end):
        handles = [peer.submit(tensor_tasks.private) for _ in range(2)]
        for handle in handles:
            pid, size = peer.result(handle, 30)
            seen[pid] = size
        rounds += 1
    return Outcome(statistics.median(seen.values()) / 1e6)


def second_start(peer: Peer, _sizes: Sizes) -> Outcome:
    """Milliseconds from opening a program's second pool to its first tensor."""
    from bench import tensor_tasks

    peer.open(with_torch=True)
    peer.apply(tensor_tasks.first)
    peer.close()
    begin = time.perf_counter()
    peer.open(with_torch=True)
    peer.apply(tensor_tasks.first)
    return Outcome((time.perf_counter() - begin) * 1e3)


def _workers(peer: Peer, who: Callable[[], int]) -> set[int]:
    """The pids of the workers: usually both, or one if it takes all tasks for a second."""
    seen: set[int] = set()
    end = time.monotonic() + 1
    while len(seen) < 2 and time.monotonic() < end:
        handles = [peer.submit(who) for _ in range(4)]
        seen |= {peer.result(handle, 30) for handle in handles}
    return seen


def _is_timeout(error: BaseException) -> bool:
    """Is it a time-out?  Each library has its own TimeoutError."""
    return any(c.__name__ in ("TimeoutError", "GetTimeoutError") for c in type(error).__mro__)


def _until_replaced(peer: Peer, who: Callable[[], int], old: set[int]) -> tuple[float, int]:
    """Submit tasks until a process that is not in `old` answers.

    Returns:
        The monotonic time of that answer, and how many tries failed before.

    Raises:
        Broken: the pool refuses tasks, or does not answer them.
    """
    failures = 0
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            handles = [peer.submit(who) for _ in range(2)]
            found = {peer.result(handle, 5) for handle in handles}
        except Exception as error:
            if _is_timeout(error):
                raise Broken("hangs") from error
            failures += 1
            if failures == 10:
                raise Broken(f"breaks ({type(error).__name__})") from error
            continue
        if found - old:
            return time.monotonic(), failures
    raise Broken("not replaced")


def idle_death(peer: Peer, _sizes: Sizes) -> Outcome:
    """Milliseconds from the kill of an idle worker to a result of its successor."""
    from bench import tensor_tasks

    peer.open(with_torch=True)
    old = _workers(peer, tensor_tasks.who)
    begin = time.monotonic()
    os.kill(min(old), signal.SIGKILL)
    done, failures = _until_replaced(peer, tensor_tasks.who, old)
    return Outcome((done - begin) * 1e3, f"{failures} tasks failed" if failures else "")


def busy_death(peer: Peer, _sizes: Sizes) -> Outcome:
    """Milliseconds from a worker's death in a task to a result of its successor."""
    from bench import tensor_tasks

    peer.open(with_torch=True)
    old = _workers(peer, tensor_tasks.who)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "time-of-death")
        doomed = peer.submit(tasks.die, path)
        done, failures = _until_replaced(peer, tensor_tasks.who, old)
        with open(path, encoding="ascii") as file:
            begin = float(file.read())
    note = f"{failures} tasks failed" if failures else ""
    try:
        peer.result(doomed, 1)
    except Exception as error:
        if _is_timeout(error):
            note = "the task that died is never answered"
    return Outcome((done - begin) * 1e3, note)


PLAIN, TENSORS, START, DEATH = "plain", "tensors", "start", "death"
SHARE, LIMIT = "share", "limit"  # these works change settings of the whole process

SHARED = (PLAIN, TENSORS)
"""Groups whose works can run on one pool."""

WORKS: dict[str, Work] = {
    work.key: work
    for work in (
        Work("imap", "imap_unordered(noop), chunksize 1", "tasks/s", True, (), PLAIN, imap_noop),
        Work(
            "apply",
            "apply(noop) round trip",
            "us",
            False,
            ("pipe", "pipe_two_cpus"),
            PLAIN,
            apply_noop,
        ),
        Work("map", "map(noop), default chunks", "items/s", True, (), PLAIN, map_noop),
        Work("lambda", "as imap, with a lambda", "tasks/s", True, (), PLAIN, imap_lambda),
        Work("private", "private memory of a worker", "MB", False, (), TENSORS, private_memory),
        Work(
            "small",
            "1 KiB tensors there and back",
            "tensors/s",
            True,
            (),
            TENSORS,
            small_tensors,
        ),
        Work(
            "to_parent",
            "64 MiB tensor, worker to parent",
            "ms",
            False,
            ("memcpy",),
            TENSORS,
            to_parent,
        ),
        Work(
            "to_worker",
            "64 MiB tensor, parent to worker",
            "ms",
            False,
            ("memcpy",),
            TENSORS,
            to_worker,
        ),
        Work(
            "shared",
            "64 MiB tensor shared before, handle only",
            "us",
            False,
            ("pipe",),
            SHARE,
            shared_handle,
        ),
        Work(
            "few_fds",
            "5,000 live tensors, 64 descriptors",
            "tensors/s",
            True,
            (),
            LIMIT,
            few_descriptors,
        ),
        Work("start", "first tensor of a second pool", "ms", False, ("fork",), START, second_start),
        Work(
            "idle_death", "idle worker killed, replaced", "ms", False, ("fork",), DEATH, idle_death
        ),
        Work("busy_death", "busy worker died, replaced", "ms", False, ("fork",), DEATH, busy_death),
    )
}


def uses_torch(keys: Sequence[str]) -> bool:
    """Does any of these works need torch?"""
    return any(WORKS[key].group != PLAIN for key in keys)


def grouped(keys: Sequence[str], peer: type[Peer]) -> list[list[str]]:
    """Split the works of one peer into runs: each run gets a process."""
    ordered = [key for key in WORKS if key in keys]
    if peer.one_process and ordered:
        return [ordered]
    runs: dict[str, list[str]] = {}
    for key in ordered:
        group = WORKS[key].group
        runs.setdefault(group if group in SHARED else key, []).append(key)
    return list(runs.values())
