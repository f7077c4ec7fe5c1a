"""Ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ranks import Ranks


@pytest.fixture(scope="session", autouse=True)
def loopback() -> Iterator[None]:
    """All traffic stays on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("TP_SOCKET_IFNAME", "lo")
        yield


@pytest.fixture
def ranks(tmp_path: Path, nothing_leaks: None) -> Iterator[Ranks]:
    """Start processes that are ended after the test."""
    started = Ranks(tmp_path)
    yield started
    started.close()
