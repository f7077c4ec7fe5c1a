"""The README and the guides show what really happens."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from support.scripts import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])
GUIDE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")

Block = tuple[str, str]  # language, text


def fenced_blocks(text: str) -> list[Block]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def test_first_screen():
    """The first 40 lines have an install line, a script and its output."""
    first = "\n".join(README.splitlines()[:40])
    assert [language for language, _ in fenced_blocks(first)] == ["sh", "python", "text"]


def test_commands_exist():
    """All make targets that the README names exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M))
    assert {"run", "test"} <= named
    assert named <= targets


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site build them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path):
    """Links to files and headings have targets."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


@pytest.mark.torch  # some of the modules import it
@pytest.mark.parametrize(
    ("module", "name"),
    sorted(set(re.findall(r"`(xpool(?:\.\w+)*)\.(\w+)[`(]", GUIDE))),
)
def test_names_in_the_guide_exist(module: str, name: str):
    """Each name in the guide can be imported, or is marked as missing."""
    if re.search(rf"`{module}\.{name}[^`]*`, \*not in this version\*", GUIDE):
        pytest.skip(f"{module}.{name} is marked as not in this version")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.torch
def test_imports_in_the_guide_work():
    """The guide's import lines work."""
    pytest.importorskip("torch", reason="the guide is for programs that use torch")
    for language, text in fenced_blocks(GUIDE):
        if language == "python":
            exec(compile(text, "docs/migrating.md", "exec"), {})
