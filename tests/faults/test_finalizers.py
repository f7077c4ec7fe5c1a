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
            self.stream = self.pool.imap(slow, range(300))
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
    check(told, [[0, 1, 2, 3], 299, 1])
    assert all(out is None for use, out in told if use in IN_PLACE)


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool", *also("P2PPool")])
def test_a_cycle_at_the_end_of_the_program(tmp_path, kind):
    """At the end of the interpreter no other thread runs, and so a finalizer waits for none."""
    check(told_by(tmp_path, kind, END), [299])


IN_THE_THREAD = """
    def trace(frame, event, arg):
        global left
        if frame.f_code.co_filename == threading.__file__:
            return None  # a thread at its end is none of the current ones
        if left and threading.current_thread().name.endswith("-engine"):
            left -= 1
            if not left:
                ended = len(told)
                gc.collect()
                left = len(told) == ended  # the thread has the pool here: again at the next line
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
    check(told, [[0, 1, 2, 3], 299, 1])
    assert len(told) == 13 * 6
    assert ("call", "RuntimeError") in told
    assert ("submit", "RuntimeError") in told


# A finalizer runs at every {step}th instruction of a part of xpool's code, in one of its threads.
IN_A_CALL = """
    import array
    import gc
    import sys
    import threading
    import xpool

    def same(n):
        return n

    def first(arrays):
        return [one[0] for one in arrays]

    LATER = [
        lambda pool, n: pool.apply_async(same, (n,)).get,
        lambda pool, n: pool.map_async(same, [n]).get,
        lambda pool, n: pool.submit(same, n).result,
        lambda pool, n: pool.imap(same, [n]).next,
    ]
    NOW = [
        lambda pool, n: pool.map(same, [n]),
        lambda pool, n: pool.submit(same, n).result(),
        lambda pool, n: pool.apply_async(same, (n,)).cancel(),
        lambda pool, n: pool.statistics(),
        lambda pool, n: pool.report(),
        lambda pool, n: getattr(pool, "run_all", pool.map)(same, [n]),
    ]

    class Proxy:
        def __init__(self, pool, use, n):
            self.pool, self.use, self.n, self.me = pool, use, n, self

        def __del__(self):
            try:
                answer = self.use(self.pool, self.n)
            except RuntimeError as error:
                assert "finalizer" in str(error)
                refused.append(self.n)
            else:
                if self.use in LATER:
                    answers.append((self.n, answer))
            ended.append(self.n)

    def trace(frame, event, arg):
        global left
        if {part!r} not in frame.f_code.co_filename.rpartition("/")[0]:
            return None
        frame.f_trace_opcodes = True
        if left and {thread!r} in threading.current_thread().name:
            left -= 1
            if not left:
                gc.collect()
        return trace

    CALLS = [
        {calls}
    ]
    left, answers, refused, ended, uses = 0, [], [], [], {uses}

    if __name__ == "__main__":
        gc.disable()
        threading.settrace(trace)
        with xpool.{kind}(2) as pool:
            for call in CALLS * 2:
                call()
            for call in CALLS:
                at = 1
                while True:
                    use = uses[at % len(uses)]
                    Proxy(pool, use, at)
                    left = at
                    sys.settrace(trace)
                    expected = call()
                    sys.settrace(None)
                    beyond, left = left, 0
                    while ended != [at]:  # another thread may be collecting
                        gc.collect()
                    ended.clear()
                    while answers:
                        n, get = answers.pop()
                        assert get(60) in (n, [n]), (n, use)
                    if beyond or at > 6000:
                        break
                    at += {step}
                print(call(), expected == call())
        print(len(refused))
"""


CALLS = """
        lambda: pool.apply(same, (1,)),
        lambda: pool.apply_async(same, (1,)).get(),
        lambda: pool.map(same, range(4)),
        lambda: list(pool.imap(same, range(4))),
"""


@pytest.mark.parametrize("main", [True, False], ids=["in-the-caller", "in-a-thread-of-the-pool"])
@pytest.mark.parametrize("kind", ["Pool", "ThreadPool", *also("P2PPool")])
def test_a_finalizer_submits_at_any_moment(tmp_path, kind, main):
    """The collector may run while a call of the pool holds a lock: what a finalizer submits then is
    answered, and what would wait raises."""
    thread, uses = "MainThread" if main else "-engine", "[*LATER, *NOW]"
    if kind == "ThreadPool" and not main:
        # If a thread that runs tasks waits for another task, other threads have to be free.
        thread, uses = "-worker", "LATER"
    text = IN_A_CALL.format(kind=kind, thread=thread, uses=uses, calls=CALLS, part="xpool", step=67)
    lines = script(tmp_path, text)
    assert lines[:4] == ["1 True", "1 True", "[0, 1, 2, 3] True", "[0, 1, 2, 3] True"]
    assert (int(lines[4]) > 5) == (kind != "ThreadPool")


ARRAYS = "lambda: first(pool.imap(same, [array.array('d', [n]) * 9000 for n in range(6)])),"


@pytest.mark.parametrize("main", [True, False], ids=["in-the-caller", "in-a-thread-of-the-pool"])
@pytest.mark.parametrize("kind", ["Pool", *also("P2PPool")])
def test_a_finalizer_submits_while_shared_memory_changes(tmp_path, kind, main):
    """The collector may run while memory for an array is taken or given back: the thread that
    receives results waits for this."""
    text = IN_A_CALL.format(
        kind=kind,
        thread="MainThread" if main else "-engine",
        uses="[*LATER, *NOW]",
        calls=ARRAYS,
        part="xpool/_memory",
        step=19,
    )
    lines = script(tmp_path, text)
    assert lines[0] == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0] True"
    assert int(lines[1]) > 5


# A finalizer meets another thread, which it may start: it waits until this thread waits for a lock
# in one of the functions `meets`, and submits a task then.
PROXY = """
    import gc
    import sys
    import threading
    import time
    import xpool

    class Proxy:
        def __init__(self, thread, meet, submit):
            self.thread, self.meet, self.submit, self.me = thread, meet, submit, self

        def __del__(self):
            self.meet()
            while sys._current_frames()[self.thread.ident].f_code.co_name not in {meets!r}:
                time.sleep(0.001)
            answers.append(self.submit())

    answers = []
