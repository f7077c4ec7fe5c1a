"""The base of xpool's errors: below `xpool.errors`, since two of them live in `pool_errors`."""

from __future__ import annotations

import builtins
import multiprocessing

__all__ = ["TimeoutError", "XPoolError"]


class XPoolError(Exception):
    """Base of everything that xpool itself raises."""


class TimeoutError(multiprocessing.TimeoutError, builtins.TimeoutError):
    """The caller waited for ``timeout`` seconds, and what it waited for has not come.

    Both Python's own `TimeoutError` and `multiprocessing.TimeoutError`.
    """


for _one in (XPoolError, TimeoutError):
    _one.__module__ = "xpool.errors"  # the public name, in pickles and tracebacks
