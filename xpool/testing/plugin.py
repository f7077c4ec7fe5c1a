"""The pytest fixture `no_leaks`.  Enable it in ``conftest.py``:
``pytest_plugins = ["xpool.testing.plugin"]``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from xpool.testing import _leaks as leaks


def pytest_configure() -> None:
    """Mark this run, so that its processes are recognized after their parent has ended."""
    leaks.mark_this_run()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail the test if it leaves threads, processes, descriptors or shared memory behind.

    If it is the last argument of a test, it checks before the other fixtures clean up.  If it is
    the first, it checks after them.  Leftovers have ``XPOOL_TEST_LEAK_LIMIT`` seconds (an
    environment variable, default 5) to disappear.
    """
    with leaks.no_leaks(float(os.environ.get("XPOOL_TEST_LEAK_LIMIT", "5"))):
        yield
