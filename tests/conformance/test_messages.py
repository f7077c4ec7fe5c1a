"""Messages for common mistakes. They appear at the call."""

import asyncio
import bdb
import functools
import multiprocessing
import os
import pickle
import sys
import threading
import time

import pytest
from support import scripts, work
from support.waiting import eventually

import xpool
from xpool import (
    CtxPool,
    OptionError,
    P2PPool,
    Pool,
    PoolClosed,
    ResultNotPicklable,
    TaskNotPicklable,
    TaskTimeout,
    ThreadPool,
    WorkerStartFailed,
)
from xpool.devices import Host, devices
from xpool.queue import SimpleQueue

PACKAGE = os.path.dirname(xpool.__file__) + os.sep

pytestmark = pytest.mark.xpool_only


class Holder:
    """Stores an object in an attribute."""

    def __init__(self, held):
        self.held = held


async def coroutine(x):
    """Return the argument."""
    return x


# Objects that cannot be sent ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda x: x, Holder, lambda x: [{"a": Holder(x)}]], ids=["itself", "attribute", "deep"]
)
@pytest.mark.parametrize("ready", [False, True])
def test_pools_and_results_are_not_sent(process_kind, make_pool, gate, wrap, ready):
    """For a pool or a result in an argument, the message says that pools cannot be sent."""
    pool = make_pool(process_kind, 1)
    results = [pool.apply_async(work.gated, (gate.path,)), pool.imap(work.gated, [gate.path])]
    if ready:
        gate.open(2)
        results[0].wait()
        eventually(results[1]._movable, "the iterator has its value")
    for held in (pool, *results, ThreadPool(1)):
        with pytest.raises(NotImplementedError, match="pools cannot be sent to workers"):
            pool.apply_async(work.same, (wrap(held),)).get()
    held.terminate()
    held.join()
    gate.open(2)


def test_a_lock_that_a_function_captured(process_kind, make_pool):
    """The message names the variable, and says that workers cannot share a thread's lock."""
    pool = make_pool(process_kind, 1)
    held = threading.Lock()

    def locked(x):
        with held:
            return x

    with pytest.raises(Exception, match="locked's variable 'held'.*share a thread's lock"):
        pool.map(locked, range(3))


def test_the_cause_is_said_once(process_kind, make_pool):
    """The traceback has the pickler's error of the part, and not also that of the whole task."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(TaskNotPicklable, match=r"argument 0 of echo\(\).*Send list") as caught:
        pool.apply(work.echo, ((x for x in ()),))
    assert isinstance(caught.value.__cause__, TypeError)
    assert caught.value.__cause__.__context__ is None


@pytest.mark.torch
def test_a_tensor_with_a_graph(process_kind, make_pool):
    """The error says where the tensor is, as a tensor in a result does, before the long result."""
    import torch

    pool = make_pool(process_kind, 1)
    loss = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(
        TaskNotPicklable, match=r"at \['loss'\] in argument 0 of echo\(\): .* Send x\.detach"
    ):
        pool.apply(work.echo, ({"net": {}, "loss": loss},))
    with pytest.raises(ResultNotPicklable, match=r"^The result cannot be .* at \[0\]: ") as caught:
        pool.apply(make_loss)
    said = str(caught.value)
    assert "Return x.detach(). The result is" in said and "Return data" not in said


def make_loss(*_):
    import torch

    return [torch.ones(2, requires_grad=True) * 2, "x" * 1000]


EVENTS = """
    import threading
    from xpool import Pool

    ready = [threading.Event()]
    lock = threading.RLock()

    def look(x):
        return ready[0].is_set(), lock

    if __name__ == "__main__":
        with Pool(1) as pool:
            pool.map(lambda x: bool(look(x)), [1])
