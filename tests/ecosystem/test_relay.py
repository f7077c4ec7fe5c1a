"""Log records, warnings and output of workers."""

from __future__ import annotations

import enum
import logging
import logging.handlers
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from support import scripts
from support.limits import WAIT
from support.tiers import also
from support.waiting import eventually

from xpool import Pool, WorkerDied, current_worker
from xpool._engine import relay

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
    """The records of the logger "tasks" from level INFO."""
    logger = logging.getLogger("tasks")
    handler = Keeping()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.records
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def _run(func, *items, **options):
    with Pool(2, **options) as pool:  # its end waits for all records
        return pool.map(func, items, 1)


def _log(x):
    logger = logging.getLogger("tasks")
    logger.debug("nothing %s", x)
    logger.info("item %s", x, extra={"odd": {x}, "lock": threading.Lock()})
    return current_worker().index


@pytest.mark.parametrize("context", [None, "fork", *also("spawn")])
def test_records_arrive(kept, context):
    """Records reach the program's loggers with level, text, worker and extras."""
    workers = _run(_log, 1, 2, 3, context=context)
    assert sorted(r.getMessage() for r in kept) == ["item 1", "item 2", "item 3"]
    assert {r.levelno for r in kept} == {logging.INFO}
    by_item = {r.getMessage(): r.xpool_worker for r in kept}
    assert [by_item[f"item {i}"] for i in (1, 2, 3)] == workers
    assert {r.process for r in kept}.isdisjoint({os.getpid()})
    assert sorted(max(r.odd) for r in kept) == [1, 2, 3]
    assert all("lock" in r.lock for r in kept)


def _log_events(x):
    logger = logging.getLogger("tasks")
    logger.info({"event": "done", "n": x, "path": Path("/x"), 3: [b"y"]})
    logger.info({"%d": 1}, x)
    logger.info(["no", "dict"])
    logger.info(dict.fromkeys(range(2000)))


def test_events_arrive(kept):
    """A message that is a dict arrives as one, with texts for values that are no plain data."""
    _run(_log_events, 5)
    event, filled, text, large = kept
    assert event.msg == {"event": "done", "n": 5, "path": "PosixPath('/x')", 3: [b"y"]}
    assert (filled.msg, text.msg) == ("{'5': 1}", "['no', 'dict']")
    assert event.args == filled.args == text.args == ()
    assert large.msg.startswith("{0: None, 1: None")


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
    """A thread of a task can log. A traceback arrives as text."""
    _run(_log_from_thread, 1)
    (record,) = kept
    assert "KeyError: 'here'" in record.exc_text
    assert "_log_error" in record.exc_text


def _level(_):
    return logging.getLogger("tasks").getEffectiveLevel(), logging.getLogger("tasks").isEnabledFor(
        30
    )


def test_levels_are_the_parents(kept):
    """Loggers in workers have the program's levels, so that no unneeded record is sent."""
    assert _run(_level, 1) == [(logging.INFO, True)]
    logging.disable(logging.ERROR)
    try:
        assert _run(_level, 1) == [(logging.INFO, False)]
    finally:
        logging.disable(logging.NOTSET)


def _configure(path):
    logging.getLogger("tasks").addHandler(logging.FileHandler(path))


def _configure_all(path):
    logging.basicConfig(filename=path, format="%(message)s", level=logging.INFO)


@pytest.mark.parametrize("configure", [_configure, _configure_all])
def test_a_worker_that_handles_its_records_keeps_them(kept, tmp_path, configure):
    """A record that a handler in the worker takes is not sent. `logging.basicConfig` in a worker
    installs one."""
    path = tmp_path / "log"
    with Pool(1, configure, (str(path),)) as pool:
        pool.map(_log, [1])
    assert path.read_text() == "item 1\n"
    assert kept == []


def _log_by_a_library(x):
    logger = logging.getLogger("tasks.library")
    logger.addHandler(logging.NullHandler())
    logger.warning("item %s", x)


