"""`report`, `trace` and `watch`."""

import functools
import io
import json
import os
import re
import sys
import types

import pytest
from support import work

from xpool import OptionError, Pool, ThreadPool
from xpool._pools.observing import trace


def _spin(x):
    total = 0
    for i in range(x):
        total += i
    return total


def _die_once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(3)


LONG = 300_000  # iterations of a loop: some milliseconds


def test_report_of_work(tmp_path):
    """The report has each worker's tasks and times, bytes, deaths, retries and slow tasks."""
    with Pool(2) as pool:
        pool.map(_spin, [1000] * 40 + [LONG], 1)
        pool.apply(_die_once, (str(tmp_path / "flag"),), retries=1)
        report = pool.report()
    assert (report.submitted, report.succeeded, report.failed) == (42, 42, 0)
    assert (report.deaths, report.retries) == (1, 1)
    assert sum(w.tasks for w in report.workers) == 42
    assert sum(w.busy_seconds for w in report.workers) > 0
    assert all(0 <= w.utilisation <= 1 for w in report.workers)
    assert report.bytes_to_workers > 41 * 5
    assert report.bytes_from_workers > 41 * 5
    assert ("item 40 of _spin()", str(LONG)) in {(s.task, s.item) for s in report.slowest}
    assert f"item 40 of _spin(): {LONG}" in str(report)


def test_the_arguments_of_a_single_task_are_shown():
    """A call, and the only task of a map, are sent with their function, which is not shown."""
    n = LONG
    with Pool(1) as pool:
        pool.map(_spin, [n])
        pool.starmap(_spin, [(n + 1,)])
        pool.apply(_spin, (n + 2,))
        pool.apply(_spin, kwds={"x": n + 3})
        pool.map(_spin, [n + 4, n + 5], 2)
        shown = {(slow.task, slow.item) for slow in pool.report().slowest}
    assert shown == {
        ("item 0 of _spin()", str(n)),
        ("item 0 of _spin()", f"({n + 1},)"),
        ("_spin()", f"({n + 2},)"),
        ("_spin()", f"{{'x': {n + 3}}}"),
        ("chunk 0 of _spin()", f"[{n + 4}, {n + 5}]"),
    }


def test_a_report_while_it_works(gate):
    """A busy pool can be asked for its report."""
    with Pool(1) as pool:
        result = pool.apply_async(work.gated, (gate.path,))
        assert pool.report().succeeded == 0
        gate.open()
        result.get()
        assert pool.report().succeeded == 1


class Loud:
    """Must not be unpickled for a report."""

    def __init__(self):
        self.parent = os.getpid()

    def __setstate__(self, state):
        assert os.getpid() != state["parent"], "its code ran in the parent"

    def __repr__(self):
        raise AssertionError("its code ran")


def test_items_are_shown_without_their_code():
    """An item of a user's class is shown by its class name. Long items are shortened."""
    with Pool(1) as pool:
        pool.map(_spin_loud, [(LONG, Loud(), "x" * 1000)], 1)
        (slowest, *_) = pool.report().slowest
    assert "<Loud>" in slowest.item
    assert len(slowest.item) < 200


@pytest.mark.parametrize("size", [10_000, 100_000])
def test_an_item_is_shown_without_the_state_that_its_message_brings(monkeypatch, size):
    """A long variable of the environment comes with the item, in its message or in a block."""
    with Pool(1) as pool:
        pool.apply(_spin, (1,))
        monkeypatch.setenv("XPOOL_TEST_LONG", "x" * size)
        pool.apply(_spin_loud, ((LONG, "first"),))
        pool.map(_spin_loud, [(LONG, Loud(), "second"), (LONG, "third")], 1)
        shown = [slow.item for slow in pool.report().slowest]
    for name in ("first", "second", "third"):
        assert any(name in item for item in shown)


def _spin_loud(item):
    return _spin(item[0])


def test_a_pool_of_threads_has_counts():
    """A `ThreadPool` reports tasks but no workers, and has no trace."""
    with ThreadPool(2) as pool:
        pool.map(work.square, range(5), 1)
        report = pool.report()
        with pytest.raises(OptionError, match="ThreadPool"):
            with pool.trace("nowhere.json"):
                pass
    assert (report.succeeded, report.workers) == (5, ())


def test_trace(tmp_path):
    """A trace has a row for each worker, spans of tasks, and moments of deaths and retries."""
    path = tmp_path / "run.json"
    with Pool(2) as pool:
        pool.map(_spin, [LONG], 1)
        with pool.trace(path):
            pool.map(_spin, [LONG] * 4, 1)
            pool.apply(_die_once, (str(tmp_path / "flag"),), retries=1)
            pool.map(_spin, range(300), 1)
        pool.map(_spin, [LONG], 1)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {"worker 0", "worker 1"}
    spans = [e for e in events if e["ph"] == "X"]
    assert sum(e["args"]["tasks"] for e in spans) == 305
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["tid"] in (0, 1) for e in spans)
    assert {e["name"] for e in spans} >= {f"item {i} of _spin()" for i in range(1)}
    moments = [e["name"] for e in events if e["ph"] == "i"]
    assert any("exit code 3" in name for name in moments)
    assert any("_die_once() again" in name for name in moments)


def test_a_trace_as_a_page(tmp_path):
    """If the name ends in .html, the trace is a page that loads no other files."""
    path = tmp_path / "run.html"
    with Pool(2) as pool, pool.trace(path):
        pool.map(work.square, range(4), 1)
        pool.apply(_named("</script>"), (1,))
    text = path.read_text()
    assert "://" not in text
    assert text.count("</script>") == 2  # those of the page itself
    found = re.search(r'application/json">(.*)</script>', text)
    data = json.loads(found[1])
    assert data["rows"] == ["worker 0", "worker 1"]
    assert sum(tasks for *_, tasks in data["spans"]) == 5
    assert any("</script>" in name for _, _, _, name, _ in data["spans"])
    assert all(
        0 <= start <= start + length <= data["end"] for _, start, length, *_ in data["spans"]
    )


def _named(name):
    func = functools.partial(abs)

    def call(x):
        return func(x)

    call.__name__ = call.__qualname__ = name
    return call


def test_a_trace_over_hosts_leaves_no_file(tmp_path):
    """If the engine cannot trace, no file is written."""
    pool = types.SimpleNamespace(_engine=object(), name="p")
    with pytest.raises(OptionError, match="clocks differ"), trace(pool, tmp_path / "run.json"):
        pass
    assert not (tmp_path / "run.json").exists()


def test_one_trace_at_a_time(tmp_path):
    """A second trace at the same time is refused. So is a path in a missing folder."""
    with Pool(1) as pool:
        with pool.trace(tmp_path / "a.json"):
            with pytest.raises(OptionError, match="already"):
                with pool.trace(tmp_path / "b.json"):
                    pass
            pool.map(_spin, [LONG], 1)
        with pool.trace(tmp_path / "b.json"):
            pass
        with pytest.raises(OSError, match="nowhere"):
            with pool.trace(tmp_path / "nowhere" / "c.json"):
                pass
    spans = [e for e in json.loads((tmp_path / "a.json").read_text())["traceEvents"] if "dur" in e]
    assert len(spans) == 1


def test_watch(monkeypatch):
    """`watch` shows the report, and leaves its last state on the screen."""
    pytest.importorskip("rich")
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with Pool(1) as pool, pool.watch():
        pool.map(work.square, range(4), 1)
    assert "4 of 4 tasks" in out.getvalue()
