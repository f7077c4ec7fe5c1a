"""Checks for parts that users write for pools: hooks and channels.

Each check uses the part as xpool does, and watches it.  Then it raises one `AssertionError` that
lists how the part differs from its description.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from xpool._pools.base import TURN, BasePool
from xpool.testing._leaks import Snapshot
from xpool.testing._test_tasks import Late, TaskError, eventually, in_time, perform

QUICK = 0.5
"""Seconds that a non-blocking hook may take.  The limit is high for slow machines."""

LIMIT = 20.0
"""Seconds after which an operation counts as hanging."""


_HOOKS = (
    "setup_queues", "pool_inqueue_put", "pool_outqueue_get", "repopulate_pool", "maintain_pool",
    "terminate_workers", "join_workers",
)  # fmt: skip


class _Report:
    """The observations of all threads."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.called: set[str] = set()

    def say(self, what: str) -> None:
        if what not in self.wrong:
            self.wrong.append(what)

    def took(self, hook: str, seconds: float, args: tuple[Any, ...]) -> None:
        if hook in ("maintain_pool", "terminate_workers") and seconds > QUICK:
            self.say(f"{hook}() took {seconds:.1f} s; it may not block")
        timeout = args[0] if args else 0.0
        if hook == "pool_outqueue_get" and seconds > timeout + QUICK:
            self.say(f"{hook}({timeout}) took {seconds:.1f} s; it waits no longer than that")

    def returned(self, hook: str, value: Any) -> None:
        if hook == "maintain_pool" and not isinstance(value, bool):
            self.say(f"{hook}() returned {value!r}; it says whether workers ended")
        if hook == "pool_outqueue_get" and not _is_result(value):
            self.say(f"{hook}() returned {value!r:.80}; a result is (job, chunk, (ok, value))")


def _is_result(value: Any) -> bool:
    try:
        job, chunk, (ok, _) = value
    except (TypeError, ValueError):
        return False
    return isinstance(job, int) and isinstance(chunk, int) and isinstance(ok, bool)


@contextlib.contextmanager
def _watched(kind: type[BasePool], report: _Report) -> Iterator[None]:
    """Watch all calls of the class's hooks in the block.

    This changes the class itself for a time, because workers could not import a subclass.
    """

    def watched(name: str) -> Any:
        hook = getattr(kind, name)

        @functools.wraps(hook)
        def call(self: Any, *args: Any) -> Any:
            report.called.add(name)
            start = time.monotonic()
            try:
                value = hook(self, *args)
            except queue.Empty:
                if name != "pool_outqueue_get":
                    report.say(f"{name}() raised queue.Empty; only pool_outqueue_get() may")
                report.took(name, time.monotonic() - start, args)
                raise
            except Exception as exc:
                report.say(f"{name}() raised {exc!r}")
                raise
            report.took(name, time.monotonic() - start, args)
            report.returned(name, value)
            return value

        return call

    # Remember the hooks that the class defines itself.  Inherited ones are deleted afterwards.
    own = {name: vars(kind)[name] for name in _HOOKS if name in vars(kind)}
    for name, hook in {name: watched(name) for name in _HOOKS}.items():
        setattr(kind, name, hook)
    try:
        yield
    finally:
        for name in _HOOKS:
            if name in own:
                setattr(kind, name, own[name])
            else:
                delattr(kind, name)


