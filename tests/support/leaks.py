"""See `xpool.testing._leaks`."""

from xpool.testing._leaks import *  # noqa: F403
