"""Draws the pictures of the pages: ``python docs/draw.py`` writes them into ``docs/pictures``.

The trace is drawn from ``pictures/trace.json``, which `pool.trace` wrote; the plots from the tables
in ``dev/measurements.md`` and ``dev/scale.md``, so that no figure stands in two places.  Pictures
are SVG without scripts.  Each brings its own background and follows the reader's choice of light
or dark, so that it can be read on any page.  Plots are as wide as a phone; a trace, which is wider,
has larger letters where it is shown smaller.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "pictures"
WIDTH = 400
WIDE = 680  # a trace
STYLE = """
    svg { --card: #fff; --edge: #d0d7de; --text: #1f2328; --soft: #57606a; --rule: #e4e8ec;
          --ours: #0969da; --other: #a3adb8; --bad: #cf222e;
          --a: #2f74c0; --b: #8054c7; --c: #a6611a; }
    @media (prefers-color-scheme: dark) {
      svg { --card: #161b22; --edge: #30363d; --text: #e6edf3; --soft: #9da7b1; --rule: #2b323b;
            --ours: #58a6ff; --other: #66717d; --bad: #ff7b72; }
    }
    text { font: 12px system-ui, sans-serif; fill: var(--text); }
    .soft { fill: var(--soft); } .head { font-weight: 600; font-size: 13px; }
    .end { text-anchor: end; } .mid { text-anchor: middle; } .mine { font-weight: 600; }
    .in { fill: #fff; font-size: 11px; }
    .rule { stroke: var(--rule); } .bad { stroke: var(--bad); fill: none; stroke-width: 2; }
    .line { fill: none; stroke-width: 2; } .why { fill: var(--bad); font-size: 11px; }
    @media (max-width: 500px) {
      .wide text { font-size: 20px; } .wide .in, .wide .why { display: none; }
    }
"""


class Picture:
    """The parts of an SVG, in the order in which they are painted."""

    def __init__(self, title: str, width: int = WIDTH) -> None:
        self.title, self.width = title, width
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Write a text that begins at x, or ends or has its middle there."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>')

    def rect(self, x: float, y: float, wide: float, high: float, colour: str, says: str) -> None:
        """Draw a bar; `says` is shown by a browser when the pointer is over it."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(wide, 1):.1f}" height="{high:.1f}" rx="2"'
        says = f"<title>{escape(says)}</title>"
        self.parts.append(f'<rect {place} fill="var(--{colour})">{says}</rect>')

    def path(self, data: str, kind: str, more: str = "") -> None:
        """Draw lines."""
        self.parts.append(f'<path d="{data}" class="{kind}" {more}/>')

    def svg(self, height: float) -> str:
        """Return the text of the file."""
        size = f'viewBox="0 0 {self.width} {height:.0f}" width="{self.width}" height="{height:.0f}"'
        place = f'x=".5" y=".5" width="{self.width - 1}" height="{height - 1:.0f}" rx="6"'
        kind = ' class="wide"' if self.width == WIDE else ""
        begin = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"{kind}>',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect {place} fill="var(--card)" stroke="var(--edge)"/>',
        ]
        return "\n".join([*begin, *self.parts, "</svg>\n"])


# A trace ------------------------------------------------------------------------------------------


def trace(events: Sequence[dict[str, Any]]) -> str:
    """Draw the Chrome trace events that `pool.trace` writes: a row for each worker."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    moments = [e for e in events if e["ph"] == "i"]
    last = max(e["ts"] + e.get("dur", 0) for e in [*spans, *moments])
    left, row, top = 106.0, 34, 44
    scale = (WIDE - left - 20) / last
    bottom = top + row * len(names)
    picture = Picture("What the workers of a pool did, by time", WIDE)
    colours = _by_function(spans)
    x = left
    for function, colour in colours.items():
        picture.rect(x, 16, 12, 12, colour, function)
        picture.text(x + 17, 26, function)
        x += 34 + 11 * len(function)
    picture.path(f"M{x} 17 l10 10 m0 -10 l-10 10", "bad")
    picture.text(x + 17, 26, "the worker died")
    step = _round_step(last / 1e3 / 6)
    for ms in range(0, int(last / 1e3) + 1, step):
        at = left + ms * 1e3 * scale
        picture.path(f"M{at:.1f} {top} V{bottom}", "rule")
        picture.text(at, bottom + 18, f"{ms} ms", "soft mid")
    for tid, name in names.items():
        picture.text(left - 10, top + row * tid + 21, name, "soft end")
    again = {e["name"].removesuffix(" again") for e in moments if e["name"].endswith(" again")}
    for e in spans:
        x, y, wide = left + e["ts"] * scale, top + row * e["tid"] + 5, e["dur"] * scale
        says = f"{e['name']}: {e['dur'] / 1e3:.1f} ms"
        picture.rect(x, y, wide - 0.5, 24, colours[_function(e["name"])], says)
        short = re.sub(r"\D+", "", e["name"]) + (" again" if e["name"] in again else "")
        if wide > 4 + 6 * len(short):
            picture.text(x + wide / 2, y + 16, short, "in mid")
    for e in (e for e in moments if e["s"] == "t"):
        x, y = left + e["ts"] * scale, top + row * e["tid"]
        picture.path(f"M{x - 5:.1f} {y + 12} l10 10 m0 -10 l-10 10", "bad")
        picture.text(x - 9, y + 21, re.sub(r".*, ", "", e["name"]), "why end")
    return picture.svg(bottom + 32)


def _by_function(spans: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Give a colour to each function, in the order in which they were first run."""
    functions = dict.fromkeys(_function(e["name"]) for e in sorted(spans, key=lambda e: e["ts"]))
    return dict(zip(functions, "abc"))


def _function(name: str) -> str:
    return name.split(" of ")[-1]


def _round_step(about: float) -> int:
    """Return a round number of milliseconds near `about`."""
    power = 10 ** math.floor(math.log10(about))
    return int(min((power * n for n in (1, 2, 5, 10)), key=lambda step: abs(step - about)))


# Plots --------------------------------------------------------------------------------------------


def table(page: str, *columns: str) -> list[dict[str, str]]:
    """Return the rows of the first table on a page whose header begins with these columns."""
    lines = iter(page.splitlines())
    for line in lines:
        head = _cells(line)
        if tuple(head[: len(columns)]) == columns:
            break
    else:
        raise ValueError(f"there is no table with the columns {columns}")
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(head, _cells(line))))
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(cell: str) -> float | None:
    """Return the figure in a cell of a table, or None where words or nothing stand there."""
    found = re.fullmatch(r"([\d,.]+)( M)?( \(\d+\))?", cell)
    return float(found[1].replace(",", "")) * (1e6 if found[2] else 1) if found else None


