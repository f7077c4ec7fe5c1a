"""`journal=`: finished items are read, not run again."""

import contextlib
import functools
import operator
import os
import re
import signal
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import scripts, work
from support.kinds import PROCESS_KINDS, THREAD_KINDS
from support.programs import PROGRAM
from support.waiting import eventually

from xpool import CtxPool, OptionError, Pool, ThreadPool
from xpool._pools.journal import Journal
from xpool.devices import devices


@pytest.fixture(params=[PROCESS_KINDS[0], THREAD_KINDS[0]], ids=repr, scope="module")
def kind(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.db"


class Logged:
    """A function that logs its arguments. Item 3 fails if a certain file exists."""

    def __init__(self, log):
        self.log = str(log)

    def __call__(self, x):
        with open(self.log, "a") as file:
            file.write(f"{x}\n")
        if os.path.exists(self.log + ".fail") and x == 3:
            raise ValueError(x)
        return x * x

    def calls(self):
        """Return the sorted arguments of all calls since the last time."""
        try:
            with open(self.log) as file:
                found = sorted(map(int, file))
        except FileNotFoundError:
            return []
        os.unlink(self.log)
        return found


class Quits:
    """Calls `sys.exit` when it is unpickled."""

    def __reduce__(self):
        return sys.exit, ("opened",)


class Single:
    """Can be pickled a limited number of times."""

    def __init__(self, times):
        self.times = times

    def __reduce__(self):
        if not self.times:
            raise TypeError("once is enough")
        return Single, (self.times - 1,)


def odd_result(x, times):
    """For 1, return an object that cannot be written to the journal."""
    return Single(times) if x == 1 else x


def quit_or(x):
    """For 1, return `Quits`."""
    return Quits() if x == 1 else x


def execute(path, *statements):
    """Run statements of SQL on a file. Return the rows of the last one."""
    with contextlib.closing(sqlite3.connect(path)) as base, base:
        for statement in statements:
            rows = base.execute(statement).fetchall()
    return rows


@pytest.fixture
def logged(tmp_path):
    return Logged(tmp_path / "log")


@pytest.mark.parametrize("verb", ["map", "imap", "imap_unordered"])
def test_a_second_run_reads(pool, path, logged, verb):
    """Items in the journal do not run again. New items run."""
    run = getattr(pool, verb)
    assert sorted(run(logged, range(5), journal=path)) == [0, 1, 4, 9, 16]
    assert logged.calls() == [0, 1, 2, 3, 4]
    assert sorted(run(logged, range(7), journal=path)) == [0, 1, 4, 9, 16, 25, 36]
    assert logged.calls() == [5, 6]
    assert len(list(run(logged, iter(range(7)), 3, journal=str(path), progress=print))) == 7
    assert logged.calls() == []


def test_order_and_long_inputs(pool, path):
    """Results come in order, even if many are in the journal already."""
    assert pool.map(work.square, range(0, 3000, 2), journal=path) == [
        x * x for x in range(0, 3000, 2)
    ]
    assert list(pool.imap(work.square, range(3000), journal=path)) == [x * x for x in range(3000)]


def test_an_error_is_run_again(pool, path, logged):
    """An item that fails raises after the others are done. The next call runs it again."""
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
    """`key` names items. An item whose key is in the journal does not run."""
    assert pool.map(logged, [1, 2], journal=path, key=lambda x: f"item {x}") == [1, 4]
    assert pool.map(logged, [5], journal=path, key=lambda x: "item 2") == [4]
    assert logged.calls() == [1, 2]
    with pytest.raises(TypeError, match="key must return"):
        pool.map(logged, [1], journal=path, key=lambda x: 1.5)
    with pytest.raises(OptionError, match="pass journal="):
        pool.map(logged, [1], key=str)


def test_a_key_for_two_items(pool, path, logged):
    """The same key for two items of a call is an error, because both would get the same result."""
    with pytest.raises(OptionError, match=r"key= returns 'a\.png' for two items"):
        pool.map(logged, [2, 3], journal=path, key=lambda x: "a.png")
    logged.calls()
    assert pool.map(logged, [2], journal=path, key=lambda x: "a.png") == [4]
    assert pool.map(logged, [5, 5], journal=path) == [25, 25]


@pytest.mark.parametrize("verb", ["map", "imap"])
def test_a_key_that_quits(pool, path, logged, verb):
    """`sys.exit` in key= is raised by the call, as in the iterable. The pool goes on."""
    with pytest.raises(SystemExit):
        list(getattr(pool, verb)(logged, [2], journal=path, key=sys.exit))
    assert pool.map(logged, [2], journal=path) == [4]


def test_odd_keys(pool, path, logged):
    """A key may be a str, bytes or an int of any size. Keys of different types differ."""
    keys = [1, "1", b"1", 2**63, -(2**64), 10**5000, "\udc80", "\\udc80", "", b"", "'1'"]
    wanted = [x * x for x in range(len(keys))]
    assert pool.map(logged, range(len(keys)), journal=path, key=keys.__getitem__) == wanted
    logged.calls()
    assert pool.map(logged, range(len(keys)), journal=path, key=keys.__getitem__) == wanted
    assert logged.calls() == []


def test_starmap(pool, path):
    """`starmap` accepts a journal."""
    pairs = [(2, 5), (3, 2)]
    assert pool.starmap(pow, pairs, journal=path) == [32, 9]
    assert pool.starmap(pow, [*pairs, (2, 3)], journal=path) == [32, 9, 8]
    assert execute(path, "SELECT count(*) FROM results") == [(3,)]


def make_times(k):
    """Return a function that refers to a number."""
    return lambda x: x * k


def test_a_changed_function_is_refused(pool, path):
    """The error names the changed part. A new path or a `version=` avoids it."""
    assert pool.map(make_times(2), [1, 2], journal=path) == [2, 4]
    assert pool.map(make_times(2), [2, 3], journal=path) == [4, 6]
    with pytest.raises(
        OptionError, match=r"before a change of the variable k of .* \(2, now 3\)"
    ) as error:
        pool.map(make_times(3), [1], journal=path)
    version = re.search("version='(.*?)'", str(error.value)).group(1)
    assert pool.map(make_times(3), [1, 2, 4], journal=path, version=version) == [2, 4, 12]
    assert pool.map(make_times(3), [1, 2], journal=path.with_suffix(".new")) == [3, 6]


def test_a_version_replaces_the_parts(pool, path):
    """With `version=`, only the name of a function is compared."""
    with open(os.devnull) as file:
        assert pool.map(make_times(2), [1], journal=path, version=1) == [2]
        with ThreadPool(1) as threads:
            reads = make_times(file)
            with pytest.raises(OptionError, match=r"variable k of .*TextIOWrapper.*version="):
                threads.map(reads, [1], journal=path)
            assert threads.map(reads, [1], journal=path, version="1") == [2]
    with pytest.raises(OptionError, match="version '1' of .*not of version '2'"):
        pool.map(make_times(2), [1], journal=path, version=2)
    with pytest.raises(OptionError, match="version '1' of .*give that version="):
        pool.map(make_times(2), [1], journal=path)
    with pytest.raises(OptionError, match="not of support.work.same"):
        pool.map(work.same, [1], journal=path, version=1)
    with pytest.raises(TypeError, match="version must be"):
        pool.map(work.same, [1], journal=path, version=1.5)
    with pytest.raises(OptionError, match="pass journal="):
        pool.map(work.same, [1], version=1)


def test_the_initializer_counts(path):
    """The initializer and its arguments are parts of a journal."""
    with ThreadPool(1, work.same, ["a"]) as pool:
        pool.map(work.square, [1], journal=path)
    with ThreadPool(1, work.same, ["a"]) as pool:
        pool.map(work.square, [1], journal=path)
    with ThreadPool(1, work.same, ["b"]) as pool:
        with pytest.raises(OptionError, match="a change of the initargs"):
            pool.map(work.square, [1], journal=path)


def test_a_broadcast_counts_by_its_value(path):
    """A broadcast object is compared by its value."""

    def run(text):
        with Pool(1) as pool:
            ask = functools.partial(ask_length, pool.broadcast([text] * 3))
            return pool.map(ask, ["item"], journal=path)

    assert run("a") == run("a") == [4]
    with pytest.raises(OptionError, match="the arguments of the partial"):
        run("b")


def test_contexts_of_workers_count(path):
    """A worker's context is a part, but not the device on which it runs."""
    for n in (1, 2):
        with CtxPool(worker_contexts=devices("cpu", n=n)) as pool:
            assert pool.map(ask_length, [[1]], journal=path) == [1]
    with CtxPool(worker_contexts=["a"]) as pool:
        with pytest.raises(OptionError, match="a change of the worker_contexts"):
            pool.map(ask_length, [[1]], journal=path)


def ask_length(context, item):
    return len(item)


class Scored:
    """An item with a method."""

    def score(self):
        return 1


def test_classes_of_items_count(path, monkeypatch):
    """If an item's class changes, the journal's result is refused."""

    def run(item, **options):
        with ThreadPool(1) as pool:
            return pool.map(ask_score, [item], journal=path, **options)

    assert run(Scored()) == run(Scored()) == [1]
    monkeypatch.setattr(Scored, "score", lambda self: 2)
    with pytest.raises(OptionError, match=r"before a change of .*Scored\.score"):
        run(Scored())
    assert run(Scored(), key=lambda x: "another") == [2]
    with ThreadPool(1) as pool, pytest.raises(OptionError, match="give key="):
        pool.map(work.same, [(x for x in ())], journal=path.with_suffix(".new"))


def test_items_without_a_name(pool, path):
    """Lambdas and local functions as items are compared by their code, in any order."""
    items = [make_times(2), make_times(3), lambda x: -x]
    assert pool.map(call_with_5, items, journal=path) == [10, 15, -5]
    items = [lambda x: -x, make_times(4), make_times(3)]
    assert pool.map(call_with_5, items, journal=path) == [-5, 20, 15]
    assert execute(path, "SELECT count(*) FROM results") == [(4,)]


def call_with_5(item):
    return item(5)


def ask_score(item):
    return item.score()


def test_the_file_is_whole_at_the_end(pool, path):
    """When the results are there, the journal is closed: SQLite keeps nothing beside its file."""
    beside = Path(f"{path}-wal")
    calls = [
        lambda: pool.map(work.square, range(9), journal=path),
        lambda: list(pool.imap(work.square, range(99), journal=path)),
        lambda: list(pool.imap_unordered(work.square, iter(()), journal=path)),
    ]
    for call in calls * 5:
        call()
        assert path.exists() and not beside.exists()
    with pytest.raises(TypeError):
        list(pool.imap(work.square, [1, None, 2], journal=path))
    eventually(lambda: not beside.exists(), "the journal is closed")


def test_another_function_is_refused(pool, path, tmp_path):
    """A journal belongs to one function. Other files are refused."""
    pool.map(work.square, [1], journal=path)
    with pytest.raises(OptionError, match=r"journal of support\.work\.square"):
        pool.map(work.same, [1], journal=path)
    with pytest.raises(OptionError, match=rf"{tmp_path} is a folder; give the path of a file"):
        pool.map(work.square, [1], journal=tmp_path)
    with pytest.raises(OptionError, match=rf"is missing; make {tmp_path / 'none'}"):
        pool.map(work.square, [1], journal=tmp_path / "none" / "x.db")
    (tmp_path / "text").write_text("no database\n" * 100)
    with pytest.raises(OptionError, match="is not a journal"):
        pool.map(work.square, [1], journal=tmp_path / "text")
    assert pool.map(work.square, [1], journal=path) == [1]


def foreign(path):
    """Make a database of another program."""
    execute(path, "CREATE TABLE theirs (x)")


def newer(path):
    """Make a journal of a later format."""
    with ThreadPool(1) as pool:
        pool.map(work.square, [1], journal=path)
    execute(path, "PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("make", "match"),
    [(foreign, "another program's"), (newer, "of format 99")],
)
def test_other_databases_are_refused(path, make, match):
    """A database of another kind is refused by name, and not changed."""
    make(path)
    before = path.read_bytes()
    with ThreadPool(1) as pool, pytest.raises(OptionError, match=match) as error:
        pool.map(work.square, [1], journal=path)
    assert str(path) in str(error.value)
    assert path.read_bytes() == before


def test_programs_that_begin_a_journal_at_once(tmp_path):
    """If several programs begin a journal, one makes it. Another function is refused."""
    barrier = threading.Barrier(6)

    def begin(path, func):
        barrier.wait()
        try:
            Journal(path, func, None, None, {}).close()
        except OptionError as exc:
            return str(exc)
        return "begun"

    functions = [work.square, work.same] * 3
    for n in range(10):
        with ThreadPoolExecutor(6) as threads:
            said = list(threads.map(functools.partial(begin, tmp_path / f"{n}"), functions))
        first, other = said[::2], said[1::2]
        if first[0] != "begun":
            first, other = other, first
        assert first == ["begun"] * 3
        assert all("is the journal of support.work." in text for text in other)


def test_a_journal_waits_for_another_that_begins(tmp_path, monkeypatch):
    """If SQLite refuses to change a new file's mode, the journal tries again."""
    refusals = iter(["database is locked"] * 2)

    class Refusing(sqlite3.Connection):
        def execute(self, sql, *args):
            if "WAL" in sql:
                for text in refusals:
                    raise sqlite3.OperationalError(text)
            return super().execute(sql, *args)

    connect = functools.partial(sqlite3.connect, factory=Refusing)
    monkeypatch.setattr(sqlite3, "connect", connect)
    with ThreadPool(1) as pool:
        assert pool.map(work.square, [3], journal=tmp_path / "new") == [9]
    assert next(refusals, None) is None


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_an_input_that_raises(pool, path, verb):
    """The results before the error arrive, and are kept for the next run."""

    def source():
        yield from range(5)
        raise KeyError("input")

    for _ in range(2):
        results, got = getattr(pool, verb)(operator.neg, source(), journal=path), []
        with pytest.raises(KeyError, match="input"):
            for one in results:
                got.append(one)
        assert sorted(got) == [-4, -3, -2, -1, 0]


def test_special_names_of_sqlite_are_files(tmp_path, monkeypatch):
    """A path with a special meaning for SQLite is a file like any other."""
    monkeypatch.chdir(tmp_path)
    with ThreadPool(1) as pool:
        pool.map(work.square, [1], journal=":memory:")
        assert (tmp_path / ":memory:").exists()
        with pytest.raises(OptionError, match=re.escape(f"{tmp_path} is a folder")):
            pool.map(work.square, [1], journal="")


@pytest.mark.parametrize("value", ["NULL", "5", "'text'", "x'8005'"])
def test_a_damaged_result_is_named(pool, path, value):
    """A row without a pickle, or with a damaged one, fails its item only. The error has the path,
    the key and a remedy, after which the item runs again."""
    pool.map(work.square, [1, 2, 3], journal=path, key=str)
    execute(
        path,
        "CREATE TABLE other (key TEXT PRIMARY KEY, value BLOB)",
        "INSERT INTO other SELECT * FROM results",
        f"UPDATE other SET value = {value} WHERE key = '''2'''",
        "DROP TABLE results",
        "ALTER TABLE other RENAME TO results",
    )
    found = pool.map(work.square, [1, 2, 3], journal=path, key=str, on_error="return")
    assert (found[0], found[2]) == (1, 9)
    results = pool.imap(work.square, [1, 2, 3], journal=path, key=str)
    assert next(results) == 1
    with pytest.raises(OptionError):
        next(results)
    assert next(results) == 9
    text = str(found[1])
    assert str(path) in text and "the result of '2' " in text
    execute(path, text[text.index("DELETE") :])
    assert execute(path, "SELECT key FROM results") == [("'1'",), ("'3'",)]
    assert pool.map(work.square, [1, 2, 3], journal=path, key=str) == [1, 4, 9]


def test_a_result_that_quits(path):
    """An exception from unpickling a result reaches the caller. The journal stays usable."""
    with Pool(2) as pool:
        results = pool.imap(quit_or, range(3), journal=path)
        assert next(results) == 0
        with pytest.raises(SystemExit, match="opened"):
            next(results)
        assert pool.map(quit_or, [0, 2], journal=path) == [0, 2]


def test_a_result_that_cannot_be_written(pool, path):
    """A result that cannot be written fails its item. The others are written and returned."""
    run = functools.partial(odd_result, times=int(isinstance(pool, Pool)))
    found = pool.map(run, range(50), journal=path, on_error="return")
    assert [*found[:1], *found[2:]] == [0, *range(2, 50)]
    assert isinstance(found[1], TypeError)
    assert found[1].args == ("once is enough",)
    assert execute(path, "SELECT count(*) FROM results") == [(49,)]


def test_flow_control_counts_submitted_items(path):
    """Flow control counts submitted items only, not finished ones or those without a key."""
    with ThreadPool(1) as pool:
        pool.map(work.square, range(100), journal=path, key=str)
        results = pool.imap(
            work.square, range(-20, 120), journal=path, key=lambda x: str(x) if x >= 0 else None,
            on_error="return",
        )  # fmt: skip
        _, flow = results.cancelling
        assert len(list(results)) == 140
        assert (flow.put, flow.taken_items) == (20, 20)


SENTINELS = """
from typing import TypeVar
MISSING, T = object(), TypeVar("T")
def get(x, default=MISSING):
    return default is MISSING, T
inner = f
def f(x):
    return inner(x), get(x)
"""

RUN = """
import json
from xpool._pools.identity import Identity
print(json.dumps(Identity().of_function(f, {}), sort_keys=True))
"""


def test_each_run_has_the_same_parts():
    """The parts depend neither on the order of sets, nor on addresses and tokens."""
    code = PROGRAM + SENTINELS + RUN
    said = [scripts.run_ok(["-c", code], PYTHONHASHSEED=seed) for seed in "123"]
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("name", ["journal", "key", "version"])
@pytest.mark.parametrize("verb", ["map_async", "starmap_async"])
def test_verbs_without_a_journal(pool, verb, name):
    """The error of a verb without a journal names the verbs that have one."""
    theirs = "map, starmap, imap and imap_unordered have it"
    with pytest.raises(TypeError, match=rf"^{verb}\(\) has no keyword '{name}'; {theirs}"):
        getattr(pool, verb)(work.square, [1], **{name: "x"})


def test_a_dropped_iterator_is_written(pool, path, logged):
    """Results of a dropped iterator are written too."""
    del_me = pool.imap(logged, range(50), journal=path)
    del del_me
    pool.close()
    pool.join()
    assert execute(path, "SELECT count(*) FROM results") == [(50,)]


def test_a_termination_loses_nothing_that_was_seen(path, logged):
    """After `terminate`, all returned results are in the journal."""
    with Pool(2) as pool:
        results = pool.imap_unordered(logged, range(2000), journal=path)
        seen = {next(results) for _ in range(20)}
    logged.calls()
    with Pool(2) as pool:
        assert pool.map(logged, range(2000), journal=path) == [x * x for x in range(2000)]
    again = {x * x for x in logged.calls()}
    assert not seen & again


def test_a_disk_that_is_full(path, monkeypatch):
    """If a result cannot be written, the job fails with the reason."""
    from xpool._pools import journal

    def full(self, results):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(journal.Journal, "write", full)
    with Pool(1) as pool:
        with pytest.raises(sqlite3.OperationalError, match="full"):
            pool.map(work.square, range(3), journal=path)
        assert pool.map(work.square, [1]) == [1]


def test_a_file_that_is_removed(path):
    """If the journal's file is removed, the job fails with the reason."""

    def items():
        yield 1
        os.unlink(path)
        yield 2

    with ThreadPool(1) as pool:
        with pytest.raises(sqlite3.OperationalError, match=f"file was removed.*{path}"):
            list(pool.imap(work.square, items(), journal=path))
        assert pool.map(work.square, [1, 2], journal=path) == [1, 4]


def test_a_program_that_is_killed_goes_on(tmp_path, path):
    """After SIGKILL of the program, the next run runs only the remaining items."""
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
    command = [str(script), str(path), str(log), "2000"]
    with scripts.popen([*command, "wait"]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "50\n":
                break
        process.send_signal(signal.SIGKILL)
    first = set(map(int, eventually(log.read_text, "tasks have run").split()))
    log.unlink()
    assert scripts.run_ok(command).split() == [str(x + 1) for x in range(2000)]
    second = set(map(int, log.read_text().split())) if log.exists() else set()
    assert first | second == set(range(2000))
    assert not set(range(50)) & second


def use_sqlite():
    base = sqlite3.connect(":memory:")
    base.execute("CREATE TABLE numbers (x)")
    base.close()


def test_forked_children_use_sqlite(path):
    """A child that is forked while the journal is written does not wait in SQLite, whose locks it
    would have copied. Workers may be such children, too."""
    children = []
    try:
        with Pool(2) as pool:
            results = pool.imap(bytes, range(3000, 3800), 1, journal=path)
            for number, _ in enumerate(results):
                if number % 8 == 0:
                    pid = os.fork()
                    if not pid:
                        use_sqlite()
                        os._exit(0)
                    children.append(pid)
        for pid in list(children):
            ended = eventually(
                lambda pid=pid: os.waitpid(pid, os.WNOHANG)[0], "the child has ended"
            )
            children.remove(ended)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


LIBRARY = """
rate = 1
rows = None

def scaled(x):
    return rate * x

def deeper(x):
    from journal_library import scaled
    return scaled(x)

class Item:
    def __init__(self, x):
        self.x = x
    def scaled(self):
        import journal_library
        return journal_library.rate * self.x

def counted(x):
    import journal_library
    return x if journal_library.rows is None else None
"""


def test_values_in_modules_that_functions_import(tmp_path, monkeypatch):
    """If the program changes a value in a module that the function imports, this is noticed, but
    not in a call before whose time the module was not imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "journal_library.py").write_text(LIBRARY)

    def plain(x):
        import journal_library as library  # type: ignore[import-not-found]

        return library.rate * x

    def by_name(x):
        from journal_library import deeper

        return deeper(x)

    def of_item(x):
        return x.scaled()

    def counted(x):
        import journal_library

        return journal_library.counted(x)

    with ThreadPool(1) as pool:

        def run(func, items, name=""):
            return pool.map(func, items, journal=tmp_path / f"{func.__name__}{name}.db")

        assert run(plain, [1, 2], "late") == [1, 2]  # imports it
        library: Any = sys.modules["journal_library"]
        items = [library.Item(x) for x in range(2)]
        cases = [(plain, [1, 2]), (by_name, [1, 2]), (of_item, items), (counted, [1, 2])]
        for func, some in cases:
            first = run(func, some)
            assert run(func, some) == first
        library.rate, library.rows = 5, 0
        for func, some in cases[:3]:
            with pytest.raises(
                OptionError, match=r"the global rate of journal_library \(1, now 5\)"
            ):
                run(func, some)
        with pytest.raises(OptionError, match="the global rows of journal_library"):
            run(counted, [1, 2])
        library.rate, library.rows = 1, (row for row in [1])
        assert run(plain, [1, 2, 3]) == [1, 2, 3]
        with pytest.raises(OptionError, match=r"global rows of .* is, or holds, .*generator"):
            run(counted, [1, 2], "again")
        del sys.modules["journal_library"]
        assert run(plain, [1, 2]) == [1, 2]