"""


def test_locks_of_threads_in_globals(tmp_path):
    """The warning names the object that the program has made, and its counterpart."""
    script = scripts.write(tmp_path / "script.py", EVENTS)
    err = scripts.run([script]).stderr
    assert "own copy of the Event 'ready[0]' of __main__" in err, err
    assert "pass a multiprocessing.Event in initargs=" in err, err
    assert "own copy of the lock 'lock' of __main__" in err, err
    assert "pass a multiprocessing.RLock in initargs=" in err, err


class Refusing:
    """Cannot be sent, and refers to an object whose attributes must not be looked at."""

    class Part:
        @property
        def __dict__(self):
            raise AssertionError("looked at")

    def __init__(self):
        self.part = self.Part()

    def __reduce__(self):
        raise LookupError("of its own")


def test_an_object_that_refuses_to_be_sent_is_not_searched(process_kind, make_pool):
    """Its place is known.  To search it took 50 ms at each call, for a pool in a global."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(LookupError, match="of its own"):
        pool.map(work.same, [Refusing(), 0], 1)


def test_a_lock_of_multiprocessing_as_an_argument(process_kind, make_pool):
    """The error names the argument, and says where to pass the lock instead."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(RuntimeError, match="inheritance") as caught:
        pool.apply(work.echo, (0, [multiprocessing.Lock()]))
    said = "".join([*getattr(caught.value, "__notes__", ()), str(caught.value.__cause__)])
    assert "by Lock.__getstate__ at [0] in argument 1 of echo(). Pass it in initargs=" in said


INHERITED = """
    import multiprocessing, traceback
    from xpool import Pool

    queue = multiprocessing.Queue()
    script = open(__file__)

    def put(x):
        queue.put(x)

    def read(x):
        return script.read()

    def keep(given):
        global queue
        queue = given

    with Pool(1) as pool:
        for func in put, read:
            try:
                pool.apply(func, ("a",))
            except NameError:
                print(traceback.format_exc().splitlines()[-1])
    with Pool(1, keep, (queue,)) as pool:
        pool.apply(put, ("a",))
        print(queue.get())
"""


def test_a_queue_of_multiprocessing_as_a_global(tmp_path):
    """The remedy is `initargs=`: a queue that each worker makes itself would be another one."""
    of_queue, of_file, got = scripts.program(tmp_path, INHERITED).splitlines()
    assert of_queue.endswith(
        "Pass it in initargs= of the pool, and let the initializer set the global."
    )
    assert of_file.endswith("pass what it is made from as an argument.")
    assert got == "a"


# Arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["map", "map_async", "imap", "imap_unordered", "starmap"])
def test_two_iterables_hint_at_starmap(pool, verb):
    """For `map(f, xs, ys)`, the message says how to write it with `starmap`."""
    with pytest.raises(TypeError, match=r"chunksize.*starmap\(func, zip\(xs, ys\)\)"):
        getattr(pool, verb)(work.add, [1, 2], [3, 4])


def test_a_string_as_args(kind, make_pool):
    """A string for `args` is refused unless its characters fit the function's parameters."""
    pool = make_pool(kind, 1)
    plain = getattr(pool, "_pool", pool)
    with pytest.raises(TypeError, match=r"args=\('data.csv',\)"):
        plain.apply(work.square, "data.csv")
    with pytest.raises(TypeError, match=r"args=\(3,\)"):
        plain.apply(work.square, 3)
    assert pool.apply(work.add, "ab") == "ab"
    assert pool.apply(work.echo, "abc") == (("a", "b", "c"), {})


def test_a_string_as_args_of_a_function_with_a_context(make_pool):
    """With a context, the string's characters are counted after the context."""
    pool = make_pool(CtxPool, 1)
    with pytest.raises(TypeError, match="args is a string"):
        pool.apply(work.add, "ab")
    assert pool.apply(work.echo, "a") == ((None, "a"), {})


@pytest.mark.parametrize(
    "func", [coroutine, functools.partial(coroutine)], ids=["plain", "partial"]
)
def test_a_coroutine_function(process_kind, make_pool, func):
    """A coroutine function is refused before it is called. The message says what to write."""
    pool = make_pool(process_kind, 1)
    for verb in ("map", "imap", "starmap"):
        with pytest.raises(TypeError, match=r"asyncio.run\(coroutine\(...\)\)"):
            getattr(pool._pool if hasattr(pool, "_pool") else pool, verb)(func, [(1,)])


def test_coroutines_of_threads(make_pool):
    """Thread pools may return coroutines, because they stay in this process."""
    (one,) = make_pool(ThreadPool, 1).map(coroutine, [3])
    assert asyncio.run(one) == 3