@pytest.mark.parametrize("context", [None, *also("fork", "spawn")])
def test_functions_of_the_module_logging(capfd, context):
    """In a worker, functions of the module `logging` add no handler to the root logger. Their
    records go to the program."""
    handler, root = Keeping(), logging.getLogger()
    root.addHandler(handler)
    try:
        assert _run(log_by_the_module, 1, 2, context=context) == [None, None]
    finally:
        root.removeHandler(handler)
    said = sorted(record.getMessage() for record in handler.records)
    assert said == ["1", "1 again", "2", "2 again"]
    assert capfd.readouterr().err == ""


def log_by_the_module(x: int) -> None:
    logging.warning("%d", x)  # noqa: LOG015
    logging.error("%d again", x)  # noqa: LOG015


def test_a_null_handler_takes_nothing(kept):
    """A library's `NullHandler` does not keep its records from the program."""
    _run(_log_by_a_library, 1)
    assert [r.getMessage() for r in kept] == ["item 1"]


def test_forks_do_not_write_what_the_program_has_buffered(tmp_path):
    """Forked workers do not write records that the program has buffered."""
    path = tmp_path / "log"
    target = logging.FileHandler(path)
    handler = logging.handlers.MemoryHandler(100, target=target)
    logger = logging.getLogger("tasks")
    logger.addHandler(handler)
    try:
        logger.warning("buffered")
        with Pool(2, context="fork") as pool:
            pool.map(abs, range(4), 1)
            pool.close()
            pool.join()
        assert path.read_text() == ""
        handler.flush()
        assert path.read_text() == "buffered\n"
    finally:
        logger.removeHandler(handler)
        handler.close()
        target.close()


def _log_long(_):
    logger = logging.getLogger("tasks")
    try:
        raise ValueError("begin" + "x" * 300_000 + "end")
    except ValueError:
        logger.exception("too long to send")
    logger.info("extra", extra={"long": list(range(100_000)), "short": (1, b"two", {"three": 3})})
    logger.info("many", extra={f"field_{i}": "\N{SNOWMAN}" * 100 for i in range(3000)})
    logger.info("text " + "y" * 10**6)
    odd = {"number": 10**5000, "level": Level.HIGH, "surrogate": "\udcff"}
    logger.info("odd", extra={**odd, "bad": Bad(), "path": Path("/x"), "nan": -0.0})


class Level(enum.IntEnum):
    """A number with a class of its own."""

    HIGH = 3


def test_long_records_are_cut(kept):
    """A record of any size arrives. Long texts are cut, and omitted fields are named. Extras arrive
    as plain data or as their repr, so no object of a user's class is made."""
    _run(_log_long, 1)
    failed, extra, many, text, odd = kept
    assert "_log_long" in failed.exc_text
    assert "xpool cut 2" in failed.exc_text
    assert "ValueError: begin" in failed.exc_text
    assert failed.exc_text.endswith("end")
    assert extra.long.startswith("[0, 1, 2")
    assert "xpool cut" in extra.long
    assert extra.short == (1, b"two", {"three": 3})
    assert many.getMessage() == "many [xpool left out 3000 extra fields: they are too large]"
    assert "xpool cut" in text.getMessage()
    assert odd.surrogate == "\udcff"
    assert (odd.level, type(odd.level)) == (3, int)
    assert "ValueError" in odd.number
    assert odd.bad == "<Bad, whose repr raised RuntimeError>"
    assert odd.path == "PosixPath('/x')"
    assert str(odd.nan) == "-0.0"


class Bad:
    """Its repr raises."""

    def __repr__(self):
        raise RuntimeError


class Slow(Keeping):
    """Takes 0.1 s for each record."""

    def emit(self, record):
        time.sleep(0.1)
        super().emit(record)


