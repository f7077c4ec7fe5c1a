"""What workers log, warn of and print."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import warnings
from pathlib import Path

import pytest
from support.tiers import also
from support.waiting import eventually

from xpool import OptionError, Pool, current_worker

ROOT = Path(__file__).resolve().parents[2]


class Keeping(logging.Handler):
    """Keeps records."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def kept():
    """What arrives at the logger "tasks", of level INFO and above."""
    logger = logging.getLogger("tasks")
    handler = Keeping()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.records
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def _run(func, *items, **options):
    with Pool(2, **options) as pool:  # at its end, all that was logged is handled
        return pool.map(func, items, 1)


def _log(x):
    logger = logging.getLogger("tasks")
    logger.debug("nothing %s", x)
    logger.info("item %s", x, extra={"odd": {x}, "lock": threading.Lock()})
    return current_worker().index


def test_records_arrive(kept):
    """Records come to the parent's loggers with level, text, worker and extras."""
    workers = _run(_log, 1, 2, 3)
    assert sorted(r.getMessage() for r in kept) == ["item 1", "item 2", "item 3"]
    assert {r.levelno for r in kept} == {logging.INFO}
    by_item = {r.getMessage(): r.xpool_worker for r in kept}
    assert [by_item[f"item {i}"] for i in (1, 2, 3)] == workers
    assert {r.process for r in kept}.isdisjoint({os.getpid()})
    assert sorted(max(r.odd) for r in kept) == [1, 2, 3]
    assert all("lock" in r.lock for r in kept)


def _log_from_thread(x):
    thread = threading.Thread(target=_log_error)
    thread.start()
    thread.join()


def _log_error():
    try:
        raise KeyError("here")
    except KeyError:
        logging.getLogger("tasks.inner").exception("it failed")


def test_from_threads_and_with_tracebacks(kept):
    """A thread of a task logs as well; a traceback arrives as text."""
    _run(_log_from_thread, 1)
    (record,) = kept
    assert "KeyError: 'here'" in record.exc_text
    assert "_log_error" in record.exc_text


def _level(_):
    return logging.getLogger("tasks").getEffectiveLevel(), logging.getLogger("tasks").isEnabledFor(
        30
    )


def test_levels_are_the_parents(kept):
    """What the parent would not show is not sent: loggers in workers have the parent's levels."""
    assert _run(_level, 1) == [(logging.INFO, True)]
    logging.disable(logging.ERROR)
    try:
        assert _run(_level, 1) == [(logging.INFO, False)]
    finally:
        logging.disable(logging.NOTSET)


def _configure(path):
    logging.getLogger("tasks").addHandler(logging.FileHandler(path))


def test_a_worker_that_handles_its_records_keeps_them(kept, tmp_path):
    """Nothing comes twice: what a handler in the worker takes is not sent."""
    path = tmp_path / "log"
    with Pool(1, _configure, (str(path),)) as pool:
        pool.map(_log, [1])
    assert path.read_text() == "item 1\n"
    assert kept == []


def _log_many(n):
    for _ in range(n):
        logging.getLogger("tasks").info("one of many")


def test_drops_are_counted(kept, monkeypatch, caplog):
    """When the parent does not keep up, a worker goes on, and says later how many are missing."""
    opened = threading.Event()
    (handler,) = logging.getLogger("tasks").handlers
    monkeypatch.setattr(handler, "emit", lambda record: (opened.wait(), kept.append(record)))
    with Pool(1) as pool:
        pool.map(_log_many, [3000])
        opened.set()
        # There is room again when the first of them are handled.
        eventually(lambda: len(kept) > 100, "records are handled")
        pool.map(_log, [1])
    dropped = [r for r in caplog.records if r.name == "xpool"]
    assert sum(r.args[1] for r in dropped) + len(kept) == 3001
    assert dropped


def _warn(_):
    for _ in range(2):
        warnings.warn("take care", stacklevel=1)


def test_warnings_come_once_for_each_place():
    """A warning of many tasks in many workers is shown in the parent, once."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _run(_warn, *range(6))
    (warning,) = seen
    assert str(warning.message) == "take care"
    assert warning.category is UserWarning
    assert warning.filename == __file__


def test_a_filter_that_raises_ends_nothing():
    """Where the parent's filters make errors of warnings, it is shown; nobody could catch it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("error")
        _run(_warn, 1)
    assert [str(one.message) for one in seen] == ["take care"]


def _print(x):
    print("one", x)
    print("two", end=" ", flush=True)
    print("three\nfour", file=sys.stdout)
    print("five", file=sys.stderr)
    os.write(1, b"raw\n")


def test_prefix(capfd):
    """``output="prefix"`` names the worker before each line that a task prints."""
    with Pool(1, output="prefix") as pool:
        pool.map(_print, [7])
    out, err = capfd.readouterr()
    assert out.replace("raw\n", "") == ("[worker 0] one 7\n[worker 0] two three\n[worker 0] four\n")
    assert err == "[worker 0] five\n"


def test_output_is_checked():
    """`output` is "prefix" or None."""
    with pytest.raises(OptionError, match="output"):
        Pool(1, output="quiet")


def test_logging_is_not_imported_for_it():
    """A program without logging starts no logging, no thread, and imports neither in workers."""
    code = """
import sys, threading
from xpool import Pool
def modules(_):
    import sys
    return "logging" in sys.modules
if __name__ == "__main__":
    with Pool(1) as pool:
        pool.map(abs, [1])
        assert not any("logs" in t.name for t in threading.enumerate())
    assert "logging" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.parametrize(
    "call",
    [
        "pool.map(f, range(3), 1, progress='bar')",
        "pool.map(f, range(3), 3, progress='bar')",
        *also(
            "list(pool.imap(f, range(3), progress='bar'))",
            "pool.starmap(f, [(0,), (1,), (2,)], 3, progress='bar')",
        ),
    ],
)
def test_lines_of_workers_do_not_run_into_a_bar(tmp_path, call):
    """On a terminal, a line that a task prints stands by itself, and the bar goes on below."""
    pytest.importorskip("tqdm")
    script = tmp_path / "script.py"
    script.write_text(
        "from xpool import Pool\n"
        "def f(x):\n"
        "    print('line', x)\n"
        "if __name__ == '__main__':\n"
        "    with Pool(1) as pool:\n"
        f"        {call}\n"
    )
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=slave, stdout=slave, stderr=slave,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        os.close(slave)
        seen = b""
        while True:
            try:
                some = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            seen += some
    os.close(master)
    assert process.returncode == 0
    for x in range(3):
        assert re.search(rb"\r\x1b\[Kline %d\r\n" % x, seen), seen
    assert b"3/3" in seen
