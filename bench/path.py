"""List the functions of xpool that one `Pool.apply` calls in the parent.

The task does nothing.  Calls in the caller's thread and in the engine's are listed in their order.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import xpool
from bench.tasks import noop

ROOT = str(Path(xpool.__file__).parent)


class Passed(NamedTuple):
    """The calls of one run, in order: (thread, file, function)."""

    calls: list[tuple[str, str, str]]

    @property
    def functions(self) -> list[tuple[str, str]]:
        """Each function once, as (file, name)."""
        return list(dict.fromkeys(call[1:] for call in self.calls))

    @property
    def files(self) -> list[str]:
        """Each file once."""
        return list(dict.fromkeys(file for _, file, _ in self.calls))


def trace(call: Callable[[], object], engine: list[Any]) -> Passed:
    """Run `call`, and record the functions of xpool that this thread and the engine's enter.

    ``engine``: the list that `watch_threads` returned.
    """
    calls: list[tuple[str, str, str]] = []

    def note(frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            name = f"{getattr(code, 'co_qualname', code.co_name)}:{code.co_firstlineno}"
            where = code.co_filename[len(ROOT) + 1 :]
            calls.append((threading.current_thread().name, where, name))

    engine.append(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        engine.remove(note)
    return Passed(calls)


def watch_threads() -> list[Any]:
    """Return an empty list for profile functions.

    Threads that start from now on report their calls to each function in it.
    """
    listeners: list[Any] = []

    def pass_on(frame: FrameType, event: str, arg: Any) -> None:
        for listener in list(listeners):
            listener(frame, event, arg)

    threading.setprofile(pass_on)
    return listeners


def measure_apply() -> Passed:
    """Return the shortest path of 20 calls of `apply`, on a pool that is warm."""
    engine = watch_threads()
    try:
        with xpool.Pool(2) as pool:
            for _ in range(50):
                pool.apply(noop)
            paths = [trace(lambda: pool.apply(noop), engine) for _ in range(20)]
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return min(paths, key=lambda path: len(path.calls))


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    path = measure_apply()
    for thread, file, name in path.calls:
        print(f"{thread:20} {file:28} {name}")
    print(f"{len(path.functions)} functions in {len(path.files)} files, {len(path.calls)} calls")


if __name__ == "__main__":
    main()
