"""Use pools while a signal handler raises at random instants.

The program calls random verbs of one kind of pool.  A timer signals the main thread, singly or in
bursts.  If the handler's exception ends a call, the call is made again.  The program checks that
each call ends with that exception or the right result, and that no item of an iterator is lost or
comes twice.  It also closes and terminates pools under alarms, and checks that they end.

It prints one line of JSON.  "in finalizers" counts the exceptions that Python printed instead of
raising them, because the alarm came in a finalizer.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from xpool import P2PPool, Pool, ThreadPool
from xpool._python.interrupt import escapes
from xpool.testing._leaks import descriptors

T = TypeVar("T")

KINDS: dict[str, Any] = {"Pool": Pool, "P2PPool": P2PPool, "ThreadPool": ThreadPool}

PATIENCE = 60.0
"""The program prints all stacks and exits with status 3 if no call ends for so many seconds.
A call that an alarm ended does not count."""


class Alarm(Exception):
    """Raised by the signal handler."""


class Wrong(Exception):
    """A call returned a wrong result."""


class Bell:
    """Sets alarms, and counts them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.armed = False
        self.heard = self.seen = self.unseen = self.calls = 0
        signal.signal(signal.SIGALRM, self._ring)
        sys.unraisablehook = self._not_raised

    def _ring(self, signum: int, frame: Any) -> None:
        if self.armed and (frame is None or not self._is_left_out(frame)):
            self.heard += 1
            raise Alarm

    def _is_left_out(self, frame: Any) -> bool:
        """Whether Python itself could not go on if the handler raised here."""
        return (
            # Python prints an exception that is raised in this hook, and does not raise it.
            frame.f_code is Bell._not_raised.__code__
            # The lock of all imports would stay taken.
            or frame.f_code.co_filename == "<frozen importlib._bootstrap>"
            # A `finally` of this program, or of a library, would not run.
            or (escapes is not None and escapes(frame))
        )

    def _not_raised(self, what: Any) -> None:
        self.unseen += 1

    def set(self, tries: int) -> None:
        """Set the timer for the next alarm, or, one time in ten, for a burst.

        The delay grows with ``tries``, so that some try ends without an alarm.
        """
        patience = 1.3 ** min(tries, 30)
        scale = self.random.choice((2e-5, 2e-4, 2e-3)) * patience
        burst = self.random.uniform(5e-5, 1e-3) * patience if self.random.random() < 0.1 else 0
        signal.setitimer(signal.ITIMER_REAL, self.random.random() * scale + 1e-6, burst)

    def until_done(self, call: Callable[[], T]) -> T:
        """Repeat a call under alarms until no alarm comes in it."""
        for tries in itertools.count():
            try:
                try:
                    self.armed = True
                    self.set(tries)
                    result = call()
                finally:
                    self.armed = False  # not in a method: an alarm could come as it returns
                    signal.setitimer(signal.ITIMER_REAL, 0)
                self.calls += 1
                return result
            except Alarm:
                self.seen += 1
        raise AssertionError("unreachable")


def same(x: Any) -> Any:
    return x


def add(a: int, b: int) -> int:
    return a + b


def below(n: int) -> Iterator[int]:
    yield from range(n)


def slow(x: int) -> int:
    time.sleep(0.001)
    return x


