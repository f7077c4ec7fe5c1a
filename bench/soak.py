"""Check that every task is answered once while workers are killed, stopped and slowed.

``python -m bench.soak [--minutes N] [--kill-every SECONDS] [--seed N]``.  Several threads submit
all kinds of tasks to three pools: small tasks, closures, tensors (copied and shared), tasks that
exceed their time, that are cancelled, that fail, and that have retries.  Every 15 seconds the load
pauses, and the program counts its descriptors (the fork server's too), threads, processes, shared
memory and private memory.  The program prints what went wrong and exits with status 1 if a task is
unanswered, answered twice or answered wrongly, or if one of these counts has grown.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import xpool
from xpool._memory.arena import Arena
from xpool.testing._leaks import Snapshot, descendants, descriptors, mark_this_run, servers

PATIENCE = 60.0
"""Seconds after which a task counts as unanswered."""

LIMIT = 0.2
"""The time limit, in seconds, of tasks that never end."""

LAP = 15.0
"""Seconds of load between two counts."""

WARM_UP = 3
"""Number of laps after which no count may grow."""


# Tasks: each returns its number with the result ---------------------------------------------------


def square(number: int) -> tuple[int, int]:
    return number, number * number


def power(number: int, exponent: int) -> tuple[int, int]:
    return number, number**exponent


def fail(number: int) -> None:
    raise ValueError(number)


def stuck(number: int) -> None:
    while True:
        number += 1


def add_one(number: int, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return a new tensor."""
    return number, tensor + 1


def add_here(number: int, tensor: torch.Tensor) -> int:
    """Change the caller's tensor, which must be shared."""
    tensor += 1
    return number


# The load ----------------------------------------------------------------------------------------


