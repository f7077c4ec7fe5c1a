"""Saboteurs for the fault matrix. Run as a program, this file is one cell whose fault is in the
caller.

``python cells.py KIND METHOD STAGE HOW`` prints the workers' pids, the task's outcome, and
"usable". The parent process checks whether and how the program ends.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import work
from support.kinds import KINDS
from support.limits import WAIT
from support.waiting import eventually

LIMIT = 0.3
"""Seconds after which a task is stopped."""

entered = threading.Event()


def strike(how: str) -> None:
    """Apply the fault to the caller's process; return only if the process continues."""
    entered.set()
    if how == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        work.end(how)


# In workers --------------------------------------------------------------------------------------


def arm(how: str) -> None:
    """Initializer: let SIGUSR1 apply the fault; it is sent while the worker is idle."""
    signal.signal(signal.SIGUSR1, lambda *_: work.end(how))


def end_in_collection(how: str) -> str:
    """Apply the fault during a garbage collection."""
    work.EndsWhenCollected(how)
    gc.collect()
    return "collected"


def end_half_written(how: str, size: int, box: str | None = None) -> bytes:
    """Apply the fault after writing half of the result's message."""
    from xpool._worker.protocol import Replies

    Replies.small = -1  # write to the pipe, because the outbox takes a message as a whole
    write, heads = os.write, 0

    def half(fd: int, part: Any) -> int:
        nonlocal heads
        view = memoryview(part)
        heads += 1
        if heads == 1:
            return write(fd, view)  # only the header, which announces the rest
        os.write = write
        for begin in range(0, len(view) // 2, 4096):  # the pipe has room as the parent reads
            write(fd, view[begin : min(begin + 4096, len(view) // 2)])
        if box is not None:
            work.post(box, str(os.getpid()))
        work.end(how)
        raise AssertionError(f"{how} did not end this worker")

    os.write = half
    return bytes(size)


def stay_half_written(box: str, size: int) -> bytes:
    """Post and wait after writing half of the result's message."""
    return end_half_written("hang", size, box)


class TwoBuffers:
    """An object that is sent as two blocks of shared memory."""

    def __reduce__(self) -> Any:
        return list, ([pickle.PickleBuffer(bytearray(300_000)) for _ in range(2)],)


def end_half_copied(how: str) -> TwoBuffers:
    """Apply the fault after filling the first of two blocks, when the second is requested."""
    from xpool._memory.arena import Arena

    lease = Arena.lease
    calls: list[int] = []

    def second(self: Arena, nbytes: int, limit: int | None = None) -> Any:
        calls.append(nbytes)
        if len(calls) == 2:
            Arena.lease = lease  # type: ignore[method-assign]
            work.end(how)
        return lease(self, nbytes, limit)

    Arena.lease = second  # type: ignore[method-assign]
    return TwoBuffers()


# In the caller -----------------------------------------------------------------------------------


class StrikesWhenPickled:
    """Applies the fault to the process that pickles it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        strike(self.how)
        return int, (7,)


def rebuild(how: str) -> int:
    """Apply the fault during unpickling."""
    strike(how)
    return 7


class StrikesWhenUnpickled:
    """Applies the fault to the process that unpickles it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return rebuild, (self.how,)


def make_strikes(how: str) -> StrikesWhenUnpickled:
    """Return a result that applies the fault to the caller."""
    return StrikesWhenUnpickled(how)


class StrikesWhenCollected:
    """Applies the fault to the process that collects it."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.me = self

    def __del__(self) -> None:
        strike(self.how)


def strike_in_collection(how: str) -> str:
    """Apply the fault during a garbage collection, in a worker thread."""
    StrikesWhenCollected(how)
    gc.collect()
    return "collected"


def outcome(result: Any, limit: float = WAIT) -> str:
    """Return a task's outcome in the terms of the matrix."""
    try:
        result.get(limit)
    except BaseException as error:
        return named(error)
    return "answered"


def named(error: BaseException) -> str:
    """Describe an error in the terms of the matrix."""
    import xpool

    if isinstance(error, xpool.WorkerDied):
        return f"WorkerDied ({error.signal or f'exit code {error.exitcode}'})"
    for kind in (
        xpool.TaskTimeout, xpool.ResultNotPicklable, xpool.WorkerStartFailed, xpool.InternalError,
        SystemExit,
    ):  # fmt: skip
        if isinstance(error, kind):
            return kind.__name__
    if isinstance(error, xpool.PoolClosed) and error.__cause__ is not None:
        return named(error.__cause__)
    if "sabotage" in "".join(traceback.format_exception(error)):
        return "its error"
    return "".join(traceback.format_exception(error))


def struck(pool: Any, stage: str, how: str) -> str:
    """Apply the fault; return the task's outcome."""
    if stage == "task pickle":
        try:
            return outcome(pool.apply_async(work.same, (StrikesWhenPickled(how),)))
        except SystemExit as error:
            return named(error)
    if stage == "result unpickle":
        return outcome(pool.apply_async(make_strikes, (how,)))
    if stage == "callback":
        return outcome(pool.apply_async(work.square, (3,), callback=lambda _: strike(how)))
    limit = LIMIT if how == "hang" else None
    func = {"run": strike, "garbage collection": strike_in_collection}[stage]
    return outcome(pool.apply_async(func, (how,), timeout=limit))


def main(name: str, method: str, stage: str, how: str) -> None:
    """Run one cell."""
    kind = next(kind for kind in KINDS if kind.name == name)
    options = {} if method == "None" else {"context": method}
    if stage == "initializer":
        pool = kind(1, strike, (how,), initializer_timeout=LIMIT)
        try:
            said = outcome(pool.apply_async(work.square, (3,)))
        except Exception as error:  # the pool has already failed
            said = named(error)
        print(said, flush=True)
        pool.terminate()
        return
    pool = kind(2, **options)
    others = [pool.apply_async(work.square, (i,)) for i in range(20)]
    assert [r.get(WAIT) for r in others] == [i * i for i in range(20)]
    eventually(lambda: None not in pool.statistics().get("pids", ()), "all workers have started")
    print(*pool.statistics().get("pids", ()), flush=True)
    others = [pool.apply_async(work.square, (i,)) for i in range(20)]
    if how == "hang" and stage in ("task pickle", "result unpickle", "callback"):
        thread = threading.Thread(target=struck, args=(pool, stage, how), daemon=True)
        thread.start()
        assert entered.wait(WAIT)
        said = "waits"
    else:
        said = struck(pool, stage, how)
    others += [pool.apply_async(work.square, (i,)) for i in range(20)]
    assert [r.get(WAIT) for r in others] == [i * i for i in range(20)] * 2
    assert pool.map(work.square, range(50), 1) == [i * i for i in range(50)]
    if said == "waits":
        assert thread.is_alive()
    print("goes on" if how == "SIGSTOP" and said == "answered" else said, flush=True)
    print("usable", flush=True)
    pool.terminate()
    if said != "waits":
        pool.join(WAIT)


if __name__ == "__main__":
    main(*sys.argv[1:])
