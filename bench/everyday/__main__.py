"""Everyday programs, with xpool and with what a user would pick instead.

Each row is a small program, run in a process of its own with each peer, one after the other, round
by round, after xpool's modules have been compiled.  The table has medians, and the ratio of xpool's
to that of the best peer.  xpool is behind if it takes more than a tenth longer, or more memory.

`rows` has the rows, `programs` their texts, and `peers` the functions that the texts call.
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
from collections.abc import Collection
from multiprocessing import get_start_method
from pathlib import Path

from bench.everyday.peers import PACKAGES, PEERS, PRELUDE
from bench.everyday.rows import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0
"""Seconds that one program may take."""
BEHIND = 1.1
COLUMN = 14
"""The width of a column of the table."""


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
