"""How long the way of a single call is through the parent's code."""

from __future__ import annotations

import pytest

from bench.path import measure_apply


@pytest.mark.starts
def test_path_of_an_apply():
    """One `apply` passes no more functions and files than it did when this was last shortened."""
    path = measure_apply()
    assert len(path.functions) <= 60, "\n".join(map(str, path.calls))
    assert len(path.files) <= 26, path.files
