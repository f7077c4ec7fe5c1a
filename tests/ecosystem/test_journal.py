"""`journal=`: what was done is read, not run again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from support import work
from support.waiting import eventually

from xpool import OptionError, Pool, ThreadPool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=[Pool, ThreadPool], ids=lambda pool: pool.__name__)
def pool(request):
    """A pool of processes, and one of threads."""
    with request.param(2) as made:
        yield made


@pytest.fixture
def path(tmp_path):
    """Where a journal may be."""
    return tmp_path / "journal.db"


class Logged:
    """A function that says what it was called with; items named in a file fail."""

    def __init__(self, log):
        self.log = str(log)

    def __call__(self, x):
        with open(self.log, "a") as file:
            file.write(f"{x}\n")
        if os.path.exists(self.log + ".fail") and x == 3:
            raise ValueError(x)
        return x * x

    def calls(self):
        """Return what it was called with since the last time, sorted."""
        try:
            with open(self.log) as file:
                found = sorted(map(int, file))
        except FileNotFoundError:
            return []
        os.unlink(self.log)
        return found


@pytest.fixture
def logged(tmp_path):
    """Such a function."""
    return Logged(tmp_path / "log")


@pytest.mark.parametrize("verb", ["map", "imap", "imap_unordered"])
def test_a_second_run_reads(pool, path, logged, verb):
    """What is in the journal is not run again; what is new is."""
    run = getattr(pool, verb)
    assert sorted(run(logged, range(5), journal=path)) == [0, 1, 4, 9, 16]
    assert logged.calls() == [0, 1, 2, 3, 4]
    assert sorted(run(logged, range(7), journal=path)) == [0, 1, 4, 9, 16, 25, 36]
    assert logged.calls() == [5, 6]
    assert len(list(run(logged, iter(range(7)), 3, journal=str(path), progress=print))) == 7
    assert logged.calls() == []


def test_order_and_long_inputs(pool, path):
    """Results come in order, however many are there already."""
    assert pool.map(work.square, range(0, 3000, 2), journal=path) == [
        x * x for x in range(0, 3000, 2)
    ]
    assert list(pool.imap(work.square, range(3000), journal=path)) == [x * x for x in range(3000)]


def test_an_error_is_run_again(pool, path, logged):
    """An item that fails is raised when the others are done, and is run again the next time."""
    Path(logged.log + ".fail").touch()
    with pytest.raises(ValueError, match="3"):
        pool.map(logged, range(6), journal=path)
    assert logged.calls() == [0, 1, 2, 3, 4, 5]
    (error,) = pool.map(logged, [3], journal=path, on_error="return")
    assert isinstance(error, ValueError)
    os.unlink(logged.log + ".fail")
    logged.calls()
    assert pool.map(logged, range(6), journal=path) == [0, 1, 4, 9, 16, 25]
    assert logged.calls() == [3]


def test_keys(pool, path, logged):
    """`key` names items: one with a name that is there is not run."""
    assert pool.map(logged, [1, 2], journal=path, key=lambda x: f"item {x}") == [1, 4]
    assert pool.map(logged, [5], journal=path, key=lambda x: "item 2") == [4]
    assert logged.calls() == [1, 2]
    with pytest.raises(TypeError, match="key must return"):
        pool.map(logged, [1], journal=path, key=lambda x: 1.5)
    with pytest.raises(OptionError, match="give journal="):
        pool.map(logged, [1], key=str)


def test_another_function_is_refused(pool, path, tmp_path):
    """A journal belongs to one function; what is no journal is refused as well."""
    pool.map(work.square, [1], journal=path)
    with pytest.raises(OptionError, match=r"journal of support\.work\.square"):
        pool.map(work.same, [1], journal=path)
    (tmp_path / "text").write_text("no database\n" * 100)
    with pytest.raises(OptionError, match="is not a journal"):
        pool.map(work.square, [1], journal=tmp_path / "text")
    with pytest.raises(sqlite3.OperationalError):
        pool.map(work.square, [1], journal=tmp_path / "nowhere" / "journal")
    assert pool.map(work.square, [1], journal=path) == [1]


NAMES = """
from xpool.pool.journal import _name
print(_name(lambda x: [(lambda z: z in {"a", "b", "c", "d"})(y) for y in x]))
print(_name(lambda x: abs(x)))
print(_name(lambda x: len(x)))
"""


def test_a_lambda_has_its_name_in_each_run():
    """Its inner code and its sets say the same wherever they lie; another one has another name."""
    said = [
        subprocess.run(
            [sys.executable, "-c", NAMES],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout.split("\n")
        for seed in "123"
    ]  # fmt: skip
    assert said[0] == said[1] == said[2]
    assert len(set(said[0][:3])) == 3


def test_verbs_without_a_journal(pool, path):
    """`starmap` and the async forms have none."""
    with pytest.raises(OptionError, match="journal= is for"):
        pool.map_async(work.square, [1], journal=path)


def test_a_dropped_iterator_is_written(pool, path, logged):
    """What runs after the iterator is dropped is written down as well."""
    del_me = pool.imap(logged, range(50), journal=path)
    del del_me
    pool.close()
    pool.join()
    with sqlite3.connect(path) as base:
        assert base.execute("SELECT count(*) FROM xpool_done").fetchone() == (50,)
    base.close()


def test_a_termination_loses_nothing_that_was_seen(path, logged):
    """After `terminate`, what was handed out is in the journal."""
    with Pool(2) as pool:
        results = pool.imap_unordered(logged, range(2000), journal=path)
        seen = {next(results) for _ in range(20)}
    logged.calls()
    with Pool(2) as pool:
        assert pool.map(logged, range(2000), journal=path) == [x * x for x in range(2000)]
    again = {x * x for x in logged.calls()}
    assert not seen & again


def test_a_disk_that_is_full(path, monkeypatch):
    """What cannot be written fails the job with the reason."""
    from xpool.pool import journal

    def full(self, results):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(journal.Journal, "write", full)
    with Pool(1) as pool:
        with pytest.raises(sqlite3.OperationalError, match="full"):
            pool.map(work.square, range(3), journal=path)
        assert pool.map(work.square, [1]) == [1]


def test_a_program_that_is_killed_goes_on(tmp_path, path):
    """After SIGKILL of the whole program, the next run does the rest, and only that."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from xpool import Pool\n"
        "def f(x):\n"
        "    with open(sys.argv[2], 'a') as file: file.write(f'{x}\\n')\n"
        "    return x + 1\n"
        "if __name__ == '__main__':\n"
        "    with Pool(2) as pool:\n"
        "        for y in pool.imap(f, range(int(sys.argv[3])), journal=sys.argv[1]):\n"
        "            print(y, flush=True)\n"
        "            if sys.argv[4:] and y == 50: sys.stdin.read()\n"
    )
    log = tmp_path / "log"
    command = [sys.executable, str(script), str(path), str(log), "2000"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "50\n":
                break
        process.send_signal(signal.SIGKILL)
    first = set(map(int, eventually(log.read_text, "tasks have run").split()))
    log.unlink()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(x + 1) for x in range(2000)]
    second = set(map(int, log.read_text().split())) if log.exists() else set()
    assert first | second == set(range(2000))
    assert not set(range(50)) & second
