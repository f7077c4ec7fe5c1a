"""Run a text as a separate program and check how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.limits import PROGRAM_LIMIT

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


# Sends a notebook's cells to a kernel and prints their output. A separate program, because the
# client keeps sockets and an event loop until its process ends.
NOTEBOOK = """
import json
import sys
from jupyter_client.manager import start_new_kernel

def show(message):
    if message["msg_type"] == "stream":
        print(message["content"]["text"], end="")
    if message["msg_type"] == "error":
        print("\\n".join(message["content"]["traceback"]))

kernel, client = start_new_kernel(kernel_name="python3")
try:
    for cell in json.load(open("cells.json")):
        client.execute_interactive(cell, output_hook=show)
finally:
    client.stop_channels()
    kernel.shutdown_kernel(now=True)
"""


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which scripts can import xpool and the tests' helpers."""
    path = [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


def popen(
    arguments: Sequence[str], more: Mapping[str, str] | None = None, **options: object
) -> subprocess.Popen[str]:
    """Start this interpreter in a new session, with captured output; ``more``: variables."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**(more or {})),
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )


def write(path: Path, text: str) -> str:
    path.write_text(textwrap.dedent(text))
    return str(path)


def run(
    arguments: Sequence[str], text: str | None = None, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end; `text` is the standard input, for ``python -``; ``more`` are variables."""
    process = popen(arguments, more, cwd=cwd)
    try:
        out, err = process.communicate(
            None if text is None else textwrap.dedent(text), PROGRAM_LIMIT
        )
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(
            f"the script did not end within {PROGRAM_LIMIT:g} s\n--- out\n{out}\n--- err\n{err}"
        ) from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def run_ok(
    arguments: Sequence[str], text: str | None = None, cwd: Path | None = None, **more: str
) -> str:
    """Run to the end, expect exit code 0 and an empty stderr; return the output."""
    done = run(arguments, text, cwd, **more)
    assert done.returncode == 0 and not done.stderr, (
        f"exit code {done.returncode}\n--- out\n{done.stdout}\n--- err\n{done.stderr}"
    )
    return done.stdout


def program(folder: Path, text: str, *arguments: str, **modules: str) -> str:
    """Run a program of this text, beside modules of these names and texts, as `run_ok` does."""
    for name, of_module in modules.items():
        write(folder / f"{name}.py", of_module)
    return run_ok([write(folder / "program.py", text), *arguments])