class Meets:
    """An object whose pickling takes some time in Python code."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (sum(1 for _ in range(self.n)),)


def check(found: Any, expected: Any) -> None:
    if found != expected:
        raise Wrong(f"{found!r} instead of {expected!r}")


class Storm:
    """Uses all verbs of one pool."""

    def __init__(self, bell: Bell, pool: Any) -> None:
        self.bell, self.pool = bell, pool
        self.verbs: list[Callable[[int], None]] = [
            self.apply, self.apply_async, self.many, self.map, self.map_async, self.starmap,
            self.imap, self.imap_with_buffersize, self.imap_unordered, self.cancel, self.callback,
            self.pickled_in_python, self.yields, self.some_yields,
        ]  # fmt: skip

    def turn(self) -> None:
        self.bell.random.choice(self.verbs)(self.bell.random.randrange(40))

    def apply(self, n: int) -> None:
        func = self.bell.random.choice((same, slow))
        check(self.bell.until_done(lambda: self.pool.apply(func, (n,))), n)

    def apply_async(self, n: int) -> None:
        result = self.bell.until_done(lambda: self.pool.apply_async(same, (n,)))
        for _ in range(2):
            check(self.bell.until_done(result.get), n)

    def many(self, n: int) -> None:
        results = [self.bell.until_done(lambda: self.pool.apply_async(same, (7,)))]
        results += [self.pool.apply_async(same, (7,)) for _ in range(n)]
        for result in results:
            check(self.bell.until_done(result.get), 7)

    def map(self, n: int) -> None:
        check(self.bell.until_done(lambda: self.pool.map(same, range(n))), list(range(n)))

    def map_async(self, n: int) -> None:
        result = self.bell.until_done(lambda: self.pool.map_async(lambda x: x, range(n), 1))
        check(self.bell.until_done(result.get), list(range(n)))

    def starmap(self, n: int) -> None:
        pairs = [(i, 1) for i in range(n)]
        check(self.bell.until_done(lambda: self.pool.starmap(add, pairs)), list(range(1, n + 1)))

    def imap(self, n: int) -> None:
        it = self.bell.until_done(lambda: self.pool.imap(same, range(n), 3))
        check(self._drawn(it), list(range(n)))

    def imap_with_buffersize(self, n: int) -> None:
        it = self.bell.until_done(lambda: self.pool.imap(same, range(n), buffersize=4))
        check(self._drawn(it), list(range(n)))

    def imap_unordered(self, n: int) -> None:
        it = self.bell.until_done(lambda: self.pool.imap_unordered(same, range(n)))
        check(sorted(self._drawn(it)), list(range(n)))

    def yields(self, n: int) -> None:
        it = self.bell.until_done(lambda: self.pool.imap(below, [n, 3], yields=True))
        check(self._drawn(it), [*range(n), *range(3)])

    def some_yields(self, n: int) -> None:
        it = self.bell.until_done(lambda: self.pool.imap_unordered(below, [n + 1], yields=True))
        drawn: list[int] = []  # as in `_drawn`
        self.bell.until_done(lambda: drawn.extend(itertools.islice(it, 1)))
        check(drawn[0] in range(n + 1), True)
        self.bell.until_done(it.close)

    def _drawn(self, it: Iterable[Any]) -> list[Any]:
        """Return all items.

        C code takes them, because an alarm between `next` and an assignment would lose an item.
        """
        drawn: list[Any] = []

        def draw() -> None:
            drawn.extend(it)

        self.bell.until_done(draw)
        return drawn

    def cancel(self, n: int) -> None:
        result = self.bell.until_done(lambda: self.pool.apply_async(slow, (n,)))
        self.bell.until_done(result.cancel)

    def callback(self, n: int) -> None:
        called: list[int] = []
        result = self.bell.until_done(
            lambda: self.pool.apply_async(same, (n,), callback=called.append)
        )
        check(self.bell.until_done(result.get), n)
        check(n in called, True)

    def pickled_in_python(self, n: int) -> None:
        result = self.bell.until_done(lambda: self.pool.apply(same, (Meets(50 * n),)))
        if not isinstance(self.pool, ThreadPool):  # a thread gets the object itself
            check(result, 50 * n)

    def end(self) -> None:
        """Close or terminate the pool, or leave its ``with`` block."""
        until_done, pool = self.bell.until_done, self.pool
        how = self.bell.random.randrange(3)
        if how == 0:
            until_done(pool.close)
        elif how == 1:
            until_done(pool.terminate)
        else:
            until_done(lambda: pool.__exit__(None, None, None))
        until_done(pool.join)


def run(kind: str, alarms: int, seed: int, life: int) -> dict[str, Any]:
    with KINDS[kind](2) as pool:  # opens descriptors that stay open until the program ends
        pool.map(same, range(20))
    pool.join()
    del pool
    fds = descriptors()
    bell = Bell(seed)
    # SIG_IGN if a shell runs this program in the background.
    at_interrupt = signal.getsignal(signal.SIGINT)
    errors: Counter[str] = Counter()
    pools = 0
    begin = time.monotonic()
    threading.Thread(target=watch, args=(bell,), daemon=True).start()
    while bell.heard < alarms:
        pool = bell.until_done(lambda: KINDS[kind](2))
        pools += 1
        storm = Storm(bell, pool)
        for _ in range(bell.random.randrange(life)):
            try:
                storm.turn()
            except Exception as exc:
                errors[f"{type(exc).__name__}: {str(exc)[:120]}"] += 1
                if len(errors) > 20:
                    break
        try:
            check(pool.map(same, range(20)), list(range(20)))
        except Exception as exc:
            errors[f"afterwards {type(exc).__name__}: {str(exc)[:120]}"] += 1
        storm.end()
        del pool, storm
        check([name for name, lock in locks() if lock._is_owned()], [])
        # The pool has restored the handlers that it replaced for a moment.
        check(signal.getsignal(signal.SIGINT), at_interrupt)
        check(signal.getsignal(signal.SIGALRM), bell._ring)
    # If an alarm ended a constructor, a thread of that pool ends its workers.
    end = time.monotonic() + PATIENCE
    while threading.active_count() > 2 and time.monotonic() < end:
        time.sleep(0.01)
    return {
        "kind": kind, "alarms": bell.heard, "seen": bell.seen, "in finalizers": bell.unseen,
        "calls": bell.calls, "pools": pools, "errors": dict(errors),
        "seconds": round(time.monotonic() - begin, 1),
        "more descriptors": more(fds, descriptors()),
        "threads": threading.active_count() - 2,  # besides this thread and `watch`
    }  # fmt: skip


def locks() -> list[tuple[str, Any]]:
    """Return the locks of xpool's modules that may be taken twice, with their names."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("xpool.")]
    kind = type(threading.RLock())
    return [
        (f"{module.__name__}.{name}", one)
        for module in modules
        for name, one in vars(module).items()
        if type(one) is kind
    ]


def more(before: dict[int, str], now: dict[int, str]) -> list[str]:
    """Return the new descriptors, if their number has grown."""
    come = [f"{fd}: {to}" for fd, to in now.items() if before.get(fd) != to]
    return come if len(now) > len(before) else []


def watch(bell: Bell) -> None:
    """End the program if no call ends for `PATIENCE` seconds."""
    last, since = -1, time.monotonic()
    while True:
        time.sleep(1)
        now = bell.calls
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            print(f"hangs after {bell.heard} alarms", file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(KINDS), default="Pool")
    parser.add_argument("--alarms", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--life", type=int, default=200, help="most calls on one pool")
    args = parser.parse_args()
    found = run(args.kind, args.alarms, args.seed, args.life)
    print(json.dumps(found))
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
