"""What must hold after a fault: the error says what has happened, and the pool is usable."""

import os
import signal
import traceback

from support import work
from support.limits import WAIT
from support.waiting import wait_gone

from xpool import WorkerDied

EXIT = {"sys.exit": 3, "os._exit": 4, "SIGKILL": -signal.SIGKILL, "SIGSEGV": -signal.SIGSEGV}


def story(error):
    """Return an exception and its causes as text."""
    return "".join(traceback.format_exception(error))


def check_death(error, how, workers):
    """Check that the error says which worker died, and how."""
    assert isinstance(error, WorkerDied), story(error)
    assert error.exitcode == EXIT.get(how, 1)
    assert error.signal == (how if how.startswith("SIG") else None)
    assert 0 <= error.worker < workers
    assert isinstance(error.pid, int) and error.pid != os.getpid()
    assert wait_gone([error.pid], 5) == []
    assert error.task and str(error.pid) in str(error)


def check_usable(pool, mailbox, gate, workers):
    """Check that every worker runs a task."""
    results = [
        pool.apply_async(work.who_at_gate, (mailbox.path, gate.path)) for _ in range(workers)
    ]
    mailbox.lines(workers)
    gate.open(workers)
    assert sorted(r.get()[0] for r in results) == list(range(workers))


def workers_of(pool, mailbox, gate, count):
    """Return the pids of the pool's workers. Each runs a task at the same time."""
    results = [
        pool.apply_async(work.post_and_gate, (mailbox.path, gate.path)) for _ in range(count)
    ]
    pids = [int(line) for line in mailbox.lines(count)]
    gate.open(count)
    for result in results:
        result.get(WAIT)
    return pids
