"""The policy for interrupting silent workers, tested without a clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xpool._calls.terms import Limit, Terms
from xpool._engine.jobs.states import Act, Deadlines, WorkerProgress

pytestmark = [pytest.mark.pure, pytest.mark.xpool_only]


def test_the_limit_of_the_running_task_counts():
    """If a worker does not report when it began, the limit of its running task counts, even if the
    next task has a shorter one."""
    runs: Any = SimpleNamespace(terms=Terms(0, Limit(1.0, False)), withdrawn=False, seq=0)
    waits: Any = SimpleNamespace(terms=Terms(0, Limit(0.01, False)), withdrawn=False, seq=1)
    held: Any = SimpleNamespace(held=[runs, waits], answered=0, paused=False)
    seen = WorkerProgress(began=1, since=None, pipes=0)
    deadlines = Deadlines()
    now = 100.0
    while now < 101.9:
        act, _, when = deadlines.judge(held, (runs, 0), seen, now)
        assert act is Act.NOTHING and when is not None and when > now
        now = min(when, now + 0.3)
    assert deadlines.judge(held, (runs, 0), seen, 102.1).act is Act.INTERRUPT
