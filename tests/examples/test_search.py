"""The site's search leads to the paragraph: the script of its search page runs in Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIRST = {
    "timeout": "timeouts#a-timeout-for-each-call",
    "memory limit": "memory#limit-the-memory",
    "nested": "faq#may-pools-be-nested",
    "guard": "faq#do-i-need-the-guard-if-name-main",
    "seed": "faq#how-do-i-seed-random-numbers",
    "retries": "timeouts#retries",
    "DataLoader": "api#xpool.data.DataLoader",
}


@pytest.fixture(scope="module")
def hits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The pages and sections that the search finds for each entry of `FIRST`, best first."""
    for name in ("sphinx", "myst_parser", "furo", "torch"):
        pytest.importorskip(name, reason=f"{name} is not installed: make docs runs this test")
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(DOCS), str(site)]
    subprocess.run(build, check=True)
    search = [node, str(Path(__file__).with_name("search.js")), str(site), *FIRST]
    done = subprocess.run(search, check=True, capture_output=True, text=True)
    found = [[place for place, _ in json.loads(line)] for line in done.stdout.splitlines()]
    return dict(zip(FIRST, found, strict=True))


@pytest.mark.parametrize("words", FIRST)
def test_first_hit_is_the_paragraph(hits: dict[str, list[str]], words: str):
    """The first hit is the section about the words."""
    assert hits[words][0] == FIRST[words]


def test_pages_for_developers_come_last(hits: dict[str, list[str]]):
    """Pages for those who change xpool come after all others; Sphinx puts its index behind them."""
    for words, places in hits.items():
        pages = [place for place in places if "#" not in place]
        inside = [page.startswith("dev/") for page in pages]
        assert inside == sorted(inside), words
    assert any(place.startswith("dev/") for place in hits["seed"])