@pytest.mark.parametrize("seconds", [3e6, 1e18, 1e300, sys.float_info.max])
def test_very_long_limits(kind, make_pool, seconds):
    """Very long limits work for a call, for a pool and for `join`."""
    pool = make_pool(kind, 1, task_timeout=seconds, initializer_timeout=seconds)
    assert pool.apply(work.square, (2,)) == 4
    assert pool.apply_async(work.square, (3,), timeout=seconds).get(seconds) == 9
    assert list(pool.imap(work.square, [4], timeout=seconds)) == [16]
    pool.close()
    pool.join(seconds)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: p.map(work.square), r"Pool.map\(\) missing .* 'iterable'"),
        (lambda p: p.map(work.square, 5), r"iterable, not int; for one call .* use apply"),
        (lambda p: p.apply(work.square, (1,), [2]), r"kwds must be a dict .*, not \[2\]"),
        (lambda p: p.apply(work.square, (1,), retry=3), r"'retry'; did you mean retries=\?"),
        (lambda p: p.apply(abs, (1,), callback=print), r"apply_async.* have it; it has func"),
        (lambda p: p.apply(abs, (1,), worker=1), r"apply and apply_async of P2PPool have it"),
        (lambda p: p.map(abs, [1], with_index=True), r"imap_unordered has it"),
        (lambda p: p.map(abs, [1], buffersize=3), r"imap and imap_unordered have it"),
        (lambda p: p.map(abs, [1], journal=5), r"journal must be the path .*, not 5"),
    ],
)
def test_arguments_of_verbs(call, says):
    """The error names the verb and the argument, and says what to write."""
    with ThreadPool(1) as pool, pytest.raises(TypeError, match=says):
        call(pool)


def test_a_slow_initializer(make_pool):
    """The error names the option that gives a worker's start more time."""
    pool = make_pool(Pool, 1, time.sleep, (60,), initializer_timeout=0.2)
    with pytest.raises((WorkerStartFailed, PoolClosed), match="a longer initializer_timeout=, or"):
        pool.apply(abs, (1,))


def test_limits_that_are_too_short(make_pool):
    """The error says which value means that there is no limit."""
    pool = make_pool(Pool, 1, task_timeout=60)
    for call in (lambda: pool.apply(abs, (1,), timeout=0), lambda: pool.run_all(abs, 1, timeout=0)):
        with pytest.raises(OptionError, match="not 0; infinity means no limit, and None the pool"):
            call()
    with pytest.raises(OptionError, match="task_timeout .* not 0; None means no limit"):
        Pool(1, task_timeout=0)


@pytest.mark.parametrize("timeout", ["5", [1]])
def test_timeouts_of_waits(timeout, tmp_path):
    """For every wait, a timeout that is not a number raises an error that names it."""
    with ThreadPool(1) as pool:
        lock = multiprocessing.Lock()
        with lock:
            result = pool.apply_async(lock.acquire)
            for wait in (result.get, result.wait, pool.imap(lock.acquire, [True]).next):
                with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
                    wait(timeout)
        result.get()
        lock.release()
        pool.close()
        with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
            pool.join(timeout)
    with SimpleQueue() as queue, pytest.raises(TypeError, match="timeout must be a number"):
        queue.get(timeout)


@pytest.mark.parametrize("hosts", ["localhost", ["a", "b"], 2])
def test_hosts(hosts):
    """If hosts are given by name, the error says how to make hosts."""
    with pytest.raises(OptionError, match=r"xpool\.ray\.hosts\(\)"):
        Pool(hosts=hosts)


def test_a_function_without_the_context():
    """If a function does not take the context, the error says that the pool passes one."""
    with CtxPool(worker_contexts=["context"]) as pool:
        for call in (lambda: pool.map(work.square, [1]), lambda: pool.apply(work.square, (1,))):
            with pytest.raises(TypeError, match="positional") as caught:
                call()
            assert "it calls func(context, *args)" in str(vars(caught.value)["__notes__"])
        with pytest.raises(TypeError) as caught:
            pool.map(lambda context, x: context + x, [1])
        assert "it calls func" not in str(vars(caught.value)["__notes__"])


