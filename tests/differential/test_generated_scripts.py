"""Random scripts: what a worker sees of them is what a worker that is forked at the call sees.

By default, a script of each kind of statement runs, with all statements of that kind, and each
statement of a whole program by itself. To run more::

    XPOOL_TEST_SCRIPTS=1000 pytest --all tests/differential/test_generated_scripts.py
    XPOOL_TEST_SEED=4711 XPOOL_TEST_SCRIPTS=50 pytest --all ...     # from this seed on

``python -m differential.scripts_generator``, in ``tests``, prints and runs scripts by hand. Both
show the shortest script with a fault.
"""

import os

import pytest
from support.tiers import also

from differential.scripts_generator import (
    BY_THEMSELVES,
    KINDS_OF_STATEMENTS,
    Part,
    Script,
    complete,
    judged,
    script,
    shortened,
    story,
)
from differential.statements import LINKS, MODES, STATEMENTS, Statement

FIRST = int(os.environ.get("XPOOL_TEST_SEED", "0"))
SCRIPTS = int(os.environ.get("XPOOL_TEST_SCRIPTS", "100"))
BATCH = 10  # scripts of one exhaustive test

pytestmark = pytest.mark.xpool_only


def names(kinds):
    """Return the kinds of statements, those with torch as exhaustive."""
    return [one for kind in kinds for one in (also(kind) if kind == "torch" else [kind])]


@pytest.mark.parametrize("kind", [*names(KINDS_OF_STATEMENTS), *BY_THEMSELVES])
def test_all_statements_of_a_kind(kind, tmp_path):
    """Each answer is that of a fork, or an error names what cannot be sent; nothing loads again."""
    check(f"each {kind}", complete(kind), tmp_path)


@pytest.mark.torch
@pytest.mark.parametrize("first", also(*range(FIRST, FIRST + SCRIPTS, BATCH)))
def test_more_scripts(first, tmp_path):
    """The same, with scripts of statements at random."""
    for seed in range(first, min(first + BATCH, FIRST + SCRIPTS)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check(f"run {seed}", script(seed), folder)


@pytest.mark.pure
def test_seeds_reach_everything():
    """A seed always gives the same script, which is a program, and a thousand have all statements
    in all ways. Each statement has a probe. At most five are excused, with a reason of the
    documentation."""
    found = [script(seed) for seed in range(1000)]
    assert found[:100] == [script(seed) for seed in range(100)]
    for one in found[:100]:
        compile(one.text(), "a script", "exec")
    assert all(one.probes for one in STATEMENTS.values())
    assert len([one for one in STATEMENTS.values() if one.differs]) <= 5
    assert {one.mode for one in found} == set(MODES)
    parts = [part for one in found for part in one.parts]
    assert {part.statement.name for part in parts} == {*STATEMENTS, *LINKS} - {*BY_THEMSELVES}
    places = {change[1:] for part in parts for change in part.changes}
    assert places == {(a, b) for a in ("top", "guard", "between") for b in (False, True)}
    assert any(one.needs_torch for one in found)


BROKEN = {
    "different in silence": ("own~ = os.getpid()", "os.getppid() == own~"),
    "confusing error": ("own~ = os.getpid()", "own~ if os.getppid() == own~ else 1 / 0"),
    "loaded in a worker": ("def load~():\n    note_load()\n    return 5", "load~()"),
    "the fork fails": ("", "1 / 0"),
    "the script fails": ("1 / 0", "x"),
}


@pytest.mark.parametrize("kind", ["different in silence", *also(*list(BROKEN)[1:])])
def test_faults_are_found_and_shortened(kind, tmp_path):
    """A script with a fault is shortened to the statement that has it, and the report shows it."""
    top, probe = BROKEN[kind]
    good = Part(STATEMENTS["function: recursion of two"], 1)
    bad = Part(Statement("broken: on purpose", top, (probe,)), 2, forms=("def",))
    verdicts, _ = judged(Script("script", (good, bad)), tmp_path)
    found = [one for one in verdicts if one.is_fault]
    assert {one.kind for one in found} == {kind}
    short = shortened(Script("script", (good, bad)), found[0])
    assert short.parts == (bad,)
    assert probe.replace("~", "2") in story(short, found[0])


def check(command, one, folder):
    """Fail with the shortest script if a script has a fault."""
    for name in ("numpy", "torch"):
        if f"import {name}" in one.text():
            pytest.importorskip(name, reason=f"the script imports {name}, which is not installed")
    verdicts, _ = judged(one, folder)
    found = [verdict for verdict in verdicts if verdict.is_fault]
    if found:
        # Each run of a script that hangs takes as long as a test may take.
        short = one if found[0].kind == "hang" else shortened(one, found[0])
        again = f"python -m differential.scripts_generator {command}"
        pytest.fail(f"{again}\n{story(short, found[0])}", pytrace=False)
    assert any(verdict.kind == "same" for verdict in verdicts)
