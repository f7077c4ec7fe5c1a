"""The size of files, and the names by which they are found."""

from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

PACKAGE = Path(__file__).resolve().parents[2] / "xpool"
FILE_LINES = 800

FILES = sorted(PACKAGE.rglob("*.py"))


def test_no_file_is_too_long():
    """A file of the package has at most 800 lines."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = [f"{path}: {n} lines" for path, n in lines.items() if n > FILE_LINES]
    assert not long, "\n" + "\n".join(long)


def test_file_names_are_unique():
    """A file's name says which file it is, without its folder."""
    names = Counter(path.stem.lstrip("_") for path in FILES if path.stem != "__init__")
    assert [name for name, n in names.items() if n > 1] == []


def test_files_inside_public_packages_are_private():
    """Programs import from the package (`xpool.data`), and only pytest imports the plug-in."""
    plain = {
        f"{path.parent.name}.{path.stem}"
        for path in FILES
        if path.parent.parent == PACKAGE and path.parent.name[0] != "_" and path.name[0] != "_"
    }
    assert plain == {"testing.plugin"}