@pytest.mark.parametrize("options", [{}, {"chunksize": 2}, {"seed": 1}])
def test_map_of_tuples(options):
    """If a function needs the parts of a tuple, the error names `starmap`."""
    with Pool(1) as pool:
        with pytest.raises(TypeError, match="missing 1") as caught:
            pool.map(lambda x, y: x, [(1, 2)], **options)
        assert "starmap passes the parts" in str(vars(caught.value)["__notes__"])
        with pytest.raises(TypeError) as caught:
            pool.map(lambda x: x + 1, [(1, 2)], **options)
        assert "starmap" not in str(vars(caught.value)["__notes__"])


def test_a_name_that_xpool_does_not_have():
    """The AttributeError has the fields from which a traceback suggests the right name."""
    with pytest.raises(AttributeError, match="has no attribute 'Pol'") as caught:
        xpool.Pol  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("Pol", xpool)  # for "Did you mean: 'Pool'?"


@pytest.mark.parametrize("kind", [Pool, ThreadPool, P2PPool])
def test_verbs_are_pickled_by_name(kind):
    """A verb taken from a pool's class is the same function after pickling."""
    for name in ("map", "imap", "starmap_async"):
        assert pickle.loads(pickle.dumps(getattr(kind, name))) is getattr(kind, name)


# Ends and states ----------------------------------------------------------------------------------


def test_results_that_outlive_the_with_block(kind, gate):
    """Pending results and the pool say that the end of the ``with`` block ended them."""
    with kind(1) as pool:
        result, stream = pool.apply_async(work.gated, (gate.path,)), pool.imap(work.same, [1] * 9)
        gate_of_two = pool.map_async(work.same, range(9))
    gate.open()
    for wait in (result.get, gate_of_two.get, lambda: list(stream)):
        with pytest.raises(PoolClosed, match=r"end of its with block.*get\(\) results inside"):
            wait()
    with pytest.raises(PoolClosed, match="Pool not running.*end of its with block"):
        pool.apply(work.square, (1,))
    pool.join()


def test_received_tasks_count_as_waiting(process_kind, make_pool, mailbox, gate):
    """A task that a worker has received but not begun counts as waiting, not as running."""
    pool = make_pool(process_kind, 1)
    pool.map(work.same, range(1000), 1)  # short tasks, so the worker is given several at once
    results = pool.map_async(work.gated, [gate.path] * 20, 1)
    last = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
    eventually(lambda: pool.statistics()["running"] == 1, "one task runs")
    assert pool.statistics()["waiting"] == 20
    assert "20 tasks waiting, 1 running" in repr(pool)
    gate.open(21)
    results.get()
    last.get()
    eventually(lambda: "0 tasks waiting, 0 running" in repr(pool), "nothing runs")


# Pools in workers ---------------------------------------------------------------------------------


def start_process(_):
    """Start a process of multiprocessing inside a worker."""
    import multiprocessing

    child = multiprocessing.Process(target=work.nothing)
    child.start()
    child.join()
    return child.exitcode


def test_a_process_in_a_daemonic_worker(process_kind, make_pool):
    """If multiprocessing refuses to start a process, a note suggests `is_daemon=False`."""
    with pytest.raises(AssertionError, match="daemonic processes") as caught:
        make_pool(process_kind, 1).map(start_process, [0])
    said = [*getattr(caught.value, "__notes__", ()), str(caught.value.__cause__)]
    assert any("is_daemon=False" in text for text in said)
    assert make_pool(process_kind, 1, is_daemon=False).map(start_process, [0]) == [0]


GUARDED = """
    import sys, xpool

    {at_import}

    def task(x):
        return x + 1

    if __name__ == "__main__":
        with xpool.Pool(1, context=eval(sys.argv[1])) as pool:
            try:
                print(pool.map(task, range(3)))
            except Exception as exc:
                print(type(exc).__name__, exc)
"""


def test_a_pool_at_the_top_level_of_the_program(tmp_path):
    """A pool at the top level of the program is made once: workers do not run the program."""
    text = GUARDED.format(at_import="outer = xpool.Pool(1)") + "        outer.terminate()"
    out = scripts.program(tmp_path, text, "None")
    assert out == "[1, 2, 3]\n"


