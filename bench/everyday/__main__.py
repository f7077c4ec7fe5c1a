"""Run everyday programs with xpool and with its alternatives.

Each row of the table is a small program.  A round runs it once with each peer, in a new process.
xpool's modules are compiled before.  The table shows the median of each peer, and the ratio of
xpool's median to the best peer's.  xpool is "behind" if this ratio is above 1.1.

`rows` has the rows, `programs` has their texts, and `peers` has the functions that the texts call.
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
"""Seconds after which a program counts as hanging."""
BEHIND = 1.1
COLUMN = 14
"""The width of a column of the table."""


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    found.pop("PYTHONDONTWRITEBYTECODE", None)  # users run with compiled modules
    return found


def measure(row: Row, peer: str, folder: Path) -> float | str:
    """Run a program once; return its seconds, or a word that says why it has none."""
    path = folder / f"with_{peer}.py"  # the name of the peer alone would hide its package
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
"""The number that `tell` prints.  pytest may have printed dots before it in the line."""


def run_row(row: Row, peers: list[str], rounds: int) -> dict[str, float | str]:
    """Return for each peer its median, or the word that `measure` returned."""
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
"""Peers that fork their workers from the program if `fork` is Python's default start method.
Such workers have the program's modules and data from the start."""


def compare(row: Row, results: dict[str, float | str], without: Collection[str] = ()) -> float:
    """Return xpool's median divided by the best peer's; inf if one of them has none."""
    others = [
        v for p, v in results.items() if p not in {"xpool", *without} and isinstance(v, float)
    ]
    mine = results["xpool"]
    if not others or isinstance(mine, str):
        return math.inf
    least = 0.02 if row.unit == "B/task" else 0.0  # fewer than 20 bytes are no advantage
    return max(mine, least) / max(min(others), least)


def show(row: Row, peers: list[str], results: dict[str, float | str]) -> float:
    """Print a row of the table; return the ratio."""
    ratio = compare(row, results)
    cells = [v if isinstance(v, str) else f"{1e3 * v:.1f}" for v in map(results.__getitem__, peers)]
    said = "?" if ratio == math.inf else f"{ratio:.2f}{' behind' if ratio > BEHIND else ''}"
    line = f"{row.name:36}{row.unit:>7}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)
    print(f"{line}   {said}", flush=True)
    return ratio


def main() -> None:
    """Run the chosen rows, and count those in which xpool is behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="a row's number, or a part of its name")
    parser.add_argument("--peers", default=",".join([*PEERS, "interpreters", "joblib"]))
    parser.add_argument("--json", type=Path, help="write the medians to this file, in seconds")
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
            # In rows with their own programs, these names stand for other peers, e.g. threads.
            forks = FORKS if not row.programs and get_start_method() == "fork" else ()
            only_forks += compare(row, results, forks) <= BEHIND
    if given.json is not None:
        given.json.write_text(json.dumps(kept, indent=1))
    print(
        f"behind in {behind} of {len(kept)} rows; "
        f"in {only_forks} of these only peers that fork the program are ahead"
    )


if __name__ == "__main__":
    main()
