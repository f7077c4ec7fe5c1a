"""Finds the start method of a pool's workers by its ``context=``."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import BaseContext
from typing import cast

from xpool._calls.options import check_context
from xpool._engine.launch import (
    ForkServer,
    Launcher,
    ProcessLauncher,
    wanted_modules,
)
from xpool._python.server_process import interpreter
from xpool.errors import OptionError


def find_launcher(context: BaseContext | str | None) -> Launcher:
    """Return the launcher for the workers of a pool with this ``context=``."""
    if hasattr(context, "launch"):  # a launcher of a loader
        return cast(Launcher, context)
    if context is None or context == "forkserver":
        if sys.platform != "linux":
            return ProcessLauncher(multiprocessing.get_context("spawn"))
        return ForkServer.get(wanted_modules())
    check_context("context", context)
    if isinstance(context, str):
        context = multiprocessing.get_context(context)
    if context.get_start_method() == "fork":
        _refuse_fork_of_runtime()
        return ProcessLauncher(context)
    interpreter(freeze_support=True)
    return ProcessLauncher(context)


def _refuse_fork_of_runtime() -> None:
    if "torch" not in sys.modules:
        return  # all such runtimes are torch's
    from xpool.devices._frameworks import running_runtime  # only here: most programs never need it

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
