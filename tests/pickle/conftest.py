"""Fixtures: a receiving process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from receiver import Receiver, code
from template import Template


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    """The process whose forks are the receivers of a module's tests, which import pytest."""
    with contextlib.closing(Template(code() + "import pytest", "-W", "error")) as one:
        yield one


@pytest.fixture
def receiver(template: Template) -> Iterator[Receiver]:
    """A process that has received nothing."""
    with Receiver(template) as other:
        yield other
