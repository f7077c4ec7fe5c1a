"""Runs torchdata's own tests of its stateful loader with xpool's in its place.

    python loader_suite.py FILE CLASS[.TEST] ...

FILE is a test of torchdata's, by its path; a line of JSON on stdout tells the outcome of each test:
its class, its name, "ok", "skipped" or "failed", and the reason.  Without a class, all are run.

What is replaced: the module `torchdata.stateful_dataloader`, so that torchdata itself need not be
installed; and, for tests that look into a state, the layout of torchdata's, which is built from
ours beside it.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

# Of tests/cpython: each outcome is a line on stdout.
sys.path.insert(0, str(Path(__file__).parents[1] / "cpython"))
from telling import Told

from xpool import preload
from xpool.data import DataLoader

T = TypeVar("T", covariant=True)


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be asked for and loaded."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Outcomes(Told):
    """Tells a test with a part that failed as one that failed."""

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        """Tell that a part of a test failed."""
        if err is not None:
            self.addFailure(test, err)


class Replaced(DataLoader[T]):
    """xpool's loader, whose states also have torchdata's layout, which its tests look into."""

    def state_dict(self) -> dict[str, Any]:
        """Return our state, and beside it what torchdata's says of each worker."""
        state = super().state_dict()
        parts = {f"worker_{i}": _theirs(None) for i in range(max(1, self.num_workers))}
        parts.update({f"worker_{i}": _theirs(part) for i, part in enumerate(state["workers"])})
        if self.num_workers:
            return {**state, "_snapshot": {"_worker_snapshots": parts}}
        return {**state, **parts["worker_0"]}


def _theirs(part: Any) -> dict[str, Any]:
    inner = {} if part is None else part["state"] or {}
    fetcher = {
        "dataset_iter_state": inner.get("iterator"),
        "fetcher_ended": part is not None and part["ended"],
    }
    return {"dataset_state": inner.get("dataset"), "fetcher_state": fetcher}


def install() -> None:
    """Put xpool's loader where these tests, here and in workers, look for torchdata's."""
    folder = Path(tempfile.mkdtemp(prefix="torchdata-"))
    atexit.register(shutil.rmtree, folder)
    (folder / "torchdata").mkdir()
    (folder / "torchdata" / "__init__.py").touch()
    (folder / "torchdata" / "stateful_dataloader.py").write_text(
        "from loader_suite import Replaced as StatefulDataLoader, Stateful\n"
    )
    sys.path.insert(0, str(folder))
    # Some of them run programs.
    paths = [str(folder), str(Path(__file__).parent), *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def load(path: str) -> types.ModuleType:
    """Import their file under its own name, by which workers find its classes."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)
    if hasattr(module, "JOIN_TIMEOUT"):
        # 60 s for a spawned program, which imports all this, and whose fork server does too.
        vars(module)["JOIN_TIMEOUT"] = 300.0
    return module


def main(path: str, names: list[str]) -> None:
    """Run these tests of a file."""
    module = load(path)
    load_all = unittest.defaultTestLoader
    suite = unittest.TestSuite()
    if not names:
        suite.addTests(
            load_all.loadTestsFromTestCase(cls)
            for cls in vars(module).values()
            if isinstance(cls, type) and issubclass(cls, unittest.TestCase)
            if cls.__module__ == module.__name__
        )
    for name in names:
        suite.addTest(load_all.loadTestsFromName(name, module))
    suite.run(Outcomes())


if __name__ == "__main__":
    # Each worker imports the tests, and with them what torch has for tests: once, in the server.
    preload("torch.testing._internal.common_utils", "parameterized")
    install()
    main(sys.argv[1], sys.argv[2:])
