"""Invalid arguments: the error names the argument, and no process is left behind."""

from __future__ import annotations

import inspect
import sys
from fractions import Fraction

import pytest
from support import work
from support.kinds import KINDS, STDLIB, VERBS

from xpool import ThreadPool
from xpool._calls import options

pytestmark = [pytest.mark.pure, pytest.mark.xpool_only]

PLAIN = ["Pool", "P2PPool", "ThreadPool"]
PROCESS = ["Pool", "P2PPool"]
CONTEXT = ["CtxPool", "CtxThreadPool"]


def _class(name):
    if STDLIB:
        pytest.skip("xpool's constructors")
    import xpool

    return getattr(xpool, name)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("processes", [0, -1])
def test_processes_below_one(name, processes):
    """Fewer than one worker raises a ValueError that names `processes`."""
    with pytest.raises(ValueError, match="(?i)processes"):
        _class(name)(processes)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("processes", ["2", 1.5, [1]])
def test_processes_of_a_wrong_type(name, processes):
    """A number of workers that is not an integer raises an error that names `processes`."""
    with pytest.raises((TypeError, ValueError), match="(?i)processes"):
        _class(name)(processes)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("initializer", [3, "f"])
def test_initializer_that_cannot_be_called(name, initializer):
    """An initializer that is not callable raises TypeError, as in the standard library."""
    with pytest.raises(TypeError, match="initializer"):
        _class(name)(1, initializer)


@pytest.mark.parametrize("name", PLAIN)
def test_initargs_that_are_no_iterable(name):
    """`initargs` that cannot be unpacked raise an error that names `initargs`."""
    with pytest.raises((TypeError, ValueError), match="initargs"):
        _class(name)(1, work.remember, 3)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("limit", [0, -1, 0.5, "12"])
def test_maxtasksperchild(name, limit):
    """A `maxtasksperchild` that is neither None nor a positive integer raises ValueError."""
    with pytest.raises(ValueError, match="maxtasksperchild"):
        _class(name)(1, maxtasksperchild=limit)


@pytest.mark.parametrize("name", PROCESS)
@pytest.mark.parametrize("context", ["sporn", ""])
def test_unknown_start_method(name, context):
    """An unknown start method raises a ValueError that names the argument `context`."""
    with pytest.raises(ValueError, match="context"):
        _class(name)(1, context=context)


@pytest.mark.parametrize("name", PROCESS)
def test_context_of_a_wrong_type(name):
    """A context of a wrong type raises an error that names `context`."""
    with pytest.raises((TypeError, ValueError), match="context"):
        _class(name)(1, context=3)


@pytest.mark.parametrize("name", PROCESS)
@pytest.mark.parametrize("method", ["gpu", "", 3])
def test_unknown_share_method(name, method):
    """An unknown share method raises a ValueError that names `share_method`."""
    with pytest.raises(ValueError, match="share_method"):
        _class(name)(1, share_method=method)


@pytest.mark.parametrize("name", PROCESS)
@pytest.mark.parametrize("seed", ["x", 1.5])
def test_bad_seed(name, seed):
    """A seed that is not an integer raises an error that names `seed`."""
    with pytest.raises((TypeError, ValueError), match="seed"):
        _class(name)(1, seed=seed)


@pytest.mark.parametrize("name", PLAIN + CONTEXT)
def test_unknown_argument(name):
    """An unknown argument raises a TypeError that names it."""
    more = {"worker_contexts": [1]} if name in CONTEXT else {}
    with pytest.raises(TypeError, match="procs"):
        _class(name)(procs=1, **more)


@pytest.mark.parametrize("name", CONTEXT)
@pytest.mark.parametrize(("processes", "contexts"), [(2, [1]), (1, [1, 2]), (1, [])])
def test_contexts_of_the_wrong_length(name, processes, contexts):
    """If the number of contexts is not the number of workers, the ValueError names
    `worker_contexts`."""
    with pytest.raises(ValueError, match="worker_contexts"):
        _class(name)(processes, worker_contexts=contexts)