def test_a_pool_at_the_top_level_of_a_module(tmp_path):
    """If a pool is at the top level of another module, the message names the module."""
    helpers = "import xpool\npool = xpool.Pool(1)\ndef f(x): return x"
    text = GUARDED.format(at_import="").replace("return x + 1", "import helpers; helpers.f(x)")
    out = scripts.program(tmp_path, text, "None", helpers=helpers)
    assert "OptionError" in out and "while a worker imports module helpers" in out


def test_a_pool_in_a_fork_of_a_module_that_is_imported(tmp_path):
    """A worker forked while the parent imports a module may make pools in tasks."""
    text = """
        import xpool
        def nested(x):
            with xpool.ThreadPool(1) as pool, xpool.Pool(1) as processes:
                return pool.apply(abs, (x,)) + processes.apply(abs, (x,))
        with xpool.Pool(1, context="fork", is_daemon=False) as pool:
            print(pool.apply(nested, (-1,)))
    """
    assert scripts.program(tmp_path, "import helpers", helpers=text) == "2\n"


@pytest.mark.xpool_only
@pytest.mark.parametrize(
    ("stopped", "says"),
    [
        (True, "the worker did not answer a signal"),
        (False, "in a function that is not written in Python"),
    ],
)
def test_a_time_limit_without_a_stack(stopped, says):
    """Without a stack, `TaskTimeout` gives the reason, which differs for processes and threads."""
    from xpool import TaskTimeout

    assert says in str(TaskTimeout(1.0, 0, 123, "sleep()", "", stopped))


@pytest.mark.pure
def test_the_repr_of_a_timeout():
    """The repr is one line and contains no stack."""
    error = TaskTimeout(0.5, 3, 77, "f()", "line\n" * 100)
    assert repr(error) == "<TaskTimeout: f() ran longer than its limit of 0.5 s in worker 3>"
    assert str(error).startswith("f() ran longer than its limit of 0.5 s in worker 3 (pid 77) and")


def lock_in_a_result(x):
    return {"a": {"b": threading.Lock()}}


def generator_as_a_result(x):
    return (i for i in range(x))


def asks(x):
    return input()


def breaks(x):
    raise bdb.BdbQuit  # as `breakpoint()` without a terminal


class Owner:
    """An object with a pool and a method."""

    def __init__(self, pool):
        self.pool = pool

    def method(self, x):
        return x


@pytest.mark.parametrize("kind", [Pool, P2PPool])
def test_places_in_a_task(make_pool, kind):
    """They name the function, the argument or the item."""
    pool, held = make_pool(kind, 1), threading.Lock()

    def locked(x, _lock=held):
        return x

    for call, place in {
        lambda: pool.apply(work.same, ({"k": [held]},)): "at ['k'][0] in argument 0 of same()",
        lambda: pool.apply(work.same, (held,)): "as argument 0 of same()",
        lambda: pool.apply(work.same, (), {"x": held}): "as argument 'x' of same()",
        lambda: pool.map(work.same, [1, held]): "as an item",
        lambda: pool.starmap(work.add, [(1, held)]): "in an item, at [1]",
        lambda: pool.map(locked, [1]): "at locked's default",
        lambda: pool.map(locked, [1, 2], 1): "at locked's default",
        lambda: pool.apply(locked, (1,), retries=1, retry_on=OSError): "at locked's default",
        lambda: list(pool.imap(work.same, [held])): "as an item",
    }.items():
        with pytest.raises(TaskNotPicklable) as caught:
            call()
        assert f" {place}: cannot pickle" in str(caught.value)
        assert "initializer" in str(caught.value) and "initargs" in str(caught.value)
    with pytest.raises(NotImplementedError) as refused:
        pool.map(Owner(pool).method, [1])
    assert "It is at Owner.method.__self__.pool" in str(refused.value)
    assert "__getstate__" in str(refused.value)


class Raising:
    def __reduce__(self):
        raise KeyError("its own")


def test_places_of_an_error_of_an_object(make_pool):
    """An exception that an object's own code raises has a note that names the object's place."""
    pool = make_pool(Pool, 1)
    for call, place in {
        lambda: pool.apply(work.same, (Holder(Raising()),)): "at held in argument 0 of same()",
        lambda: pool.map(work.same, [1, Raising()]): "as an item",
        lambda: Pool(1, print, (1, [Raising()])): "at initargs[1][0]",
        lambda: Pool(1, Holder(Raising()).__init__, (1,)): "at Holder.__init__.__self__.held",
    }.items():
        with pytest.raises(KeyError, match="its own") as caught:
            call()
        notes = getattr(caught.value, "__notes__", None) or caught.value.__cause__.args
        # Python 3.14 has notes of its own.
        assert f"by Raising.__reduce__ {place}." in "\n".join(map(str, notes))


