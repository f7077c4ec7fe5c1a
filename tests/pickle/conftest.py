"""Fixtures: a receiving process, and a function that runs programs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.limits import PROGRAM_LIMIT

sys.path.insert(0, str(Path(__file__).parent))

from receiver import HERE, ROOT, Receiver, code
from template import Template


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    """The process whose forks are the receivers of a module's tests, which import pytest."""
    with contextlib.closing(Template(code() + "import pytest", "-W", "error")) as one:
        yield one


@pytest.fixture
def receiver(template: Template) -> Iterator[Receiver]:
    """A process that has received nothing."""
    with Receiver(template) as other:
        yield other


@pytest.fixture
def run_program(tmp_path: Path) -> Callable[..., str]:
    """Run a program from a file, from stdin, by ``-c`` or by ``-m``; return its output."""

    def run(source: str, how: str = "file") -> str:
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
        command, text = [sys.executable, "-W", "error"], None
        if how == "file":
            path = tmp_path / "program.py"
            path.write_text(source)
            command += [str(path)]
        elif how == "module":
            (tmp_path / "program_module.py").write_text(source)
            environ["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
            command += ["-m", "program_module"]
        elif how == "stdin":
            command, text = [*command, "-"], source
        else:
            command += ["-c", source]
        done = subprocess.run(
            command, input=text, env=environ, capture_output=True, text=True, timeout=PROGRAM_LIMIT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
