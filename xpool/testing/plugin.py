"""The pytest fixtures.  In a ``conftest.py``: ``pytest_plugins = ["xpool.testing.plugin"]``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from xpool.testing import leaks

__all__ = ["no_leaks"]


def pytest_configure() -> None:
    """Mark this run, so that processes whose parent has ended are still known as ours."""
    leaks.mark_this_run()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail the test when it leaves threads, processes, descriptors or shared memory behind.

    Name it last among the arguments of a test, and it looks before the other fixtures clean up;
    name it first, and it looks after them.  What is there then has ``XPOOL_TEST_LEAK_LIMIT``
    seconds (of the environment; 5) to go.
    """
    with leaks.no_leaks(float(os.environ.get("XPOOL_TEST_LEAK_LIMIT", "5"))):
        yield
