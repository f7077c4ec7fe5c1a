"""Random programs of several modules: tasks see what a fork at the call sees (`shapes`).

By default, a few programs run.  To run more::

    XPOOL_TEST_SCRIPTS=1000 pytest --all tests/differential/test_shapes.py
    XPOOL_TEST_SEED=4711 XPOOL_TEST_SCRIPTS=50 pytest --all ...     # from this seed on

A failure prints the command that runs the program again; with ``--shorten``, it finds the fewest
parts that show the fault.
"""

import os

import pytest
from support import scripts
from support.tiers import also

FIRST = int(os.environ.get("XPOOL_TEST_SEED", "0"))
SCRIPTS = int(os.environ.get("XPOOL_TEST_SCRIPTS", "30"))
SHAPES = str(scripts.TESTS / "differential" / "shapes.py")

pytestmark = pytest.mark.xpool_only


@pytest.mark.parametrize(
    "seed", [*range(FIRST, FIRST + 3), *also(*range(FIRST + 3, FIRST + SCRIPTS))]
)
def test_shapes(seed):
    """Each task sees the objects of all modules as a process that is forked at the call."""
    scripts.run_ok([SHAPES, str(seed)])


def test_a_difference_is_found():
    """A program whose tasks differ ends with the command that runs it again."""
    text = (scripts.TESTS / "differential" / "shapes.py").read_text()
    assert text.count("said = []") == 1
    text = text.replace("said = []", "said = [os.getpid()]")
    done = scripts.run(["-c", text, "3"])
    assert done.returncode == 1
    assert "again: python" in done.stdout
