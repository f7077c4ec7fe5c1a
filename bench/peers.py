"""Compare xpool with its peers at the same works, with two workers each.

Each round measures all peers in turn and begins with another one, so that a slow minute of the
machine does not affect one peer alone.  The tables show medians of the rounds.  Each peer runs in
its own process (`bench.measure`).  A time limit ends a peer that hangs; hangs and crashes are
recorded as outcomes.

To save time, a peer is left out of the later rounds of a work if it has failed twice, or if it is
three times worse than the best peer after two rounds.  ``--all`` measures it in all rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import floor
from bench.adapters import PEERS, WORKERS
from bench.procs import adopt_orphans, kill_descendants
from bench.works import WORKS, Work, grouped, uses_torch

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 45.0
"""Additional time for the first work of a process, which imports and opens the first pool."""
SETTLED_ROUNDS = 2
FAR_BEHIND = 3.0
"""A peer so many times worse than the best after `SETTLED_ROUNDS` rounds is not measured again."""
Outcomes = dict[str, dict[str, list[dict[str, Any]]]]
"""The outcomes of all rounds, by work and by peer."""


def _environment() -> dict[str, str]:
    """The environment variables of all measured processes."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # torch's own threads would compete for the cores, and a process with such threads must
        # not fork.
        "OMP_NUM_THREADS": "1",
    }


class _Server:
    """A process that imports once, and forks the processes that measure."""

    def __init__(self, torch: bool) -> None:
        self.link, other = socket.socketpair()
        command = [sys.executable, "-m", "bench.measure", "--serve", str(other.fileno())]
        self.process = subprocess.Popen(
            command + (["--torch"] if torch else []),
            cwd=ROOT,
            env=_environment(),
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
        )
        other.close()

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Start a process for `request`; return its pid."""
        socket.send_fds(self.link, [json.dumps(request).encode()], fds)
        data = self.link.recv(8)
        if len(data) != 8:
            raise RuntimeError("the server of bench.measure has ended; see the output above")
        return int.from_bytes(data, "big")

    def close(self) -> None:
        self.link.close()
        self.process.wait(10)


class _Child:
    """A process that measures one peer and sends a line for each outcome."""

    def __init__(self, servers: list[_Server], torch: bool, request: dict[str, Any]) -> None:
        self._spare = [server.process.pid for server in servers]
        self._read, write = os.pipe()
        self._log = tempfile.TemporaryFile()
        self._pid = servers[torch].fork(request, [write, self._log.fileno()])
        os.close(write)
        self._pidfd = os.pidfd_open(self._pid)
        self._buffer = b""

    def line(self, seconds: float) -> dict[str, Any] | None:
        """The next outcome; None if the process ends or `seconds` pass before it."""
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = max(0.0, end - time.monotonic())
            ready, _, _ = select.select([self._read, self._pidfd], [], [], left)
            if self._read in ready and (data := os.read(self._read, 65536)):
                self._buffer += data
            else:
                return None
        text, _, self._buffer = self._buffer.partition(b"\n")
        outcome: dict[str, Any] = json.loads(text)
        return outcome

    def has_ended(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the process."""
        return bool(select.select([self._pidfd], [], [], seconds)[0])

    def end(self) -> str:
        """Kill the process and its descendants; return the last line of its output."""
        kill_descendants(self._spare)
        os.close(self._read)
        os.close(self._pidfd)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self._log.close()
        return lines[-1][:300] if lines else ""


def _measure(
    servers: list[_Server], peer: str, keys: list[str], quick: bool
) -> dict[str, dict[str, Any]]:
    """Measure works of one peer, in one process until a work fails."""
    found: dict[str, dict[str, Any]] = {}
    left = list(keys)
    while left:
        request = {"peer": peer, "works": left, "quick": quick}
        child = _Child(servers, uses_torch(keys), request)
        limit = START_SECONDS
        outcome: dict[str, Any] | None = None
        while left:
            limit += WORKS[left[0]].seconds
            outcome = child.line(limit)
            if outcome is None:
                break
            found[left.pop(0)] = outcome
            if "fault" in outcome and not outcome["goes_on"]:
                break
            limit = 0.0
        # Give the process time to end by itself.  This time is not measured.
        ended = child.has_ended(2 if left else 20)
        words = child.end()
        if outcome is None:
            key = left.pop(0)
            fault = f"crashes: {words}" if ended else f"hangs: no result in {limit:.0f} s"
            found[key] = {"work": key, "fault": fault}
    return found