@pytest.mark.parametrize("name", CONTEXT)
def test_contexts_that_are_no_list(name):
    """Contexts without a length raise an error that names `worker_contexts`."""
    with pytest.raises((TypeError, ValueError), match="worker_contexts"):
        _class(name)(worker_contexts=3)


@pytest.mark.parametrize("name", CONTEXT)
def test_empty_contexts(name):
    """An empty list of contexts is refused, because it means no workers."""
    with pytest.raises(ValueError, match="worker_contexts|processes"):
        _class(name)(worker_contexts=[])


@pytest.mark.starts
def test_context_that_does_not_pickle():
    """A context that cannot be pickled raises an error in the constructor or from a task."""
    import threading

    from xpool import XPoolError

    with (
        pytest.raises(XPoolError) as caught,
        _class("CtxPool")(worker_contexts=[threading.Lock()]) as pool,
    ):
        pool.apply(work.context_and)
    assert "context" in str(caught.value)


@pytest.mark.parametrize("retries", [-1, "1", 1.5])
def test_bad_retries(pool, retries):
    """`retries` must be an integer of at least 0."""
    with pytest.raises((TypeError, ValueError), match="retries"):
        pool.apply(work.square, (1,), retries=retries)


@pytest.mark.parametrize(
    "priority", [None, "1", b"1", [1], True, 1j, float("nan"), Fraction(10**400)]
)
@pytest.mark.parametrize("verb", VERBS)
def test_bad_priority(pool, verb, priority):
    """For every verb, `priority` must be a real number that can be compared."""
    with pytest.raises((TypeError, ValueError), match="priority"):
        getattr(pool, verb)(work.square, (1,), priority=priority)


@pytest.mark.parametrize("priority", [5, -5.5, float("-inf"), 10**400, Fraction(1, 3), 0, -0.0])
def test_good_priority(pool, priority):
    """`priority` accepts real numbers of any type."""
    assert pool.apply(work.square, (3,), priority=priority) == 9


BAD_SECONDS = [-1, 0, "1", b"1", [1], float("nan")]


@pytest.mark.parametrize("timeout", BAD_SECONDS)
@pytest.mark.parametrize("verb", VERBS)
def test_bad_timeout(pool, verb, timeout):
    """For every verb, `timeout` must be None or a number of seconds above zero."""
    with pytest.raises((TypeError, ValueError), match="timeout"):
        getattr(pool, verb)(work.square, (1,), timeout=timeout)


@pytest.mark.parametrize("timeout", [5, 5.5, float("inf"), None, Fraction(5)])
def test_good_timeout(pool, timeout):
    """`timeout` accepts any type of number. None and infinity mean no limit."""
    assert pool.apply(work.square, (3,), timeout=timeout) == 9


@pytest.mark.parametrize("verb", ["map", "map_async", "imap", "imap_unordered", "starmap"])
def test_an_unknown_option(pool, verb):
    """An unknown option raises a TypeError that names the verb. Private options are refused too."""
    for option in ("worker", "waits", "plain", "returns_errors"):
        with pytest.raises(TypeError, match=rf"^{verb}\(\) has no keyword '{option}'"):
            getattr(pool, verb)(work.square, (1,), **{option: 1})
    with pytest.raises(TypeError, match=rf"^{verb}\(\) .*'max_retries'; did you mean retries=\?$"):
        getattr(pool, verb)(work.square, (1,), max_retries=1)


@pytest.mark.parametrize("verb", VERBS)
def test_signatures_have_the_keywords(verb):
    """`help` shows the keywords of a verb with their defaults, and its code is found."""
    verb = getattr(_class("Pool"), verb)
    parameters = inspect.signature(verb).parameters
    assert parameters["timeout"].default is None and parameters["retries"].default == 0
    assert {one.kind for one in parameters.values()} == {
        inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY,
    }  # fmt: skip
    assert f"def {verb.__name__}(" in inspect.getsource(verb)


