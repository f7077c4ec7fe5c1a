"""Observing a pool while it works: `report`, `stacks`, `trace` and `watch`."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import importlib.resources
import io
import itertools
import json
import os
import pickle
import reprlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpool._engine.ledger import EngineReport
from xpool._engine.ledger import WorkerReport as WorkerReport
from xpool._engine.stacks import WorkerStack as WorkerStack
from xpool._python.interrupt import shielded
from xpool._worker.callables import OF_MAPS
from xpool.errors import OptionError

if TYPE_CHECKING:
    from xpool._engine.ledger import Event, Slow


@dataclasses.dataclass(frozen=True)
class SlowTask:
    """One of the slowest tasks; a chunk of `map` is a task."""

    seconds: float
    task: str
    item: str
    worker: int


@dataclasses.dataclass(frozen=True)
class Report:
    """The work of a pool so far; `str` of it is a table.

    ``bytes_to_workers`` and ``bytes_from_workers`` count bytes in pipes, and not large values,
    which lie in shared memory.  A running task counts when it is answered.  ``dropped_records``:
    log records and warnings of workers that did not reach the program.  ``peaks``: by the name of a
    function, the most bytes of private memory that a worker had while it ran the function, as
    measured five times a second.  Only with ``worker_memory=``, or after a death for lack of
    memory.
    """

    pool: str
    seconds: float
    submitted: int
    succeeded: int
    failed: int
    retries: int
    deaths: int
    dropped_records: int
    bytes_to_workers: int
    bytes_from_workers: int
    workers: tuple[WorkerReport, ...]
    slowest: tuple[SlowTask, ...]
    peaks: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        counts = (
            f"{self.pool}: {self.seconds:.1f} s, {self.succeeded} of {self.submitted} tasks "
            f"succeeded, {self.failed} failed, {self.retries} retries, {self.deaths} deaths, "
            f"{_size(self.bytes_to_workers)} out, {_size(self.bytes_from_workers)} back"
            + (f", {self.dropped_records} log records dropped" if self.dropped_records else "")
        )
        lines = [counts, "worker      pid      tasks     busy s    waits s   used  deaths"]
        lines += [
            f"{w.index:6} {w.pid or '-':>8} {w.tasks:10} {w.busy_seconds:10.2f} "
            f"{w.waiting_seconds:10.2f} {w.utilisation:6.0%} {w.deaths:7}"
            for w in self.workers
        ]
        lines += [
            f"{s.seconds:8.3f} s  worker {s.worker}  {s.task}{s.item and ': '}{s.item}"
            for s in self.slowest
        ]
        lines += [f"{_size(most)} of memory at most in {name}" for name, most in self.peaks.items()]
        return "\n".join(lines)


class Stacks(tuple[WorkerStack, ...]):
    """Where the workers of a pool are; `str` of it is a text with the stacks."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def stacks_of(pool: Any) -> Stacks:
    backend: Any = getattr(pool, "_backend", None)
    if not hasattr(backend, "stacks"):
        if pool._life.failure is not None:  # in a child that was forked, a pool has no workers
            pool._life.check_running()
        raise OptionError(
            f"stacks() is not for {type(pool).__name__}, whose workers xpool does not start"
        )
    return Stacks(backend.stacks())


def report_of(pool: Any) -> Report:
    """Return the report of a pool; workers are listed if the pool has an engine."""
    counts = pool.statistics()
    engine = getattr(pool, "_engine", None)
    found = engine.report() if engine else EngineReport()
    return Report(
        pool=pool.name,
        seconds=time.monotonic() - pool._life.started,
        submitted=counts["submitted"],
        succeeded=counts["succeeded"],
        failed=counts["failed"],
        retries=found.retries,
        deaths=sum(one.deaths for one in found.workers),
        dropped_records=sum(one.dropped_records for one in found.workers),
        bytes_to_workers=found.bytes_to_workers,
        bytes_from_workers=found.bytes_from_workers,
        workers=tuple(found.workers),
        slowest=tuple(
            SlowTask(slow.nanos * 1e-9, slow.task, _sketch(slow), slow.worker)
            for slow in found.slowest
        ),
        peaks=dict(sorted(found.peaks.items(), key=lambda one: one[1], reverse=True)),
    )


