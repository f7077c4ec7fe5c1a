"""Finds the start method of a pool's workers by its ``context=``."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.context import BaseContext
from typing import cast

from xpool._calls.options import check_context
from xpool._engine.launch import (
    ForkServer,
    Launcher,
    ProcessLauncher,
    StandIns,
    asked_for,
    needs_arrays,
    wanted_modules,
)
from xpool._pickling.by_value.main import main_is_importable
from xpool._python.server_process import interpreter
from xpool.errors import OptionError


def find_launcher(context: BaseContext | str | None, may_stand_in: bool = False) -> Launcher:
    """Return the launcher for the workers of a pool with this ``context=``."""
    if hasattr(context, "launch"):  # a launcher of a loader
        return cast(Launcher, context)
    if context is None or context == "forkserver":
        if sys.platform != "linux":
            return ProcessLauncher(multiprocessing.get_context("spawn"))
        modules = wanted_modules()
        # No stand-ins if the program has called `preload`: it waits for its server's imports.
        if may_stand_in and needs_arrays(modules) and not asked_for():
            return StandIns(modules)
        return ForkServer.get(modules)
    check_context("context", context)
    if isinstance(context, str):
        context = multiprocessing.get_context(context)
    if context.get_start_method() == "fork":
        _refuse_fork_of_runtime()
        return ProcessLauncher(context)
    interpreter(freeze_support=True)
    if unguarded_script() is not None:
        raise OptionError(
            f"context={context.get_start_method()!r} runs {unguarded_script()} again in every "
            'worker; put the code that makes the pool behind if __name__ == "__main__": '
            "or leave context out"
        )
    return ProcessLauncher(context)


def unguarded_script() -> str | None:
    """Return the path of the program's script if `multiprocessing` would run all of it again."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if not path or not os.path.exists(path) or main_is_importable():
        return None
    spec = getattr(main, "__spec__", None)
    name = os.path.splitext(os.path.basename(path))[0] if spec is None else spec.name
    # multiprocessing.spawn does not run the `__main__.py` of a folder or a zip file, or IPython's
    # launcher, again.  A compiled script has no text that could show a guard.
    skipped = name == "ipython" if spec is None else name.rpartition(".")[2] == "__main__"
    return None if skipped or path.endswith(".pyc") else path


def _refuse_fork_of_runtime() -> None:
    if "torch" not in sys.modules:
        return  # all such runtimes are torch's
    from xpool.devices.frameworks import running_runtime  # only here: most programs never need it

    runtime = running_runtime()
    if runtime is not None:
        raise OptionError(
            f"context='fork': this process has started the {runtime} runtime, which does not "
            "survive a fork; leave context out, or use 'spawn'"
        )


def only_by_inheritance(exc: BaseException) -> bool:
    """Whether pickling failed because multiprocessing can send the object only to a new process."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, RuntimeError) and "inheritance" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
