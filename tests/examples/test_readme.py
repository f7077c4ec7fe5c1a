"""What the README and the guides show is what happens."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])
GUIDE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")

Block = tuple[str, str]  # language, text


def fenced_blocks(text: str) -> list[Block]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def test_first_screen():
    """Install line, script and output are there within the first 40 lines, as a screen shows."""
    first = "\n".join(README.splitlines()[:40])
    assert [language for language, _ in fenced_blocks(first)] == ["sh", "python", "text"]


def test_commands_exist():
    """The two commands, and every other target that is named, are in the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M))
    assert {"run", "test"} <= named
    assert named <= targets


def anchors(page: Path) -> set[str]:
    """Return what links may name of a page: its headings, as GitHub and the site name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    """Links to files lead to files that exist, links to headings to headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize(
    ("module", "name"),
    sorted(set(re.findall(r"`(xpool(?:\.\w+)*)\.(\w+)[`(]", GUIDE))),
)
def test_names_in_the_guide_exist(module: str, name: str):
    """Each name that the guide offers can be imported, or is marked as missing there."""
    if re.search(rf"`{module}\.{name}[^`]*`, \*not in this version\*", GUIDE):
        pytest.skip(f"{module}.{name} is marked as not in this version")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.torch
def test_imports_in_the_guide_work():
    """The import lines that the guide puts in place of others work."""
    pytest.importorskip("torch", reason="the guide is for programs that use torch")
    for language, text in fenced_blocks(GUIDE):
        if language == "python":
            exec(compile(text, "docs/migrating.md", "exec"), {})
