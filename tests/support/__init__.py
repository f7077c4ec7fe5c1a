"""What the tests share: pool kinds, functions for workers, leak checks, bounded waiting."""

import os

# `xpool.testing.waiting` reads it when it is imported: time enough on a busy machine.
os.environ.setdefault("XPOOL_TEST_WAIT", "90")
