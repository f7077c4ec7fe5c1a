"""The length of a call's path through the parent's code."""

from __future__ import annotations

import pytest

from bench.path import measure_apply


@pytest.mark.starts
def test_path_of_an_apply():
    """One `apply` runs through at most 85 functions in 32 files; 15 functions read settings."""
    path = measure_apply()
    assert len(path.functions) <= 85, "\n".join(map(str, path.calls))
    assert len(path.files) <= 32, path.files