@pytest.mark.parametrize("verb", ["apply", "apply_async"])
def test_a_keyword_of_the_called_function(pool, verb):
    """The error says where the function's keywords belong, or suggests the intended keyword."""
    with pytest.raises(TypeError, match=rf"^{verb}\(\) has no keyword 'x'; .*go into args=\(\)"):
        getattr(pool, verb)(work.square, x=1)
    with pytest.raises(TypeError, match=r"'time_out'; did you mean timeout=\?$"):
        getattr(pool, verb)(work.square, (1,), time_out=1)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("n_jobs", "processes"), ("max_tasks_per_child", "maxtasksperchild"), ("names", "name")],
)
@pytest.mark.parametrize("name", [*PLAIN, *CONTEXT, "BasePool"])
def test_a_keyword_of_another_library(name, given, meant):
    """The error suggests this library's name for the keyword."""
    with pytest.raises(TypeError, match=rf"^{name}\(\) .*'{given}'; did you mean {meant}=\?$"):
        _class(name)(**{given: 1})


def test_a_keyword_of_pools_for_an_executor():
    """For `Executor`, the error suggests the name that `concurrent.futures` uses."""
    for given in ("processes", "n_jobs"):
        with pytest.raises(TypeError, match=r"^Executor\(\) .*; did you mean max_workers=\?$"):
            _class("Executor")(**{given: 1})


@pytest.mark.parametrize("on", [3, "OSError", [OSError], OSError(), (OSError, int)])
@pytest.mark.parametrize("verb", VERBS)
def test_bad_retry_on(pool, verb, on):
    """For every verb, `retry_on` must be an exception class or a tuple of them."""
    with pytest.raises(TypeError, match="retry_on"):
        getattr(pool, verb)(work.square, (1,), retries=1, retry_on=on)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("option", ["task_timeout", "initializer_timeout"])
@pytest.mark.parametrize("seconds", BAD_SECONDS)
def test_bad_limits_of_the_pool(name, option, seconds):
    """An invalid limit in a constructor raises an error that names the limit."""
    with pytest.raises((TypeError, ValueError), match=option):
        _class(name)(1, **{option: seconds})


@pytest.mark.parametrize("name", PROCESS)
@pytest.mark.parametrize("budget", [0, -1, 1.5, "3"])
def test_bad_restart_budget(name, budget):
    """`restart_budget` must be None or a positive integer."""
    with pytest.raises((TypeError, ValueError), match="restart_budget"):
        _class(name)(1, restart_budget=budget)


@pytest.mark.parametrize("verb", ["apply", "apply_async"])
def test_args_that_cannot_be_unpacked(pool, verb):
    """`args` that are not iterable raise a TypeError, in the verb or in `get`."""
    with pytest.raises(TypeError, match=r"args|argument after \*"):
        result = getattr(pool, verb)(work.square, 3)
        result.get()


def test_kwds_that_are_no_mapping(pool):
    """`kwds` that are not a mapping raise a TypeError, in the verb or in `get`."""
    with pytest.raises(TypeError):
        pool.apply_async(work.square, (1,), 3).get()


@pytest.mark.parametrize("bad", [None, 3])
def test_functions_that_cannot_be_called(pool, bad):
    """All verbs refuse a function that is not callable, and the pool stays usable."""
    with pytest.raises(TypeError):
        pool.map(bad, [1])
    with pytest.raises(TypeError):
        list(pool.imap(bad, [1]))
    assert pool.apply(work.square, (2,)) == 4


def test_a_failed_constructor_leaves_nothing(warm):
    """A constructor that refuses its arguments starts nothing. The leak check would report it."""
    for kind in KINDS:
        with pytest.raises(ValueError, match="maxtasksperchild"):
            kind(2, maxtasksperchild=0)


@pytest.mark.xpool_only
@pytest.mark.parametrize(
    ("threads", "processes"), [("ThreadPool", "Pool"), ("CtxThreadPool", "CtxPool")]
)
def test_pools_of_threads_take_the_arguments_of_pools_of_processes(make_pool, threads, processes):
    """Constructors of thread and process pools have the same parameters in the same order."""
    given, wanted = (inspect.signature(_class(name)).parameters for name in (threads, processes))
    assert [str(one) for one in given.values()] == [str(one) for one in wanted.values()]
    options = {
        "is_recursive": True, "is_daemon": False, "is_copy_tensor": False, "share_method": "cpu",
        "memory_limit": 0, "task_timeout": 60, "initializer_timeout": 60,
        "restart_budget": 3, "name": "some",
    }  # fmt: skip
    pool = make_pool(_class(threads), 2, None, (), None, None, **options)
    call = (lambda _, x: x + 1) if threads == "CtxThreadPool" else (lambda x: x + 1)
    assert pool.map(call, range(3)) == [1, 2, 3] and pool.name == "some"


