"""Stacks of workers: signals ask for them, and their handlers write them into the shared page.

The handler of the second signal is in C, so a worker that is stuck in C code answers, too.  A
process that is stopped, or blocked in the kernel, does not answer; /proc says what it waits for.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from xpool._engine.answers import OURS, own_part
from xpool._engine.jobs.scheduler import Scheduler
from xpool._engine.worker_process import WorkerProcess
from xpool._wire.outbox import NO_LIMIT, STACK_SIGNAL, STOP_SIGNAL, TASK_LINE, Outbox

ANSWER_SECONDS = 0.5
"""Seconds to wait for a worker that was asked."""

C_CODE_SECONDS = 0.1
"""Seconds to wait for the handler in Python, which a worker in C code does not run."""

_STATES = {
    "D": "in the kernel, waiting for a device or file",
    "R": "running",
    "S": "waiting",
    "T": "stopped by a signal",
    "Z": "ended",
    "t": "stopped by a debugger",
}


class WorkerStack(NamedTuple):
    """Where one worker is.

    ``task``, ``item``: the task that it runs, and its item as far as it is known; empty while it
    waits for a task.  ``seconds``: how long it has run the task; None: not known.  ``stack``: the
    calls of the task, most recent first, or why they are not known.  ``waits``: the kernel's text
    of what its process does.
    """

    index: int  # type: ignore[assignment]  # not the method of tuples
    pid: int | None
    task: str
    item: str
    seconds: float | None
    stack: str
    waits: str
    host: str = ""

    def __str__(self) -> str:
        where = f" on host {self.host}" if self.host else ""
        who = f"worker {self.index} (pid {self.pid}){where}"
        if not self.task and self.stack:
            return f"{who}: {self.stack}"
        if not self.task:
            return f"{who} {'waits for a task' if self.pid else 'has no process now'}"
        since = "" if self.seconds is None else f" for {self.seconds:.1f} s"
        item = f", item {self.item}" if self.item else ""
        lines = [f"{who} runs {self.task}{item}{since}"]
        if self.waits:
            lines.append(f"  its process: {self.waits}")
        lines.append(self.stack or "  it has not reported where it is")
        return "\n".join(lines)


def in_kernel(pid: int) -> str:
    """Return the state of a process and what it waits for in the kernel; "": unknown."""
    try:
        state = _read(pid, "stat").rpartition(")")[2].split()[0]
        place = _read(pid, "wchan").strip("0 \n")
    except (OSError, IndexError):
        return ""
    found = _STATES.get(state, state)
    if place:
        found += f" in the kernel's {place}()"
    library = _library(pid)
    return f"{found}, called by {library}" if library else found


def _read(pid: int, name: str) -> str:
    # The name of a process, and the path of a file, may have any bytes.
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return os.fsdecode(file.read())


def _library(pid: int) -> str:
    """Return the file whose code made the system call in which a process waits."""
    try:
        pc = int(_read(pid, "syscall").split()[-1], 16)
        maps = _read(pid, "maps").splitlines()
    except (OSError, ValueError, IndexError):
        return ""  # the process runs, or may not be inspected
    for line in maps:
        start, _, rest = line.partition("-")
        if int(start, 16) <= pc < int(rest.split()[0], 16):
            return os.path.basename(line.split(maxsplit=5)[5]) if line.count("/") else ""
    return ""


def outside(pid: int) -> list[WorkerStack]:
    """Return where the workers are of another process.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: the process has another user.
    """
    # The inodes of the outboxes that the process maps.
    maps = _read(pid, "maps").splitlines()
    pages = {int(line.split()[4]) for line in maps if "/memfd:xpool-outbox" in line}
    found: list[WorkerStack] = []
    for worker in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            # The parent may map the pages, too.
            if worker != pid and (page := _mapped(worker, pages)):
                found.append(_outside(worker, page, len(found)))
        except OSError:
            continue  # the process has ended, or has another user
    return found


def _mapped(pid: int, pages: set[int]) -> str | None:
    """Return the path of the first descriptor of a process that leads to one of these inodes."""
    folder = f"/proc/{pid}/fd"
    paths = (f"{folder}/{name}" for name in os.listdir(folder))
    return next((path for path in paths if os.stat(path).st_ino in pages), None)


def _outside(pid: int, page: str, index: int) -> WorkerStack:
    with open(page, "r+b") as file:
        box = Outbox(file.fileno())
    try:
        turn, stack = box.turn, ""
        if turn is not None:
            box.clear_stack()
            for signum, patience in (STOP_SIGNAL, C_CODE_SECONDS), (STACK_SIGNAL, ANSWER_SECONDS):
                os.kill(pid, signum)
                end = time.monotonic() + patience
                while time.monotonic() < end:
                    stack = box.stack()
                    if TASK_LINE in stack or (stack and signum == STACK_SIGNAL):
                        break
                    time.sleep(0.005)
                if stack:
                    break
    finally:
        box.close()
    # The worker runs a task if the function of the loop that runs tasks is on the stack.
    runs = f"{OURS[0]}, line " in stack and " in _run\n" in stack
    task = "a task" if runs else ""
    item = stack.rpartition(TASK_LINE)[2].strip() if runs and TASK_LINE in stack else ""
    seconds = time.monotonic() - turn if runs and turn else None
    return WorkerStack(
        index, pid, task, item, seconds, own_part(stack) if runs else "", in_kernel(pid)
    )


class StackRequest:
    """Asks all workers that can answer for their stacks.  Used with the engine's lock held."""

    def __init__(self, workers: list[WorkerProcess]) -> None:
        self._asked: dict[WorkerProcess, int] = {}  # the generations of their processes
        self._again = False
        for worker in workers:
            # Not before its signal handlers are installed, or while it must stop an item.
            ready = worker.handle is not None and (worker.box.turn or worker.box.since)
            if ready and not worker.box.asked:
                worker.box.ask(NO_LIMIT)
                worker.send_signal(STOP_SIGNAL)
                self._asked[worker] = worker.generation

    def collect(
        self,
        workers: list[WorkerProcess],
        sched: Scheduler,
        describe: Callable[[int, int], str],
        waited: float,
    ) -> list[WorkerStack] | None:
        """Return where the workers are, ``waited`` seconds after the request; None: not yet."""
        told = {
            worker: worker.box.stack()
            for worker, generation in self._asked.items()
            if worker.generation == generation
            and worker.handle is not None
            and worker.interrupted is None
        }
        if not all(TASK_LINE in stack for stack in told.values()):
            if waited < C_CODE_SECONDS:
                return None
            for worker in () if self._again else told:
                if not told[worker]:
                    worker.send_signal(STACK_SIGNAL)
            self._again = True
            if waited < ANSWER_SECONDS and not all(told.values()):
                return None
        for worker in told:
            worker.box.ask(0)
        return [_stack_of(worker, told.get(worker, ""), sched, describe) for worker in workers]


def _stack_of(
    worker: WorkerProcess, stack: str, sched: Scheduler, describe: Callable[[int, int], str]
) -> WorkerStack:
    task, since = "", None
    if worker.handle is not None:
        running = sched.running(worker.index, worker.box.began)
        if running is not None:
            batch, position = running
            task, since = describe(*batch.name(batch.first + position)), worker.box.turn
        elif worker.box.turn is None:
            task, since = "its start, with the initializer", worker.box.since
    pid = worker.pid
    return WorkerStack(
        worker.index,
        pid,
        task,
        stack.rpartition(TASK_LINE)[2].strip() if task and TASK_LINE in stack else "",
        time.monotonic() - since if since else None,
        own_part(stack) if task else "",
        in_kernel(pid) if pid is not None and sys.platform == "linux" else "",
    )
