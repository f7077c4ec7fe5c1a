"""Every Python block in the pages runs as shown, or has a reason why it cannot.

A hidden comment above a block says how to run it:

* ``<!-- not run: needs a TPU -->``: the block cannot run; its test is skipped for this reason.
* ``<!-- with: import torch -->``: code that the reader's program already has; any number of lines.
* ``<!-- goes on -->``: the block continues the program of the block before it.
* ``<!-- my_pool.py -->``: the blocks below can import this block by that name.

A block of kind ``text`` that follows has the program's exact output.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import scripts
from support.scripts import ROOT

from xpool import Pool

pytest.importorskip("torch", reason="most of the pages use torch")

pytestmark = pytest.mark.torch

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"(?:^<!-- ((?:(?!-->).)*) -->\n)?^```([^\n]*)\n(.*?)^```$", re.M | re.S)


@dataclass
class Program:
    """A block, or several that continue each other."""

    place: str
    text: str
    why_not: str = ""
    files: dict[str, str] = field(default_factory=dict)
    prints: str | None = None


def programs(page: Path) -> list[Program]:
    found: list[Program] = []
    files: dict[str, str] = {}
    text, end = page.read_text(encoding="utf-8"), -1
    for match in BLOCK.finditer(text):
        comment, language, code = match[1] or "", match[2], match[3]
        kind, _, rest = comment.partition(":")
        if language == "text" and found and not text[end : match.start()].strip():
            found[-1].prints = code
        if language != "python":
            continue
        line = text.count("\n", 0, match.start(3)) + 1
        if comment == "goes on":
            found[-1].text += code
        else:
            before = rest.strip() + "\n" if kind == "with" else ""
            place = f"{page.relative_to(ROOT)}:{line}"
            found.append(Program(place, before + code, files=dict(files)))
        if kind == "not run":
            found[-1].why_not = rest.strip()
        elif comment.endswith(".py"):
            files[comment] = code
        else:
            assert kind in ("", "with", "goes on"), f"{page.name}: unknown <!-- {comment} -->"
        end = match.end()
    return found


PROGRAMS = [
    pytest.param(
        program,
        id=program.place,
        marks=() if page.name == "README.md" or program.why_not else pytest.mark.exhaustive,
    )
    for page in PAGES
    for program in programs(page)
]


def test_every_block_is_found():
    """No Python block is missed, also if it is indented."""
    there = sum(page.read_text(encoding="utf-8").count("```python\n") for page in PAGES)
    joined = sum(page.read_text(encoding="utf-8").count("<!-- goes on -->\n") for page in PAGES)
    assert len(PROGRAMS) + joined == there > 20


def test_all_keywords_are_listed():
    """The tables of docs/api.md have all keywords of the verbs, and all arguments of `Pool`."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").partition("```{eval-rst}")[0]
    functions = Pool, Pool.map, Pool.imap, Pool.apply_async
    wanted = {name for one in functions for name in inspect.signature(one).parameters}
    wanted -= {"self"}
    assert wanted <= set(re.findall(r"\w+", text)), wanted - set(re.findall(r"\w+", text))


def test_keywords_of_each_verb():
    """The table of verbs has the keywords of each verb, some as those of another."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")

    def listed(verb: str) -> set[str]:
        row = re.search(rf"^\| `{verb}\(.*\|(.*)\|$", text, re.M)
        assert row, verb
        others = re.findall(r"those of `(\w+)`", row[1])
        own = set(re.findall(r"`(\w+)`", row[1])) - set(others)
        return own.union(*map(listed, others))

    for verb in ("apply", "apply_async", "map", "map_async", "run_all"):
        parameters = inspect.signature(getattr(Pool, verb)).parameters.values()
        wanted = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
        assert listed(verb) == wanted, verb


def test_help_is_short():
    """`help(Pool)` has all arguments in 300 words; `help(Pool.map)` has all keywords."""
    text = inspect.getdoc(Pool) or ""
    assert len(text.split()) <= 300
    assert set(inspect.signature(Pool).parameters) <= set(re.findall(r"\w+", text))
    text = inspect.getdoc(Pool.map) or ""
    known = set(inspect.signature(Pool.map).parameters) - {"self"}
    assert known <= set(re.findall(r"\w+", text))


@pytest.mark.parametrize("program", PROGRAMS)
def test_block(tmp_path: Path, program: Program):
    """The block runs without an error or a warning, and prints the text shown below it."""
    if program.why_not:
        pytest.skip(program.why_not)
    for name, text in {**program.files, "program.py": program.text}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    out = scripts.run_ok(
        ["-W", "error", "program.py"],
        cwd=tmp_path,
        # torch would log each connection that a leaving rank closes.
        TORCH_CPP_LOG_LEVEL="ERROR",
        # As in a terminal, where lines of the program and of workers are in order.
        PYTHONUNBUFFERED="1",
    )
    if program.prints is not None:
        assert out == program.prints
