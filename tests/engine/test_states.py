"""The table of a worker's states."""

import pytest

from xpool import InternalError
from xpool._engine.jobs.states import WORKER, WorkerEvent, WorkerStates, step

pytestmark = pytest.mark.pure


def test_every_state_is_in_its_table():
    """Every state is in the table."""
    assert set(WORKER) == set(WorkerStates)


def test_an_event_that_cannot_happen_raises():
    """The error names the event and the state."""
    with pytest.raises(InternalError, match=r"HELLO.*ABSENT"):
        step(WorkerStates.ABSENT, WorkerEvent.HELLO)
