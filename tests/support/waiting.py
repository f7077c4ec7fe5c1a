"""See `xpool.testing._test_tasks`."""

from xpool.testing._test_tasks import *  # noqa: F403
