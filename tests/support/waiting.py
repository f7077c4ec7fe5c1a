"""See `xpool.testing.waiting`."""

from xpool.testing.waiting import *  # noqa: F403