@contextlib.contextmanager
def trace(pool: Any, path: str | os.PathLike[str]) -> Iterator[None]:
    """Trace a pool in the ``with`` block, and write Chrome trace events, or a page of HTML."""
    engine = getattr(pool, "_engine", None)
    if engine is None:
        raise OptionError(f"trace() is for pools of processes, not {type(pool).__name__}")
    if not hasattr(engine, "begin_trace"):
        raise OptionError("trace() is not for pools over hosts, whose clocks differ; use report()")
    as_page = Path(path).suffix.lower() in (".html", ".htm")
    Path(path).write_text("" if as_page else "[]", encoding="utf-8")  # fails now, not at the end
    shielded(engine.begin_trace)()
    try:
        yield
    finally:
        events, begun, dropped = shielded(engine.end_trace)()
        rows = _rows(pool.name, pool.size(), events, begun)
        if as_page:
            text = page(f"Pool {pool.name}", rows, dropped)
        else:
            other = {"events that had no room": dropped}
            found = {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": other}
            text = json.dumps(found)
        Path(path).write_text(text, encoding="utf-8")


def _rows(name: str, workers: int, events: list[Event], begun: float) -> list[dict[str, Any]]:
    pid = os.getpid()
    # Chrome's trace event format: "M" names a row, "X" is a span, and "i" a moment of one row ("t")
    # or of all rows ("g").  Times are in microseconds.
    rows: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    ]
    rows += [
        {"ph": "M", "pid": pid, "tid": i, "name": "thread_name", "args": {"name": f"worker {i}"}}
        for i in range(workers)
    ]
    for event in events:
        row: dict[str, Any] = {
            "name": event.what if event.tasks <= 1 else f"{event.what} and {event.tasks - 1} more",
            "pid": pid,
            "tid": 0 if event.worker is None else event.worker,
            "ts": (event.when - begun) * 1e6,
        }
        if event.seconds is None:
            row |= {"ph": "i", "s": "g" if event.worker is None else "t"}
        else:
            row |= {"ph": "X", "dur": event.seconds * 1e6, "args": {"tasks": event.tasks}}
        rows.append(row)
    return rows


@contextlib.contextmanager
def watch(pool: Any) -> Iterator[None]:
    """Show the report on the terminal four times a second, during the ``with`` block."""
    try:
        from rich import live, text
    except ImportError as exc:
        raise ImportError("watch() needs rich: pip install 'xpool[progress]'") from exc

    def table() -> Any:
        return text.Text(str(shielded(report_of)(pool)), no_wrap=True)

    with live.Live(get_renderable=table, refresh_per_second=4):
        yield


def _size(n: float) -> str:
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


def _sketch(slow: Slow) -> str:
    """Return a short text for a slow task's item without running the user's code."""
    if slow.item is None:
        return ""
    try:
        buffers = itertools.repeat(b"")  # the buffers were not kept
        value = _Sketcher(io.BytesIO(slow.item), buffers=buffers).load()
        if slow.is_call:
            func, args, kwds = value
            if func in OF_MAPS:  # the only task of its map
                value = args[1]
            elif args or kwds:
                value = (args, kwds) if args and kwds else args or kwds
            else:
                return ""
        return _short.repr(value)
    except Exception:
        return ""  # the item cannot be shown without its classes


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60

_NAMES_OF_MAPS = frozenset(one.__name__ for one in OF_MAPS)

_PLAIN = {"set", "frozenset", "slice", "range", "complex", "bytearray"}


class _Sketcher(pickle.Unpickler):
    """Unpickles plain values; other objects become stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        # `pickle` keeps what it finds for a number of `copyreg`, so it must be the function itself.
        own = module.startswith("xpool.") and name.startswith("extension")
        own = own or (module == OF_MAPS[0].__module__ and name in _NAMES_OF_MAPS)
        if own or (module == "builtins" and name in _PLAIN):
            return super().find_class(module, name)
        return _StandIn(name, (), {})


class _StandIn(type):
    """A class in place of one that is not imported; its instances accept any state."""

    def __new__(cls, name: str, bases: Any, space: Any) -> Any:
        def ignore(self: Any, *args: Any, **kwds: Any) -> None:
            pass

        space = {
            "__init__": ignore, "__setstate__": ignore, "append": ignore, "extend": ignore,
            "__setitem__": ignore, "add": ignore, "update": ignore,
            "__new__": lambda kind, *args, **kwds: object.__new__(kind),
            "__repr__": lambda self: f"<{name}>",
        }  # fmt: skip
        return super().__new__(cls, name, bases, space)

    def __repr__(cls) -> str:
        return cls.__name__


def page(title: str, events: Sequence[dict[str, Any]], dropped: int) -> str:
    """Return the page of events in Chrome's format; ``dropped``: how many more there were."""
    spans = [e for e in events if e["ph"] == "X"]
    end = max((e["ts"] + e.get("dur", 0.0) for e in events if "ts" in e), default=0.0)
    tasks = sum(e["args"]["tasks"] for e in spans)
    facts = f"{end * 1e-6:.2f} s, {tasks} tasks"
    if dropped:
        facts += f"; {dropped} events had no room"
    data = {
        "end": max(end, 1.0),
        "rows": [e["args"]["name"] for e in events if e.get("name") == "thread_name"],
        "spans": [[e["tid"], e["ts"], e["dur"], e["name"], e["args"]["tasks"]] for e in spans],
        "moments": [
            [e["tid"] if e["s"] == "t" else -1, e["ts"], e["name"]]
            for e in events
            if e["ph"] == "i"
        ],
    }
    # Escape it, since "</script>" in the name of a task would end the data.
    text = json.dumps(data).replace("<", "\\u003c")
    template = importlib.resources.files(__package__).joinpath("timeline.html")
    return (
        template.read_text(encoding="utf-8")
        .replace("@TITLE@", html.escape(title))
        .replace("@FACTS@", html.escape(facts))
        .replace("@DATA@", text)
    )
