"""The ``conftest.py`` for joblib's tests: xpool's backend replaces the process backends."""

from __future__ import annotations

import joblib.parallel
import pytest

import xpool.joblib

for _name in ("loky", "multiprocessing"):
    joblib.parallel.BACKENDS.pop(_name, None)
joblib.parallel.DEFAULT_BACKEND = "xpool"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thread_unsafe: used by joblib's tests")


def pytest_unconfigure(config: pytest.Config) -> None:
    xpool.joblib.shutdown()
