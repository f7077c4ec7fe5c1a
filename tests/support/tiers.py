"""Mark parameters with their tier: ``parametrize("size", [1, *also(2, 70_000)])``."""

from __future__ import annotations

from typing import Any

import pytest


def also(*values: Any, ids: Any = None) -> list[Any]:
    """Return values as parameters for `make test-all` only; a tuple is several arguments."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=pytest.mark.exhaustive,
            id=None if ids is None else ids(value),
        )
        for value in values
    ]
