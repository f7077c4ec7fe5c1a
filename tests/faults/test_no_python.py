"""Programs and systems that lack what a pool needs: one error says what, and nothing is started."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

HEAD = """
    import multiprocessing, multiprocessing.util, os, sys
    import xpool

    started = []
    spawn, fork_exec = os.posix_spawn, multiprocessing.util.spawnv_passfds

    def posix_spawn(path, *args, **options):
        started.append(path)
        return spawn(path, *args, **options)

    def spawnv_passfds(path, *args):
        started.append(path)
        return fork_exec(path, *args)

    os.posix_spawn, multiprocessing.util.spawnv_passfds = posix_spawn, spawnv_passfds

    def error(context=None):
        try:
            with xpool.Pool(1, context=context) as pool:
                assert pool.apply(abs, (-1,)) == 1
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        return ""
"""


def run(tmp_path: Path, *lines: str) -> None:
    body = "".join(f"        {line}\n" for line in lines)
    text = f"{HEAD}\n    if __name__ == '__main__':\n{body}"
    scripts.program(tmp_path, text)


def test_a_frozen_program_is_not_started_again(tmp_path):
    """The error names the ways that work: a Python, context="fork", or "spawn" with
    `freeze_support`."""
    run(
        tmp_path,
        "sys.frozen = True",
        "for attempt in error, xpool.preload:",
        "    try:",
        "        found = attempt()",
        "    except xpool.XPoolError as exc:",
        "        found = str(exc)",
        "    for word in 'is a frozen program', 'set_executable', 'fork', 'freeze_support':",
        "        assert word in found, found",
        "assert not started and error('fork') == '' and not started",
    )


def test_a_copy_of_a_frozen_program_starts_no_copy(tmp_path):
    """If the program does not call `freeze_support`, its copy says so, and starts nothing."""
    run(
        tmp_path,
        "sys.frozen = True",
        "for words in ['--multiprocessing-fork', 'a=5'], ['-c', 'from multiprocessing.x']:",
        "    sys.argv[1:] = words",
        "    assert 'call multiprocessing.freeze_support() at the begin' in error('spawn')",
        "assert not started, started",
    )


def test_no_executable(tmp_path):
    """A program without `sys.executable` is told how to name a Python."""
    run(
        tmp_path,
        "for sys.executable in None, '':",
        "    assert 'sys.executable is empty' in error(), error()",
        "    multiprocessing.set_executable(sys.executable)",
        "    for context in None, 'spawn':",
        "        assert 'sys.executable is empty' in error(context), error(context)",
        "    assert not started",
        "assert error('fork') == ''",
    )


def test_a_program_with_python_inside_is_not_started_again(tmp_path):
    """A program that has Python as a library is no Python."""
    run(
        tmp_path,
        "sys.orig_argv = []",
        "assert 'is a program with Python inside' in error(), error()",
        "assert not started",
    )


def test_the_executable_of_multiprocessing_is_used(tmp_path):
    """Workers run the Python of `multiprocessing.set_executable`, in a frozen program too."""
    mark, python = tmp_path / "mark", tmp_path / "python"
    paths = [shlex.quote(str(path)) for path in (mark, sys.executable)]
    python.write_text('#!/bin/sh\necho . >> {}\nexec {} "$@"\n'.format(*paths))
    python.chmod(0o755)
    run(
        tmp_path,
        f"multiprocessing.set_executable({str(python)!r})",
        "assert error() == '', error()",
        f"assert open({str(mark)!r}).read() == '.\\n'",
        "sys.frozen = True",
        "assert error() == '', error()",
    )


def test_an_executable_that_is_no_python(tmp_path):
    """The error names the program that was started, or that does not exist. That it has ended
    before it was asked for a worker is found as after that."""
    run(
        tmp_path,
        "def wait_until_it_ends(path, *args, **options):",
        "    pid = spawn(path, *args, **options)",
        "    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)",
        "    return pid",
        "for sys.executable in '/nowhere/python', '/bin/true':",
        "    assert sys.executable in error(), error()",
        "os.posix_spawn = wait_until_it_ends",
        "assert 'ended before it had forked the worker' in error(), error()",
        "assert '/bin/true' in error(), error()",
    )


def test_no_anonymous_files(tmp_path):
    """If the system refuses `memfd_create`, an error says so."""
    run(
        tmp_path,
        "def refuse(*args):",
        "    raise PermissionError(1, 'Operation not permitted')",
        "os.memfd_create = refuse",
        "for context in None, 'fork', 'spawn':",
        "    found = error(context)",
        "    assert found.startswith('PermissionError'), found",
        "    assert 'memfd_create(2) is refused (Operation not permitted)' in found, found",
    )


def test_no_proc(tmp_path):
    """Without /proc, an error says so."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    text = scripts.write(
        tmp_path / "program.py",
        f"{HEAD}\n    if __name__ == '__main__':\n"
        "        assert '/proc is not mounted' in error(), error()\n        print('refused')\n",
    )
    command = 'mount -t tmpfs none /proc && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", sys.executable, text],
        env=scripts.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in done.stderr or "mount" in done.stderr.partition("Traceback")[0]:
        pytest.skip(f"this user may not unmount /proc: {done.stderr}")
    assert done.stdout == "refused\n", done.stderr
