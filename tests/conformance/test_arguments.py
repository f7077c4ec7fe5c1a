"""Invalid arguments: the error names the argument, and no process is left behind."""

from __future__ import annotations

import inspect
import sys
from fractions import Fraction
from typing import Any

import pytest
from support import work
from support.kinds import KINDS, STDLIB, VERBS

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


EITHER = (TypeError, ValueError)
BAD_SECONDS = [-1, 0, "1", b"1", [1], float("nan")]
BAD_SIZES = ["", "GB", "2XB", "2 G B", "-1GB", "nanMB", "infGB", "0.1B"]

REFUSED = [
    (PLAIN, "processes", ValueError, [0, -1]),
    (PLAIN, "processes", EITHER, ["2", 1.5, [1]]),
    (PLAIN, "initializer", TypeError, [3, "f"]),
    (PLAIN, "maxtasksperchild", ValueError, [0, -1, 0.5, "12"]),
    (PLAIN, "task_timeout", EITHER, BAD_SECONDS),
    (PLAIN, "initializer_timeout", EITHER, BAD_SECONDS),
    (PROCESS, "context", ValueError, ["sporn", ""]),
    (PROCESS, "context", EITHER, [3]),
    (PLAIN, "share_method", ValueError, ["gpu", "", 3]),
    (PLAIN, "seed", EITHER, ["x", 1.5]),
    (PLAIN, "restart_budget", EITHER, [0, -1, 1.5, "3"]),
    (PLAIN, "memory_limit", EITHER, [-1]),
    (["ThreadPool"], "worker_memory", ValueError, BAD_SIZES),
    (["Pool", "ThreadPool"], "worker_memory", EITHER, [0, []]),
    (["Pool", "ThreadPool"], "memory_high", EITHER, [1.5, 0, "half"]),
    (PLAIN, "name", TypeError, [5]),
    *((PLAIN, flag, TypeError, ["no"]) for flag in ("is_copy_tensor", "is_daemon", "is_recursive")),
    (PROCESS, "on_worker_end", TypeError, [3]),
    (CONTEXT, "worker_contexts", EITHER, [[], 3, [1, 2]]),
]


@pytest.mark.parametrize(("names", "option", "error", "values"), REFUSED)
def test_refused_by_constructors(names, option, error, values):
    """The error names the option, also in pools of threads, on which it may have no effect."""
    for name in names:
        for value in values:
            with pytest.raises(error, match=f"(?i){option}"):
                _class(name)(**{"processes": 1, option: value})
                pytest.fail(f"{name} took {value!r}")


def test_hosts_without_ray(monkeypatch):
    """Without Ray, the `ImportError` says what to install."""
    from xpool import ray

    pool = _class("Pool")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install xpool\[ray\]"):
        pool(hosts=ray.hosts())


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


REFUSED_BY_VERBS: dict[str, list[Any]] = {
    "retries": [-1, "1", 1.5, True, False, None],
    "priority": [None, "1", b"1", [1], True, 1j, float("nan"), Fraction(10**400)],
    "timeout": [*BAD_SECONDS, True, 10**400],
    "retry_on": [3, "OSError", [OSError], OSError(), (OSError, int)],
}


@pytest.mark.parametrize("keyword", REFUSED_BY_VERBS)
@pytest.mark.parametrize("verb", VERBS)
def test_refused_by_verbs(pool, verb, keyword):
    """For every verb, the error names the keyword."""
    more = {"retries": 1} if keyword == "retry_on" else {}
    for value in REFUSED_BY_VERBS[keyword]:
        with pytest.raises((TypeError, ValueError), match=keyword):
            getattr(pool, verb)(work.square, (1,), **{keyword: value}, **more)
            pytest.fail(f"{value!r} was accepted")


@pytest.mark.parametrize("verb", VERBS[2:])
def test_refused_by_verbs_of_many_items(pool, verb):
    """The error names `chunksize` or `buffersize`, or says what the input is."""
    call = getattr(pool, verb)
    for value in (0, -1, "2", 1.5):
        with pytest.raises(EITHER, match="(?i)chunksize"):
            call(work.square, [(1,)], value)
        if verb.startswith("imap"):
            with pytest.raises(EITHER, match="buffersize"):
                call(work.square, [1], buffersize=value)
    with pytest.raises(TypeError, match="iterable, not int"):
        call(work.square, 3)


@pytest.mark.parametrize("bad", [None, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_functions_that_cannot_be_called(pool, verb, bad):
    """All verbs refuse a function that is not callable, and the pool stays usable."""
    with pytest.raises(TypeError, match="func|callable"):
        getattr(pool, verb)(bad, [1])
    assert pool.apply(work.square, (2,)) == 4


def test_good_priorities_and_timeouts(pool):
    """`priority` and `timeout` accept numbers of any type. None and infinity mean no limit."""
    for priority in (5, -5.5, float("-inf"), 10**400, Fraction(1, 3), 0, -0.0):
        assert pool.apply(work.square, (3,), priority=priority) == 9
    for timeout in (5, 5.5, float("inf"), None, Fraction(5)):
        assert pool.apply(work.square, (3,), timeout=timeout) == 9


@pytest.mark.parametrize("verb", ["map", "map_async", "imap", "imap_unordered", "starmap"])
def test_an_unknown_option(pool, verb):
    """An unknown option raises a TypeError that names the verb. Private options are refused too."""
    for option in ("worker", "waits", "terms", "returns_errors"):
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
    [
        ("n_jobs", "processes"),
        ("max_worker", "processes"),  # close to another library's name
        ("max_tasks_per_child", "maxtasksperchild"),
        ("names", "name"),
    ],
)
@pytest.mark.parametrize("name", [*PLAIN, *CONTEXT, "BasePool"])
def test_a_keyword_of_another_library(name, given, meant):
    """The error suggests this library's name for the keyword."""
    with pytest.raises(TypeError, match=rf"^{name}\(\) .*'{given}'; did you mean {meant}=\?$"):
        _class(name)(**{given: 1})
    if meant == "processes":
        with pytest.raises(TypeError, match=r"^Executor\(\) .*; did you mean max_workers=\?$"):
            _class("Executor")(**{given: 1})


def test_an_executor_lists_the_keywords_that_it_takes():
    """The error for an unknown keyword does not name `processes`, which an executor refuses."""
    with pytest.raises(TypeError, match="it has max_workers, ") as got:
        _class("Executor")(unheard_of=1)
    assert "processes" not in str(got.value)


def test_a_failed_constructor_leaves_nothing(warm):
    """A constructor that refuses its arguments starts nothing. The leak check would report it."""
    for kind in KINDS:
        with pytest.raises(ValueError, match="maxtasksperchild"):
            kind(2, maxtasksperchild=0)


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
def test_a_hook_for_ends_over_hosts():
    """Pools over hosts refuse ``on_worker_end``, with the reason."""

    class Hosts:
        make_engine = None

    with pytest.raises(ValueError, match=r"^on_worker_end=.*a host replaces its workers"):
        _class("Pool")(hosts=Hosts(), on_worker_end=print)


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
