"""Everyday programs, with xpool and with what a user would pick instead.

Each row is a small program.  It is run as a process of its own with each peer, one after the other,
round by round, once xpool's modules are compiled.  The table has medians, and xpool's against that
of the best peer.  xpool is behind where it takes more than a tenth longer, or more memory.

A row to add is a `Row` in `ROWS`: the text of a program that uses ``start(n, **options)``,
``run(pool, func, items)``, which has each item be a task, ``spread(pool, func, items)``, which lets
the peer cut the items into chunks, ``star(pool, func, items)``, which does that with arguments,
``notify(pool, func, items, callback)``, ``stream(pool, func, items, chunk)`` and ``finish(pool)``,
which waits until the workers have ended; and calls ``tell(seconds)``, unless all of the process is
to be measured.  A work that other packages are made for has programs of its own, by peer.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Collection, Mapping
from multiprocessing import get_start_method
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120.0
"""Seconds that one program may take."""
BEHIND = 1.1
COLUMN = 14
"""The width of a column of the table."""

_AS_A_POOL = """
        def run(pool, func, items):
            return pool.map(func, items, 1)
        def spread(pool, func, items):
            return pool.map(func, items)
        def star(pool, func, items):
            return pool.starmap(func, items)
        def notify(pool, func, items, callback):
            for one in [pool.apply_async(func, (item,), callback=callback) for item in items]:
                one.get()
        def stream(pool, func, items, chunk):
            return pool.imap(func, items, chunk)
        def finish(pool):
            pool.close()
            pool.join()
