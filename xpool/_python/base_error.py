"""The base of xpool's errors.  It is in this layer, because `pool_errors` is, which derives two."""

from __future__ import annotations

import builtins
import multiprocessing


class XPoolError(Exception):
    """Base of all errors that xpool itself raises."""


class TimeoutError(multiprocessing.TimeoutError, builtins.TimeoutError):
    """The caller waited for ``timeout`` seconds without a result.

    This is a subclass of Python's own `TimeoutError` and of `multiprocessing.TimeoutError`.
    """


for _one in (XPoolError, TimeoutError):
    _one.__module__ = "xpool.errors"  # the public name, in pickles and tracebacks
