"""The checks of custom hooks and channels: correct ones pass, and each fault is named."""

import fcntl
import importlib.util
import os
import queue
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hooks.own_pools import QueueProcessPool, QueueThreadPool
from support.limits import PROGRAM_LIMIT, WAIT
from support.tiers import also

from xpool import Pool, ThreadPool
from xpool.testing import (
    LeakError,
    PoolStateMachine,
    check_channel,
    check_hooks,
    no_leaks,
    sabotage,
)
from xpool.testing import (
    _pool_machine as machine,
)
from xpool.testing import (
    _test_tasks as waiting,
)
from xpool.testing._pool_machine import Answer
from xpool.testing._test_tasks import EXITS, STAGES, WAYS, Late

pytestmark = [pytest.mark.xpool_only, pytest.mark.usefixtures("warm")]


@pytest.mark.parametrize("pool", [QueueThreadPool, *also(QueueProcessPool)])
def test_good_hooks_pass(pool):
    """Pools whose hooks follow their descriptions pass."""
    check_hooks(pool)


def test_the_documented_pool_passes():
    """The pool in docs/own_pools.md passes."""
    page = (Path(__file__).parents[2] / "docs" / "own_pools.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(.*?)if __name__", page, re.DOTALL)
    space = {"__name__": "page"}
    exec(text, space)
    check_hooks(space["QueuePool"])


def test_the_bug_of_the_testing_page_is_found():
    """The pool in docs/testing.md sends the error of task 1 as that of task 0."""
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"<!-- my_pool.py -->\n```python\n(.*?)```", page, re.DOTALL)
    for mend in (False, True):
        space = {"__name__": "page"}
        exec(text.replace("put((job, 0,", "put((job, chunk,") if mend else text, space)
        if mend:
            check_hooks(space["RoundPool"])
        else:
            with pytest.raises(AssertionError, match="imap of a value and an error"):
                check_hooks(space["RoundPool"], limit=1)


def test_later_histories_wait_less(monkeypatch):
    """After the first hang of an answer or of `join`, later histories have a short limit."""
    for act in ("expect", "ends"):
        made = PoolStateMachine.for_pool(ThreadPool, limit=9)
        one = made()

        def late(*args):
            raise Late

        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="within 9 s"):
            patch.setattr(machine, "in_time", late)
            if act == "expect":
                one.model.check(Answer("a call", late, []))
            else:
                one.ends("join", late)
        assert made.limit.seconds == 0.25
        made.limit.slowest = 0.01
        one.teardown()
        assert not made.TestCase.settings.report_multiple_bugs


class Blocking(QueueThreadPool):
    def pool_outqueue_get(self, timeout=None):
        return self.answers.get(timeout=timeout + 1.5)


class Malformed(QueueThreadPool):
    def pool_outqueue_get(self, timeout=None):
        job, chunk, answer = super().pool_outqueue_get(timeout)
        return job, chunk, answer[1]


class Unsure(QueueThreadPool):
    def maintain_pool(self):
        super().maintain_pool()


class Slow(QueueThreadPool):
    def terminate_workers(self):
        threading.Event().wait(0.8)
        super().terminate_workers()


class Mortal(QueueThreadPool):
    """Does not replace workers that have ended."""

    def maintain_pool(self):
        return False


class Twice(QueueThreadPool):
    """Reports errors as results."""

    def pool_outqueue_get(self, timeout=None):
        job, chunk, (_, value) = super().pool_outqueue_get(timeout)
        return job, chunk, (True, value)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (Blocking, r"pool_outqueue_get\(0.\d\) took"),
        (Malformed, r"a result is \(job, chunk, \(ok, value\)\)"),
        (Unsure, r"maintain_pool\(\) returned None"),
        (Slow, r"terminate_workers\(\) took \d+\.\d s; it may not block"),
        (Mortal, r"map with maxtasksperchild=1 does not return"),
        (Twice, r"a task that raised TaskError\(7\) is answered with"),
    ],
)
def test_faults_of_hooks_are_named(pool, message):
    """Each hook that breaks its description is named, with its fault."""
    with pytest.raises(AssertionError, match=message):
        check_hooks(pool, limit=2)


class Channel:
    def __init__(self):
        self.q = queue.SimpleQueue()

    def put(self, obj):
        self.q.put(obj)

    def get(self, timeout):
        return self.q.get(timeout=timeout)


class Impatient(Channel):
    def get(self, timeout):
        if self.q.empty() and timeout < 1:
            raise queue.Empty
        return super().get(timeout)


