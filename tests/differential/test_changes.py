"""Programs that change their globals at random: tasks see what the program sees (`changes`).

By default, a few programs run.  To run more::

    XPOOL_TEST_SCRIPTS=1000 pytest --all tests/differential/test_changes.py
    XPOOL_TEST_SEED=4711 XPOOL_TEST_SCRIPTS=50 pytest --all ...     # from this seed on

A failure prints the command that runs the program again; with ``--shorten``, it finds the fewest
changes that show the fault.
"""

import os

import pytest
from support import scripts
from support.tiers import also

FIRST = int(os.environ.get("XPOOL_TEST_SEED", "0"))
SCRIPTS = int(os.environ.get("XPOOL_TEST_SCRIPTS", "30"))
SEEDS = range(FIRST, FIRST + SCRIPTS)
STEPS = "25"

pytestmark = pytest.mark.xpool_only


@pytest.mark.parametrize(
    "seed", [*range(FIRST, FIRST + 3), *also(*range(FIRST + 3, FIRST + SCRIPTS))]
)
def test_changes(seed):
    """Each task sees the values at its call; what is one object in the program is one there."""
    scripts.run_ok([str(scripts.TESTS / "differential" / "changes.py"), str(seed), STEPS])


def test_a_difference_is_found():
    """A program whose tasks differ ends with the command that runs it again."""
    text = (scripts.TESTS / "differential" / "changes.py").read_text()
    assert text.count("want, verb = task(),") == 1
    text = text.replace("want, verb = task(),", "want, verb = [*task(), 0],")
    done = scripts.run(["-c", text, "3", STEPS])
    assert done.returncode == 1
    assert "again: python" in done.stdout
