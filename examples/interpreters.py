"""A pool of sub-interpreters, made with the hooks of `BasePool` alone.  Needs Python 3.14.

Each worker is a thread with its own interpreter and its own GIL, so pure Python runs on all cores
within one process. In a sub-interpreter, importing numpy or Pillow raises ImportError, and
importing torch crashes the process. Use `Pool` for scripts that import these at the top.

    python examples/interpreters.py --workers 2
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import xpool
from xpool import BasePool
from xpool.pickle import dumps, loads

# A new interpreter knows neither the program's folder nor the functions of its script.
PREPARE = """
import runpy, sys
sys.path[:] = {path!r}
if {script!r}:
    vars(sys.modules["__main__"]).update(runpy.run_path({script!r}, run_name="__mp_main__"))
"""


def run(task: bytes) -> bytes:
    """Run a pickled task in the sub-interpreter; return the pickled answer ``(ok, value)``."""
    from xpool.pickle import dumps, loads

    func, args, kwds = loads(task)
    try:
        return dumps((True, func(*args, **kwds)))
    except BaseException as exc:
        return dumps((False, exc))


class InterpreterPool(BasePool):
    """A pool of sub-interpreters, each in its own thread."""

    def setup_queues(self) -> None:
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []

    def pool_inqueue_put(self, obj: Any) -> None:
        if obj is not None:
            job, chunk, *call = obj
            obj = job, chunk, dumps(tuple(call), recurse=True)  # raises in the caller's thread
        self.tasks.put(obj)

    def pool_outqueue_get(self, timeout: float) -> Any:
        return self.answers.get(timeout=timeout)

    def repopulate_pool(self) -> None:
        while len(self.threads) < self.size():
            thread = threading.Thread(target=self.serve, daemon=True)
            self.threads.append(thread)
            thread.start()

    def serve(self) -> None:
        """Run tasks in this thread's interpreter until the task is None."""
        from concurrent import interpreters  # type: ignore[attr-defined]

        interpreter = interpreters.create()
        try:
            script = getattr(sys.modules["__main__"], "__file__", "")
            interpreter.exec(PREPARE.format(path=sys.path, script=script))
            if self.initializer is not None:
                start = dumps((self.initializer, self.initargs, {}), recurse=True)
                ok, error = loads(interpreter.call(run, start))
                if not ok:
                    raise error
            while (task := self.tasks.get()) is not None:
                job, chunk, call = task
                self.answers.put((job, chunk, loads(interpreter.call(run, call))))
        finally:
            interpreter.close()

    def maintain_pool(self) -> bool:
        before = len(self.threads)
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        return len(self.threads) < before

    def terminate_workers(self) -> None:
        for _ in self.threads:
            self.tasks.put(None)

    def join_workers(self) -> None:
        for thread in self.threads:
            thread.join()


def count_primes(limit: int) -> int:
    """Count primes in pure Python, which holds the GIL."""
    return sum(all(n % k for k in range(2, int(n**0.5) + 1)) for n in range(2, limit))


def measure(make: Callable[[], BasePool], limits: list[int]) -> tuple[list[int], float]:
    """Return the results, and the seconds without the workers' start."""
    with make() as pool:
        pool.map(abs, range(100), chunksize=1)
        begin = time.perf_counter()
        return pool.map(count_primes, limits, chunksize=1), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Count primes in sub-interpreters.")
    parser.add_argument("--workers", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--limit", type=int, default=60_000, help="count primes below this")
    options = parser.parse_args()
    if sys.version_info < (3, 14):
        raise SystemExit("sub-interpreters in threads need Python 3.14 or later")

    limits = [options.limit] * 16
    begin = time.perf_counter()
    expected = list(map(count_primes, limits))
    print(f"plain loop: {time.perf_counter() - begin:.2f} s")
    for kind in (xpool.ThreadPool, InterpreterPool, xpool.Pool):
        results, seconds = measure(lambda kind=kind: kind(options.workers), limits)  # type: ignore[misc]
        assert results == expected, kind
        print(f"{kind.__name__} of {options.workers}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
