"""The fault matrix: every fault at every stage, in every kind of pool, and in `Pool` with every
start method.

`matrix` has the expected outcomes. ``make test`` runs a part, ``make test-all`` runs all.
"""

import collections
import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support import cells, scripts, work
from support.kinds import KINDS, STDLIB
from support.limits import PROGRAM_LIMIT, WAIT
from support.tiers import also
from support.waiting import drained, eventually, wait_gone

from xpool import TaskTimeout, WorkerDied

from . import matrix
from .after_faults import check_death, check_usable, workers_of

pytestmark = pytest.mark.xpool_only

METHODS = ("None", "fork", "spawn")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"

SABOTEURS: dict[str, Any] = {
    "task unpickle": lambda how: (work.same, (work.EndsWhenUnpickled(how),)),
    "run": lambda how: (work.end, (how,)),
    "result pickle": lambda how: (work.EndsWhenPickled, (how,)),
    "garbage collection": lambda how: (cells.end_in_collection, (how,)),
    "result half copied to shared memory": lambda how: (cells.end_half_copied, (how,)),
    "result in shared memory half announced": lambda how: (
        cells.end_half_written, (how, 1_000_000),
    ),
    "large result half written to the pipe": lambda how: (
        cells.end_half_written, (how, 1_000_000),
    ),
}  # fmt: skip


def grid(rows, stages, kinds, quick):
    """Return the parameters of the cells. ``make test`` runs only the quick cells."""
    found = []
    for kind in kinds:
        for method in METHODS if kind.name == "pool" else METHODS[:1]:
            for stage in stages:
                for how in matrix.WAYS:
                    plain = kind.name in ("pool", "thread") and method == "None"
                    marks = () if plain and quick(stage, how) else pytest.mark.exhaustive
                    name = f"{kind}-{method}-{stage.replace(' ', '_')}-{how}"
                    cell = (kind, method, stage, how, rows[stage][how])
                    found.append(pytest.param(*cell, id=name, marks=marks))
    return found


PROCESS_KINDS = [kind for kind in KINDS if kind.processes and not STDLIB]
THREAD_KINDS = [kind for kind in KINDS if not kind.processes and not STDLIB]

IN_WORKERS = grid(
    matrix.PROCESSES,
    SABOTEURS,
    PROCESS_KINDS,
    # Each hang waits for its time limit, and is ended alike at every stage.
    lambda stage, how: (
        stage == "run"
        or how in ("raise", "SIGKILL")
        or (how == "hang" and stage.startswith(("task", "large")))
    ),
)
STARTS = grid(
    matrix.PROCESSES,
    ["initializer"],
    PROCESS_KINDS,
    lambda stage, how: how in ("raise", "SIGSTOP", "hang"),
)
IDLE = grid(
    matrix.PROCESSES, ["idle"], PROCESS_KINDS, lambda stage, how: how in ("SIGKILL", "hang")
)
IN_THE_CALLER = grid(
    matrix.PROCESSES,
    matrix.IN_THE_CALLER,
    PROCESS_KINDS,
    lambda stage, how: how == "SIGKILL" or (stage, how) == ("callback", "hang"),
) + grid(matrix.THREADS, matrix.THREADS, THREAD_KINDS, lambda stage, how: how == "hang")

CELLS = "kind, method, stage, how, expected"


def options(method, stage=""):
    """Return the pool's options for a cell."""
    found = {} if method == "None" else {"context": method}
    if stage.endswith("pipe"):
        found["memory_limit"] = 0
    return found


def shared_memory():
    """Return how many blocks of the arena are held, and how many bytes the arena uses."""
    from xpool._memory.arena import Arena

    arena = Arena.own()
    counts = arena.statistics() if arena is not None else {"held": 0, "out": 0, "bytes": 0}
    return counts["held"] + counts["out"], counts["bytes"]


