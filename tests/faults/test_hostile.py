"""A hostile worker misuses each of its descriptors.

`matrix` has the outcome of its task. In every case the program survives, the other worker
continues, and the pool stays usable and ends.
"""

import logging
from pathlib import Path

import pytest
from support import cells, hostile, scripts, work
from support.limits import WAIT
from support.tiers import also

from xpool import InternalError, P2PPool, Pool

from . import matrix
from .after_faults import check_usable

pytestmark = pytest.mark.xpool_only

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"

SOME = ("garbage", "closed")
CELLS = [
    pytest.param(
        name,
        way,
        expected,
        id=f"{name.replace(' ', '_')}-{way}",
        # Without an effect, garbage and the end stand for all of them in `make test`.
        marks=pytest.mark.exhaustive if expected == "answered" and way not in SOME else (),
    )
    for name, ways in matrix.HOSTILE.items()
    for way, expected in ways.items()
    if expected != "-" and name != "arena"
]
NOTICED_BESIDE = ("status", "control")
"""The parent reads these descriptors apart from the answers, so the task waits for its end."""


def test_the_table_is_complete():
    """The table has a cell for each descriptor and each misuse. The page shows the table."""
    assert set(matrix.HOSTILE) == set(hostile.DESCRIPTORS)
    assert all(set(ways) == set(hostile.WAYS) for ways in matrix.HOSTILE.values())
    assert matrix.hostile_document() in PAGE.read_text(), "run: python tests/faults/matrix.py"


@pytest.fixture
def records():
    """The records that arrive at the logger "hostile"."""
    logger, found = logging.getLogger("hostile"), []
    handler = logging.Handler()
    handler.emit = found.append
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize("context", [None, *also("spawn", "fork")])
@pytest.mark.parametrize(("name", "way", "expected"), CELLS)
def test_mischief(make_pool, name, way, expected, context, mailbox, gate, records):
    """At most the hostile task fails. Tasks and logs of the other worker are not affected."""
    if context is not None and name in ("status", "control"):
        pytest.skip("workers of multiprocessing have no status, the control is the same")
    pool = make_pool(P2PPool if name == "control" else Pool, 2, context=context)
    beside = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, "beside"))
    mailbox.line()
    stays = expected == "InternalError" and name in NOTICED_BESIDE
    limit = cells.LIMIT if expected == "TaskTimeout" else None
    task = pool.apply_async(hostile.strike, (name, way, stays), timeout=limit)
    assert cells.outcome(task) == expected
    if stays and name == "status":  # a forged exit code is not believed
        with pytest.raises(InternalError, match=r"process \d+ wrote \d+ bytes to the socket"):
            task.get(0)
    gate.open(1)
    assert beside.get(WAIT) == "beside"
    check_usable(pool, mailbox, gate, 2)
    large = [bytes([i]) * 10**6 for i in range(4)]
    assert pool.map(work.same, large, 1) == large
    assert pool.map(hostile.log, ["a", "b", "c"], 1) == ["a", "b", "c"]
    pool.close()
    pool.join()
    # Later records of a worker that closed its socket, or sent an empty packet to it, are lost.
    said = {record.getMessage() for record in records}
    lost = {"a", "b", "c"} - said
    assert not lost or (name == "log records" and way in ("closed", "empty"))


@pytest.mark.parametrize("way", ["garbage", "truncated", *also("empty", "closed", "replayed")])
def test_mischief_with_the_arena(way):
    """The program survives, and tasks with small values work. This runs in a separate program."""
    done = scripts.run([hostile.__file__, way])
    said, small, large, later = done.stdout.splitlines()
    assert (said, small, later) == (matrix.HOSTILE["arena"][way], "True", "True"), done.stderr
    assert large == "True" or way in ("garbage", "empty", "replayed"), done.stderr
    assert done.returncode == 0, done.stderr


def test_a_log_record_runs_no_code(make_pool, tmp_path, records):
    """A pickle written to the log socket is not unpickled. It does not corrupt other workers'
    records."""
    pool = make_pool(Pool, 2)
    path = tmp_path / "made by unpickling"
    assert pool.apply(hostile.send_code, (str(path),)) == "sent"
    assert pool.map(hostile.log, ["a", "b"], 1) == ["a", "b"]
    pool.terminate()
    pool.join()
    assert not path.exists()
    assert sorted(record.getMessage() for record in records) == ["a", "b"]
