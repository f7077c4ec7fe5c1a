"""A kernel runs the examples' notebooks from the first cell to the last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import scripts
from support.limits import PROGRAM_LIMIT

NOTEBOOKS = sorted((scripts.ROOT / "examples" / "notebooks").glob("*.ipynb"))

with_notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

LAST = {
    "first_steps": ["lost one task, exit code 3", "[1, 2, 3]", ", 2 failed, 0 retries, 1 deaths"],
    "preprocess_images": ["torch.Size([108, 3, 32, 32]) torch.float32", "checked: a plain loop"],
    "grid_search": ["rate 0.5   width 64", "{'max_depth': 12}"],
}
"""Some lines of each notebook's output."""


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.pure
@with_notebooks
def test_nothing_is_stored(path: Path):
    """The file has no output and no count, and the first cell installs missing packages."""
    assert path.stem in LAST
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(path))
    first = "".join(cells(path)[0]["source"])
    assert 'if importlib.util.find_spec("xpool") is None:\n    %pip install' in first


@pytest.mark.torch
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["first_steps", "preprocess_images", "grid_search"])
def test_notebook_runs(tmp_path: Path, name: str):
    """Each cell runs without an error, and the notebook prints its results."""
    for module in ("torch", "sklearn", "PIL", "joblib", "jupyter_client", "ipykernel"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    path = scripts.ROOT / "examples" / "notebooks" / f"{name}.ipynb"
    texts = ["".join(cell["source"]) for cell in cells(path)]
    (tmp_path / "cells.json").write_text(json.dumps([*texts, "print('all done')"]))
    (tmp_path / "notebook.py").write_text(scripts.NOTEBOOK)
    done = scripts.popen(["notebook.py"], cwd=str(tmp_path))
    out, err = done.communicate(timeout=PROGRAM_LIMIT)
    assert "Traceback" not in out and out.endswith("all done\n"), out + err
    assert [text for text in LAST[name] if text not in out] == [], out
