"""Times after which something counts as hanging, also on a busy machine."""

import os

TEST_LIMIT = float(os.environ.get("XPOOL_TEST_TIMEOUT", "300"))
"""Seconds for a test; then the stacks of all threads are shown."""

PROGRAM_LIMIT = TEST_LIMIT - 5
"""Seconds for a program in a test; less than the test's, so that the test can show its output."""

WAIT = float(os.environ["XPOOL_TEST_WAIT"])
"""Seconds for one wait in a test: a result, a message, the end of a process or thread."""