class Book:
    """Counts tasks and their outcomes, and records errors.  Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.submitted = 0
        self.ends: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.unanswered = 0
        self.twice = 0

    def numbers(self, n: int) -> list[int]:
        """Count ``n`` new tasks as submitted, and return their numbers."""
        with self._lock:
            self.submitted += n
            return [next(self._numbers) for _ in range(n)]

    def end(self, how: str, n: int = 1) -> None:
        """Count the outcome of ``n`` tasks."""
        with self._lock:
            self.ends[how] += n

    def complain(self, what: str) -> None:
        """Record an error."""
        with self._lock:
            self.wrong.append(what)

    def settle(
        self,
        get: Callable[[], Any],
        check: Callable[[Any], bool],
        allowed: tuple[type, ...],
        n: int = 1,
    ) -> None:
        """Wait for the answer of ``n`` tasks; check the result, or that the error is allowed."""
        try:
            value = get()
        except (*allowed, xpool.WorkerDied) as error:
            self.end(type(error).__name__, n)
        except BaseException as error:
            if type(error) is xpool.TimeoutError:
                with self._lock:
                    self.unanswered += n
            self.complain(f"{type(error).__name__}: {error}")
        else:
            self.end("result", n)
            if not check(value):
                self.complain(f"a wrong result: {value!r:.200}")


class Load:
    """The load of one thread: jobs of random kinds, one after the other."""

    def __init__(self, book: Book, pools: list[Any], shared: Any, seed: int) -> None:
        self.book, self.pools, self.shared = book, pools, shared
        self.chance = random.Random(seed)
        self.kinds = [
            self.apply, self.apply_async, self.map, self.starmap, self.lazily, self.closure,
            self.tensors, self.tensors, self.share, self.too_long, self.cancel, self.failing,
            self.retried,
        ]  # fmt: skip

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                self.chance.choice(self.kinds)()
            except BaseException as error:
                self.book.complain(f"the caller got {type(error).__name__}: {error}")

    def pool(self) -> Any:
        return self.chance.choice(self.pools)

    def apply(self) -> None:
        (x,) = self.book.numbers(1)
        self.book.settle(lambda: self.pool().apply(square, (x,)), lambda v: v == (x, x * x), ())

    def apply_async(self) -> None:
        called: collections.Counter[int] = collections.Counter()
        pool, results = self.pool(), []
        for x in self.book.numbers(self.chance.randint(1, 60)):

            def count(_: Any, x: int = x) -> None:
                called[x] += 1

            results.append(
                (x, pool.apply_async(square, (x,), callback=count, error_callback=count))
            )
        for x, result in results:
            self.book.settle(lambda r=result: r.get(PATIENCE), lambda v, x=x: v == (x, x * x), ())
            if called[x] != 1:
                self.book.twice += called[x] > 1
                self.book.complain(f"task {x} was called back {called[x]} times")

    def map(self) -> None:
        numbers = self.book.numbers(self.chance.randint(1, 400))
        chunk = self.chance.choice([None, 1, 7])
        self.book.settle(
            lambda: self.pool().map_async(square, numbers, chunk).get(PATIENCE),
            lambda v: v == [(x, x * x) for x in numbers], (), len(numbers),
        )  # fmt: skip

    def starmap(self) -> None:
        numbers = self.book.numbers(self.chance.randint(1, 100))
        self.book.settle(
            lambda: self.pool().starmap_async(power, [(x, 3) for x in numbers]).get(PATIENCE),
            lambda v: v == [(x, x**3) for x in numbers], (), len(numbers),
        )  # fmt: skip

    def lazily(self) -> None:
        numbers = self.book.numbers(self.chance.randint(1, 300))
        pool = self.pool()
        verb = self.chance.choice([pool.imap, pool.imap_unordered])
        results = verb(square, numbers, buffersize=self.chance.choice([None, 20]))
        seen: collections.Counter[int] = collections.Counter()
        answers = 0
        while True:
            try:
                x, y = results.next(PATIENCE)
                answers += 1
                seen[x] += 1
                if y != x * x:
                    self.book.complain(f"a wrong result: {x, y}")
                self.book.end("result")
            except StopIteration:
                break
            except xpool.WorkerDied:
                answers += 1
                self.book.end("WorkerDied")
        twice = sum(n - 1 for n in seen.values())
        if twice or answers != len(numbers) or not seen.keys() <= set(numbers):
            self.book.twice += twice
            self.book.complain(f"{answers} answers to {len(numbers)} tasks, {twice} of them twice")

    def closure(self) -> None:
        numbers = self.book.numbers(20)
        extra = self.chance.randrange(1000)
        self.book.settle(
            lambda: self.pool().map_async(lambda x: (x, x + extra), numbers).get(PATIENCE),
            lambda v: v == [(x, x + extra) for x in numbers], (), len(numbers),
        )  # fmt: skip

    def tensors(self) -> None:
        pool, size = self.pool(), self.chance.choice([100, 50_000, 500_000])
        results = [
            (x, pool.apply_async(add_one, (x, torch.full((size,), float(x % 1000)))))
            for x in self.book.numbers(5)
        ]
        for x, result in results:
            self.book.settle(
                lambda r=result: r.get(PATIENCE),
                lambda v, x=x: v[0] == x and v[1].shape == (size,)
                and bool((v[1] == x % 1000 + 1).all()), (),
            )  # fmt: skip

    def share(self) -> None:
        (x,) = self.book.numbers(1)
        tensor = torch.zeros(self.chance.choice([100, 200_000]))
        result = self.shared.apply_async(add_here, (x, tensor))
        self.book.settle(
            lambda: result.get(PATIENCE), lambda v: v == x and bool((tensor == 1).all()), ()
        )

    def too_long(self) -> None:
        (x,) = self.book.numbers(1)
        result = self.pool().apply_async(stuck, (x,), timeout=LIMIT)
        self.book.settle(lambda: result.get(PATIENCE), lambda _: False, (xpool.TaskTimeout,))

    def cancel(self) -> None:
        numbers = self.book.numbers(self.chance.randint(1, 10))
        pool = self.pool()
        results = [(x, pool.apply_async(square, (x,))) for x in numbers]
        for x, result in results:
            allowed = (xpool.TaskCancelled,) if result.cancel() else ()
            self.book.settle(
                lambda r=result: r.get(PATIENCE), lambda v, x=x: v == (x, x * x), allowed
            )
        (x,) = self.book.numbers(1)
        result = pool.apply_async(stuck, (x,))
        result.wait(self.chance.random() / 20)
        result.cancel()
        self.book.settle(lambda: result.get(PATIENCE), lambda _: False, (xpool.TaskCancelled,))

    def failing(self) -> None:
        (x,) = self.book.numbers(1)
        result = self.pool().apply_async(fail, (x,))
        self.book.settle(lambda: result.get(PATIENCE), lambda _: False, (ValueError,))

    def retried(self) -> None:
        numbers = self.book.numbers(50)
        self.book.settle(
            lambda: self.pool().map_async(square, numbers, 1, retries=4, timeout=30).get(PATIENCE),
            lambda v: v == [(x, x * x) for x in numbers], (), len(numbers),
        )  # fmt: skip


# The faults --------------------------------------------------------------------------------------


class Faults:
    """Kills workers at a fixed interval, and stops others for one or several moments."""

    def __init__(self, pools: list[Any], every: float, seed: int) -> None:
        self.pools, self.every, self.chance = pools, every, random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()

    def _signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def run(self, until: float) -> None:
        """Cause faults until then; afterwards let all stopped workers continue."""
        pause = threading.Event()
        slowed: dict[int, int] = {}  # by pid: the number of further stops
        due = time.monotonic()
        while due < until:
            due += self.every
            pids = [pid for pool in self.pools for pid in pool.statistics()["pids"] if pid]
            for pid in list(slowed):
                self._signal(pid, signal.SIGCONT)
                slowed[pid] -= 1
                if slowed[pid] < 1:
                    del slowed[pid]
            if pids:
                self._signal(self.chance.choice(pids), signal.SIGKILL)
                self.counts["killed"] += 1
                if self.chance.random() < 0.3:
                    slowed[self.chance.choice(pids)] = turns = self.chance.choice([1, 1, 5])
                    self.counts["stopped" if turns == 1 else "slowed"] += 1
            pause.wait(self.every / 2)
            for pid in slowed:
                self._signal(pid, signal.SIGSTOP)
            pause.wait(max(0.0, due - time.monotonic()))
        for pid in slowed:
            self._signal(pid, signal.SIGCONT)


# Resources ---------------------------------------------------------------------------------------


def held(pools: list[Any]) -> dict[str, int]:
    """Wait until all workers are ready and all tasks are done; count the program's resources."""
    end = time.monotonic() + PATIENCE
    while any(
        s["ready"] < s["workers"] or s["running"] or s["waiting"]
        for s in (pool.statistics() for pool in pools)
    ):
        if time.monotonic() > end:
            raise AssertionError(f"not idle after {PATIENCE:.0f} s: {pools}")
        time.sleep(0.05)
    gc.collect()
    arena = Arena.own()
    assert arena is not None
    counts = arena.statistics()
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": len(descriptors()),
        "server's": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in servers()),
        "threads": threading.active_count(),
        "processes": len(descendants()),
        "blocks held": counts["held"],
        "arena MiB": counts["bytes"] >> 20,
        "private MiB": int(status.split("RssAnon:")[1].split()[0]) >> 10,
    }


