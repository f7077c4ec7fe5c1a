"""The scripts in the guides to processes that work together do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_readme import fenced_blocks, run_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.torch
@pytest.mark.parametrize("page", ["assigner.md", "distributed.md", "peers.md"])
def test_guide(tmp_path: Path, page: str):
    """The guide's program prints what is shown, word for word."""
    pytest.importorskip("torch", reason="what these guides are about stands on torch")
    blocks = fenced_blocks((ROOT / "docs" / page).read_text(encoding="utf-8"))
    program = "\n".join(text for language, text in blocks if language == "python")
    assert run_script(tmp_path, program) == next(text for kind, text in blocks if kind == "text")
