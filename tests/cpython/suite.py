"""Runs CPython's own tests of its pools with xpool's pools.

    python suite.py METHOD CLASS[.TEST] ...

METHOD is a start method. For each test it prints a line of JSON: name, "ok", "skipped" or "failed",
and the reason. It runs as a script of the interpreter whose `test` package it uses; that package is
no part of this project.

It replaces `Pool` of `multiprocessing`, of its contexts and of `multiprocessing.pool`, and
`ThreadPool`, also in the tests' scripts. It replaces `RemoteTraceback` by xpool's subclass.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import multiprocessing.dummy
import multiprocessing.managers
import multiprocessing.pool
import os
import re
import sys
import types
import unittest
from typing import Any

from telling import Told, tell

import xpool

HAS_TESTS = importlib.util.find_spec("test._test_multiprocessing") is not None
MAIN = "test.test_multiprocessing_main_handling"
METHOD = sys.argv[1] if len(sys.argv) > 1 else "fork"

REPLACED = (
    # In scripts it changes the line that a user would change.
    (r"from multiprocessing import Pool, ", "from xpool import Pool; from multiprocessing import "),
    (r"from multiprocessing import Pool$", "from xpool import Pool"),
    (r"^(\s*)import multiprocessing$", r"\1import multiprocessing, xpool"),
    (r"multiprocessing\.Pool\(", "xpool.Pool("),
)


def replaced(text: str) -> str:
    """Return a script with xpool's pools instead of the standard library's."""
    for pattern, by in REPLACED:
        text = re.sub(pattern, by, text, flags=re.MULTILINE)
    return text


def install() -> None:
    """Replace the standard library's pools by xpool's."""
    # In xpool "forkserver" is the name of its own fork server.
    pool = functools.partial(xpool.Pool, context=METHOD)
    threads = xpool.ThreadPool
    multiprocessing.Pool = pool  # type: ignore[assignment]
    multiprocessing.pool.Pool = pool  # type: ignore[misc, assignment]
    multiprocessing.pool.ThreadPool = threads  # type: ignore[misc, assignment]
    multiprocessing.dummy.Pool = threads  # type: ignore[assignment]
    multiprocessing.pool.RemoteTraceback = xpool.RemoteTraceback  # type: ignore[attr-defined]
    registry = multiprocessing.managers.SyncManager._registry  # type: ignore[attr-defined]
    registry["Pool"] = (pool, *registry["Pool"][1:])


def install_in_scripts() -> None:
    """Change the line in the tests' scripts, and let them find xpool."""
    from test import support
    from test.support import script_helper

    # The sleep of a thread that cannot be stopped. It is five minutes before Python 3.12, where the
    # standard library usually takes the task back before a thread begins it.
    support.LONG_TIMEOUT = 1.0

    original = script_helper.assert_python_ok
    paths = os.pathsep.join(p for p in sys.path if p)

    def assert_python_ok(*args: str, **options: Any) -> Any:
        if args[-1].endswith(".py") or args[0] == support.os_helper.TESTFN:
            with open(args[-1], encoding="utf-8") as file:
                text = file.read()
            with open(args[-1], "w", encoding="utf-8") as file:
                file.write(replaced(text))
        return original(
            *map(replaced, args), **{"PYTHONPATH": paths, **options, "__isolated": False}
        )

    script_helper.assert_python_ok = assert_python_ok


def load_main_handling() -> types.ModuleType:
    """Import the tests of many kinds of scripts, with changed lines."""
    spec = importlib.util.find_spec(MAIN)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        text = replaced(file.read()).replace("Pool(5)", "Pool(5, context=start_method)")
    module = types.ModuleType(MAIN)
    module.__file__ = spec.origin
    sys.modules[MAIN] = module
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    return module


def main(names: list[str]) -> None:
    """Run the tests."""
    if not HAS_TESTS:
        tell("", "", "skipped", "no tests here")
        return
    install_in_scripts()
    main_handling = load_main_handling()
    suite = unittest.TestSuite()
    for name in names:
        name, _, test = name.partition(".")
        cls = globals().get(name) or getattr(main_handling, name, None)
        # some versions lack some of them
        if cls is not None and not test:
            suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(cls))
        elif hasattr(cls, test):
            suite.addTest(cls(test))
    globals()["setUpModule"]()
    suite.run(Told())
    globals()["tearDownModule"]()


# Also in workers and managers, which run this file again for its names.
install()
if HAS_TESTS:
    from test._test_multiprocessing import install_tests_in_module_dict

    install_tests_in_module_dict(globals(), METHOD)

if __name__ == "__main__":
    main(sys.argv[2:])
