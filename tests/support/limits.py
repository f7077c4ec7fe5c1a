"""How long things may take before they count as hanging: far longer than on a busy machine."""

from __future__ import annotations

import os

TEST_LIMIT = float(os.environ.get("XPOOL_TEST_TIMEOUT", "300"))
"""Seconds for a test, after which the stacks of all threads are shown."""

PROGRAM_LIMIT = TEST_LIMIT - 5
"""Seconds for a program that a test runs, so that the test still says what it printed."""

WAIT = float(os.environ["XPOOL_TEST_WAIT"])
"""Seconds for a part of a test: a result, a message, a process or a thread that has to end."""
