"""Finalizers that the garbage collector calls, and that use a pool in the same cycle."""

import ast

import pytest
from support.tiers import also

from .test_limits import script

pytestmark = pytest.mark.xpool_only

RUNNER = """
    import gc
    import threading
    import time
    import xpool

    KIND = xpool.{kind}

    class Runner:
        def __init__(self, use):
            self.pool, self.use = KIND(2), use
            self.pool.map(abs, range(4))
            self.stream = self.pool.imap(slow, range(30))
            next(self.stream)
            self.me = self

        def __del__(self):
            try:
                out = self.use(self)
            except BaseException as error:
                out = type(error).__name__
            told.append((self.use.__name__, out))

    def slow(x):
        time.sleep(0.001)
        return x

    def close(runner):
        runner.pool.close()
        runner.pool.join()

    def terminate(runner):
        runner.pool.terminate()
        runner.pool.join()

    def leave(runner):
        runner.pool.__exit__(None, None, None)

    def call(runner):
        return runner.pool.map(abs, range(4))

    def iterate(runner):
        return len(list(runner.stream))

    def submit(runner):
        return runner.pool.submit(abs, -1).result()

    USES = [close, terminate, leave, call, iterate, submit]
    told = []
    gc.disable()
"""

NOW = """
    if __name__ == "__main__":
        for use in USES:
            Runner(use)
            {collect}
        print(told)
"""

END = """
    class Last:
        def __init__(self, told):
            self.told, self.me = told, self

        def __del__(self):
            print(self.told)

    if __name__ == "__main__":
        for use in USES:
            Runner(use)
        Last(told)
"""

# At the end, SystemExit ends daemon threads without a traceback, and nothing can be imported.
ERRORS = ["PoolClosed", "BrokenExecutor", "RuntimeError", "SystemExit", "ImportError"]
IN_PLACE = {"close", "terminate", "leave"}


def told_by(tmp_path, kind, program):
    lines = script(tmp_path, RUNNER.format(kind=kind) + program, "-W", "ignore")
    return ast.literal_eval(lines[-1])


def check(told, values):
    """Check that each finalizer has ended: with a result, or with an error that says why not."""
    assert {use for use, _ in told} == {"close", "terminate", "leave", "call", "iterate", "submit"}
    for use, out in told:
        assert out in ERRORS or out in values or (out is None and use in IN_PLACE), (use, out)


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool", *also("P2PPool")])
@pytest.mark.parametrize(
    "collect",
    [
        "gc.collect()",
        "thread = threading.Thread(target=gc.collect); thread.start(); thread.join()",
    ],
    ids=["here", "in-a-thread"],
)
def test_a_cycle_with_its_pool(tmp_path, kind, collect):
    """A finalizer may close, join and call a pool in its cycle, and waits for nothing in vain.

    Python clears weak references to the pool, and to the iterator, before it calls the finalizer.
    """
    told = told_by(tmp_path, kind, NOW.format(collect=collect))
    check(told, [[0, 1, 2, 3], 29, 1])
    assert all(out is None for use, out in told if use in IN_PLACE)


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool", *also("P2PPool")])
def test_a_cycle_at_the_end_of_the_program(tmp_path, kind):
    """At the end of the interpreter no other thread runs, and so a finalizer waits for none."""
    check(told_by(tmp_path, kind, END), [29])


IN_THE_THREAD = """
    def trace(frame, event, arg):
        global left
        if left and threading.current_thread().name.endswith("-engine"):
            left -= 1
            if not left:
                gc.collect()
        return trace

    if __name__ == "__main__":
        left = 0
        threading.settrace(trace)
        for at in range(1, 50, 4):
            for use in USES:
                before = set(threading.enumerate())
                Runner(use)
                left = at
                for thread in set(threading.enumerate()) - before:
                    thread.join(10)
                    assert not thread.is_alive(), (at, use, thread)
                left = 0
                gc.collect()
        print(told)
"""


@pytest.mark.parametrize("kind", ["Pool", *also("P2PPool")])  # answers wake no thread of threads
def test_a_finalizer_in_the_pools_thread(tmp_path, kind):
    """The collector may run in the pool's own thread, while it holds a lock: the pool ends."""
    told = told_by(tmp_path, kind, IN_THE_THREAD)
    check(told, [[0, 1, 2, 3], 29, 1])
    assert len(told) == 13 * 6
    assert ("call", "RuntimeError") in told
    assert ("submit", "RuntimeError") in told