def test_the_matrix_is_complete():
    """Every fault has a cell at every stage, and the page shows these tables."""
    for rows in (matrix.PROCESSES, matrix.THREADS):
        assert all(set(cells) == set(matrix.WAYS) for cells in rows.values())
    said = {word for rows in (matrix.PROCESSES, matrix.THREADS) for c in rows.values()
            for word in c.values()}  # fmt: skip
    assert {word.split(" (")[0] for word in said} == set(matrix.MEANING)
    assert matrix.document() in PAGE.read_text(), "run: python tests/faults/matrix.py"


@pytest.mark.parametrize(CELLS, IN_WORKERS)
def test_in_a_worker(make_pool, kind, method, stage, how, expected, log, mailbox, gate):
    """The task ends as the matrix says. Each other task is done once, and the pool stays usable."""
    _, used = shared_memory()
    pool = make_pool(kind, 2, **options(method, stage))
    before = [pool.apply_async(work.logged, (str(log), i)) for i in range(20)]
    func, args = SABOTEURS[stage](how)
    limit = cells.LIMIT if expected == "TaskTimeout" else None
    victim = pool.apply_async(func, args, timeout=limit)
    after = [pool.apply_async(work.logged, (str(log), i)) for i in range(20, 40)]
    assert cells.outcome(victim) == expected
    assert [r.get(WAIT) for r in before + after] == list(range(40))
    assert sorted(map(int, log.read_text().split())) == list(range(40))
    if expected.startswith("WorkerDied"):
        with pytest.raises(Exception) as caught:
            victim.get(0)
        check_death(caught.value, how, 2)
    check_usable(pool, mailbox, gate, 2)
    pool.terminate()
    pool.join()

    def given_back():
        held, now = shared_memory()
        # The tables keep a few pages. Each result here is larger.
        return not held and now < used + 200_000

    eventually(given_back, "no block is held, and the memory is released")


@pytest.mark.parametrize(CELLS, STARTS)
def test_in_the_initializer(make_pool, kind, method, stage, how, expected):
    """If workers never start, all waiting calls get the expected error."""
    more = {"initializer_timeout": cells.LIMIT} if how in ("SIGSTOP", "hang") else {}
    pool = make_pool(kind, 1, work.end, (how,), **options(method), **more)
    try:
        results = [pool.apply_async(work.square, (i,)) for i in range(5)]
    except Exception as error:
        assert cells.named(error) == expected
    else:
        assert {cells.outcome(result, 50) for result in results} == {expected}


def gone_or_signalled(pid):
    """Signal the worker again, and return whether it ended within a second.

    If a signal arrives just before `os.read` blocks, its Python handler does not run until another
    signal arrives.
    """
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return True
    return not wait_gone([pid], 1)


@pytest.mark.parametrize(CELLS, IDLE)
def test_in_an_idle_worker(make_pool, kind, method, stage, how, expected, mailbox, gate):
    """No task is lost, and a new worker replaces the idle one."""
    pool = make_pool(kind, 2, cells.arm, (how,), **options(method))
    victim = workers_of(pool, mailbox, gate, 2)[0]
    if how in ("SIGSTOP", "hang"):
        os.kill(victim, signal.SIGUSR1)
    else:
        eventually(lambda: gone_or_signalled(victim), "the worker ends")
    # Only a limit ends a worker that does not go on. The other worker has imported the function.
    limit = cells.LIMIT if how in ("SIGSTOP", "hang") else None
    # Submit all tasks at once. Otherwise one quick worker may run them all.
    results = pool.map_async(work.square, range(8), chunksize=1, timeout=limit)
    assert results.get(WAIT) == [i * i for i in range(8)]
    assert (expected, wait_gone([victim])) == ("replaced", [])
    check_usable(pool, mailbox, gate, 2)


