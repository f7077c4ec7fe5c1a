"""Every block of Python in the pages runs as it is shown, or says why it cannot.

A comment right above a block, which the page does not show, says how:

* ``<!-- not run: needs a TPU -->``: why it cannot be run here; the test is skipped for this reason.
* ``<!-- with: import torch -->``: what the reader's program has already (may be many lines).
* ``<!-- goes on -->``: the block is one program with the block before it.
* ``<!-- my_pool.py -->``: the blocks below import it by this name.

A block of kind ``text`` that follows is what the program prints, word for word.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from xpool import Pool

pytest.importorskip("torch", reason="most of the pages use torch")

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"(?:^<!-- ((?:(?!-->).)*) -->\n)?^```([^\n]*)\n(.*?)^```$", re.M | re.S)


@dataclass
class Program:
    """A block, or several that go on from each other."""

    place: str
    text: str
    why_not: str = ""
    files: dict[str, str] = field(default_factory=dict)
    prints: str | None = None


def programs(page: Path) -> list[Program]:
    """Return the programs of a page."""
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
            assert kind in ("", "with", "goes on"), f"{page.name}: what is <!-- {comment} -->?"
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
    """No block of Python is overlooked, however it is indented."""
    there = sum(page.read_text(encoding="utf-8").count("```python\n") for page in PAGES)
    joined = sum(page.read_text(encoding="utf-8").count("<!-- goes on -->\n") for page in PAGES)
    assert len(PROGRAMS) + joined == there > 20


def test_all_keywords_are_listed():
    """The tables of docs/api.md have each keyword of the verbs, and each argument of `Pool`."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").partition("```{eval-rst}")[0]
    functions = Pool, Pool.map, Pool.imap, Pool.apply_async
    wanted = {name for one in functions for name in inspect.signature(one).parameters}
    wanted -= {"self", "unknown"}
    assert wanted <= set(re.findall(r"\w+", text)), wanted - set(re.findall(r"\w+", text))


def test_help_is_read_in_a_minute():
    """`help(Pool)` begins with each argument, in 300 words; `help(Pool.map)` has each keyword."""
    text = inspect.getdoc(Pool) or ""
    assert len(text.split()) <= 300
    assert set(inspect.signature(Pool).parameters) <= set(re.findall(r"\w+", text))
    text = inspect.getdoc(Pool.map) or ""
    known = set(inspect.signature(Pool.map).parameters) - {"self", "unknown"}
    assert known <= set(re.findall(r"\w+", text))


@pytest.mark.parametrize("program", PROGRAMS)
def test_block(tmp_path: Path, program: Program):
    """The block runs without an error or a warning, and prints what is shown below it."""
    if program.why_not:
        pytest.skip(program.why_not)
    for name, text in {**program.files, "program.py": program.text}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        # torch tells of each connection that a rank closes when it leaves.
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    if program.prints is not None:
        assert done.stdout == program.prints