def test_places_in_initargs():
    """They name the argument by the word of the caller."""
    for initializer, initargs, place in (
        (print, (1, {"a": threading.Lock()}), "at initargs[1]['a']"),
        (functools.partial(print, threading.Lock()), (), "at print.args[0]"),
    ):
        with pytest.raises(TaskNotPicklable) as caught:
            Pool(1, initializer, initargs)
        assert f" {place}: cannot pickle" in str(caught.value)


def test_places_in_a_result(process_kind, make_pool):
    """They are in the error, with the reason and what to return."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(ResultNotPicklable, match=r"at \['a'\]\['b'\]: cannot pickle"):
        pool.apply(lock_in_a_result, (1,))
    with pytest.raises(ResultNotPicklable, match=r"Return list\(\.\.\.\) of it"):
        pool.map(generator_as_a_result, [1])


def test_starmap_of_items_that_are_no_tuples(process_kind, make_pool):
    """A note says to use `map`."""
    for pool in make_pool(process_kind, 1), make_pool(ThreadPool, 1):
        for chunksize in 1, 2:
            with pytest.raises(TypeError) as caught:
                pool.starmap(work.square, [1, 2], chunksize)
            assert "use map" in "".join(getattr(caught.value, "__notes__", ["use map"]))


def test_a_string_as_initargs():
    """A string for `initargs` is refused as one for `args`, and so is a number."""
    for kind in Pool, ThreadPool:
        with pytest.raises(TypeError, match=r"write initargs=\('abc',\)"):
            kind(1, work.square, "abc")
        with pytest.raises(TypeError, match=r"write initargs=\(3,\)"):
            kind(1, work.square, 3)


def test_input_in_a_task(make_pool):
    """A note says that a worker has no standard input, also for a debugger."""
    pool = make_pool(Pool, 1)
    for func, kind in (asks, EOFError), (breaks, bdb.BdbQuit):
        with pytest.raises(kind) as caught:
            pool.apply(func, (1,))
        assert "A worker has no standard input" in caught.value.__cause__.text


def test_a_time_limit_in_a_builtin(make_pool):
    """The error shows no file of xpool as the place where the task was."""
    pool = make_pool(Pool, 1)
    for call in (
        lambda: pool.apply(sum, (range(10**12),), timeout=0.3),
        lambda: pool.map(sum, [range(10**12)] * 2, 2, timeout=0.3),
    ):
        with pytest.raises(TaskTimeout, match="in a function that is not written in Python"):
            call()


def test_frames_in_a_notebook(make_pool):
    """Between the caller's line and the error are at most two frames that notebooks show."""
    pool = make_pool(Pool, 1)
    for call in (
        lambda: pool.map(work.fail, [1]),
        lambda: pool.apply(work.fail, (1,)),
        lambda: list(pool.imap(work.fail, [1])),
        lambda: pool.run_all(work.fail, 1),
        lambda: pool.map(work.fail, [1], chunksize=0),
        lambda: pool.map(work.fail, [1], time_out=1),
        lambda: pool.map(work.fail, 1),
        lambda: pool.apply(work.fail, (1,), retries=-1),
        lambda: Pool(1, task_timeout="5"),
        lambda: Pool(1, task_timeot=5),
        lambda: Pool(0),
        lambda: CtxPool(3, worker_contexts=[1, 2]),
        lambda: devices("cpu", n=0),
        lambda: devices("cuda", n=2, host=Host()),
    ):
        with pytest.raises(Exception) as caught:
            call()
        trace, shown = caught.value.__traceback__, 0
        while trace is not None:
            ours = trace.tb_frame.f_code.co_filename.startswith(PACKAGE)
            shown += ours and (
                "__tracebackhide__" not in trace.tb_frame.f_locals or trace.tb_next is None
            )
            trace = trace.tb_next
        assert 1 <= shown <= 2
