"""The fixture that tests of torch_xla's devices share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def cpu_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use torch_xla's CPU client, and do not start it in this process."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    yield
    torch_xla = sys.modules.get("torch_xla")
    assert torch_xla is None or not torch_xla._XLAC._xla_runtime_is_initialized()
