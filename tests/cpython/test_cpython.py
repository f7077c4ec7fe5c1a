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
    "WithProcessesTestPool.test_resource_warning": "sets pool._state; here that is a part's own",
    "WithThreadsTestPool.test_resource_warning": "as above",
    "TestPoolNotLeakOnFailure.test_release_unused_processes": (
        "a stand-in for a context whose Process has neither pid nor sentinel"
    ),
}

# Of their tests of executors of processes: names of tests, in the class of each start method.
EXCLUDED_OF_PROCESSES = {
    "test_error_at_task_unpickle": "breaks the executor there; here it is its future's error",
    "test_error_during_result_unpickle_in_result_handler": "as above",
    "test_exit_during_result_unpickle_in_result_handler": "as above",
    "test_exit_during_func_exec_on_worker": (
        "sys.exit in a task ends its worker here, as in multiprocessing.Pool: `WorkerDied`"
    ),
    "test_exit_during_result_pickle_on_worker": "as above",
    "test_killed_child": "a death breaks the executor there; here it costs one future",
    "test_idle_process_reuse_one": "counts workers, which start with the executor here",
    "test_idle_process_reuse_multiple": "as above",
    "test_max_tasks_per_child_defaults_to_spawn_context": "a private name: _mp_context",
    "test_python_finalization_error": "replaces a private function of threading's",
}
# What holds for some start methods only.
EXCLUDED_OF_METHOD = {
    "Forkserver.test_processes_terminate": "counts workers, which start with the executor here",
    "Spawn.test_processes_terminate": "as above",
    "Fork.test_max_tasks_per_child": "the fork method is refused there, and works here",
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
    if any(t.reason == "no tests here" for t in told):
        pytest.skip("this interpreter comes without these tests")
    assert done.returncode == 0 and told, done.stderr
    return told


def check(told: list[Outcome], excluded: dict[str, str] = EXCLUDED) -> None:
    """Fail for a test that failed and is not excluded, or passed and is."""
    story = [
        f"{t.name}: {t.reason}" for t in told if t.outcome == "failed" if t.name not in excluded
    ]
    story += [
        f"{t.name} is excluded ({excluded[t.name]}), and is {t.outcome} now"
        for t in told
        if t.outcome == "ok" and t.name in excluded
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


@pytest.mark.skipif(
    sys.version_info < (3, 12),
    reason="before 3.12, each of these tests waits for threads that one that failed has left",
)
@pytest.mark.parametrize(
    "method",
    ["Forkserver", *(pytest.param(m, marks=pytest.mark.slow) for m in ("Fork", "Spawn"))],
)
def test_executors_of_processes(tmp_path: Path, method: str) -> None:
    """Their tests of executors of processes pass, of deadlocks and of shutdowns among them."""
    told = outcomes(tmp_path, "futures_suite.py", "--processes", method)
    excluded = {}
    for t in told:
        reason = EXCLUDED_OF_PROCESSES.get(t.test) or EXCLUDED_OF_METHOD.get(f"{method}.{t.test}")
        if t.cls.endswith("FailingInitializerTest"):
            reason = "looks for what a worker logs as `concurrent.futures`"
        if reason:
            excluded[t.name] = reason
    check(told, excluded)


@pytest.mark.parametrize("method", MAIN_HANDLING)
def test_scripts(tmp_path: Path, method: str) -> None:
    """Scripts, packages, folders and zip files that were started in any way have their names."""
    check(outcomes(tmp_path, "suite.py", method, MAIN_HANDLING[method]))


def test_exclusions(tmp_path: Path) -> None:
    """Each exclusion names a test that there is; a pool of 200 works, where this version tries."""
    told = outcomes(tmp_path, "suite.py", "fork", "MiscTestCase.test_large_pool", *EXCLUDED)
    check(told)
    assert set(EXCLUDED) <= {t.name for t in told}
