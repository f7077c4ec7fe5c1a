"""Runs torchdata's own tests of its stateful loader with xpool's loader instead.

    python loader_suite.py FILE CLASS[.TEST] ...

FILE is the path of a test file of torchdata. For each test, a line of JSON on stdout has its class,
its name, "ok", "skipped" or "failed", and the reason. Without a class, all tests run.

The module `torchdata.stateful_dataloader` is replaced, so torchdata need not be installed. States
also get torchdata's layout, because some tests read it.
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

# `telling` of tests/cpython prints each outcome as a line.
sys.path.insert(0, str(Path(__file__).parents[1] / "cpython"))
from telling import Told

from xpool import preload
from xpool.data import DataLoader

T = TypeVar("T", covariant=True)


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be returned and loaded."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Outcomes(Told):
    """Reports a test with a failed part as failed."""

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        """Report the failed part of a test."""
        if err is not None:
            self.addFailure(test, err)


class Replaced(DataLoader[T]):
    """xpool's loader. Its states also have torchdata's layout, which the tests read."""

    def state_dict(self) -> dict[str, Any]:
        """Return xpool's state, and torchdata's state of each worker."""
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
    """Make the tests, here and in workers, import xpool's loader instead of torchdata's."""
    folder = Path(tempfile.mkdtemp(prefix="torchdata-"))
    atexit.register(shutil.rmtree, folder)
    (folder / "torchdata").mkdir()
    (folder / "torchdata" / "__init__.py").touch()
    (folder / "torchdata" / "stateful_dataloader.py").write_text(
        "from loader_suite import Replaced as StatefulDataLoader, Stateful\n"
    )
    sys.path.insert(0, str(folder))
    # Some tests run programs.
    paths = [str(folder), str(Path(__file__).parent), *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def load(path: str) -> types.ModuleType:
    """Import a test file under its own name, by which workers find its classes."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)
    if hasattr(module, "JOIN_TIMEOUT"):
        # The default is 60 s, in which a spawned program and its fork server must import all this.
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
    # Each worker needs the tests and torch's test helpers. The server imports them once.
    preload("torch.testing._internal.common_utils", "parameterized")
    install()
    main(sys.argv[1], sys.argv[2:])
