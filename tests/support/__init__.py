"""Shared by the tests: kinds of pools, functions for workers, leak checks, waiting with limits."""

import os

# `xpool.testing._test_tasks` reads this at import; the time suits a busy machine.
os.environ.setdefault("XPOOL_TEST_WAIT", "90")