@pytest.mark.parametrize(CELLS, IN_THE_CALLER)
def test_in_the_caller(kind, method, stage, how, expected):
    """Faults in the program's own process run in a separate program for each cell."""
    program = scripts.popen([cells.__file__, kind.name, method, stage, how])
    try:
        if how == "SIGSTOP":
            _, status = os.waitpid(program.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), status
            os.kill(program.pid, signal.SIGCONT)
        out, err = program.communicate(timeout=PROGRAM_LIMIT)
    finally:
        program.kill()
        program.communicate()
    lines = out.split("\n")
    workers = [] if stage == "initializer" else [int(word) for word in lines.pop(0).split()]
    if expected == "program ends":
        exits = {"os._exit": 4, "SIGSEGV": -signal.SIGSEGV, "SIGKILL": -signal.SIGKILL}
        assert program.returncode == exits[how], err
    else:
        said = lines[0]
        if stage == "initializer" and how == "SIGSTOP" and said == "answered":
            said = "goes on"
        assert (said, program.returncode) == (expected, 0), err
        assert stage == "initializer" or "usable" in out
    assert wait_gone(workers, 3) == []


# In verbs, and together with others --------------------------------------------------------------


VERBS = pytest.mark.parametrize("how", ["SIGKILL", "hang"])


@VERBS
@pytest.mark.parametrize("chunksize", [1, 5])
def test_in_a_map(process_kind, make_pool, how, chunksize, log):
    """The map fails after all other chunks have run once. The error names the item's chunk."""
    pool = make_pool(process_kind, 2, work.nothing)
    task = functools.partial(work.end_or_return, how, 17, str(log))
    limit = cells.LIMIT if how == "hang" else None
    result = pool.map_async(task, range(40), chunksize, timeout=limit)
    assert cells.outcome(result) == matrix.PROCESSES["run"][how]
    with pytest.raises((WorkerDied, TaskTimeout)) as caught:
        result.get(0)
    assert ("chunk 3" if chunksize == 5 else "item 17") in str(caught.value)
    ran = collections.Counter(map(int, log.read_text().split()))
    lost = set(range(18, 20)) if chunksize == 5 else set()
    assert set(ran) == set(range(40)) - lost and set(ran.values()) == {1}
    assert pool.map(work.square, range(10), timeout=WAIT) == [i * i for i in range(10)]


@VERBS
@pytest.mark.parametrize("verb", ["imap", *also("imap_unordered")])
def test_in_a_lazy_map(process_kind, make_pool, how, verb, log):
    """The iterator raises the error for one item, and yields the results of the others."""
    pool = make_pool(process_kind, 2, work.nothing)
    task = functools.partial(work.end_or_return, how, 7, str(log))
    limit = cells.LIMIT if how == "hang" else None
    good, bad = drained(getattr(pool, verb)(task, range(200), timeout=limit))
    assert sorted(good) == [i for i in range(200) if i != 7]
    assert verb == "imap_unordered" or good == sorted(good)
    assert [cells.named(error) for error in bad] == [matrix.PROCESSES["run"][how]]


def test_calls_of_one_worker_run_in_order(process_kind, make_pool, log):
    """Calls run in the order in which they were made, whatever their options."""
    pool = make_pool(process_kind, 1)
    terms = [{}, {"timeout": 30}, {"retries": 2}, {}]
    calls = [pool.apply_async(work.logged, (str(log), i), **terms[i % 4]) for i in range(100)]
    assert [call.get(WAIT) for call in calls] == list(range(100))
    assert [int(line) for line in log.read_text().split()] == list(range(100))


# Signals of other processes ----------------------------------------------------------------------


def ignore_sigterm(box):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    work.post_and_spin(box)


@pytest.mark.parametrize("task", [work.stop_self, ignore_sigterm])
def test_terminate_ends(process_kind, make_pool, mailbox, task):
    """`terminate` ends a worker that is stopped, or ignores SIGTERM."""
    pool = make_pool(process_kind, 2)
    pool.apply_async(task, (mailbox.path,))
    victim = int(mailbox.line())
    pool.terminate()
    pool.join()
    assert wait_gone([victim], 10) == []
