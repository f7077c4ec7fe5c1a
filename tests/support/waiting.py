"""What `xpool.testing._test_tasks` has, and threads that start together."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
