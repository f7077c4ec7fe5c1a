"""Runs CPython's own tests of its executors with `xpool.Executor` in their place.

    python futures_suite.py CLASS[.TEST] ...

As `suite`, whose text says more.  These tests make executors by a class attribute; in the scripts
that they run, the import line is changed.  Their classes for processes look into the executor, so
those that hold for all executors are taken.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
import unittest
from typing import Any

from telling import Told, tell

import xpool

HOME = "test.test_concurrent_futures"
HAS_TESTS = importlib.util.find_spec(HOME) is not None

# Where they are since they are a package; before, all are in one module.
WHERE = {
    "ExecutorTest": "executor",
    "WaitTests": "test_wait",
    "AsCompletedTests": "test_as_completed",
    "ExecutorShutdownTest": "test_shutdown",
    "InitializerMixin": "test_init",
    "ExecutorMixin": "util",
    "BaseTestCase": "util",
}


def find(name: str) -> Any:
    """Return one of their classes."""
    home = importlib.import_module(HOME)
    if hasattr(home, "__path__"):
        home = importlib.import_module(f"{HOME}.{WHERE[name]}")
    return getattr(home, name)


class Executor(xpool.Executor):
    """An executor that cancels what has not begun when something has.

    Their tests count on it: theirs call a future running when it is handed to a worker's queue.
    Their scripts import it by its name.
    """

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Submit, and remember the first."""
        future = super().submit(fn, *args, **kwargs)
        self.first = getattr(self, "first", future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down, once the first has begun if the others are cancelled."""
        if cancel_futures and hasattr(self, "first"):
            while not (self.first.running() or self.first.done()):
                time.sleep(0.001)
        super().shutdown(wait, cancel_futures=cancel_futures)


def over_xpool(name: str) -> Any:
    """Return a class of theirs with executors of ours."""
    bases = (find(name), find("BaseTestCase"))
    if not issubclass(bases[0], find("ExecutorMixin")):
        bases = (find("ExecutorMixin"), *bases)
    return type(name, bases, {"executor_type": Executor})


def install_in_scripts() -> None:
    """Have scripts run with the line changed that a user changes, and with xpool to be found."""
    module = importlib.import_module(HOME)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{HOME}.test_shutdown")
    original = module.assert_python_ok
    paths = os.pathsep.join(p for p in sys.path if p)

    def assert_python_ok(*args: str) -> Any:
        theirs, ours = "from concurrent.futures import Executor", "from xpool import Executor"
        changed = [arg.replace(theirs, ours) for arg in args]
        return original(*changed, PYTHONPATH=paths, __isolated=False)

    module.assert_python_ok = assert_python_ok  # type: ignore[attr-defined]


def main(names: list[str]) -> None:
    """Run these tests."""
    if not HAS_TESTS:
        tell("", "", "skipped", "no tests here")
        return
    install_in_scripts()
    suite = unittest.TestSuite()
    for name in names:
        name, _, test = name.partition(".")
        cls = over_xpool(name)
        if not test:
            suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(cls))
        elif hasattr(cls, test):
            suite.addTest(cls(test))
    suite.run(Told())


if __name__ == "__main__":
    tell("", "", "skipped", "begun")
    main(sys.argv[1:])