"""

_AS_AN_EXECUTOR = """
        def run(pool, func, items):
            return list(pool.map(func, items))
        def spread(pool, func, items):
            return list(pool.map(func, items, chunksize=max(1, len(items) // 8)))
        def star(pool, func, items):
            return list(pool.map(func, *zip(*items), chunksize=max(1, len(items) // 8)))
        def notify(pool, func, items, callback):
            for item in items:
                pool.submit(func, item).add_done_callback(lambda one: callback(one.result()))
            pool.shutdown()
        def stream(pool, func, items, chunk):
            return pool.map(func, items, chunksize=chunk)
        def finish(pool):
            pool.shutdown()
"""

PEERS = {
    "xpool": """
        import xpool
        from xpool import Pool
        def start(n, **options):
            return Pool(n, **options)
    """
    + _AS_A_POOL,
    "fork": """
        import multiprocessing.pool
        def start(n, **options):
            return multiprocessing.get_context("fork").Pool(n, **options)
    """
    + _AS_A_POOL,
    "forkserver": """
        import multiprocessing.pool
        def start(n, **options):
            return multiprocessing.get_context("forkserver").Pool(n, **options)
    """
    + _AS_A_POOL,
    "futures": """
        from concurrent.futures import ProcessPoolExecutor
        def start(n, maxtasksperchild=None):
            if maxtasksperchild is not None:
                unable()
            return ProcessPoolExecutor(n)
    """
    + _AS_AN_EXECUTOR,
    "torch": """
        import torch.multiprocessing
        def start(n, **options):
            return torch.multiprocessing.get_context("fork").Pool(n, **options)
    """
    + _AS_A_POOL,
    "loky": """
        import loky
        def start(n, maxtasksperchild=None):
            if maxtasksperchild is not None:
                unable()
            return loky.ProcessPoolExecutor(n)
    """
    + _AS_AN_EXECUTOR,
}
THREADS = {
    "xpool": """
        from xpool import ThreadPool
        start = ThreadPool
    """
    + _AS_A_POOL,
    "fork": """
        from multiprocessing.pool import ThreadPool
        start = ThreadPool
    """
    + _AS_A_POOL,
    "futures": """
        from concurrent.futures import ThreadPoolExecutor
        start = ThreadPoolExecutor
    """
    + _AS_AN_EXECUTOR,
    "interpreters": """
        if sys.version_info < (3, 14):
            unable("needs 3.14")
        from concurrent.futures import InterpreterPoolExecutor
        start = InterpreterPoolExecutor
    """
    + _AS_AN_EXECUTOR,
}
"""Pools of threads; in the column `fork`, the standard library's.

The workers of `interpreters` are threads that have an interpreter each.
"""

PACKAGES = {"loky": "loky", "torch": "torch", "joblib": "joblib"}

PRELUDE = """
    import sys, time
    def tell(seconds):
        print(seconds, flush=True)
    def unable(why="-"):
        print("unable", why, flush=True)
        sys.exit()
"""


class Row(NamedTuple):
    """One everyday program."""

    name: str
    program: str
    whole: bool = False  # all of the process is measured, and not what it tells
    needs: str = ""  # packages
    programs: Mapping[str, str] = MappingProxyType({})  # by peer; others than these have nothing
    unit: str = "ms"
    once: bool = False  # run once: it takes long, and is the same every time


TASKS = """
    def square(x):
        return x * x
"""
DATA_TASKS = """
    def record(r):
        return {**r, "total": sum(r["values"])}
    def shout(text):
        return text.upper()
    def size(a):
        return a.nbytes
    def make(n):
        import numpy
        return numpy.ones(n // 8)
    def twice(a):
        return a * 2
    def add(a, b):
        return a + b
"""
LARGE_TOP = 'DATA = b"x" * (150 << 20)\n'

WHOLE = """
    if __name__ == "__main__":
        pool = start(2)
        assert list(run(pool, square, range(9))) == [x * x for x in range(9)]
        finish(pool)
"""

FIRST = """
    if __name__ == "__main__":
        begin = time.perf_counter()
        pool = start(2)
        run(pool, square, [1])
        tell(time.perf_counter() - begin)
        finish(pool)
"""

PRELOADED = """
    if __name__ == "__main__":
        preload = getattr(sys.modules.get("xpool"), "preload", None)
        if preload is not None:
            preload("torch")
        begin = time.perf_counter()
        import torch
        time.sleep(time.perf_counter() - begin)  # other work, for as long
        begin = time.perf_counter()
        pool = start(2)
        run(pool, square, [1])
        tell(time.perf_counter() - begin)
        finish(pool)
"""

SECOND = """
    if __name__ == "__main__":
        pool = start(2)
        run(pool, square, range(9))
        finish(pool)
        begin = time.perf_counter()
        pool = start(2)
        run(pool, square, [1])
        tell(time.perf_counter() - begin)
        finish(pool)
"""

REPLACED = """
    if __name__ == "__main__":
        pool = start(2, maxtasksperchild=1)
        run(pool, square, range(4))
        begin = time.perf_counter()
        run(pool, square, range(30))
        tell((time.perf_counter() - begin) / 30)
        finish(pool)
"""

RELOADED = """
    def total(x):
        return len(data) + x
    if __name__ == "__main__":
        begin = time.perf_counter()
        pool = start(2, maxtasksperchild=1)
        assert list(run(pool, total, range(4))) == [1000, 1001, 1002, 1003]
        tell(time.perf_counter() - begin)
        finish(pool)
"""

TEN = """
    if __name__ == "__main__":
        begin = time.perf_counter()
        for _ in range(5):
            pool = start(2)
            run(pool, square, range(10))
            finish(pool)
        tell((time.perf_counter() - begin) / 5)
"""

MANY = """
    if __name__ == "__main__":
        begin = time.perf_counter()
        with start(32) as pool:
            assert len(list(run(pool, square, range(320)))) == 320
        tell(time.perf_counter() - begin)
"""


DATA = """
    if __name__ == "__main__":
        import numpy
        pool = start(2)
        run(pool, square, range(9))
        items = {items}
        {how}(pool, {func}, items[:8])
        begin = time.perf_counter()
        got = {how}(pool, {func}, items)
        tell(time.perf_counter() - begin)
        assert len(list(got)) == len(items)
        finish(pool)
"""

CALLBACKS = """
    if __name__ == "__main__":
        pool = start(2)
        run(pool, square, range(9))
        got = []
        begin = time.perf_counter()
        notify(pool, square, range(2000), got.append)
        while len(got) < 2000:
            time.sleep(0.0001)
        tell(time.perf_counter() - begin)
        finish(pool)
"""

COMPUTED = """
    def compute(x):
        for n in range(100_000):
            x += n
        return x
    if __name__ == "__main__":
        pool = start(2)
        run(pool, square, range(9))
        begin = time.perf_counter()
        got = list(run(pool, compute, range(40)))
        tell(time.perf_counter() - begin)
        assert len(got) == 40
        finish(pool)
"""

BUSY = """
    def nap(x):
        time.sleep(0.005)
        return x
    if __name__ == "__main__":
        import threading
        pool = start(2)
        run(pool, nap, range(9))
        over = []
        def compute():
            n = 0
            while not over:
                n += 1
        thread = threading.Thread(target=compute)
        thread.start()
        begin = time.perf_counter()
        got = list(run(pool, nap, range(200)))
        seconds = time.perf_counter() - begin
        over.append(True)
        thread.join()
        tell(seconds)
        assert len(got) == 200
        finish(pool)
"""

TESTED = """
    import pytest
    class TestWithPools:
        @pytest.mark.parametrize("n", range(5))
        def test_squares(self, n):
            pool = start(2)
            try:
                assert list(run(pool, square, range(n, n + 3))) == [x * x for x in range(n, n + 3)]
            finally:
                finish(pool)
    class Clock:
        def pytest_runtest_setup(self, item):
            self.begin = getattr(self, "begin", None) or time.perf_counter()
        def pytest_runtest_teardown(self, item):
            self.end = time.perf_counter()
    if __name__ == "__main__":
        clock = Clock()
        options = [__file__, "-q", "-s", "--no-header", "-p", "no:cacheprovider", "-c", "/dev/null"]
        assert pytest.main(options, plugins=[clock]) == 0
        tell((clock.end - clock.begin) / 5)
"""

STREAMED_THROUGH = """
    if __name__ == "__main__":
        pool = start(2)
        run(pool, square, range(9))
        begin = time.perf_counter()
        for _ in range({times}):
            assert sum(1 for _ in stream(pool, square, range({n}), 1)) == {n}
        tell(time.perf_counter() - begin)
        finish(pool)
"""

ONE_BY_ONE = """
    if __name__ == "__main__":
        pool = start(2)
        one = getattr(pool, "apply", None) or (lambda f, args: pool.submit(f, *args).result())
        one(square, (1,))
        begin = time.perf_counter()
        for n in range(1000):
            one(square, (n,))
        tell(time.perf_counter() - begin)
        finish(pool)
"""

SHARED = """
    def first(t):
        return int(t[0])
    if __name__ == "__main__":
        t = torch.arange(1 << 20).share_memory_()
        pool = start(2, **({"is_copy_tensor": False} if "xpool" in sys.modules else {}))
        one = getattr(pool, "apply", None) or (lambda f, args: pool.submit(f, *args).result())
        for n in range(20):
            one(first, (t,))
        begin = time.perf_counter()
        for n in range(300):
            one(first, (t,))
        tell((time.perf_counter() - begin) / 300)
        finish(pool)
"""

ARRAYS_STREAMED = """
    if __name__ == "__main__":
        import numpy
        pool = start(2)
        assert sum(a.nbytes for a in stream(pool, make, [1 << 20] * 300, 1)) == 300 << 20
        begin = time.perf_counter()
        for _ in range(3):
            assert sum(a.nbytes for a in stream(pool, make, [1 << 20] * 300, 1)) == 300 << 20
        tell((time.perf_counter() - begin) / 3)
        finish(pool)
"""

MEMORY = """
    def field(name, pid="self"):
        with open(f"/proc/{{pid}}/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
    def small(x):
        return x & 127
    def peak(x):
        time.sleep(0.02)  # so that each worker has some of these
        return field("VmHWM")
    if __name__ == "__main__":
        pool = start(2)
        spread(pool, small, range(1000))
        worker = max(run(pool, peak, range(16)))
        before = field("VmRSS")
        n = {n}
        {work}
        tell((({what}) / n) / 1e3)
        finish(pool)
"""
MAPPED = "got = spread(pool, small, range(n)); assert len(got) == n"
STREAMED = "assert sum(1 for _ in stream(pool, small, iter(range(n)), 100)) == n"
OF_PARENT = 'max(0, field("VmHWM") - before)'
OF_WORKER = "max(run(pool, peak, range(16))) - worker"

IMAGES = """
    import io
    import numpy
    import torch
    from PIL import Image
    from torch.utils.data import Dataset
    class Photos(Dataset):
        def __init__(self):
            from sklearn.datasets import load_sample_images
            self.files = []
            for image in load_sample_images().images:
                file = io.BytesIO()
                Image.fromarray(image).save(file, "jpeg")
                self.files.append(file.getvalue())
        def __len__(self):
            return 192
        def __getitem__(self, i):
            image = Image.open(io.BytesIO(self.files[i % len(self.files)])).convert("RGB")
            image = image.resize((224, 224))
            array = numpy.asarray(image, dtype="float32").transpose(2, 0, 1) / 255
            return torch.from_numpy(array), i
    if __name__ == "__main__":
        torch.set_num_threads(1)
        loader = DataLoader(Photos(), batch_size=16, num_workers=2)
        begin = time.perf_counter()
        assert sum(len(images) for images, _ in loader) == 192
        tell(time.perf_counter() - begin)
"""

SEARCH = """
    if __name__ == "__main__":
        import joblib
        {importing}
        from sklearn.datasets import load_digits
        from sklearn.model_selection import GridSearchCV
        from sklearn.tree import DecisionTreeClassifier
        x, y = load_digits(return_X_y=True)
        search = GridSearchCV(
            DecisionTreeClassifier(random_state=0),
            {{"max_depth": [4, 8, 12], "min_samples_leaf": [1, 2, 4, 8]}}, cv=5,
        )
        begin = time.perf_counter()
        with joblib.parallel_config({backend!r}, n_jobs=2):
            search.fit(x, y)
        tell(time.perf_counter() - begin)
"""


JOBS = """
    def nap(x):
        time.sleep(0.001)
        return x
    if __name__ == "__main__":
        import joblib
        {importing}
        with joblib.parallel_config({backend!r}, n_jobs=2):
            joblib.Parallel()(joblib.delayed(nap)(x) for x in range(100))
            begin = time.perf_counter()
            got = joblib.Parallel()(joblib.delayed(nap)(x) for x in range(10_000))
            tell(time.perf_counter() - begin)
        assert got == list(range(10_000))
"""


def _program(main: str, top: str = "") -> str:
    return top + textwrap.dedent(TASKS) + textwrap.dedent(main)


def _data(items: str, how: str, func: str) -> str:
    return textwrap.dedent(DATA_TASKS) + _program(DATA.format(items=items, how=how, func=func))


def _memory(n: int, work: str, what: str) -> str:
    return _program(MEMORY.format(n=n, work=work, what=what))


IMPORT_TORCH = "import torch\n"
SET_TORCH = """\
import torch
torch.set_default_dtype(torch.float64)
torch.backends.cudnn.benchmark = True
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""
LOADING_TOP = """\
def load():
    time.sleep(2)
    return list(range(1000))
data = load()
"""
PANDAS_TOP = "import pandas\n"
LISTS_TOP = "rows = [[i, i + 1, i + 2, i + 3] for i in range(700_000)]\n"
RECORDS = '[{"id": i, "name": f"name {i}", "values": [i, i + 1.5]} for i in range(20_000)]'
STRINGS = '[f"line {i} of a text" for i in range(50_000)]'
_LOADERS = {
    # What its documentation begins a program with that uses torch.
    "xpool": 'import xpool\nif __name__ == "__main__":\n    xpool.preload("torch")\n'
    "from xpool.data import DataLoader\n" + textwrap.dedent(IMAGES),
    "torch": "from torch.utils.data import DataLoader\n" + textwrap.dedent(IMAGES),
}


def _with_joblib(program: str) -> Mapping[str, str]:
    return MappingProxyType(
        {
            "xpool": textwrap.dedent(
                program.format(importing="import xpool.joblib", backend="xpool")
            ),
            "joblib": textwrap.dedent(program.format(importing="", backend="loky")),
        }
    )


def _with_threads(program: str) -> Mapping[str, str]:
    return MappingProxyType(
        {peer: textwrap.dedent(top) + _program(program) for peer, top in THREADS.items()}
    )


def _with_threads_and_arrays(program: str) -> Mapping[str, str]:
    """As `_with_threads`; numpy raises ImportError where a sub-interpreter imports it."""
    whole = DATA_TASKS + program
    return MappingProxyType({**_with_threads(whole), "interpreters": 'unable("no numpy")\n'})


ROWS = [
    Row("whole script: Pool(2), map of 9", _program(WHOLE), whole=True),
    Row("the same, with torch", _program(WHOLE, IMPORT_TORCH), whole=True, needs="torch"),
    Row("first pool to first answer", _program(FIRST)),
    Row("the same, with torch", _program(FIRST, IMPORT_TORCH), needs="torch"),
    Row("the same, torch set up at the top", _program(FIRST, SET_TORCH), needs="torch"),
    Row("the same, with pandas", _program(FIRST, PANDAS_TOP), needs="pandas"),
    Row("the same, a top that loads for 2 s", _program(FIRST, LOADING_TOP), once=True),
    Row("the same, torch preloaded", _program(PRELOADED), needs="torch"),
    Row("second pool to first answer", _program(SECOND)),
    Row("the same, with torch", _program(SECOND, IMPORT_TORCH), needs="torch"),
    Row("maxtasksperchild=1, a worker", _program(REPLACED)),
    Row("the same, a top of 150 MB", _program(REPLACED, LARGE_TOP)),
    Row("the same, a top of 150 MB of lists", _program(REPLACED, LISTS_TOP)),
    Row("the same, 4 tasks, a top of 2 s", _program(RELOADED, LOADING_TOP), once=True),
    Row("open, 10 tasks, close, join", _program(TEN)),
    Row("the same, a top of 150 MB", _program(TEN, LARGE_TOP)),
    Row("the same, a top of 150 MB of lists", _program(TEN, LISTS_TOP)),
    Row("Pool(32), 320 tasks", _program(MANY)),
    Row("the same, a top of 150 MB", _program(MANY, LARGE_TOP)),
    Row("the same, a top of 150 MB of lists", _program(MANY, LISTS_TOP), once=True),
    Row("a pool in a test", _program(TESTED), needs="pytest"),
    Row("map of 20,000 records", _data(RECORDS, "spread", "record"), needs="numpy"),
    Row("map of 50,000 strings", _data(STRINGS, "spread", "shout"), needs="numpy"),
    Row(
        "starmap of 50,000 pairs",
        _data("[(i, 1) for i in range(50_000)]", "star", "add"),
        needs="numpy",
    ),
    Row("2,000 callbacks", _program(CALLBACKS)),
    Row("200 tasks of 5 ms, program computes", _program(BUSY)),
    Row(
        "4,000 arrays of 1 KB there",
        _data("[numpy.ones(128) + i for i in range(4_000)]", "spread", "size"),
        needs="numpy",
    ),
    Row("4,000 arrays of 1 KB back", _data("[1_000] * 4_000", "spread", "make"), needs="numpy"),
    Row(
        "500 arrays of 100 KB both ways",
        _data("[numpy.ones(12_800) + i for i in range(500)]", "run", "twice"),
        needs="numpy",
    ),
    Row(
        "100 arrays of 1 MB there",
        _data("[numpy.ones(1 << 17) + i for i in range(100)]", "run", "size"),
        needs="numpy",
    ),
    Row("100 arrays of 1 MB back", _data("[1 << 20] * 100", "run", "make"), needs="numpy"),
    Row(
        "192 photos into batches", "", needs="torch PIL sklearn",
        programs=MappingProxyType(_LOADERS),
    ),
    Row("grid search", "", needs="joblib sklearn", programs=_with_joblib(SEARCH)),
    Row("10,000 joblib calls of 1 ms", "", needs="joblib", programs=_with_joblib(JOBS)),
    Row("threads: open, 10 tasks, close, join", "", programs=_with_threads(TEN)),
    Row(
        "threads: imap of 20,000", "",
        programs=_with_threads(STREAMED_THROUGH.format(n=20_000, times=1)),
    ),
    Row(
        "threads: 100 imaps of 8", "",
        programs=_with_threads(STREAMED_THROUGH.format(n=8, times=100)),
    ),
    Row("threads: 1,000 calls of apply", "", programs=_with_threads(ONE_BY_ONE)),
    Row(
        "threads: map of 20,000", "",
        programs=_with_threads(DATA.format(items="range(20_000)", how="spread", func="square")),
        needs="numpy",
    ),
    Row(
        "threads: starmap of 100,000", "",
        programs=_with_threads_and_arrays(
            DATA.format(items="[(i, 1) for i in range(100_000)]", how="star", func="add")
        ),
        needs="numpy",
    ),
    Row(
        "threads: imap of 300 arrays of 1 MiB", "",
        programs=_with_threads_and_arrays(ARRAYS_STREAMED), needs="numpy",
    ),
    Row("threads: 2,000 callbacks", "", programs=_with_threads(CALLBACKS)),
    Row("threads: 40 tasks of pure Python", "", programs=_with_threads(COMPUTED)),
    Row(
        "threads: 500 arrays of 100 KB", "",
        programs=_with_threads_and_arrays(
            DATA.format(
                items="[numpy.ones(12_800) + i for i in range(500)]", how="run", func="twice"
            )
        ),
        needs="numpy",
    ),
    Row("1,000 calls of apply", _program(ONE_BY_ONE)),
    Row("100 imaps of 8", _program(STREAMED_THROUGH.format(n=8, times=100))),
    Row("a call with a shared tensor", _program(SHARED, IMPORT_TORCH), needs="torch"),
    Row(
        "memory, map of 1,000,000: parent", _memory(1_000_000, MAPPED, OF_PARENT),
        unit="B/task", once=True,
    ),
    Row(
        "memory, map of 1,000,000: worker", _memory(1_000_000, MAPPED, OF_WORKER),
        unit="B/task", once=True,
    ),
    Row(
        "memory, imap of 1,000,000: parent", _memory(1_000_000, STREAMED, OF_PARENT),
        unit="B/task", once=True,
    ),
    Row(
        "memory, imap of 1,000,000: worker", _memory(1_000_000, STREAMED, OF_WORKER),
        unit="B/task", once=True,
    ),
]  # fmt: skip


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    found.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's modules are compiled once
    return found


def measure(row: Row, peer: str, folder: Path) -> float | str:
    """Run a program once; return seconds, or in a word why there are none."""
    path = folder / f"with_{peer}.py"  # not the name of what it imports
    program = row.programs.get(peer) or textwrap.dedent(PEERS[peer]) + row.program
    path.write_text(textwrap.dedent(PRELUDE) + program)
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True, text=True, timeout=LIMIT, cwd=folder, env=_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "hangs"
    seconds = time.perf_counter() - begin
    if done.returncode:
        return "fails"
    if done.stdout.startswith("unable"):
        return done.stdout.removeprefix("unable").strip()
    return seconds if row.whole else float(_LAST_NUMBER.findall(done.stdout)[-1])


_LAST_NUMBER = re.compile(r"^\S*?(\d[-.e\d]*)$", re.MULTILINE)
"""What `tell` has printed, also behind the dots that a test runner prints."""


def run_row(row: Row, peers: list[str], rounds: int) -> dict[str, float | str]:
    """Return the median of each peer, or why there is none."""
    found: dict[str, list[float]] = {peer: [] for peer in peers}
    known = row.programs or {p: PEERS[p] for p in PEERS if p != "torch" or "torch" in row.needs}
    words = {peer: "-" for peer in peers if peer not in known}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(1 if row.once else rounds):
            for peer in peers[n % len(peers) :] + peers[: n % len(peers)]:
                if peer in words:
                    continue
                outcome = measure(row, peer, Path(folder))
                if isinstance(outcome, str):
                    words[peer] = outcome
                else:
                    found[peer].append(outcome)
    return {p: words[p] if p in words else statistics.median(found[p]) for p in peers}


FORKS = {"fork", "futures", "torch"}
"""Peers whose workers are forks of the program where Python's own are, so that they have at once
all that it has."""


def compare(row: Row, results: dict[str, float | str], without: Collection[str] = ()) -> float:
    """Return xpool's time as a multiple of the best peer's; inf: one of the two has none."""
    others = [
        v for p, v in results.items() if p not in {"xpool", *without} and isinstance(v, float)
    ]
    mine = results["xpool"]
    if not others or isinstance(mine, str):
        return math.inf
    least = 0.02 if row.unit == "B/task" else 0.0  # 20 bytes: to use none is no advantage
    return max(mine, least) / max(min(others), least)


def show(row: Row, peers: list[str], results: dict[str, float | str]) -> float:
    """Print a line; return what `compare` does."""
    ratio = compare(row, results)
    cells = [v if isinstance(v, str) else f"{1e3 * v:.1f}" for v in map(results.__getitem__, peers)]
    said = "?" if ratio == math.inf else f"{ratio:.2f}{' behind' if ratio > BEHIND else ''}"
    line = f"{row.name:36}{row.unit:>7}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)
    print(f"{line}   {said}", flush=True)
    return ratio


def main() -> None:
    """Run the rows that were asked for, and count where xpool is behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="rows of which the name, or number, has this")
    parser.add_argument("--peers", default=",".join([*PEERS, "interpreters", "joblib"]))
    parser.add_argument("--json", type=Path, help="where to write the medians, in seconds")
    given = parser.parse_args()
    peers = [
        p for p in given.peers.split(",")
        if p not in PACKAGES or importlib.util.find_spec(PACKAGES[p]) is not None
    ]  # fmt: skip
    if "xpool" not in peers:
        peers.insert(0, "xpool")
    compileall.compile_dir(ROOT / "xpool", quiet=1)
    print(" " * 43 + "".join(f"{peer:>{COLUMN}}" for peer in peers) + "   xpool/best")
    behind, only_forks, kept = 0, 0, {}
    for number, row in enumerate(ROWS, 1):
        asked = given.only == str(number) if given.only.isdigit() else given.only in row.name
        if not asked:
            continue
        if any(importlib.util.find_spec(package) is None for package in row.needs.split()):
            continue
        kept[f"{number} {row.name}"] = results = run_row(row, peers, given.rounds)
        if show(row, peers, results) > BEHIND:
            behind += 1
            # Rows with programs of their own have other peers under these names, such as threads.
            forks = FORKS if not row.programs and get_start_method() == "fork" else ()
            only_forks += compare(row, results, forks) <= BEHIND
    if given.json is not None:
        given.json.write_text(json.dumps(kept, indent=1))
    print(f"behind in {behind} of {len(kept)}, in {only_forks} only of forks of the program")


if __name__ == "__main__":
    main()
