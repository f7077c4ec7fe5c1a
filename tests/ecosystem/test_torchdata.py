"""Most of torchdata's tests of its stateful loader pass with xpool's loader. They are in
torchdata's source only, not in its package. XPOOL_TORCHDATA names a folder with the source, and
`make test-loader` fetches it. `loader_suite` describes what is replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("XPOOL_TORCHDATA") or ".torchdata") / "test" / "stateful_dataloader"
NEEDED = ("torch", "parameterized", "expecttest")  # torch's own test helpers need expecttest
MISSING = [name for name in NEEDED if not importlib.util.find_spec(name)]
FILES = ("test_state_dict.py", "test_dataloader.py")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        not FOLDER.is_dir(), reason=f"no source of torchdata in {FOLDER}: make test-loader"
    ),
    pytest.mark.skipif(bool(MISSING), reason=f"torchdata's tests need {', '.join(MISSING)}"),
]

# These tests may pass by chance.
BINDS = "expects batch i of worker i modulo n; here any worker that is idle makes it"

DEATH = (
    "makes the error anew of its message alone, as a RuntimeError; a death is `WorkerDied` here, "
    "which has the process, the signal and the batch as fields"
)

EXCLUDED: dict[str, str] = {
    # Tests that cannot pass, with the reason. If one passes, this test fails.
    "TestNumWorkersMismatch_shard3.test_num_workers_mismatch": (
        "expects an AssertionError of iter(); load_state_dict refuses a state that does not fit"
    ),
    "TestDataLoader.test_get_worker_info": "reads the iterator's _workers, which are processes",
    "TestDataLoader.test_iterable_style_dataset": "reads the iterator's _workers",
    "TestDataLoader.test_partial_workers": "reads the iterator's _workers",
    "TestDataLoader.test_segfault": DEATH,
    "TestDataLoaderPersistentWorkers.test_segfault": DEATH,
    "TestDataLoaderPersistentWorkers.test_partial_workers": "reads the iterator's _workers",
    "TestDataLoaderPersistentWorkers.test_get_worker_info": "reads the iterator's _workers",
    "TestDataLoaderPersistentWorkers.test_iterable_style_dataset": "reads the iterator's _workers",
    "TestIndividualWorkerQueue.test_ind_worker_queue": BINDS,
    "TestOutOfOrderDataLoader.test_in_order_index_ds": BINDS,
    "TestOutOfOrderDataLoader.test_out_of_order_index_ds": BINDS,
}


def outcomes(folder: Path, file: str) -> dict[str, tuple[str, str]]:
    """Run a file of torchdata's tests in a process. Return the outcome and reason of each test."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("loader_suite.py")),
         str((FOLDER / file).resolve())],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told: dict[str, tuple[str, str]] = {}
    for line in done.stdout.splitlines():
        cls, test, outcome, reason = json.loads(line)
        told.setdefault(f"{cls}.{test}", (outcome, reason))
    assert done.returncode == 0 and told, done.stderr
    return told


@pytest.mark.parametrize("file", FILES)
def test_their_tests(tmp_path: Path, file: str) -> None:
    """Each test passes or is excluded. Each excluded test fails."""
    told = outcomes(tmp_path, file)
    story = [
        f"{name}: {reason}"
        for name, (outcome, reason) in told.items()
        if outcome == "failed" and name not in EXCLUDED
    ]
    story += [
        f"{name} is excluded ({EXCLUDED[name]}), and is {outcome} now"
        for name, (outcome, _) in told.items()
        if outcome == "ok" and EXCLUDED.get(name, BINDS) is not BINDS
    ]
    if story:
        pytest.fail("\n\n".join(story), pytrace=False)
