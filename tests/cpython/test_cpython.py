"""CPython's own tests of its pools pass over xpool's, but for what is private to CPython.

They come with the interpreter that runs this (its `test` package), so each version has its own;
one that ships none is skipped.  `suite` says what is replaced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import xpool

pytestmark = [
    pytest.mark.xpool_only,
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("test") is None
        or importlib.util.find_spec("test._test_multiprocessing") is None,
        reason="this interpreter comes without its tests",
    ),
]

EXCLUDED = {
    # Tests that cannot pass, and why.  Each must go on failing: one that passes has to leave.
    "WithProcessesTestPool.test_make_pool": "counts pool._pool; here that is pool.size()",
    "WithThreadsTestPool.test_make_pool": "counts pool._pool; here that is pool.size()",
    "WithProcessesTestPoolWorkerLifetime.test_pool_worker_lifetime": (
        "compares the pids in pool._pool and calls pool._repopulate_pool()"
    ),
    "WithProcessesTestPoolWorkerErrors.test_unpickleable_result": (
        "its unpicklable result is a lambda, which xpool returns (docs/migrating.md)"
    ),
    "TestPoolNotLeakOnFailure.test_release_unused_processes": (
        "a stand-in for a context whose Process has neither pid nor sentinel"
    ),
}

MAIN_HANDLING = {
    "fork": "ForkCmdLineTest",
    "spawn": "SpawnCmdLineTest",
    "forkserver": "ForkServerCmdLineTest",
}

CLASSES = (
    "WithProcessesTestPool",
    "WithManagerTestPool",
    "WithProcessesTestPoolWorkerErrors",
    "WithProcessesTestPoolWorkerLifetime",
    "TestPoolNotLeakOnFailure",
    "TestInitializers.test_pool_initializer",
    "TestStdinBadfiledescriptor.test_pool_in_process",
)


class Outcome(NamedTuple):
    """What became of one of their tests."""

    cls: str
    test: str
    outcome: str
    reason: str

    @property
    def name(self) -> str:
        """Class and test."""
        return f"{self.cls}.{self.test}"


def outcomes(folder: Path, suite: str, *names: str) -> list[Outcome]:
    """Run tests in a process of their own, by a script that is here; return what became of each."""
    path = os.pathsep.join([str(Path(next(iter(xpool.__path__))).parent), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name(suite)), *names],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    told = [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and told, done.stderr
    return told


def check(told: list[Outcome]) -> None:
    """Fail for a test that failed and is not excluded, or passed and is."""
    story = [
        f"{t.name}: {t.reason}" for t in told if t.outcome == "failed" if t.name not in EXCLUDED
    ]
    story += [
        f"{t.name} is excluded ({EXCLUDED[t.name]}), and is {t.outcome} now"
        for t in told
        if t.outcome != "failed" and t.name in EXCLUDED
    ]
    if story:
        pytest.fail("\n\n".join(story), pytrace=False)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes(tmp_path: Path, method: str, name: str) -> None:
    """Their tests pass over `Pool` with each start method, in managers too."""
    check(outcomes(tmp_path, "suite.py", method, name))


def test_threads(tmp_path: Path) -> None:
    """Their tests pass over `ThreadPool`."""
    check(outcomes(tmp_path, "suite.py", "fork", "WithThreadsTestPool"))


@pytest.mark.parametrize(
    "name",
    ["ExecutorTest", "WaitTests", "AsCompletedTests", "ExecutorShutdownTest", "InitializerMixin"],
)
def test_executors(tmp_path: Path, name: str) -> None:
    """Their tests of all executors pass over `xpool.Executor`."""
    check(outcomes(tmp_path, "futures_suite.py", name))


@pytest.mark.parametrize("method", MAIN_HANDLING)
def test_scripts(tmp_path: Path, method: str) -> None:
    """Scripts, packages, folders and zip files that were started in any way have their names."""
    check(outcomes(tmp_path, "suite.py", method, MAIN_HANDLING[method]))


def test_exclusions(tmp_path: Path) -> None:
    """Each exclusion names a test that there is; a pool of 200 works, where this version tries."""
    told = outcomes(tmp_path, "suite.py", "fork", "MiscTestCase.test_large_pool", *EXCLUDED)
    check(told)
    assert set(EXCLUDED) <= {t.name for t in told}
