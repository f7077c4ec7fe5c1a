"""What `xpool.testing._test_tasks` has, threads that start together, and all of a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from xpool.testing._test_tasks import *  # noqa: F403


def together(call: Callable[[int], object], count: int) -> None:
    """Run ``call(i)`` in ``count`` threads that start together. Raise the first error."""
    begin, errors = threading.Barrier(count), []

    def run(i: int) -> None:
        begin.wait()
        try:
            call(i)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def drained(results: Iterator[Any]) -> tuple[list[Any], list[Exception]]:
    """Return all values of an iterator that goes on after errors, and the errors."""
    values, errors = [], []
    while True:
        try:
            values.append(next(results))
        except StopIteration:
            return values, errors
        except Exception as error:
            errors.append(error)