@pytest.fixture
def slow():
    """The records that a slow handler of the logger "tasks" has taken."""
    logger = logging.getLogger("tasks")
    handler = Slow()
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)


def _log_some(n):
    for i in range(n):
        logging.getLogger("tasks").warning("item %d", i)


def test_the_end_waits_for_slow_handlers(slow, monkeypatch):
    """The pool's end waits for slow handlers, so all records are handled."""
    monkeypatch.setattr(relay, "STUCK", 1.0)
    _run(_log_some, 15)
    assert [r.getMessage() for r in slow] == [f"item {i}" for i in range(15)]


def test_a_handler_that_hangs(kept, monkeypatch, capsys):
    """The pool's end waits only a limited time for one record. Then it prints a message."""
    opened = threading.Event()
    (handler,) = logging.getLogger("tasks").handlers
    monkeypatch.setattr(handler, "emit", lambda record: (opened.wait(), kept.append(record)))
    monkeypatch.setattr(relay, "STUCK", 0.1)
    _run(_log_some, 3)
    assert "a handler of log records or warnings has not returned for" in capsys.readouterr().err
    opened.set()
    eventually(lambda: len(kept) == 3, "the other records are handled")


def _log_and_die(n):
    _log_some(n)
    os.kill(os.getpid(), signal.SIGKILL)


def test_drops_of_a_killed_worker_are_counted(kept, monkeypatch, caplog):
    """Dropped records of a killed worker are counted, even if it sends nothing after them."""
    opened = threading.Event()
    (handler,) = logging.getLogger("tasks").handlers
    monkeypatch.setattr(handler, "emit", lambda record: (opened.wait(), kept.append(record)))
    with Pool(1) as pool:
        task = pool.apply_async(_log_and_die, (3000,))
        with pytest.raises(WorkerDied):
            task.get(WAIT)
        opened.set()
        eventually(lambda: pool.report().deaths == 1, "the death is recorded")
        report = pool.report()
    (told,) = [r for r in caplog.records if r.name == "xpool"]
    assert told.args[1] + len(kept) == 3000
    assert report.dropped_records == report.workers[0].dropped_records == told.args[1]
    assert f", {told.args[1]} log records dropped\n" in str(report)


def _log_many(n):
    for _ in range(n):
        logging.getLogger("tasks").info("one of many")


def test_drops_are_counted(kept, monkeypatch, caplog):
    """If the program is too slow, a worker drops records, and later reports how many."""
    opened = threading.Event()
    (handler,) = logging.getLogger("tasks").handlers
    monkeypatch.setattr(handler, "emit", lambda record: (opened.wait(), kept.append(record)))
    with Pool(1) as pool:
        pool.map(_log_many, [3000])
        opened.set()
        # There is room again after some records have been handled.
        eventually(lambda: len(kept) > 100, "records are handled")
        pool.map(_log, [1])
        counted = pool.report().dropped_records
    dropped = [r for r in caplog.records if r.name == "xpool"]
    assert sum(r.args[1] for r in dropped) + len(kept) == 3001
    assert dropped and counted == sum(r.args[1] for r in dropped)


def _warn(_):
    for _ in range(2):
        warnings.warn("take care", stacklevel=1)


@pytest.mark.parametrize(("action", "times"), [("default", 1), ("always", 12)])
def test_warnings_come_as_often_as_the_filters_say(action, times):
    """A warning of many tasks is shown once in the program by default. Filters see its module."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.filterwarnings(action, module=__name__)
        _run(_warn, *range(6))
    assert [str(one.message) for one in seen] == ["take care"] * times
    assert {(one.category, one.filename) for one in seen} == {(UserWarning, __file__)}


def _warn_elsewhere(_):
    warnings.warn_explicit("of a library", UserWarning, "lib.py", 3)
    warnings.warn("too high", stacklevel=99)


def test_warnings_of_no_frame():
    """The program shows them by the names of their files."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", module="lib|sys")
        _run(_warn_elsewhere, 1)
    assert [str(one.message) for one in seen] == ["of a library", "too high"]


