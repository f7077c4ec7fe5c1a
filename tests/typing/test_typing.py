"""Two type checkers infer at least the types of the standard library's stubs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FILES = [str(FOLDER / name) for name in ("verbs.py", "mistakes.py", "users.py")]

MYPY = """
[mypy]
strict = True
[mypy-users]
disallow_any_expr = True
[mypy-torch.*,numpy.*,dill.*]
follow_imports = skip
"""


def _check(command, cwd):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_mypy(tmp_path):
    """mypy --strict infers each result's type, finds each mistake, and finds no `Any` in
    users.py."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "mypy.ini").write_text(MYPY)
    _check(["mypy", "--config-file", "mypy.ini", "--python-version", "3.10", *FILES], tmp_path)


@pytest.mark.exhaustive
def test_mypy_of_loaders(tmp_path):
    """With torch's annotations, a loader keeps the type of its dataset's elements."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n")
    _check(["mypy", "--config-file", "mypy.ini", str(FOLDER / "loaders.py")], tmp_path)


def test_pyright(tmp_path):
    """pyright infers the same types and finds the same mistakes."""
    found = [name for name in ("basedpyright", "pyright") if importlib.util.find_spec(name)]
    if not found:
        pytest.skip("neither basedpyright nor pyright is installed")
    settings = {
        "include": FILES,
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",
        "enableTypeIgnoreComments": False,
        "reportUnnecessaryTypeIgnoreComment": True,
        "pythonVersion": "3.10",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    _check([found[0], "-p", str(tmp_path), "--pythonpath", sys.executable], tmp_path)


def test_the_package_is_typed():
    """The package has the marker file of PEP 561, so type checkers read it."""
    assert (ROOT / "xpool" / "py.typed").exists()
