"""CPython's own tests of its pools pass with xpool, except tests of CPython's internals.

The tests are in the interpreter's `test` package, so each version has its own. Without the package
they are skipped. `suite` says what is replaced.
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
        reason="this interpreter has no test package",
    ),
]

EXCLUDED = {
    # Tests that cannot pass, and why. Remove a test that passes.
    "WithProcessesTestPool.test_make_pool": "counts pool._pool, for which xpool has pool.size()",
    "WithThreadsTestPool.test_make_pool": "counts pool._pool, for which xpool has pool.size()",
    "WithProcessesTestPoolWorkerLifetime.test_pool_worker_lifetime": (
        "compares the pids in pool._pool and calls pool._repopulate_pool()"
    ),
    "WithProcessesTestPoolWorkerErrors.test_unpickleable_result": (
        "its unpicklable result is a lambda, which xpool can pickle (docs/migrating.md)"
    ),
    "WithProcessesTestPool.test_resource_warning": "sets pool._state, which xpool does not have",
    "WithThreadsTestPool.test_resource_warning": "as above",
    "TestPoolNotLeakOnFailure.test_release_unused_processes": (
        "its fake context has a Process without pid and sentinel"
    ),
}

# Excluded tests of process executors, in the class of each start method.
EXCLUDED_OF_PROCESSES = {
    "test_error_at_task_unpickle": "breaks CPython's executor, but fails one future of xpool's",
    "test_error_during_result_unpickle_in_result_handler": "as above",
    "test_exit_during_result_unpickle_in_result_handler": "as above",
    "test_exit_during_func_exec_on_worker": (
        "sys.exit in a task ends xpool's worker, as in multiprocessing.Pool"
    ),
    "test_exit_during_result_pickle_on_worker": "as above",
    "test_killed_child": "a death breaks CPython's executor, but fails one future of xpool's",
    "test_idle_process_reuse_one": "counts workers, which xpool starts with the executor",
    "test_idle_process_reuse_multiple": "as above",
    "test_max_tasks_per_child_defaults_to_spawn_context": "uses the private name _mp_context",
    "test_python_finalization_error": "replaces a private function of threading",
    "test_kill_workers": "replaces the private method _force_shutdown",
    "test_terminate_workers": "as above",
    "test_force_shutdown_workers_invalid_op": "calls the private method _force_shutdown",
    "test_force_shutdown_during_max_tasks_worker_exit": "uses the private name _shutdown_lock",
    "test_failed_worker_replacement_breaks_pool": "replaces a private function of the executor",
    "test_gc_during_max_tasks_worker_exit_gh152967": (
        "CPython fails the futures of a dropped executor, xpool has their calls run"
    ),
    "test_shutdown_no_wait_max_tasks_gh119592": "as above",
}
# Excluded for some start methods only.
EXCLUDED_OF_METHOD = {
    "Forkserver.test_processes_terminate": "counts workers, which xpool starts with the executor",
    "Spawn.test_processes_terminate": "as above",
    "Fork.test_max_tasks_per_child": "CPython refuses the fork method, xpool does not",
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
    """The outcome of one of CPython's tests."""

    cls: str
    test: str
    outcome: str
    reason: str

    @property
    def name(self) -> str:
        return f"{self.cls}.{self.test}"


def outcomes(folder: Path, suite: str, *names: str) -> list[Outcome]:
    """Run tests in a new process by a script in this folder; return their outcomes."""
    path = os.pathsep.join([str(Path(next(iter(xpool.__path__))).parent), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name(suite)), *names],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    told = [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]
    if any(t.reason == "no tests here" for t in told):
        pytest.skip("this interpreter does not have these tests")
    assert done.returncode == 0 and told, done.stderr
    return told


def check(told: list[Outcome], excluded: dict[str, str] = EXCLUDED) -> None:
    """Fail if a test failed without being excluded, or passed although it is excluded."""
    story = [
        f"{t.name}: {t.reason}" for t in told if t.outcome == "failed" if t.name not in excluded
    ]
    story += [
        f"{t.name} is {t.outcome} although it is excluded ({excluded[t.name]})"
        for t in told
        if t.outcome == "ok" and t.name in excluded
    ]
    if story:
        pytest.fail("\n\n".join(story), pytrace=False)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes(tmp_path: Path, method: str, name: str) -> None:
    """CPython's tests of pools pass with each start method, also in managers."""
    check(outcomes(tmp_path, "suite.py", method, name))


def test_threads(tmp_path: Path) -> None:
    """CPython's tests of thread pools pass."""
    check(outcomes(tmp_path, "suite.py", "fork", "WithThreadsTestPool"))


@pytest.mark.parametrize(
    "name",
    ["ExecutorTest", "WaitTests", "AsCompletedTests", "ExecutorShutdownTest", "InitializerMixin"],
)
def test_executors(tmp_path: Path, name: str) -> None:
    """CPython's tests of all executors pass."""
    check(outcomes(tmp_path, "futures_suite.py", name))


@pytest.mark.skipif(
    sys.version_info < (3, 12),
    reason="before 3.12, each test waits for threads that a failed test has left",
)
@pytest.mark.parametrize(
    "method",
    ["Forkserver", *(pytest.param(m, marks=pytest.mark.slow) for m in ("Fork", "Spawn"))],
)
def test_executors_of_processes(tmp_path: Path, method: str) -> None:
    """CPython's tests of process executors pass, including those of deadlocks and shutdowns."""
    told = outcomes(tmp_path, "futures_suite.py", "--processes", method)
    excluded = {}
    for t in told:
        reason = EXCLUDED_OF_PROCESSES.get(t.test) or EXCLUDED_OF_METHOD.get(f"{method}.{t.test}")
        if t.cls.endswith("FailingInitializerTest"):
            reason = "reads the workers' log of `concurrent.futures`"
        if reason:
            excluded[t.name] = reason
    check(told, excluded)


@pytest.mark.parametrize("method", MAIN_HANDLING)
def test_scripts(tmp_path: Path, method: str) -> None:
    """Scripts, packages, folders and zip files find their names in workers."""
    check(outcomes(tmp_path, "suite.py", method, MAIN_HANDLING[method]))


def test_exclusions(tmp_path: Path) -> None:
    """Each excluded test exists; a pool of 200 works, if this version tests it."""
    told = outcomes(tmp_path, "suite.py", "fork", "MiscTestCase.test_large_pool", *EXCLUDED)
    check(told)
    assert set(EXCLUDED) <= {t.name for t in told}
