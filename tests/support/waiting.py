"""See `xpool.testing._eventually`."""

from xpool.testing._eventually import *  # noqa: F403
