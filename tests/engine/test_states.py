"""The tables of states."""

import pytest

from xpool import InternalError
from xpool._engine.jobs.states import (
    POOL,
    WORKER,
    PoolEvent,
    PoolStates,
    WorkerEvent,
    WorkerStates,
    step,
)

pytestmark = pytest.mark.pure


def test_every_state_is_in_its_table():
    """Every state is in a table."""
    assert set(POOL) == set(PoolStates) and set(WORKER) == set(WorkerStates)


def test_a_pool_never_goes_back():
    """A pool that has stopped accepting tasks never accepts tasks again."""
    order = [PoolStates.RUN, PoolStates.CLOSE, PoolStates.TERMINATE]
    for state, events in POOL.items():
        assert all(order.index(after) >= order.index(state) for after in events.values())


def test_an_event_that_cannot_happen_raises():
    """The error names the event and the state."""
    with pytest.raises(InternalError, match=r"HELLO.*ABSENT"):
        step(WORKER, WorkerStates.ABSENT, WorkerEvent.HELLO)
    with pytest.raises(InternalError, match=r"DRAINED.*RUN"):
        step(POOL, PoolStates.RUN, PoolEvent.DRAINED)
