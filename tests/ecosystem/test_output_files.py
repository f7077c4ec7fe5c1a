"""``output="files"``: what each task prints is in a file of its own."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from xpool import CtxPool, OptionError, P2PPool, Pool, TaskTimeout, ThreadPool, WorkerDied
from xpool._calls.results import Job
from xpool._pools.task_files import TaskFiles
from xpool.devices.context import PROCESS


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, in which the pools make theirs."""
    monkeypatch.chdir(tmp_path)


def texts(pool):
    """What the files of a pool have, by their names without the suffix."""
    return {path.stem: path.read_text() for path in Path(pool.output_folder).iterdir()}


def speak(x):
    print("out", x)
    print("err", x, file=sys.stderr)


def speak_to(context, x):
    print(context, x)


def speak_in_all_ways(x):
    print("python, without an end of line", end="")
    ctypes.CDLL(None).printf(b"; C\n")
    os.system("echo a child")
    os.write(1, b"a descriptor\n")


def test_each_verb():
    """A file has the number of the call, the function's name and the item's number."""
    with Pool(2, output="files") as pool:
        pool.map(speak, range(3), chunksize=2)
        list(pool.imap(speak, range(3), chunksize=2))
        list(pool.imap_unordered(speak, [7]))
        pool.apply(speak, (8,))
        pool.starmap(speak, [(9,)])
        pool.submit(speak, 10).result()
        pool.map(speak, [11], seed=1)
        pool.map(speak, [12], progress=lambda done, total: None)
    want = [*((1, i, i) for i in range(3)), *((2, i, i) for i in range(3)), (3, 0, 7), (5, 0, 9),
            (7, 0, 11), (8, 0, 12)]  # fmt: skip
    expected = {f"{job:04}-speak-{i:06}": f"out {x}\nerr {x}\n" for job, i, x in want}
    expected |= {f"{job:04}-speak": f"out {x}\nerr {x}\n" for job, x in ((4, 8), (6, 10))}
    assert texts(pool) == expected


def test_run_all():
    """Each worker's call has a file with the worker's number."""
    with Pool(2, output="files") as pool:
        pool.run_all(speak, 1)
    assert sorted(texts(pool)) == ["0001-speak-worker-0", "0001-speak-worker-1"]


def test_contexts_and_peers():
    """Pools whose workers have contexts or queues of their own write files, too."""
    with CtxPool(worker_contexts=["here"], output="files") as pool:
        pool.map(speak_to, [1])
        pool.apply(speak_to, (2,))
    assert texts(pool) == {"0001-speak_to-000000": "here 1\n", "0002-speak_to": "here 2\n"}
    with P2PPool(2, output="files") as pool:
        pool.map(speak, [1])
    assert list(texts(pool)) == ["0001-speak-000000"]


def test_what_goes_by_python():
    """C code, child processes and the descriptor itself write into the file, in order."""
    with Pool(1, output="files") as pool:
        pool.apply(speak_in_all_ways, (0,))
    (text,) = texts(pool).values()
    # C's buffer is written when the task has ended, or is full.
    parts = ["python, without an end of line", "; C\n", "a child\n", "a descriptor\n"]
    assert len(text) == len("".join(parts)) and all(part in text for part in parts)


def test_what_is_between_tasks(capfd):
    """A task that prints nothing leaves no file; the initializer prints where the program does."""
    with Pool(1, print, ("from the initializer",), output="files") as pool:
        pool.map(abs, range(50))
    assert texts(pool) == {}
    assert capfd.readouterr().out == "from the initializer\n"


def test_a_handler_of_an_earlier_task():
    """A logging handler that a task has made writes into the file of the task that logs."""

    def log(text):
        logging.basicConfig(format="%(message)s")
        logging.getLogger("tasks").warning(text)

    with Pool(1, output="files") as pool:
        pool.map(log, ["one", "two"], chunksize=1)
    assert sorted(texts(pool).values()) == ["one\n", "two\n"]


def test_ends_of_tasks():
    """A death, an exception and a time limit leave what was printed; what follows is apart."""

    def fail(how):
        print("last words")
        if how == "die":
            os._exit(3)
        if how == "raise":
            raise KeyError(how)
        while True:
            pass

    with Pool(1, output="files") as pool:
        for how, error in (("die", WorkerDied), ("raise", KeyError), ("slow", TaskTimeout)):
            with pytest.raises(error):
                pool.apply(fail, (how,), timeout=2)
            pool.apply(speak, (how,))
    assert list(dict(sorted(texts(pool).items())).values()) == [
        text
        for how in ("die", "raise", "slow")
        for text in ("last words\n", f"out {how}\nerr {how}\n")
    ]


def test_second_tries_append(tmp_path):
    """A task that runs again appends to its file."""

    def die_once(x):
        print("try")
        if not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            os._exit(3)

    with Pool(1, output="files") as pool:
        pool.map(die_once, [0], retries=1)
    assert list(texts(pool).values()) == ["try\ntry\n"]


def test_a_journal_counts_all_items():
    """What a journal has is not run again; the other items keep their numbers."""
    with Pool(1, output="files") as pool:
        pool.map(speak, [5], journal="journal.db")
        pool.map(speak, [5, 6], journal="journal.db")
    assert sorted(texts(pool)) == ["0001-speak-000000", "0002-speak-000001"]


def test_a_hook_of_a_subclass():
    """Tasks that go through an overridden hook have files."""

    class Hooked(Pool):
        def pool_inqueue_put(self, obj):
            super().pool_inqueue_put(obj)

    with Hooked(1, output="files") as pool:
        pool.map(speak, [1, 2], chunksize=1)
        list(pool.imap(speak, [3]))
    assert sorted(texts(pool)) == ["0001-speak-000000", "0001-speak-000001", "0002-speak-000000"]


def test_fork(capfd):
    """A fork of a program whose stdout is an object writes into the files."""
    with Pool(1, context="fork", output="files") as pool:
        pool.map(speak, [1])
    assert texts(pool) == {"0001-speak-000000": "out 1\nerr 1\n"}
    assert capfd.readouterr() == ("", "")


def test_the_folder_is_new_and_may_go(monkeypatch):
    """Pools of one second have folders of their own; one that is removed is made again."""
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    with Pool(1, output="files", name="a/b: c") as pool:
        os.rmdir(pool.output_folder)
        pool.map(speak, [1])
        assert list(texts(pool)) == ["0001-speak-000000"]
    folder = os.path.abspath("xpool-output/now-a-b-c")
    assert pool.output_folder == folder
    assert TaskFiles("a/b: c").folder == f"{folder}-2"
    assert TaskFiles("/").folder.endswith("now-task")


def test_names_of_files():
    """A function's name becomes a file's, without what a file's name may not have."""
    job = Job(12, "outer.<locals>.<lambda>()", None)
    name = os.path.basename(TaskFiles("x").of_call(job, speak)._path)
    assert name == "0012-outer.-locals-.-lambda"


def test_refused():
    """Threads share one stdout; other values are refused; the folder must be possible."""
    with pytest.raises(OptionError, match="share the stdout"):
        ThreadPool(1, output="files")
    with pytest.raises(OptionError, match="'prefix', 'files' or None, not 'file'"):
        Pool(1, output="file")
    contexts = [SimpleNamespace(env={PROCESS: "one"}) for _ in range(2)]
    with pytest.raises(OptionError, match="threads of one process, so they share its stdout"):
        CtxPool(worker_contexts=contexts, output="files")
    Path("xpool-output").touch()
    with pytest.raises(OSError, match="xpool-output"):
        Pool(1, output="files")
