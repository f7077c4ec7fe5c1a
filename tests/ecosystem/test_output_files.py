"""``output="files"``: the output of each task goes to a separate file."""

import ctypes
import logging
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from xpool import CtxPool, OptionError, P2PPool, Pool, TaskTimeout, ThreadPool, WorkerDied
from xpool.devices._device_context import PROCESS


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Change to an empty folder, in which pools make theirs."""
    monkeypatch.chdir(tmp_path)


def texts(pool):
    """Return the texts of a pool's files by their names without suffix."""
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
    """A file's name has the number of the call, the function's name without invalid characters, and
    the item's number."""
    with Pool(2, output="files") as pool:
        pool.map(speak, range(3), chunksize=2)
        list(pool.imap(speak, range(3), chunksize=2))
        list(pool.imap_unordered(speak, [7]))
        pool.apply(speak, (8,))
        pool.starmap(speak, [(9,)])
        pool.submit(speak, 10).result()
        pool.map(speak, [11], seed=1)
        pool.map(speak, [12], progress=lambda done, total: None)
        pool.apply(lambda: speak(13))
    want = [*((1, i, i) for i in range(3)), *((2, i, i) for i in range(3)), (3, 0, 7), (5, 0, 9),
            (7, 0, 11), (8, 0, 12)]  # fmt: skip
    expected = {f"{job:04}-speak-{i:06}": f"out {x}\nerr {x}\n" for job, i, x in want}
    expected |= {f"{job:04}-speak": f"out {x}\nerr {x}\n" for job, x in ((4, 8), (6, 10))}
    expected["0009-test_each_verb.-locals-.-lambda"] = "out 13\nerr 13\n"
    assert texts(pool) == expected


def test_run_all():
    """`run_all` makes a file for each worker, with the worker's number."""
    with Pool(2, output="files") as pool:
        pool.run_all(speak, 1)
    assert sorted(texts(pool)) == ["0001-speak-worker-0", "0001-speak-worker-1"]


def test_contexts_and_peers():
    """`CtxPool` and `P2PPool` write files too."""
    with CtxPool(worker_contexts=["here"], output="files") as pool:
        pool.map(speak_to, [1])
        pool.apply(speak_to, (2,))
    assert texts(pool) == {"0001-speak_to-000000": "here 1\n", "0002-speak_to": "here 2\n"}
    with P2PPool(2, output="files") as pool:
        pool.map(speak, [1])
    assert list(texts(pool)) == ["0001-speak-000000"]


def test_output_outside_of_python():
    """Output of C code, child processes and descriptors goes to the file."""
    with Pool(1, output="files") as pool:
        pool.apply(speak_in_all_ways, (0,))
    (text,) = texts(pool).values()
    # C's buffer is written after the task, or when it is full.
    parts = ["python, without an end of line", "; C\n", "a child\n", "a descriptor\n"]
    assert len(text) == len("".join(parts)) and all(part in text for part in parts)


def test_output_outside_of_tasks(capfd):
    """A task without output makes no file. The initializer prints to the program's stdout."""
    with Pool(1, print, ("from the initializer",), output="files") as pool:
        pool.map(abs, range(50))
    assert texts(pool) == {}
    assert capfd.readouterr().out == "from the initializer\n"


def test_a_handler_of_an_earlier_task():
    """A logging handler made by a task writes to the file of the task that logs."""

    def log(text):
        logging.basicConfig(format="%(message)s")
        logging.getLogger("tasks").warning(text)

    with Pool(1, output="files") as pool:
        pool.map(log, ["one", "two"], chunksize=1)
    assert sorted(texts(pool).values()) == ["one\n", "two\n"]


def test_ends_of_tasks():
    """After a death, an exception or a time limit, the output is kept. The next task has its own
    file."""

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
                pool.apply(fail, (how,), timeout=0.5 if how == "slow" else None)
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


def draw(number, sign):
    print(number)
    if number < 0:
        raise LookupError("below 0")
    return sign * random.random()


def test_together_with_other_options():
    """An item has its file, seed, retries and time limit; its error names it without a number."""
    items = [(5, 1), (6, -1)]
    with Pool(1) as pool:
        want = pool.starmap(draw, items, seed=3)
    with Pool(1, output="files") as pool:
        options = {"seed": 3, "timeout": 100, "retries": 1, "retry_on": LookupError}
        for chunksize in 1, 2:
            assert pool.starmap(draw, items, chunksize, **options) == want
        with pytest.raises(LookupError) as caught:
            pool.starmap(draw, [(5, 1), (-6, 1)], 2, **options)
    assert vars(caught.value)["__notes__"] == ["item 1 of draw(): (-6, 1)"]
    assert "callables" not in str(caught.value.__cause__)
    assert texts(pool)["0002-draw-000001"] == "6\n"
    assert texts(pool)["0003-draw-000001"] == "-6\n-6\n"


def test_a_journal_counts_all_items():
    """Items in a journal do not run. The others keep their numbers."""
    with Pool(1, output="files") as pool:
        pool.map(speak, [5], journal="journal.db")
        pool.map(speak, [5, 6], journal="journal.db")
    assert sorted(texts(pool)) == ["0001-speak-000000", "0002-speak-000001"]


def test_a_hook_of_a_subclass():
    """Tasks submitted through an overridden hook have files."""

    class Hooked(Pool):
        def pool_inqueue_put(self, obj):
            super().pool_inqueue_put(obj)

    with Hooked(1, output="files") as pool:
        pool.map(speak, [1, 2], chunksize=1)
        list(pool.imap(speak, [3]))
    assert sorted(texts(pool)) == ["0001-speak-000000", "0001-speak-000001", "0002-speak-000000"]


def test_fork(capfd):
    """A forked worker writes to the files although pytest has replaced stdout."""
    with Pool(1, context="fork", output="files") as pool:
        pool.map(speak, [1])
    assert texts(pool) == {"0001-speak-000000": "out 1\nerr 1\n"}
    assert capfd.readouterr() == ("", "")


def test_the_folder_is_new_and_may_go(monkeypatch):
    """Pools made in the same second have different folders. A removed folder is made again."""
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    with Pool(1, output="files", name="a/b: c") as pool:
        os.rmdir(pool.output_folder)
        pool.map(speak, [1])
        assert list(texts(pool)) == ["0001-speak-000000"]
    folder = os.path.abspath("xpool-output/now-a-b-c")
    assert pool.output_folder == folder
    with Pool(1, output="files", name="a/b: c") as pool:
        assert pool.output_folder == f"{folder}-2"
    with Pool(1, output="files", name="/") as pool:
        assert pool.output_folder.endswith("now-task")


def test_refused():
    """Thread pools, other values and a folder that cannot be made are refused."""
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