def _median(outcomes: list[dict[str, Any]]) -> float | None:
    """The median of the rounds that have a figure; None if no round has."""
    values = [outcome["value"] for outcome in outcomes if "value" in outcome]
    return statistics.median(values) if values else None


def _is_settled(key: str, peer: str, by_peer: dict[str, list[dict[str, Any]]]) -> bool:
    """Has this peer failed twice at the work, or is it far behind?"""
    outcomes = by_peer[peer]
    mine = _median(outcomes)
    if sum("fault" in outcome for outcome in outcomes) >= SETTLED_ROUNDS:
        return True
    if peer == "xpool" or mine is None or len(outcomes) < SETTLED_ROUNDS:
        return False
    others = [_median(found) for name, found in by_peer.items() if name != "xpool"]
    values = [value for value in others if value is not None]
    if WORKS[key].higher_is_better:
        return mine * FAR_BEHIND < max(values)
    return mine > min(values) * FAR_BEHIND


def _why_not(peer: str, key: str) -> str:
    """Return the reason why a peer cannot do a work; empty if it can."""
    if uses_torch([key]) and PEERS[peer].without_torch:
        return PEERS[peer].without_torch
    return "cannot" if key == "lambda" and not PEERS[peer].lambdas else ""


def run_rounds(
    peers: list[str], keys: list[str], options: argparse.Namespace
) -> tuple[Outcomes, list[dict[str, floor.Figure]]]:
    """Run all rounds; return the outcomes and the floors of each round."""
    outcomes: Outcomes = {key: {peer: [] for peer in peers} for key in keys}
    floors: list[dict[str, floor.Figure]] = []
    servers = [_Server(torch=False), _Server(torch=True)]
    rounds = options.rounds
    for number in range(rounds):
        text = subprocess.run(
            [sys.executable, "-m", "bench.floor", "--json", "-"],
            cwd=ROOT,
            env=_environment(),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        floors.append(json.loads(text))
        shift = number * max(1, len(peers) // rounds) % len(peers)
        for peer in peers[shift:] + peers[:shift]:
            begin = time.monotonic()
            wanted = [
                key for key in keys if options.all or not _is_settled(key, peer, outcomes[key])
            ]
            wanted = [key for key in wanted if not _why_not(peer, key)]
            runs = [[key] for key in wanted] if options.isolate else grouped(wanted, PEERS[peer])
            for run in runs:
                for key, outcome in _measure(servers, peer, run, options.quick).items():
                    outcomes[key][peer].append(outcome)
            took = time.monotonic() - begin
            print(f"round {number + 1}/{rounds} {peer}: {took:.1f} s", file=sys.stderr, flush=True)
    for server in servers:
        server.close()
    return outcomes, floors


def summarise(outcomes: Outcomes, missing: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Make a cell for each work and peer: the median with a note, or the fault."""
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for key, by_peer in outcomes.items():
        cells[key] = {peer: {"fault": PEERS[peer].missing} for peer in missing}
        for peer, rounds in by_peer.items():
            values = [outcome["value"] for outcome in rounds if "value" in outcome]
            faults = [outcome["fault"] for outcome in rounds if "fault" in outcome]
            if not rounds:
                cells[key][peer] = {"fault": _why_not(peer, key)}
            elif not values:
                cells[key][peer] = {"fault": faults[-1]}
            else:
                notes = [outcome["note"] for outcome in rounds if outcome.get("note")]
                if faults:
                    notes.append(f"{len(faults)} of {len(rounds)} rounds: {faults[-1]}")
                cells[key][peer] = {
                    "value": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                    "faults": len(faults),
                    "note": "; ".join(dict.fromkeys(notes)),
                }
    return cells


def _number(value: float) -> str:
    """Format a number with three significant digits."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def _best_peer(work: Work, cells: dict[str, dict[str, Any]]) -> tuple[str, float] | None:
    """The best peer except xpool, among those without a failed round."""
    values = [
        (cell["value"], peer)
        for peer, cell in cells.items()
        if peer != "xpool" and "value" in cell and not cell["faults"]
    ]
    if not values:
        return None
    value, peer = max(values) if work.higher_is_better else min(values)
    return peer, value


def _comparison(
    key: str, cells: dict[str, dict[str, Any]], floors: dict[str, floor.Figure]
) -> dict[str, Any]:
    """Compare xpool with the best peer and with the floors."""
    work = WORKS[key]
    mine = cells.get("xpool", {}).get("value")
    result: dict[str, Any] = {}
    if (best := _best_peer(work, cells)) is not None:
        result["best_peer"], result["best_value"] = best
        if mine:
            ratio = mine / best[1]
            result["times_best_peer"] = ratio if work.higher_is_better else 1 / ratio
    result["floors"] = {
        name: mine / floors[name]["value"] for name in work.floors if mine and name in floors
    }
    if best is not None:
        result["best_peer_floors"] = {
            name: best[1] / floors[name]["value"] for name in work.floors if name in floors
        }
    return result


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def tables(report: dict[str, Any]) -> str:
    """Format the report as markdown: floors, xpool against the best peer, all peers."""
    floors, cells, comparison = report["floors"], report["cells"], report["comparison"]
    lines = [floor.table(floors), ""]
    lines += [
        _row("work", "unit", "xpool", "best peer", "", "xpool is better by", "xpool in floors"),
        "|---" * 7 + "|",
    ]
    for key, row in cells.items():
        mine, compared = row.get("xpool", {}), comparison[key]
        times = compared.get("times_best_peer")
        in_floors = [f"{ratio:.2f} {name}" for name, ratio in compared["floors"].items()]
        lines.append(
            _row(
                WORKS[key].title,
                WORKS[key].unit,
                _number(mine["value"]) if "value" in mine else mine.get("fault", "-"),
                compared.get("best_peer", "-"),
                _number(compared["best_value"]) if "best_value" in compared else "-",
                f"{times:.2f}x" if times else "-",
                ", ".join(in_floors) or "-",
            )
        )
    plain, closure = (cells.get(k, {}).get("xpool", {}).get("value") for k in ("imap", "lambda"))
    if plain and closure:
        lines += ["", f"xpool's lambda runs at {closure / plain:.2f} of its plain function's rate."]
    names = list(dict.fromkeys(peer for row in cells.values() for peer in row))
    names.sort(key=list(PEERS).index)
    remarks: list[str] = []
    lines += ["", _row("work", "unit", *names), "|---" * (len(names) + 2) + "|"]
    for key, row in cells.items():
        shown = []
        for peer in names:
            cell = row[peer]
            text = _number(cell["value"]) if "value" in cell else cell["fault"].split(":")[0]
            remark = cell.get("note") or (cell["fault"] if ":" in cell.get("fault", "") else "")
            if remark:
                if remark not in remarks:
                    remarks.append(remark)
                text += f" ({remarks.index(remark) + 1})"
            shown.append(text)
        lines.append(_row(WORKS[key].title, WORKS[key].unit, *shown))
    if remarks:
        lines.append("")
        lines += [f"{number}. {remark}" for number, remark in enumerate(remarks, 1)]
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="default: 5, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--peers", help=f"separated by commas, from: {', '.join(PEERS)}")
    parser.add_argument("--works", help=f"separated by commas, from: {', '.join(WORKS)}")
    parser.add_argument("--all", action="store_true", help="every peer in every round (slow)")
    parser.add_argument("--isolate", action="store_true", help="a process for each work (slow)")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    options = parser.parse_args()
    for name, known in (("peers", PEERS), ("works", WORKS)):
        given = getattr(options, name)
        chosen = given.split(",") if given else list(known)
        if unknown := [item for item in chosen if item not in known]:
            parser.error(f"--{name}: unknown: {', '.join(unknown)}")
        setattr(options, name, chosen)
    options.rounds = options.rounds or (1 if options.quick else 5)
    return options


def main() -> None:
    options = _arguments()
    adopt_orphans()
    versions = {peer: PEERS[peer].version() for peer in options.peers}
    present = [peer for peer, version in versions.items() if version is not None]
    missing = [peer for peer, version in versions.items() if version is None]
    begin = time.monotonic()
    outcomes, floors = run_rounds(present, options.works, options)
    cells = summarise(outcomes, missing)
    figures = floor.median_of(floors)
    report = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "workers": WORKERS,
        "rounds": options.rounds,
        "quick": options.quick,
        "seconds": time.monotonic() - begin,
        "versions": {**versions, "torch": _torch_version()},
        "floors": figures,
        "cells": cells,
        "comparison": {key: _comparison(key, row, figures) for key, row in cells.items()},
        "outcomes": outcomes,
    }
    known = ", ".join(f"{p} {v}" for p, v in report["versions"].items() if v)
    print(
        f"{report['date']}, Python {report['python']}, {report['cpus']} CPUs, {WORKERS} workers, "
        f"medians of {options.rounds} rounds, {report['seconds']:.0f} s in all ({known})\n"
    )
    print(tables(report))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


def _torch_version() -> str:
    """The version of torch, without importing it."""
    return PEERS["torch.multiprocessing"].version() or "not installed"


if __name__ == "__main__":
    main()
