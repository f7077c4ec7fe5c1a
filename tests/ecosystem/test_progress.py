"""`progress=`, and ``len()`` of the iterators of `imap`."""

import importlib.util
import io
import itertools
import re
import threading

import pytest
from support import scripts, work
from support.kinds import PROCESS_KINDS, THREAD_KINDS
from support.limits import WAIT
from support.tiers import also

from xpool._calls import progress
from xpool.errors import PoolClosed

VERBS = ["map", "starmap", "map_async", "starmap_async", "imap", "imap_unordered"]


@pytest.fixture(scope="session", autouse=True)
def tqdm_is_warm():
    """Make a first bar, whose lock and thread stay for ever. No test may count them as a leak.

    This runs once before the leak checks of modules, because from Python 3.14 the lock's semaphore
    keeps its name.
    """
    if importlib.util.find_spec("tqdm"):
        importlib.import_module("tqdm").tqdm(range(0), file=io.StringIO()).close()


@pytest.fixture(params=[PROCESS_KINDS[0], THREAD_KINDS[0]], ids=repr, scope="module")
def kind(request):
    """`Pool`, then `ThreadPool`."""
    return request.param


def _run(pool, verb, n, *args, **options):
    items = [(x,) for x in range(n)] if "star" in verb else list(range(n))
    results = getattr(pool, verb)(work.square, items, *args, **options)
    return results.get() if verb.endswith("async") else list(results)


@pytest.mark.parametrize("chunksize", [1, 7])
@pytest.mark.parametrize("verb", VERBS)
def test_a_callable_gets_the_numbers_of_items(pool, verb, chunksize):
    """The callable gets increasing numbers of items. The last call, before the results, has all."""
    seen = []
    _run(pool, verb, 100, chunksize, progress=lambda *now: seen.append(now))
    done = [n for n, _ in seen]
    assert done == sorted(set(done))
    assert seen[-1] == (100, 100)
    assert {total for _, total in seen} == {100}


def test_an_input_without_length(pool):
    """The total is None if the input has no length."""
    seen = []
    assert len(list(pool.imap(work.square, iter(range(10)), progress=_append_to(seen)))) == 10
    assert seen[-1] == (10, None)


def _append_to(seen):
    return lambda done, total: seen.append((done, total))


def _pass(gate):
    return None if gate is None else work.gated(gate)


def test_it_is_called_while_the_job_runs(pool, gate):
    """The callable is called while the job runs. Here its call lets the job end."""

    def told(done, total):
        if done == 1:
            gate.open()

    assert pool.map(_pass, [None, gate.path], 1, progress=told) == [None, None]


def test_an_error_counts_as_done(pool):
    """Failed items count as done."""
    seen = []
    with pytest.raises(ValueError, match="3"):
        pool.map(work.fail_on_three, range(8), 2, progress=_append_to(seen))
    assert seen[-1] == (8, 8)


def test_no_items_at_all(pool):
    """Without items, the callable gets (0, 0)."""
    for verb in VERBS:
        seen = []
        assert _run(pool, verb, 0, progress=_append_to(seen)) == []
        assert seen == [(0, 0)]


def test_an_exception_of_the_callable(pool, monkeypatch):
    """An exception of the callable goes to `threading.excepthook`. The results arrive."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    assert _run(pool, "map", 4, progress=lambda done, total: 1 // 0) == [0, 1, 4, 9]
    assert raised == [ZeroDivisionError]


def test_it_ends_with_the_pool(kind, make_pool, gate):
    """If the pool ends early, the progress stops at its last number."""
    pool = make_pool(kind, 2)
    seen = []
    result = pool.map_async(work.gated, [gate.path] * 2, 1, progress=_append_to(seen))
    pool.terminate()
    gate.open()
    with pytest.raises(PoolClosed):
        result.get()
    result.progress.wait()
    assert seen == [(0, 2)]


def test_an_invalid_progress(pool):
    """`progress` must be a bool, a title or a callable."""
    assert _run(pool, "map", 2, progress=False) == [0, 1]
    with pytest.raises(TypeError, match="progress"):
        pool.map(work.square, [1], progress=3)


def test_len_of_an_iterator(pool):
    """An iterator has its input's length. Without one, `len` raises, but the iterator is true."""
    for verb in ("imap", "imap_unordered"):
        results = getattr(pool, verb)(work.square, range(5), 2)
        assert len(results) == 5
        assert len(list(results)) == 5
        assert len(results) == 5
        results = getattr(pool, verb)(work.square, iter(range(5)))
        with pytest.raises(TypeError, match="has no len"):
            len(results)
        assert results
        assert len(list(results)) == 5
        assert getattr(pool, verb)(work.square, [])


