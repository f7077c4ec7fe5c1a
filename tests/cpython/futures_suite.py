"""Runs CPython's own tests of its executors with `xpool.Executor`.

    python futures_suite.py CLASS[.TEST] ...
    python futures_suite.py --processes METHOD [CLASS[.TEST] ...]

It works like `suite`. These tests make executors by a class attribute; in their scripts the import
line is changed. The first form runs the classes for all executors. The second runs those for
process executors, which use private names: `LookedInto` has these. METHOD is "Fork", "Forkserver"
or "Spawn".
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import gc
import importlib
import importlib.util
import multiprocessing
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
# Tests that would wait for ever.
ENDLESS = {
    "test_broken_process_pool_traceback": "a death breaks CPython's executor, but fails one future "
    "of xpool's"
}
HAS_TESTS = importlib.util.find_spec(HOME) is not None

# The module of each class; in older versions all classes are in one module.
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
    """Return one of CPython's test classes."""
    home = importlib.import_module(HOME)
    if hasattr(home, "__path__"):
        home = importlib.import_module(f"{HOME}.{WHERE[name]}")
    return getattr(home, name)


class Executor(xpool.Executor):
    """An executor whose `shutdown` cancels waiting futures only after one has begun.

    CPython's tests expect this, because there a future counts as running when it is in a worker's
    queue. The tests' scripts import the executor by its name.
    """

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Submit, and keep the first future."""
        future = super().submit(fn, *args, **kwargs)
        self.first = getattr(self, "first", future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down; if futures are cancelled, wait until the first has begun."""
        if cancel_futures and hasattr(self, "first"):
            while not (self.first.running() or self.first.done()):
                time.sleep(0.001)
        super().shutdown(wait, cancel_futures=cancel_futures)


class LookedInto(Executor, PrivateNames):
    """An executor with the private names of CPython's that have a counterpart."""

    def __init__(
        self, max_workers: int | None = None, mp_context: Any = None, *args: Any, **kwds: Any
    ) -> None:
        # xpool's counterpart of "forkserver" is its own server.
        if mp_context is not None and mp_context.get_start_method() == "forkserver":
            mp_context = None
        super().__init__(max_workers, mp_context, *args, **kwds)

    @property
    def _broken(self) -> Any:
        return self._pool._life.failure


LookedInto.__name__ = "Executor"  # the name that the scripts import


class Outcomes(Told):
    """Reports outcomes, and ends the executors that a test left in a reference cycle.

    If a test fails before it shuts its executor down, the traceback keeps the executor. Its spawned
    workers would hold the pipe of multiprocessing's resource tracker, and the cleanup of a test
    module waits for the end of that pipe.
    """

    def stopTest(self, test: Any) -> None:
        """Collect the executors that the test left."""
        super().stopTest(test)
        gc.collect()


def over_processes(method: str) -> dict[str, type[unittest.TestCase]]:
    """Return CPython's classes for processes with this start method, with xpool's executors."""
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
            # In xpool a death fails one future; `BrokenExecutor` means that the executor has
            # failed.
            ends = (xpool.WorkerDied, concurrent.futures.BrokenExecutor)
            module.BrokenProcessPool = ends  # type: ignore[attr-defined]
        for name, cls in vars(module).items():
            begins = f"ProcessPool{method}"
            if method == "Fork" and name.startswith("ProcessPoolForkserver"):
                continue
            if name.startswith(begins) and not name.endswith("Mixin"):
                cls.executor_type = LookedInto
                for one, reason in ENDLESS.items():
                    if hasattr(cls, one):
                        setattr(cls, one, unittest.skip(reason)(getattr(cls, one)))
                found[name] = cls
    return found


def over_xpool(name: str) -> Any:
    """Return one of CPython's classes with xpool's executors."""
    bases = (find(name), find("BaseTestCase"))
    if not issubclass(bases[0], find("ExecutorMixin")):
        bases = (find("ExecutorMixin"), *bases)
    return type(name, bases, {"executor_type": Executor, "create_event": _create_event})


def _create_event(test: unittest.TestCase) -> Any:
    """Return an event that tasks can wait for.  From Python 3.14 on, tests ask for one."""
    manager = multiprocessing.Manager()
    test.addCleanup(manager.shutdown)
    return manager.Event()


def install_in_scripts() -> None:
    """Change the import line of the tests' scripts to xpool, and let them find xpool."""
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
    """Run the tests."""
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