SLACK = {"arena MiB": 64, "private MiB": 24, "threads": 3}
"""How much each count may grow after the warm-up.  Callbacks run in threads that come and go."""


def laps(seconds: float) -> Iterator[float]:
    """Yield the seconds of each lap."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 1:
        yield min(LAP, left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kill-every", type=float, default=0.1, help="seconds between two kills")
    parser.add_argument("--threads", type=int, default=4, help="threads that submit tasks")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args()
    print(f"seed {asked.seed}, {asked.minutes:g} minutes, a kill every {asked.kill_every:g} s")
    mark_this_run()
    with xpool.Pool(1) as warm:
        warm.apply(square, (1,))
    warm.join()
    del warm
    before = Snapshot.take()
    book = Book()
    shared = xpool.Pool(2, is_copy_tensor=False)
    pools = [xpool.Pool(3), xpool.P2PPool(2), shared]
    faults = Faults(pools, asked.kill_every, asked.seed)
    loads = [Load(book, pools, shared, asked.seed + i + 1) for i in range(asked.threads)]
    begin, first, last = time.monotonic(), None, {}
    for n, seconds in enumerate(laps(asked.minutes * 60)):
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=one.run, args=(until,)) for one in (faults, *loads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = held(pools)
        if n == WARM_UP:
            first = last
        print(
            f"{time.monotonic() - begin:5.0f} s  {book.submitted:8} tasks  "
            f"{faults.counts['killed']:5} kills  {last}  {len(book.wrong)} wrong",
            flush=True,
        )
    minutes = (time.monotonic() - begin) / 60
    deaths = sum(pool.statistics()["deaths"] for pool in pools)
    for pool in pools:
        pool.close()
        pool.join(PATIENCE)
    left = before.leaks(10.0)
    gc.collect()
    arena = Arena.own()
    kept = arena.statistics() if arena is not None else {}
    if kept.get("held") or kept.get("bytes", 0) > 1 << 20:
        left.append(f"shared memory after the end of all pools: {kept}")
    grown = [
        f"{name}: {value} after the warm-up, {last[name]} at the end"
        for name, value in (first or last).items()
        if last[name] > value + SLACK.get(name, 0)
    ]
    answered = sum(book.ends.values())
    print(f"\n{minutes:.1f} minutes, {dict(faults.counts)}, {deaths} workers died during a task")
    print(f"{book.submitted} tasks submitted, {answered} answered: {dict(book.ends.most_common())}")
    print(f"{book.unanswered} unanswered, {book.twice} answered twice, {len(book.wrong)} wrong")
    for what in [*book.wrong[:20], *(f"grown: {what}" for what in grown), *left]:
        print("  ", what)
    if book.wrong or grown or left or answered != book.submitted:
        sys.exit(1)
    print("no errors")


if __name__ == "__main__":
    main()
