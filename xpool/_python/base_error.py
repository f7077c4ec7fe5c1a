"""The base of xpool's errors: below `xpool.errors`, since two of them live in `pool_errors`."""

from __future__ import annotations

__all__ = ["XPoolError"]


class XPoolError(Exception):
    """Base of everything that xpool itself raises."""


XPoolError.__module__ = "xpool.errors"  # its public name, in pickles and tracebacks
