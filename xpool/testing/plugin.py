"""The pytest fixtures.  To use them, set in ``conftest.py``:
``pytest_plugins = ["xpool.testing.plugin"]``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from xpool.testing import leaks


def pytest_configure() -> None:
    """Mark this run, so that its processes are recognized even if their parent has ended."""
    leaks.mark_this_run()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail the test if it leaves threads, processes, descriptors or shared memory behind.

    As the last argument of a test it checks before the other fixtures clean up; as the first
    argument it checks after them.  Leftovers have some seconds to disappear: the environment
    variable ``XPOOL_TEST_LEAK_LIMIT``, or 5.
    """
    with leaks.no_leaks(float(os.environ.get("XPOOL_TEST_LEAK_LIMIT", "5"))):
        yield
