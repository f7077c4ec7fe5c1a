"""Submits the tasks of `PoolStateMachine`, and gets their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from xpool import errors
from xpool.errors import TimeoutError as PoolTimeout

Spec = tuple[str, int, "str | None"]


class Answer:
    """An expected answer: how to get it, and its possible values."""

    def __init__(self, what: str, get: Callable[[float], Any], specs: list[Spec]) -> None:
        self.what = what
        self.get = get
        self.specs = specs
        self.result: Any = None  # the pool's result, if it can be cancelled
        self.called: list[Any] | None = None  # the arguments with which callbacks were called
        self.unordered = False
        self.asked = False  # whether `cancel` was called
        self.cancelled = False  # whether `cancel` returned True
        self.times_out = False

    @property
    def kinds(self) -> set[str]:
        return {spec[0] for spec in self.specs}


class Late(PoolTimeout):
    """A call has not returned within the limit."""


def in_time(act: Callable[[], Any], limit: float, threads: int = 1) -> Any:
    """Call ``act()`` in new threads and return a result.  Raise `Late` after ``limit`` seconds."""
    done: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            done.append((True, act()))
        except BaseException as exc:
            done.append((False, exc))

    working = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    end = time.monotonic() + limit
    for thread in working:
        thread.start()
    for thread in working:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            raise Late
    for ok, value in done:
        if not ok:
            raise value
    return done[0][1]


def applied(call: Callable[[], Any], limit: float) -> list[Any]:
    return [in_time(call, limit)]


def value_of(spec: Spec) -> Any:
    what, number, _ = spec
    return bytes([number % 251]) * 300_000 if what == "large" else number


def submit(
    pool: Any, verb: str, specs: list[Spec], functions: tuple[Any, Any], terms: dict[str, Any]
) -> Answer:
    """Submit tasks by a verb that returns at once.  Return the expected answer."""
    one, two = functions
    what = f"{verb} of {[spec[:2] for spec in specs]}"
    if verb == "apply_async":
        called: list[Any] = []
        result = pool.apply_async(
            one, (specs[0],), callback=called.append, error_callback=called.append, **terms
        )
        answer = Answer(what, lambda limit: [result.get(limit)], specs)
        answer.result, answer.called = result, called
        return answer
    if verb == "starmap_async":
        result = pool.starmap_async(two, [(spec[1], spec) for spec in specs], **terms)
    else:
        result = getattr(pool, verb)(one, specs, **terms)
    if verb in ("map_async", "starmap_async"):
        answer = Answer(what, result.get, specs)
        answer.result = result
        return answer
    answer = Answer(what, lambda limit: _drawn(result, limit), specs)
    answer.unordered = verb == "imap_unordered"
    return answer


def _drawn(iterator: Any, limit: float) -> list[Any]:
    """Return all values of an iterator.  If values raise errors, raise the first one at the end."""
    values: list[Any] = []
    first: Exception | None = None
    while True:
        try:
            values.append(iterator.next(limit))
        except StopIteration:
            break
        except PoolTimeout:
            raise
        except errors.PoolClosed as exc:
            first = first or exc
            break
        except Exception as exc:
            first = first or exc
    if first is not None:
        raise first
    return values
