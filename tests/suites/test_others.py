"""The tests of joblib and loky pass with xpool, except tests of their own internals.

joblib's tests are in its wheel. loky's are in its source package, whose folder XPOOL_LOKY names
(``make suites`` fetches it). They run in a separate folder, and are no part of this project.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

import xpool

HERE = Path(__file__).parent

pytestmark = [pytest.mark.xpool_only, pytest.mark.slow]

# Tests that cannot pass, and why. Remove a test that passes.
_FILES = "xpool sends arrays in shared memory, not in memory-mapped files"
_CLASS = "it names the class of joblib's backend"
JOBLIB = {
    "test_nested_parallel_warnings": "xpool runs a nested call sequentially without a warning",
    "test_parallel_pickling": "xpool raises __reduce__'s own exception, not PicklingError",
    "test_error_capture": "xpool keeps its workers after an error",
    "test_backend_context_manager": _CLASS,
    "test_backend_hinting_and_constraints": _CLASS,
    "test_nested_parallelism_limit": _CLASS,
    "test_parallel_with_interactively_defined_bound_method_loky": "it reads loky's log",
    "test_multiple_generator_call_separated_gc": "joblib refuses a second call, xpool does not",
    "test_auto_memmap_on_arrays_from_generator": _FILES,
    "test_memmapping_leaks": _FILES,
    "test_parallel_isolated_temp_folders": _FILES,
    "test_managed_backend_reuse_temp_folder": _FILES,
    "test_memmapping_temp_folder_thread_safety": _FILES,
    "test_multithreaded_parallel_termination_resource_tracker_silent": _FILES,
    "test_child_raises_parent_exits_cleanly": _FILES,
    "test_memmap_returned_as_regular_array": _FILES,
}

_NAMES = "its script imports an executor from loky"
_DEATH = "a death breaks loky's executor, but fails one future of xpool's"
LOKY = {
    "test_shutdown_with_sys_exit_at_pickle": "xpool's `submit` raises an argument's SystemExit",
    "test_interpreter_shutdown": _NAMES,
    "test_hang_gh94440": _NAMES,
    "test_hang_issue39205": _NAMES,
    "test_processes_terminate_on_executor_gc": "xpool's executor lives until its work is done",
    "test_processes_crash_handling_after_executor_gc": "as above",
    "test_exited_child": _DEATH,
    "test_max_workers_negative": "xpool's message is different: it has the value",
    "test_serialization": "only loky's executors have reducers",
    "test_child_env_executor": "only loky's executors have variables",
}
# Not run, because they wait for long before they fail.
LOKY_NOT_RUN = {
    "test_killed_child": _DEATH,
    "test_killed_child_with_cancelled_work_items": _DEATH,
    "test_max_depth": "xpool does not limit the nesting of executors",
    "test_memory_leak_protection": "xpool ends leaking workers by `worker_memory=`",
    "test_worker_timeout": "xpool keeps idle workers",
    "test_manager_thread_crash_breaks_executor": "it breaks a private thread",
    "test_feeder_error_hook_crash_breaks_executor": "it breaks a private queue",
}


def run(folder: Path, names: list[str], *paths: str, deselect: str = "") -> dict[str, list[str]]:
    """Run tests in a new process; return each test's failures with their reasons."""
    path = os.pathsep.join([str(Path(next(iter(xpool.__path__))).parent), *paths])
    report = folder / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-W", "ignore",
         "-o", "faulthandler_timeout=120", f"--junitxml={report}", "-k", deselect, *names],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    outcomes: dict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        failures = outcomes[case.attrib["name"].partition("[")[0]]
        for kind in ("failure", "error"):
            failures += [f"{case.attrib['name']}: {found.text}" for found in case.iter(kind)]
    return outcomes


def check(outcomes: dict[str, list[str]], excluded: dict[str, str]) -> None:
    """Fail if a test failed without being excluded, or passed although it is excluded."""
    story = [why for name in outcomes.keys() - excluded for why in outcomes[name]]
    story += [
        f"{name} passes although it is excluded ({excluded[name]})"
        for name in excluded
        if name in outcomes and not outcomes[name]
    ]
    if story:
        pytest.fail("\n\n".join(story), pytrace=False)


def test_joblib(tmp_path: Path) -> None:
    """joblib's tests of `Parallel` and of arrays pass with "xpool" instead of its own backends."""
    joblib = pytest.importorskip("joblib", reason="joblib is not installed")
    theirs = Path(joblib.__file__).with_name("test")
    if not theirs.is_dir():
        pytest.skip("this joblib comes without its tests")
    folder = tmp_path / "test"
    shutil.copytree(theirs, folder)
    (folder / "__init__.py").unlink()
    shutil.copy(HERE / "joblib_conftest.py", folder / "conftest.py")
    names = ["test_parallel.py", "test_memmapping.py"]
    for name in names:
        path = folder / name
        path.write_text(with_backend(path.read_text(encoding="utf-8")), encoding="utf-8")
    check(run(folder, names), JOBLIB)


def with_backend(text: str) -> str:
    """Return a file of joblib's tests with "xpool" instead of its process backends."""
    text = text.replace('["multiprocessing", "loky"]\nPARALLEL', '["xpool"]\nPARALLEL')
    # Except ids of parameters, which would be equal, and names removed from a list.
    name = re.compile(r"""^((?!.*(?:ids=|\.pop\()).*?["'])(?:loky|multiprocessing)(?=["'])""", re.M)
    while name.search(text):
        text = name.sub(r"\1xpool", text)
    # A script with xpool's backend must import it.
    needed = r"\1import xpool.joblib\n\1\2"
    found = r"^( *)(from joblib import .*Parallel.*|import joblib)$"
    return re.sub(found, needed, text, flags=re.MULTILINE)


def test_loky(tmp_path: Path) -> None:
    """loky's tests of its executor pass with `xpool.Executor`."""
    source = os.environ.get("XPOOL_LOKY")
    if not source:
        pytest.skip("set XPOOL_LOKY to loky's source package, as make suites does")
    shutil.copytree(Path(source) / "tests", tmp_path / "tests")
    shutil.copy(HERE / "loky_over_xpool.py", tmp_path / "tests" / "test_over_xpool.py")
    outcomes = run(
        tmp_path,
        ["tests/test_over_xpool.py", "--skip-high-memory"],
        source,
        str(HERE.parent),  # for `support`
        deselect=" and ".join(f"not {name}" for name in LOKY_NOT_RUN),
    )
    check(outcomes, LOKY)
