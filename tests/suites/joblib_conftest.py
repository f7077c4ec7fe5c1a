"""Becomes the ``conftest.py`` of joblib's tests: its backends of processes are xpool's."""

from __future__ import annotations

import joblib.parallel
import pytest

import xpool.joblib

for _name in ("loky", "multiprocessing"):
    joblib.parallel.BACKENDS.pop(_name, None)
joblib.parallel.DEFAULT_BACKEND = "xpool"


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker of these tests."""
    config.addinivalue_line("markers", "thread_unsafe: theirs")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers."""
    xpool.joblib.shutdown()