def test_hosts_without_ray(monkeypatch):
    """Without Ray, the `ImportError` says what to install."""
    from xpool import ray

    pool = _class("Pool")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install xpool\[ray\]"):
        pool(hosts=ray.hosts())


@pytest.mark.xpool_only
@pytest.mark.parametrize("kind", ["ThreadPool", "CtxThreadPool"])
@pytest.mark.parametrize(
    "option",
    [
        {"context": "spawn"},
        {"seed": 1},
        {"output": "prefix"},
        {"on_worker_end": print},
        {"worker_memory": 1_000_000},
        {"memory_high": 0.9},
        {"hosts": ["a", "b"]},
    ],
    ids=lambda option: next(iter(option)),
)
def test_thread_pools_refuse_options_of_processes(kind, option):
    """An option that threads cannot support raises an error that names it and gives the reason."""
    (name,) = option
    with pytest.raises(ValueError, match=rf"^{name}=.*; leave it out, or use xpool.Pool$"):
        _class(kind)(2, **option)


@pytest.mark.xpool_only
@pytest.mark.parametrize(
    "wrong",
    [
        {"share_method": "gpu"},
        {"memory_limit": -1},
        {"seed": "1"},
        {"restart_budget": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arguments_without_effect_are_checked_too(wrong):
    """`ThreadPool` checks options that have no effect on it, as `Pool` does."""
    for name in ("Pool", "ThreadPool"):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            _class(name)(1, **wrong)


@pytest.mark.xpool_only
def test_a_hook_for_ends_is_checked():
    """``on_worker_end`` must be callable. Pools over hosts refuse it, with the reason."""
    with pytest.raises(TypeError, match="on_worker_end must be a callable, not 3"):
        _class("Pool")(1, on_worker_end=3)

    class Hosts:
        make_engine = None

    with pytest.raises(ValueError, match=r"^on_worker_end=.*a host replaces its workers"):
        _class("Pool")(hosts=Hosts(), on_worker_end=print)


class Opens:
    """A context with `enter` but without `env`."""

    opened = 0

    def enter(self):
        self.opened += 1


@pytest.mark.xpool_only
def test_a_context_is_entered(make_pool):
    """The worker enters its context once."""
    pool = make_pool(_class("CtxPool"), worker_contexts=[Opens()])
    assert [pool.apply(getattr, ("opened",)) for _ in range(2)] == [1, 1]


@pytest.mark.xpool_only
@pytest.mark.parametrize("name", ["CtxPool", "CtxThreadPool"])
def test_contexts_may_be_left_out(make_pool, name):
    """Without `worker_contexts`, each worker's context is None."""
    pool = make_pool(_class(name), 2)
    assert pool.size() == 2
    assert pool.map(lambda ctx, x: (ctx, x), range(3)) == [(None, 0), (None, 1), (None, 2)]
    assert pool.apply(work.who)[1] is None


@pytest.mark.pure
@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 << 30), ("512 MiB", 512 << 20), ("1.5k", 1536), (" 7 ", 7), ("3B", 3), (10, 10)],
)
def test_sizes_as_text(text, size):
    """A number of bytes may be given as text. Its unit is a power of 1024."""
    assert options.check_bytes("memory_limit", text) == size


@pytest.mark.pure
@pytest.mark.parametrize("text", ["", "GB", "2XB", "2 G B", "-1GB", "nanMB", "infGB", "0.1B"])
def test_invalid_sizes(text):
    """An invalid size raises an error that names the argument."""
    with pytest.raises(ValueError, match="worker_memory"):
        ThreadPool(1, worker_memory=text)
