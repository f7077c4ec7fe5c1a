"""`docs/draw.py` draws the pictures in the pages from the pages' tables."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.pure

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_those_of_the_tables(draw: ModuleType):
    """The pictures match the tables (run ``python docs/draw.py``), and a page shows each
    picture."""
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    for name, text in draw.pictures().items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == text, name
        assert f"pictures/{name})" in pages


def test_every_task_and_death_of_a_trace_is_drawn(draw: ModuleType):
    """The drawing has a bar for each finished task, a cross for each death, and one repeated
    task."""
    events = json.loads((DOCS / "pictures" / "trace.json").read_text(encoding="utf-8"))
    picture = ElementTree.fromstring(draw.trace(events["traceEvents"]))
    told = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    done = [text.split(":")[0] for text in told if re.search(r": [\d.]+ ms$", text)]
    numbers = [*(("load", n) for n in range(16)), *(("shrink", n) for n in range(24))]
    assert sorted(done) == sorted(f"item {n} of {function}()" for function, n in numbers)
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("exit code 3") == texts.count("9 again") == 1


def test_a_cell_without_a_figure_is_no_bar(draw: ModuleType):
    """A cell without a number has no bar, and a note after a number is ignored."""
    cells = ("293,000", "14.3 M", "23.8 (3)", "cannot", "breaks (BrokenProcessPool)", "")
    assert [draw.number(cell) for cell in cells] == [293_000, 14_300_000, 23.8, None, None, None]


@pytest.mark.parametrize("path", sorted(DOCS.glob("pictures/*.svg")), ids=lambda path: path.name)
def test_letters_can_be_read_on_a_phone(path: Path):
    """On a screen of 400 px, letters are 10 px high or more: the picture is not shown smaller, or
    has larger letters then."""
    text = path.read_text(encoding="utf-8")
    width = float(text.partition('viewBox="0 0 ')[2].split()[0])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?:[^;]*?([\d.]+)px", text)]
    small = re.search(r"@media \(max-width: 500px\) {[^}]*font-size: ([\d.]+)px", text)
    least = float(small[1]) if small and width > 400 else min(sizes)
    assert least * 368 / width >= 10
