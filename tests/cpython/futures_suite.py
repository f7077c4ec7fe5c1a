"""Runs CPython's own tests of its executors with `xpool.Executor` in their place.

    python futures_suite.py CLASS[.TEST] ...
    python futures_suite.py --processes METHOD [CLASS[.TEST] ...]

As `suite`, whose text says more.  These tests make executors by a class attribute; in the scripts
that they run, the import line is changed.  The first form takes their classes that hold for all
executors, the second those for processes, which look into the executor: `LookedInto` has what they
look for.  METHOD is "Fork", "Forkserver" or "Spawn".
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import gc
import importlib
import importlib.util
import os
import pkgutil
import sys
import time
import unittest
from typing import Any

from support.executor_names import PrivateNames
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


class LookedInto(Executor, PrivateNames):
    """An executor with the private names of theirs that have a counterpart here."""

    def __init__(
        self, max_workers: int | None = None, mp_context: Any = None, *args: Any, **kwds: Any
    ) -> None:
        # xpool's own server is what it has for "forkserver".
        if mp_context is not None and mp_context.get_start_method() == "forkserver":
            mp_context = None
        super().__init__(max_workers, mp_context, *args, **kwds)

    @property
    def _max_workers(self) -> int:
        return self._pool.size()

    @property
    def _broken(self) -> Any:
        return self._pool._life.failure


LookedInto.__name__ = "Executor"  # the name by which their scripts import it


class Outcomes(Told):
    """Tells the outcomes; ends the executors that a test left in a circle of references.

    A test that fails before it shuts its executor down leaves it to the traceback.  Its spawned
    workers would hold the pipe of multiprocessing's resource tracker, for whose end the cleanup of
    a module of theirs waits.
    """

    def stopTest(self, test: Any) -> None:
        """Collect what the test left."""
        super().stopTest(test)
        gc.collect()


def over_processes(method: str) -> dict[str, type[unittest.TestCase]]:
    """Return their classes for processes that start so, with executors of ours."""
    home = importlib.import_module(HOME)
    modules = [home]
    if hasattr(home, "__path__"):
        names = [info.name for info in pkgutil.iter_modules(home.__path__)]
        modules = [importlib.import_module(f"{HOME}.{name}") for name in names]
    concurrent.futures.ProcessPoolExecutor = LookedInto  # type: ignore[misc, assignment]
    concurrent.futures.process._RemoteTraceback = xpool.RemoteTraceback  # type: ignore[attr-defined]
    found = {}
    for module in modules:
        if hasattr(module, "BrokenProcessPool"):
            # A death is one future's here, and the end of all of it a `BrokenExecutor`.
            ends = (xpool.WorkerDied, concurrent.futures.BrokenExecutor)
            module.BrokenProcessPool = ends  # type: ignore[attr-defined]
        for name, cls in vars(module).items():
            begins = f"ProcessPool{method}"
            if method == "Fork" and name.startswith("ProcessPoolForkserver"):
                continue
            if name.startswith(begins) and not name.endswith("Mixin"):
                cls.executor_type = LookedInto
                found[name] = cls
    return found


def over_xpool(name: str) -> Any:
    """Return a class of theirs with executors of ours."""
    bases = (find(name), find("BaseTestCase"))
    if not issubclass(bases[0], find("ExecutorMixin")):
        bases = (find("ExecutorMixin"), *bases)
    return type(name, bases, {"executor_type": Executor})


def install_in_scripts() -> None:
    """Change the import line of the tests' scripts to xpool's, and let them import xpool."""
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
    classes: dict[str, Any] = {}
    if names[0] == "--processes":
        classes = over_processes(names[1])
        names = names[2:] or list(classes)
    suite = unittest.TestSuite()
    for name in names:
        name, _, test = name.partition(".")
        cls = classes.get(name) or over_xpool(name)
        if not test:
            suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(cls))
        elif hasattr(cls, test):
            suite.addTest(cls(test))
    suite.run(Outcomes())


if __name__ == "__main__":
    tell("", "", "skipped", "begun")
    main(sys.argv[1:])