class Lossy(Channel):
    n = 0

    def put(self, obj):
        self.n += 1
        if self.n % 50:
            super().put(obj)


class Nothing(Channel):
    def get(self, timeout):
        try:
            return super().get(timeout)
        except queue.Empty:
            return None


def test_a_good_channel_passes():
    """A correct queue passes."""
    check_channel(Channel)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Impatient, r"raised queue.Empty after 0.0"),
        (Lossy, r"of 200 objects that 4 threads put, 19\d came"),
        (Nothing, r"get\(0.05\) of an empty channel returned None"),
    ],
)
def test_faults_of_channels_are_named(make, message):
    """A channel fails if it loses objects or does not wait for its timeout."""
    with pytest.raises(AssertionError, match=message):
        check_channel(make, limit=5)


@pytest.mark.parametrize(
    ("stage", "how"),
    [("task unpickle", "raise"), ("run", "SIGKILL"), ("result pickle", "os._exit")],
)
def test_sabotage(make_pool, stage, how):
    """A saboteur affects only its own task. (`tests/faults` has every stage and way.)"""
    from xpool import WorkerDied

    pool = make_pool(Pool, 1)
    victim = pool.apply_async(*sabotage(stage, how))
    with pytest.raises(Exception) as caught:
        victim.get(WAIT)
    if how != "raise":
        assert isinstance(caught.value, WorkerDied) and caught.value.exitcode == EXITS[how]
    assert pool.apply(len, ((1, 2),)) == 2


@pytest.mark.parametrize("how", ["SIGSTOP", "hang", "spin"])
def test_sabotage_that_never_ends(how):
    """A task that never ends is ended with the pool."""
    with no_leaks(), Pool(1) as pool:
        pool.apply(len, ((),))
        victim = pool.apply_async(*sabotage("run", how))
        victim.wait(0.05)
        assert not victim.ready()


def test_sabotage_names_what_there_is():
    """An unknown stage or way is refused, and the error lists the known ones."""
    with pytest.raises(ValueError, match="result unpickle"):
        sabotage("lunch", "raise")
    with pytest.raises(ValueError, match=WAYS[-1]):
        sabotage(next(iter(STAGES)), "politely")


def test_descriptors_from_1024_on():
    """Mailboxes and gates work with descriptors above 1024, which `select` refuses."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert before[1] == resource.RLIM_INFINITY or before[1] > 1200, before
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1200), before[1]))
    ours, theirs = os.pipe()
    high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1100)
    try:
        assert not waiting._reader(high).poll(0)
        os.write(theirs, b"x")
        assert waiting._reader(high).poll(WAIT * 1000)
    finally:
        for fd in (ours, theirs, high):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_leaks_names_what_is_left(tmp_path):
    """The guard lists leaks of its block, but does not replace the block's own error."""
    with pytest.raises(LeakError, match="descriptor .*left"):
        with no_leaks(limit=0.1):
            file = (tmp_path / "left").open("w")
    file.close()
    with pytest.raises(ZeroDivisionError), no_leaks(limit=0.1):
        file = (tmp_path / "left").open("w")
        raise ZeroDivisionError
    file.close()


def test_the_fixture(tmp_path):
    """The fixture fails only the test that leaks."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["xpool.testing.plugin"]\n')
    (tmp_path / "test_it.py").write_text(
        "import threading\n"
        "stop = threading.Event()\n"
        "def test_clean(no_leaks): pass\n"
        "def test_leaks(no_leaks):\n"
        "    threading.Thread(target=stop.wait, args=(8,), name='leaked', daemon=True).start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, timeout=PROGRAM_LIMIT, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": _root(), "XPOOL_TEST_LEAK_LIMIT": "0.5"},
    )  # fmt: skip
    assert "2 passed, 1 error" in done.stdout and "thread leaked" in done.stdout, done.stdout


def _root():
    import xpool

    return xpool.__path__[0].rpartition("/")[0]


def test_without_hypothesis():
    """`xpool.testing` works without hypothesis and pytest, except the state machine."""
    code = (
        "import sys; sys.modules['hypothesis'] = None; sys.modules['pytest'] = None\n"
        "import xpool.testing as t\n"
        "t.no_leaks, t.sabotage, t.check_hooks, t.Gate\n"
        "try: t.PoolStateMachine\n"
        "except ImportError as exc: print(exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, timeout=PROGRAM_LIMIT,
        env={**os.environ, "PYTHONPATH": _root()},
    )  # fmt: skip
    assert "pip install hypothesis" in done.stdout, done.stderr
    assert importlib.util.find_spec("hypothesis") is not None