"""

# The finalizer has interrupted a call that holds the engine's lock.  The pool's thread comes to
# `{stop}`, and waits for this lock.
BETWEEN_TWO_LOCKS = """
    inside, held, armed = threading.Event(), threading.Event(), False

    def same(n):
        return n

    def two(n):
        yield n
        yield n

    def in_the_engine(frame, event, arg):
        global armed
        if frame.f_code.co_name == "{stop}" and armed and threading.get_ident() == engine.ident:
            armed = False
            inside.set()
            held.wait()

    def in_the_caller(frame, event, arg):
        if frame.f_code.co_name == "give_idle":
            sys.settrace(None)
            gc.collect()

    if __name__ == "__main__":
        gc.disable()
        threading.settrace(in_the_engine)
        with xpool.{kind}(2) as pool:
            pool.map(same, range(4))
            (engine,) = (t for t in threading.enumerate() if t.name.endswith("-engine"))
            armed = True
            job = pool.{call}
            inside.wait()
            Proxy(engine, held.set, lambda: pool.imap(same, [7]))
            sys.settrace(in_the_caller)
            print(pool.apply_async(same, [1]).get(), list(answers[0]), {value})
"""


@pytest.mark.parametrize("kind", ["Pool", *also("P2PPool")])
@pytest.mark.parametrize(
    ("stop", "wait", "call", "value"),
    [
        ("complete", "forget", "map_async(same, [5, 5])", "job.get()"),
        ("ask", "submit", "imap(two, [5], yields=True)", "list(job)"),
    ],
    ids=["map", "yields"],
)
def test_a_finalizer_waits_for_no_thread_that_waits_for_its_own(
    tmp_path, kind, stop, wait, call, value
):
    text = PROXY + BETWEEN_TWO_LOCKS
    (line,) = script(
        tmp_path, text.format(kind=kind, meets=[wait], stop=stop, call=call, value=value)
    )
    assert line == "1 [7] [5, 5]"


# The finalizer runs while a class is pickled, and another thread pickles globals with such a class.
WHILE_A_CLASS_IS_PICKLED = """
    class Collects:
        def __reduce__(self):
            gc.collect()
            return Collects, ()

    def with_attribute(value):
        class Own:
            attribute = value

        return Own()

    one = with_attribute(1)

    def name_of_one():
        return type(one).__name__

    def name(value):
        return type(value).__name__

    if __name__ == "__main__":
        gc.disable()
        with xpool.{kind}(2) as pool:
            pool.map(abs, range(4))
            other = threading.Thread(target=lambda: answers.append(pool.apply_async(name_of_one)))
            Proxy(other, other.start, lambda: pool.apply_async(abs, (-1,)))
            print(pool.apply(name, (with_attribute(Collects()),)))
            other.join()
            print(*sorted(str(one.get()) for one in answers))
"""


@pytest.mark.parametrize("kind", ["Pool", *also("P2PPool")])
def test_a_finalizer_submits_while_two_threads_pickle_classes(tmp_path, kind):
    text = PROXY + WHILE_A_CLASS_IS_PICKLED
    lines = script(tmp_path, text.format(kind=kind, meets=["preface", "definition_of"]))
    assert lines == ["Own", "1 Own"]


# The finalizer runs while memory is taken for an array, and another thread takes some for a global.
WHILE_MEMORY_IS_TAKEN = """
    import array

    def trace(frame, event, arg):
        if frame.f_code.co_name == "take":
            sys.settrace(None)
            gc.collect()

    large = bytearray(300000)

    def size():
        return len(large)

    if __name__ == "__main__":
        gc.disable()
        with xpool.{kind}(2) as pool:
            pool.map(abs, range(4))
            other = threading.Thread(target=lambda: answers.append(pool.apply_async(size)))
            Proxy(other, other.start, lambda: pool.apply_async(abs, (-1,)))
            sys.settrace(trace)
            print(pool.apply(len, (array.array("d", [0]) * 90000,)))
            other.join()
            print(*sorted(one.get() for one in answers))
"""


@pytest.mark.parametrize("kind", ["Pool", *also("P2PPool")])
def test_a_finalizer_submits_while_two_threads_take_memory(tmp_path, kind):
    text = (PROXY + WHILE_MEMORY_IS_TAKEN).format(kind=kind, meets=["lease"])
    assert script(tmp_path, text) == ["90000", "1 300000"]