def bars(title: str, panels: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Draw panels of bars: a heading, and for each bar, if any, its name and its cell in the
    table."""
    picture = Picture(title)
    left, y = 146.0, 14.0
    for heading, entries in panels:
        y += 18
        picture.text(14, y, heading, "head")
        y += 10
        most = max((number(cell) or 0 for _, cell in entries), default=0)
        for name, cell in entries:
            value = number(cell)
            mine = name.startswith("xpool")
            picture.text(left - 8, y + 12, name, "end mine" if mine else "end")
            wide = 0.0
            if value is not None:
                wide = max(1.0, (WIDTH - left - 64) * value / most)
                picture.rect(left, y + 2, wide, 12, "ours" if mine else "other", f"{name}: {cell}")
            picture.text(left + wide + 6, y + 12, re.sub(r" \(.*", "", cell) or "-", "soft")
            y += 17
        y += 8
    return picture.svg(y + 8)


def lines(
    title: str, across: str, up: str, series: dict[str, list[tuple[float, float]]],
    show: Callable[[float], str],
) -> str:  # fmt: skip
    """Draw one line for each name over two logarithmic axes."""
    picture = Picture(title)
    left, top, right, bottom = 62.0, 40.0, WIDTH - 130.0, 260.0
    points = [point for line in series.values() for point in line]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def at_x(x: float) -> float:
        begin, end = math.log(min(xs)), math.log(max(xs))
        return left + (right - left) * (math.log(x) - begin) / (end - begin)

    def at_y(y: float) -> float:
        return bottom - (bottom - top) * (math.log10(y) - low) / (high - low)

    picture.text(14, 24, up, "head")
    for power in range(low, high + 1):
        picture.path(f"M{left} {at_y(10.0**power):.1f} H{right}", "rule")
        picture.text(left - 8, at_y(10.0**power) + 4, f"{10.0**power:,.0f}", "soft end")
    for x in sorted(set(xs)):
        picture.text(at_x(x), bottom + 20, show(x), "soft mid")
    picture.text((left + right) / 2, bottom + 40, across, "soft mid")
    free = -math.inf  # names stand where their lines end, below each other
    for name, line in sorted(series.items(), key=lambda entry: -entry[1][-1][1]):
        mine = name.startswith("xpool")
        data = "M" + " L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in line)
        dashes = "" if mine else f'stroke-dasharray="{2 + 3 * list(series).index(name)} 3"'
        colour = "var(--ours)" if mine else "var(--soft)"
        picture.path(data, "line", f'stroke="{colour}" {dashes}')
        free = max(free + 16, at_y(line[-1][1]) + 4)
        picture.text(right + 8, free, name, "mine" if mine else "soft")
    return picture.svg(bottom + 54)


def rates(page: str) -> str:
    """Draw what pools do in a second, from the table of all peers."""
    rows = {row["work"]: row for row in table(page, "work", "unit", "xpool", "stdlib fork")}
    asked = {
        "imap_unordered(noop), chunksize 1": "calls that do nothing: tasks a second",
        "1 KiB tensors there and back": "1 KiB, there and back: tensors a second",
        "64 MiB tensor, worker to parent": "64 MiB from a worker: ms, less is better",
    }
    panels = [
        (says, [(peer, cell) for peer, cell in list(rows[work].items())[2:]])
        for work, says in asked.items()
    ]
    return bars("Rates against peers", panels)


def first(page: str) -> str:
    """Draw how long a program waits for its first result."""
    rows = table(page, "from `Pool(2)` to the first answer, ms")
    panels: list[tuple[str, Sequence[tuple[str, str]]]] = [
        ("ms to the first result, less is better:", [])
    ]
    for row in rows:
        (_, name), *cells = row.items()
        panels.append((name.replace("`", ""), cells))
    return bars("Time to the first result", panels)


def sizes(page: str) -> str:
    """Draw what a task costs by the size of its argument."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in table(page, "argument, bytes"):
        size = number(row.pop("argument, bytes")) or 0
        for name, cell in row.items():
            if (value := number(cell)) is not None:
                series.setdefault(name, []).append((size, value))
    title = "Cost of a task against its size"
    return lines(title, "size of the argument", "us a task", series, _size)


def scale(page: str) -> str:
    """Draw how busy the workers of 1,000 hosts are, by how long a task takes."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in table(page, "hosts", "a task takes, s"):
        name = f"round trip {row['round trip, ms']} ms"
        point = number(row["a task takes, s"]) or 0.0, number(row["busy, %"]) or 0.0
        if row["hosts"] == "1,000":
            series.setdefault(name, []).append(point)
    title = "How busy the workers of 1,000 hosts are"
    return lines(title, "seconds that a task takes", "busy, %", series, lambda x: f"{x:g}")


def _size(size: float) -> str:
    """Say a number of bytes shortly."""
    steps = max(0, min(2, int(math.log2(size) // 10)))
    return f"{size / 1024**steps:.0f} {('B', 'KiB', 'MiB')[steps]}"


def pictures() -> dict[str, str]:
    """Return the text of each picture by its name."""
    page = (DOCS / "dev" / "measurements.md").read_text(encoding="utf-8")
    hosts = (DOCS / "dev" / "scale.md").read_text(encoding="utf-8")
    events = json.loads((PICTURES / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return {
        "trace.svg": trace(events),
        "rates.svg": rates(page),
        "sizes.svg": sizes(page),
        "first.svg": first(page),
        "scale.svg": scale(hosts),
    }


def main() -> None:
    """Write all pictures."""
    for name, text in pictures().items():
        (PICTURES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