DISPLAYS = {
    "tqdm": (lambda name: True, r"squares: 100%.*30/30"),
    "rich": (lambda name: name != "tqdm", r"squares .*30/30"),
    "line": (lambda name: False, r"squares: 30 of 30\n"),
}


@pytest.mark.parametrize("display", DISPLAYS)
def test_displays(pool, display, monkeypatch, capsys):
    """A title, by default the function's name, is shown on stderr by tqdm, otherwise by rich,
    otherwise as a line."""
    there, pattern = DISPLAYS[display]
    if display != "line":
        pytest.importorskip(display)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "yes" if there(name) else None)
    _run(pool, "map", 30, progress="squares")
    out, err = capsys.readouterr()
    assert re.search(pattern, err)
    assert out == ""
    _run(pool, "imap", 30, progress=True)
    assert re.search(pattern.replace("squares", r"square\(\)"), capsys.readouterr().err)


DEAD_STDERR = """
import importlib.util, os, sys, threading
from xpool import Pool, ThreadPool
display, way, kind = sys.argv[1:]
find_spec = importlib.util.find_spec
ORDER = ["tqdm", "rich", "line"]
def find(name):
    return None if name in ORDER[: ORDER.index(display)] else find_spec(name)
if __name__ == "__main__":
    importlib.util.find_spec = find
    if display == "line":
        sys.modules["tqdm"] = sys.modules["rich"] = None
    if way == "closed":
        sys.stderr.close()
    elif way == "reader gone":
        r, w = os.pipe()
        os.close(r)
        os.dup2(w, 2)
    else:
        class Raises:
            def __getattr__(self, name):
                raise RuntimeError(name)
        sys.stderr = Raises()
    made = {"Pool": Pool, "ThreadPool": ThreadPool}[kind]
    with made(2) as pool:
        for _ in range(2):
            print(pool.map(abs, range(5), progress=True), flush=True)
        print(list(pool.imap(abs, range(5), progress="bar")))
    if display == "tqdm":
        from tqdm import tqdm
        assert all(lock.acquire(False) for lock in tqdm.get_lock().locks)
    sys.stderr = None
"""


DEAD = [("tqdm", "closed"), ("tqdm", "reader gone"), ("rich", "reader gone"), ("line", "closed")]


@pytest.mark.parametrize(
    ("display", "way", "kind"),
    [
        *((display, way, "Pool") for display, way in DEAD),
        *also(*itertools.product(DISPLAYS, ("raises",), ("Pool", "ThreadPool"))),
        *also(*itertools.product(DISPLAYS, ("closed", "reader gone"), ("ThreadPool",))),
        *also(("rich", "closed", "Pool"), ("line", "reader gone", "Pool")),
    ],
)
def test_a_dead_stderr_hurts_no_job(tmp_path, display, way, kind):
    """If stderr is closed or broken, jobs are done, and tqdm's lock is free."""
    if display != "line":
        pytest.importorskip(display)
    script = scripts.write(tmp_path / "script.py", DEAD_STDERR)
    done = scripts.run([script, display, way, kind])
    assert done.stdout == "[0, 1, 2, 3, 4]\n" * 3, done.stderr
    assert done.returncode == 0


def test_a_display_that_raises_releases_the_lock_of_tqdm(pool, monkeypatch):
    """If tqdm raises while it draws, its lock is released."""
    tqdm = pytest.importorskip("tqdm").tqdm
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    with monkeypatch.context() as patch:
        patch.setattr(tqdm, "format_meter", staticmethod(lambda *args, **kwds: 1 // 0))
        assert _run(pool, "map", 4, progress=True) == [0, 1, 4, 9]
    assert raised == [ZeroDivisionError]
    for lock in tqdm.get_lock().locks:
        assert lock.acquire(False)
        lock.release()


def test_a_held_lock_of_tqdm_stops_no_job(pool, monkeypatch, capsys):
    """A program that holds tqdm's lock while it waits for a job gets its results."""
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(progress, "LAST_LOOK", 0.1)
    with tqdm.get_lock():
        job = pool.map_async(work.square, range(4), progress=True)
        assert job.get(WAIT) == [0, 1, 4, 9]
    job.progress._thread.join()


def test_without_a_thread_nothing_is_shown(pool, monkeypatch):
    """If the progress thread cannot start, the job is still done."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "xpool-progress":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for shown in (True, lambda done, total: None):
        assert _run(pool, "map", 4, progress=shown) == [0, 1, 4, 9]
    assert raised == [RuntimeError] * 2


def test_import_xpool_imports_no_display():
    """`import xpool` imports neither tqdm nor rich."""
    code = (
        "import sys, xpool; from xpool import Pool, ThreadPool; "
        "assert not {'tqdm', 'rich'} & set(sys.modules)"
    )
    scripts.run_ok(["-c", code])
    assert importlib.util.find_spec("xpool._calls.progress")
