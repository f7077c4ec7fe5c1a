"""The example of docs/testing.md: the bug is found, and the fixed pool passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import scripts
from support.scripts import ROOT

PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")

pytestmark = [pytest.mark.xpool_only, pytest.mark.exhaustive]


QUICK = """
from hypothesis import Phase, settings

TestRoundPool.settings = settings(
    TestRoundPool.settings, derandomize=True, phases=[Phase.generate], database=None
)
"""
"""Added to the page's test: stop at the first failing history, without shortening it."""


def play(folder: Path, mend: bool, quick: bool = True) -> str:
    """Write the page's files into a folder, run pytest there, and return its output."""
    for name, text in re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL):
        if mend and name == "my_pool.py":
            assert text.count("put((job, 0, (False, error)))") == 1
            text = text.replace("put((job, 0, (False", "put((job, chunk, (False")
        if quick and name == "test_my_pool.py":
            text += QUICK
        (folder / name).write_text(text, encoding="utf-8")
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_pool.py"]
    return scripts.run(options, cwd=folder).stdout


def test_the_bug_is_found(tmp_path):
    """The machine finds the planted bug in a history with `imap` and an error."""
    said = play(tmp_path, mend=False)
    assert "1 failed" in said, said
    assert re.search(r"imap of \[.*'error'.*\] raised RuntimeError", said), said
    assert "state.stream(" in said


@pytest.mark.slow
def test_the_shortest_history(tmp_path):
    """With shortening, hypothesis finds the history that the page shows."""
    said = play(tmp_path, mend=False, quick=False)
    assert "imap of [('value', 1), ('error', 2)] raised RuntimeError" in said, said
    assert "state.stream(chunk=1, verb='imap', whats=['value', 'error'])" in said, said


def test_the_fixed_pool_passes(tmp_path):
    """The fix that the page shows is right."""
    said = play(tmp_path, mend=True)
    assert "1 passed" in said, said