def _within(report: _Report, what: str, act: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Call ``act`` in a new thread.  Report if it raises, or does not return within ``limit``."""
    try:
        return in_time(act, limit)
    except Late:
        report.say(f"{what} does not return within {limit:g} s")
    except BaseException as exc:
        report.say(f"{what} raised {exc!r}")
    return None


def check_hooks(pool: type[BasePool], *, limit: float = LIMIT, **options: Any) -> None:
    """Use a subclass of `BasePool` in all ways that involve its hooks, and check the hooks.

    Args:
        pool: the class.  It is called as ``pool(processes=2, **options)``; ``options`` can contain
            another number of processes.
        limit: seconds after which an operation counts as hanging.

    Raises:
        AssertionError: hooks differ from their descriptions in `BasePool`.  The text lists how.
    """
    report = _Report()
    before = Snapshot.take()
    options.setdefault("processes", 2)
    make = functools.partial(pool, **options)
    with _watched(pool, report):
        for use in (_use_to_the_end, _use_short_lives, _use_terminate):
            # Stop at the first fault, because the pool may hang and give other wrong results.
            if not report.wrong:
                use(make, report, limit)
    for name in ("pool_inqueue_put", "pool_outqueue_get", "maintain_pool", "join_workers"):
        if not report.wrong and name not in report.called:
            report.say(f"{name}() was never called; does something stand in its way?")
    if not report.wrong:
        report.wrong += [f"left over: {what}" for what in before.leaks(5.0)]
    if report.wrong:
        raise AssertionError(f"{pool.__name__} does not conform:\n  " + "\n  ".join(report.wrong))


def _use_to_the_end(make: Callable[..., Any], report: _Report, limit: float) -> None:
    pool = _within(report, "the constructor", make, limit)
    if pool is None:
        return
    specs = [("value", i, None) for i in range(40)]
    expected = list(range(40))
    for verb in ("map", "imap"):
        got = _within(report, verb, functools.partial(_drawn, getattr(pool, verb), specs))
        if got is not None and got != expected:
            report.say(f"{verb} of {expected} gave {got}")
    if report.wrong:
        pool.terminate()
        return
    # The engine's thread maintains workers at intervals, and a fast pool may end before the first.
    with contextlib.suppress(AssertionError):  # `check_hooks` reports it
        eventually(lambda: "maintain_pool" in report.called, "maintain_pool() is called", limit)
    error = pool.apply_async(perform, (("error", 7, None),))
    raised = _within(report, "get() of a task that raises", lambda: _error(error, limit), limit)
    if raised is not None and not (isinstance(raised, TaskError) and raised.args == (7,)):
        report.say(f"a task that raised TaskError(7) is answered with {raised!r}")
    what = "imap of a value and an error"
    ended = _within(report, what, functools.partial(_drawn_to_error, pool.imap), limit)
    if ended is None:  # the error belongs to no task of the job, and the pool may hang
        pool.terminate()
        _within(report, "join() after terminate()", pool.join, limit)
        return
    if repr(ended) != "[0, TaskError(7)]":
        report.say(f"{what} gave {ended}")
    waiting = [pool.apply_async(perform, (spec,)) for spec in specs]
    pool.close()
    _within(report, "join() after close()", pool.join, limit)
    for result, number in zip(waiting, expected):
        if not result.ready():
            report.say("close() and join() left tasks unanswered that had been submitted")
            break
        if result.get() != number:
            report.say(f"a task gave {result.get()!r}, not {number}")


def _use_short_lives(make: Callable[..., Any], report: _Report, limit: float) -> None:
    pool = _within(report, "the constructor", lambda: make(maxtasksperchild=1), limit)
    if pool is None:
        return
    specs = [("value", i, None) for i in range(6)]
    got = _within(report, "map with maxtasksperchild=1", lambda: pool.map(perform, specs, 1), limit)
    if got is not None and got != list(range(6)):
        report.say(f"with maxtasksperchild=1, map gave {got}")
    pool.terminate()
    _within(report, "join() after terminate()", pool.join, limit)


def _use_terminate(make: Callable[..., Any], report: _Report, limit: float) -> None:
    pool = _within(report, "the constructor", make, limit)
    if pool is None:
        return
    results = [pool.apply_async(perform, (("value", i, None),)) for i in range(20)]
    _within(report, "terminate()", pool.terminate, limit)
    _within(report, "terminate() again", pool.terminate, limit)
    _within(report, "join() after terminate()", pool.join, limit)
    if not all(result.ready() for result in results):
        report.say("terminate() left results that will never come")
    _within(report, "terminate_workers() once more", pool.terminate_workers, limit)


def _drawn(verb: Callable[..., Any], specs: list[Any]) -> list[Any]:
    return list(verb(perform, specs))


def _drawn_to_error(verb: Callable[..., Any]) -> list[Any]:
    """Return the results of two tasks; the second task raises an error, which takes its place."""
    got: list[Any] = []
    try:
        got.extend(verb(perform, [("value", 0, None), ("error", 7, None)]))
    except TaskError as exc:
        got.append(exc)
    return got


def _error(result: Any, limit: float) -> BaseException:
    try:
        result.get(limit)
    except BaseException as exc:
        return exc
    return AssertionError("no error")


def check_channel(make: Callable[[], Any], *, limit: float = LIMIT) -> None:
    """Check a queue with the methods ``put(obj)``, ``get(timeout)`` and, optionally, ``close()``.

    `get` must return equal objects in the order of `put`, each once, for objects of any size and
    any number of threads.  It must raise `queue.Empty` after its timeout in seconds.

    Args:
        make: makes the queue.
        limit: seconds after which an operation counts as hanging.

    Raises:
        AssertionError: the queue differs from this description.  The text lists how.
    """
    report = _Report()
    before = Snapshot.take()
    _use_channel(make(), report, limit)
    if not report.wrong:
        report.wrong += [f"left over: {what}" for what in before.leaks(5.0)]
    if report.wrong:
        raise AssertionError("the channel does not conform:\n  " + "\n  ".join(report.wrong))


def _use_channel(channel: Any, report: _Report, limit: float) -> None:
    objects = [None, 0, "text", (1, [2, {"three": 4}]), b"x" * 1_000_000, list(range(1000)), None]
    _within(report, "put() and get()", lambda: _one_by_one(channel, objects, report), limit)
    if not report.wrong:
        _within(report, "get(0.05)", lambda: _empty(channel, report), limit)
    if not report.wrong:
        _within(report, "many threads", lambda: _many(channel, report, limit), 2 * limit)
    if not report.wrong and hasattr(channel, "close"):
        _within(report, "close()", channel.close, limit)


def _one_by_one(channel: Any, objects: list[Any], report: _Report) -> None:
    def put_all() -> None:
        for obj in objects:
            channel.put(obj)

    # Another thread puts the objects, because the large one may not fit before the first `get`.
    putter = threading.Thread(target=put_all, daemon=True)
    putter.start()
    got = [channel.get(LIMIT) for _ in objects]
    putter.join()
    if got != objects:
        report.say(f"what was put in order came as {got!r:.200}")


def _empty(channel: Any, report: _Report) -> None:
    start = time.monotonic()
    try:
        value = channel.get(0.05)
    except queue.Empty:
        took = time.monotonic() - start
        if not 0.04 <= took <= 0.05 + QUICK:
            report.say(f"get(0.05) raised queue.Empty after {took:.3f} s")
        return
    report.say(f"get(0.05) of an empty channel returned {value!r:.80}")


def _many(channel: Any, report: _Report, limit: float) -> None:
    threads, each = 4, 50
    got: list[tuple[int, int]] = []

    def put(i: int) -> None:
        for k in range(each):
            channel.put((i, k))

    def get() -> None:
        try:
            while True:
                got.append(channel.get(2 * TURN))
        except queue.Empty:
            return

    work = [threading.Thread(target=put, args=(i,), daemon=True) for i in range(threads)]
    work += [threading.Thread(target=get, daemon=True) for _ in range(threads)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(limit)
    # On a slow machine, the threads that get may have timed out before the last `put`.
    while len(got) < threads * each:
        try:
            got.append(channel.get(2 * TURN))
        except queue.Empty:
            break
    if sorted(got) != [(i, k) for i in range(threads) for k in range(each)]:
        report.say(
            f"of {threads * each} objects that {threads} threads put, {len(got)} came, "
            f"{len(set(got))} of them different"
        )
