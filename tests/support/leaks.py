"""See `xpool.testing.leaks`."""

from xpool.testing.leaks import *  # noqa: F403
