"""Measure how soon a caller is answered after a fault: a death, a time limit, a pool's end, Ctrl-C.

``python -m bench.faults [--rounds N]`` prints the median and the maximum of the rounds in
milliseconds, and the promised limit.  A figure is the time from the fault (the kill, the end of
the task's time, the call, the signal) to the caller's answer.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import xpool

LIMIT = 0.2


def begun(fd_path: str) -> None:
    """Tell the parent that the task has begun."""
    fd = os.open(fd_path, os.O_WRONLY)
    os.write(fd, b".")
    os.close(fd)


def counting(path: str) -> None:
    """Run Python code for ever."""
    begun(path)
    n = 0
    while True:
        n += 1


def stubborn(path: str) -> None:
    """Run Python code for ever, and catch all exceptions."""
    begun(path)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    n = 0
    while True:
        try:
            while True:
                n += 1
        except BaseException:
            n = 0


def in_c(path: str) -> None:
    """Run C code for ever that neither checks for signals nor releases the GIL."""
    begun(path)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    collections.deque(itertools.repeat(0), maxlen=0)


def stopped(path: str) -> None:
    """Stop this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun(path)
    os.kill(os.getpid(), signal.SIGSTOP)


def nothing() -> None:
    """An empty task."""


TASKS = {"Python code": counting, "all caught": stubborn, "C code": in_c, "SIGSTOP": stopped}


class Signs:
    """A named pipe through which tasks say that they have begun."""

    def __init__(self) -> None:
        self.path = f"/tmp/xpool-bench-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR)

    def wait(self, n: int) -> None:
        """Wait until ``n`` more tasks have begun."""
        for _ in range(n):
            select.select([self._fd], [], [])
            os.read(self._fd, 1)
        time.sleep(0.02)  # the time that a task needs to reach its loop

    def close(self) -> None:
        os.close(self._fd)
        os.unlink(self.path)


def until_error(result: xpool.AsyncResult, kind: type[BaseException]) -> float:
    """Wait for an error of this kind; return the time at which it came."""
    try:
        result.get(30)
    except kind:
        return time.monotonic()
    raise AssertionError(f"{result!r} has no {kind.__name__}")


def death(signs: Signs, task: Callable[[str], None]) -> float:
    """Seconds from the SIGKILL of a worker to the error of its task."""
    with xpool.Pool(2) as pool:
        pool.apply(nothing)
        victim = pool.apply_async(task, (signs.path,))
        signs.wait(1)
        pids = set(pool.statistics()["pids"])
        free = pool.apply(os.getpid)
        begin = time.monotonic()
        os.kill((pids - {free}).pop(), signal.SIGKILL)
        return until_error(victim, xpool.WorkerDied) - begin


def late(signs: Signs, task: Callable[[str], None]) -> float:
    """Seconds from the end of a task's time limit to its error."""
    with xpool.Pool(2) as pool:
        pool.apply(nothing)
        victim = pool.apply_async(task, (signs.path,), timeout=LIMIT)
        begin = time.monotonic() + LIMIT  # the task begins now, because both workers are idle
        signs.wait(1)
        return until_error(victim, xpool.TaskTimeout) - begin


def free_again(signs: Signs, task: Callable[[str], None]) -> float:
    """Seconds from `cancel` to the result of the next task, in a pool of one worker."""
    with xpool.Pool(1) as pool:
        victim = pool.apply_async(task, (signs.path,))
        signs.wait(1)
        begin = time.monotonic()
        victim.cancel()
        pool.apply(nothing)
        return time.monotonic() - begin


def leaving(signs: Signs, task: Callable[[str], None]) -> float:
    """Seconds from the end of a ``with`` block to the end of `join`."""
    with xpool.Pool(2) as pool:
        for _ in range(2):
            pool.apply_async(task, (signs.path,))
        signs.wait(2)
        begin = time.monotonic()
    pool.join()
    return time.monotonic() - begin


SCRIPT = """
import sys
import xpool
from bench.faults import TASKS

if __name__ == "__main__":
    with xpool.Pool(2) as pool:
        pool.map(TASKS[sys.argv[1]], [sys.argv[2]] * 4, chunksize=1)
"""


def interrupt(signs: Signs, task: Callable[[str], None]) -> float:
    """Seconds from Ctrl-C to the end of the program, which must print one traceback.

    Ctrl-C signals the whole process group.
    """
    name = next(name for name, known in TASKS.items() if known is task)
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name, signs.path],
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    signs.wait(2)
    begin = time.monotonic()
    os.killpg(program.pid, signal.SIGINT)
    _, said = program.communicate()
    took = time.monotonic() - begin
    if said.count("Traceback") != 1 or "KeyboardInterrupt" not in said:
        raise AssertionError(f"not one traceback:\n{said}")
    return took


FIGURES: list[tuple[str, Callable[[Signs, Callable[[str], None]], float], float]] = [
    ("SIGKILL of a worker, to the error of its task", death, 100),
    ("end of a task's time limit, to its error", late, 200),
    ("cancel() of a running task, to the result of the next one", free_again, 1000),
    ("end of a `with` block, to the end of join()", leaving, 1000),
    ("Ctrl-C, to the end of the program", interrupt, 1000),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each figure")
    rounds = parser.parse_args().rounds
    signs = Signs()
    print("| what | the task runs | median | worst | promised |")
    print("|---|---|---|---|---|")
    try:
        for what, measure, promised in FIGURES:
            for name, task in TASKS.items():
                took = [measure(signs, task) * 1000 for _ in range(rounds)]
                print(
                    f"| {what} | {name} | {statistics.median(took):.0f} ms | "
                    f"{max(took):.0f} ms | {promised:.0f} ms |",
                    flush=True,
                )
    finally:
        signs.close()


if __name__ == "__main__":
    main()