SHOWS = """
    import warnings
    import xpool

    def own(message, *_):
        print("own", message, flush=True)

    def warn(text):
        warnings.warn(text, stacklevel=1)

    def shown_by(function):
        with warnings.catch_warnings(record=True) as seen:
            original, warnings.showwarning = warnings.showwarning, function or warnings.showwarning
            pool = xpool.Pool(1)
            pool.apply(warn, ("first",))
            warnings.showwarning = original
            pool.apply(warn, ("second",))
            pool.close()
            pool.join()
        return [str(one.message) for one in seen]

    print(shown_by(None), shown_by(own))
"""


def test_a_function_of_the_program_that_shows_warnings(tmp_path):
    """It is called in the worker; without it, the program shows warnings."""
    assert scripts.program(tmp_path, SHOWS) == "own first\n['first', 'second'] ['second']\n"


class Detailed(UserWarning):
    """Has its own constructor and text."""

    def __init__(self, what, how_many):
        super().__init__(what, how_many)
        self.what, self.how_many = what, how_many

    def __str__(self):
        return f"{self.how_many} times {self.what}"


class Mixed(ValueError, RuntimeWarning):
    """Its first built-in base class is no warning."""


class Weird(UserWarning, OSError):
    """Has the memory layout of `OSError`."""


def _warn_by_classes(_):
    warnings.warn(Detailed("care", 2), stacklevel=1)
    warnings.warn(Mixed("mixed"), stacklevel=1)
    warnings.warn(Weird("weird"), stacklevel=1)
    warnings.warn(type("Local", (FutureWarning,), {})("local"), stacklevel=1)


def test_warnings_of_all_classes_arrive():
    """Warnings of any class arrive, even if the program does not know the class."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _run(_warn_by_classes, 1)
    assert [str(one.message) for one in seen] == ["2 times care", "mixed", "weird", "local"]
    assert [issubclass(one.category, kind) for one, kind in zip(
        seen, (Detailed, Mixed, Warning, FutureWarning), strict=True
    )] == [True] * 4  # fmt: skip


def test_a_filter_that_raises():
    """If the program's filters turn warnings into errors, a task's warning is an error, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="take care"):
            _run(_warn, 1)


def _print(x):
    print("one", x)
    print("two", end=" ", flush=True)
    print("three\nfour", file=sys.stdout)
    print("five", file=sys.stderr)
    os.write(1, b"raw\n")


def test_prefix(capfd):
    """``output="prefix"`` writes the worker's name before each line of a task."""
    with Pool(1, output="prefix") as pool:
        pool.map(_print, [7])
    out, err = capfd.readouterr()
    assert out.replace("raw\n", "") == ("[worker 0] one 7\n[worker 0] two three\n[worker 0] four\n")
    assert err == "[worker 0] five\n"


def _print_odd(_):
    print("a\fb\x1cc\u2028d\x85e\vf")
    print("one\rtwo\r\nthree")
    thread = threading.Thread(target=sys.stdout.write, args=("a thread's",))
    sys.stdout.write("mine")
    thread.start()
    thread.join()
    sys.stdout.write(" own\n")
    sys.stdout.flush()
    print(" rest")


def test_prefix_cuts_only_at_ends_of_lines(capfd):
    """Only ends of lines start a prefix. Lines of two threads do not mix."""
    with Pool(1, output="prefix") as pool:
        pool.map(_print_odd, [7])
    lines = capfd.readouterr().out.replace("[worker 0] ", "> ")
    assert lines == (
        "> a\fb\x1cc\u2028d\x85e\vf\n> one\r> two\r\n> three\n> mine own\n> a thread's>  rest\n"
    )


def test_logging_is_not_imported_for_it():
    """If a program does not use logging, neither it nor its workers import logging or start its
    thread."""
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
    scripts.run_ok(["-c", code])
