"""Pages for developers name files that exist; the READMEs of packages name all of theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "xpool"
READMES = sorted(PACKAGE.rglob("README.md"))
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/dev/*.md"))]
FOLDERS = [path.name[1:] for path in PACKAGE.iterdir() if re.match("_[a-z]", path.name)]
USER_PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md")])
BASES = ROOT, PACKAGE, PACKAGE / "_pickling"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_large_packages_have_a_readme():
    """The three packages in which a newcomer gets lost have a README beside the code."""
    assert [page.parent.name for page in READMES] == ["_engine", "_pickling", "_worker"]


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_a_readme_names_each_file_once(page: Path):
    """The tree of a README has a line for each file of its package, and for no other."""
    tree = page.read_text(encoding="utf-8").split("```")[1]
    named = re.findall(r"^ *(\w+\.py) ", tree, re.M)
    files = [path.name for path in page.parent.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(named) == sorted(files)


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_a_readme_is_short(page: Path):
    """A README has at most 300 words, so that it is read."""
    assert len(page.read_text(encoding="utf-8").split()) <= 300


@pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
def test_pages_for_users_name_nothing_private(page: Path):
    """A page for users names no private module; docs/security.md says where each check is made."""
    private = rf"\b(?:xpool\._|_(?:{'|'.join(FOLDERS)})\b)"
    assert page.name == "security.md" or not re.findall(private, page.read_text("utf-8"))


def test_the_tour_is_short():
    """docs/dev/design.md has at most 2,000 words: each decision has the page of its subject."""
    text = (ROOT / "docs" / "dev" / "design.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 2000


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page: Path):
    """A path in quotes, such as `_engine/jobs/scheduler`, leads to a file or folder."""
    named = re.findall(r"`((?:\w+/)+\w*(?:\.(?:py|md))?)`", page.read_text(encoding="utf-8"))
    bases = (*BASES, page.parent)
    gone = [
        name
        for name in named
        if not any((base / end).exists() for base in bases for end in (name, f"{name}.py"))
    ]
    assert not gone
