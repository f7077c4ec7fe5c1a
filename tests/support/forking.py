"""Fork all the time. The children live on, with all that they inherit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import warnings
from collections.abc import Iterator

MOST = 600
"""Children."""

MOST_OF_HOSTS = 60
"""Children of a driver, and of each agent.  While a process with Ray in it forks, its threads wait.
On a busy machine, 600 forks take more than an agent's lease, 10 s, and the host is lost."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _fork_often(over: threading.Event, children: list[int], most: int) -> None:
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
    system = ctypes.CDLL(None)
    while not over.wait(0.001) and len(children) < most:
        pid = os.fork()
        if not pid:
            system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            with open(os.devnull, "r+b") as null:
                for fd in range(3):
                    os.dup2(null.fileno(), fd)
            while True:
                signal.pause()
        children.append(pid)


@contextlib.contextmanager
def forks(most: int = MOST) -> Iterator[None]:
    """Have another thread fork every millisecond, and end the children at the end."""
    children: list[int] = []
    over = threading.Event()
    thread = threading.Thread(target=_fork_often, args=(over, children, most))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def fork_from_now_on() -> None:
    """Have another thread fork every millisecond. The children end with this process."""

    def run() -> None:
        _fork_often(over, [], MOST_OF_HOSTS)
        over.wait()  # the children end with the thread that has forked them

    over = threading.Event()
    threading.Thread(target=run, daemon=True).start()
