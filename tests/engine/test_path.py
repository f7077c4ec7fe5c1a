"""The length of a call's path through the parent's code."""

from __future__ import annotations

import pytest

from bench.path import measure_apply


@pytest.mark.starts
def test_path_of_an_apply():
    """One `apply` calls at most as many functions and files as when it was last shortened."""
    path = measure_apply()
    assert len(path.functions) <= 60, "\n".join(map(str, path.calls))
    assert len(path.files) <= 26, path.files
