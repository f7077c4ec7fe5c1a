"""Alarms at random instants, by a handler that raises: `python -m bench.alarms --alarms 1000000`.

All verbs of one kind of pool are used in turn while alarms strike the main thread, one after the
other or in bursts, in the verbs and between them.  What an alarm has cut short is done again.  So
each call ends with the handler's exception or the right result, a result that was asked for again
is the right one, and no item of an iterator is lost or comes twice.  Pools are closed, terminated
and left under alarms too, and what comes after says that they have ended.

Prints one line of JSON: how many alarms, how many of them the program did not see (Python prints
what is raised in a finalizer, and goes on), errors by their names, descriptors and threads left.
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
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from xpool import P2PPool, Pool, ThreadPool
from xpool.testing.leaks import descriptors

T = TypeVar("T")

KINDS: dict[str, Any] = {"Pool": Pool, "P2PPool": P2PPool, "ThreadPool": ThreadPool}

PATIENCE = 60.0
"""Seconds without a call that is through, after which this says where it hangs, and ends with
status 3.  Alarms do not count: a call that hangs is struck and begun again for ever."""


class Alarm(Exception):
    """What the handler raises."""


class Wrong(Exception):
    """A result that is not the right one."""


class Bell:
    """Sets alarms, and counts them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.armed = False
        self.heard = self.seen = self.unseen = self.calls = 0
        signal.signal(signal.SIGALRM, self._ring)
        sys.unraisablehook = self._not_raised

    def _ring(self, signum: int, frame: Any) -> None:
        # Python prints what is raised in that hook.
        hooked = frame is not None and frame.f_code is Bell._not_raised.__code__
        if self.armed and not hooked:
            self.heard += 1
            raise Alarm

    def _not_raised(self, what: Any) -> None:
        self.unseen += 1

    def set(self, tries: int) -> None:
        """Have the next alarm struck soon; one in ten comes with more, in a burst.

        Later when a call was tried ``tries`` times, so that any will be through in the end.
        """
        patience = 1.3 ** min(tries, 30)
        scale = self.random.choice((2e-5, 2e-4, 2e-3)) * patience
        burst = self.random.uniform(5e-5, 1e-3) * patience if self.random.random() < 0.1 else 0
        signal.setitimer(signal.ITIMER_REAL, self.random.random() * scale + 1e-6, burst)

    def until_done(self, call: Callable[[], T]) -> T:
        """Call again and again under alarms, until none strikes."""
        for tries in itertools.count():
            try:
                try:
                    self.armed = True
                    self.set(tries)
                    result = call()
                finally:
                    self.armed = False  # not by a call, after which an alarm could strike
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


def slow(x: int) -> int:
    time.sleep(0.001)
    return x


class Meets:
    """Takes a moment to be pickled, in Python."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (sum(1 for _ in range(self.n)),)


def check(found: Any, expected: Any) -> None:
    if found != expected:
        raise Wrong(f"{found!r} instead of {expected!r}")


class Storm:
    """Uses one pool by all verbs."""

    def __init__(self, bell: Bell, pool: Any) -> None:
        self.bell, self.pool = bell, pool
        self.verbs: list[Callable[[int], None]] = [
            self.apply, self.apply_async, self.many, self.map, self.map_async, self.starmap,
            self.imap, self.imap_with_buffersize, self.imap_unordered, self.cancel, self.callback,
            self.pickled_in_python,
        ]  # fmt: skip

    def turn(self) -> None:
        """Use one verb."""
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

    def _drawn(self, it: Iterable[Any]) -> list[Any]:
        """All items: taken by C, since in Python a value can be lost before it has a name."""
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
        if not isinstance(self.pool, ThreadPool):  # which passes the object itself
            check(result, 50 * n)

    def end(self) -> None:
        """Close or terminate it, or leave its block."""
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
    with KINDS[kind](2) as pool:  # what a program has from its first pool on
        pool.map(same, range(20))
    pool.join()
    del pool
    fds = descriptors()
    bell = Bell(seed)
    # Ignored, where a shell has put this in the background.
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
        # Whatever was put in their place while books were kept is gone.
        check(signal.getsignal(signal.SIGINT), at_interrupt)
        check(signal.getsignal(signal.SIGALRM), bell._ring)
    # A pool whose constructor was cut short ends by itself, in a thread of its own.
    end = time.monotonic() + PATIENCE
    while threading.active_count() > 2 and time.monotonic() < end:
        time.sleep(0.01)
    return {
        "kind": kind, "alarms": bell.heard, "seen": bell.seen, "in finalizers": bell.unseen,
        "calls": bell.calls, "pools": pools, "errors": dict(errors),
        "seconds": round(time.monotonic() - begin, 1),
        "more descriptors": more(fds, descriptors()),
        "threads": threading.active_count() - 2,  # beside this one and the watch
    }  # fmt: skip


def more(before: dict[int, str], now: dict[int, str]) -> list[str]:
    """Return what the descriptors are that have come, if there are more than there were."""
    come = [f"{fd}: {to}" for fd, to in now.items() if before.get(fd) != to]
    return come if len(now) > len(before) else []


def watch(bell: Bell) -> None:
    """End the program if nothing happens any more."""
    last, since = -1, time.monotonic()
    while True:
        time.sleep(1)
        now = bell.calls
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            print(f"it hangs after {bell.heard} alarms", file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(KINDS), default="Pool")
    parser.add_argument("--alarms", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--life", type=int, default=200, help="turns of a pool at most")
    args = parser.parse_args()
    found = run(args.kind, args.alarms, args.seed, args.life)
    print(json.dumps(found))
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
