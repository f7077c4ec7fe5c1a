"""Everyday programs, with xpool and with what a user would pick instead.

Each row is a small program.  It is run as a process of its own with each peer, one after the other,
round by round, after a round that is not counted (it compiles modules and fills caches); what is
printed are medians in milliseconds, and xpool's against that of the best peer.  xpool is behind
where it takes more than a tenth longer.

A row to add is a `Row` in `ROWS`: the text of a program that uses ``start(n, **options)``,
``run(pool, func, items)``, which has each item be a task, and ``finish(pool)``, which waits until
the workers have ended; and calls ``tell(seconds)``, unless all of the process is to be measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120.0
"""Seconds that one program may take."""
BEHIND = 1.1

PEERS = {
    "xpool": """
        import xpool
        from xpool import Pool
        def start(n, **options):
            return Pool(n, **options)
        def run(pool, func, items):
            return pool.map(func, items, 1)
        def finish(pool):
            pool.close()
            pool.join()
    """,
    "fork": """
        import multiprocessing.pool
        def start(n, **options):
            return multiprocessing.get_context("fork").Pool(n, **options)
        def run(pool, func, items):
            return pool.map(func, items, 1)
        def finish(pool):
            pool.close()
            pool.join()
    """,
    "forkserver": """
        import multiprocessing.pool
        def start(n, **options):
            return multiprocessing.get_context("forkserver").Pool(n, **options)
        def run(pool, func, items):
            return pool.map(func, items, 1)
        def finish(pool):
            pool.close()
            pool.join()
    """,
    "futures": """
        from concurrent.futures import ProcessPoolExecutor
        def start(n, maxtasksperchild=None):
            if maxtasksperchild is not None:
                unable()
            return ProcessPoolExecutor(n)
        def run(pool, func, items):
            return list(pool.map(func, items))
        def finish(pool):
            pool.shutdown()
    """,
    "loky": """
        import loky
        def start(n, maxtasksperchild=None):
            if maxtasksperchild is not None:
                unable()
            return loky.ProcessPoolExecutor(n)
        def run(pool, func, items):
            return list(pool.map(func, items))
        def finish(pool):
            pool.shutdown()
    """,
    "mpire": """
        import mpire
        def start(n, maxtasksperchild=None):
            global lifespan
            lifespan = maxtasksperchild
            return mpire.WorkerPool(n_jobs=n, start_method="fork")
        def run(pool, func, items):
            return pool.map(func, items, chunk_size=1, worker_lifespan=lifespan)
        def finish(pool):
            pool.stop_and_join()
    """,
}
PACKAGES = {"loky": "loky", "mpire": "mpire"}

PRELUDE = """
    import sys, time
    def tell(seconds):
        print(seconds, flush=True)
    def unable():
        print("unable", flush=True)
        sys.exit()
"""


class Row(NamedTuple):
    """One everyday program."""

    name: str
    program: str
    whole: bool = False  # all of the process is measured, and not what it tells
    needs: str = ""  # a package


TASKS = """
    def square(x):
        return x * x
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


def _program(main: str, top: str = "") -> str:
    return top + textwrap.dedent(TASKS) + textwrap.dedent(main)


IMPORT_TORCH = "import torch\n"

ROWS = [
    Row("whole script: Pool(2), map of 9", _program(WHOLE), whole=True),
    Row("the same, with torch", _program(WHOLE, IMPORT_TORCH), whole=True, needs="torch"),
    Row("first pool to first answer", _program(FIRST)),
    Row("the same, with torch", _program(FIRST, IMPORT_TORCH), needs="torch"),
    Row("the same, torch preloaded", _program(PRELOADED), needs="torch"),
    Row("second pool to first answer", _program(SECOND)),
    Row("the same, with torch", _program(SECOND, IMPORT_TORCH), needs="torch"),
    Row("maxtasksperchild=1, a worker", _program(REPLACED)),
    Row("the same, a top of 150 MB", _program(REPLACED, LARGE_TOP)),
    Row("open, 10 tasks, close, join", _program(TEN)),
    Row("the same, a top of 150 MB", _program(TEN, LARGE_TOP)),
    Row("Pool(32), 320 tasks, a top of 150 MB", _program(MANY, LARGE_TOP)),
]


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    found.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's modules are compiled once
    return found


def measure(row: Row, peer: str, folder: Path) -> float | str:
    """Run a program once; return seconds, or in a word why there are none."""
    path = folder / f"with_{peer}.py"  # not the name of what it imports
    path.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(PEERS[peer]) + row.program)
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
        return "-"
    return seconds if row.whole else float(done.stdout.split()[-1])


def run_row(row: Row, peers: list[str], rounds: int) -> dict[str, float | str]:
    """Return the median of each peer, or why there is none."""
    found: dict[str, list[float]] = {peer: [] for peer in peers}
    words: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(rounds + 1):
            for peer in peers[n % len(peers) :] + peers[: n % len(peers)]:
                if peer in words:
                    continue
                outcome = measure(row, peer, Path(folder))
                if isinstance(outcome, str):
                    words[peer] = outcome
                elif n:
                    found[peer].append(outcome)
    return {p: words[p] if p in words else statistics.median(found[p]) for p in peers}


def show(row: Row, peers: list[str], results: dict[str, float | str]) -> float | None:
    """Print a line; return xpool's time as a multiple of the best peer's."""
    others = [v for p, v in results.items() if p != "xpool" and isinstance(v, float)]
    mine = results["xpool"]
    ratio = mine / min(others) if others and isinstance(mine, float) else None
    cells = [v if isinstance(v, str) else f"{1e3 * v:.1f}" for v in map(results.get, peers) if v]
    said = "?" if ratio is None else f"{ratio:.2f}{' behind' if ratio > BEHIND else ''}"
    print(f"{row.name:38}" + "".join(f"{cell:>11}" for cell in cells) + f"   {said}", flush=True)
    return ratio


def main() -> None:
    """Run the rows that were asked for, and count where xpool is behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows of which the name, or number, has this")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--json", type=Path, help="where to write the medians, in seconds")
    given = parser.parse_args()
    peers = [
        p for p in given.peers.split(",")
        if p not in PACKAGES or importlib.util.find_spec(PACKAGES[p]) is not None
    ]  # fmt: skip
    if "xpool" not in peers:
        peers.insert(0, "xpool")
    print(f"{'milliseconds':38}" + "".join(f"{peer:>11}" for peer in peers) + "   xpool/best")
    ratios, kept = [], {}
    for number, row in enumerate(ROWS, 1):
        asked = given.only == str(number) if given.only.isdigit() else given.only in row.name
        if not asked:
            continue
        if row.needs and importlib.util.find_spec(row.needs) is None:
            continue
        kept[f"{number} {row.name}"] = results = run_row(row, peers, given.rounds)
        ratios.append(show(row, peers, results))
    if given.json is not None:
        given.json.write_text(json.dumps(kept, indent=1))
    behind = sum(ratio is None or ratio > BEHIND for ratio in ratios)
    print(f"behind in {behind} of {len(ratios)}")


if __name__ == "__main__":
    main()
