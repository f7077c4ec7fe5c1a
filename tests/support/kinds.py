"""The kinds of pool under test, and what each of them promises.

``XPOOL_TEST_AGAINST=multiprocessing`` runs the suites over the standard library's pools, which
checks the tests: documented behaviour must hold there too. ``XPOOL_TEST_AGAINST=ray`` runs them
over pools on the hosts of a Ray cluster (`support.clusters`).
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

STDLIB = os.environ.get("XPOOL_TEST_AGAINST") == "multiprocessing"
OVER_HOSTS = os.environ.get("XPOOL_TEST_AGAINST") == "ray"


class WithoutContext:
    """Adapts ``func(*args)`` to pools that call ``func(context, *args)``."""

    def __init__(self, func: Any) -> None:
        self.func = func
        self.__qualname__ = getattr(func, "__qualname__", type(func).__name__)

    def __call__(self, _context: Any, *args: Any, **kwds: Any) -> Any:
        return self.func(*args, **kwds)


class ContextFree:
    """A context pool that is called like a plain pool; other attributes are the pool's."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __enter__(self) -> ContextFree:
        self._pool.__enter__()
        return self

    def __exit__(self, *exc: Any) -> Any:
        return self._pool.__exit__(*exc)

    def __repr__(self) -> str:
        return repr(self._pool)

    def __reduce__(self) -> Any:
        return self._pool.__reduce__()

    def __getattr__(self, name: str) -> Any:
        if name == "_pool":
            raise AttributeError(name)  # a copy without state
        return getattr(self._pool, name)


def _free(verb: str) -> Any:
    def call(self: ContextFree, func: Any, *args: Any, **kwds: Any) -> Any:
        given = WithoutContext(func) if callable(func) else func  # the latter is refused
        return getattr(self._pool, verb)(given, *args, **kwds)

    return call


VERBS = (
    "apply",
    "apply_async",
    "map",
    "map_async",
    "starmap",
    "starmap_async",
    "imap",
    "imap_unordered",
)
for _verb in VERBS:
    setattr(ContextFree, _verb, _free(_verb))


@dataclass(frozen=True)
class Kind:
    """A kind of pool: how to build it, and what tests may expect of it."""

    name: str
    build: Callable[..., Any]
    processes: bool
    """Whether workers are processes, so that arguments are pickled and copied."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Tests of features that it lacks by design: their names, with the reasons for skipping."""

    def __call__(self, processes: Any = 2, *args: Any, **kwds: Any) -> Any:
        return self.build(processes, *args, **kwds)

    def __repr__(self) -> str:
        return self.name


def _xpool(name: str, **fixed: Any) -> Callable[..., Any]:
    def build(*args: Any, **kwds: Any) -> Any:
        import xpool

        return getattr(xpool, name)(*args, **{**fixed, **kwds})

    return build


def _context_pool(name: str) -> Callable[..., Any]:
    def build(processes: Any, *args: Any, **kwds: Any) -> Any:
        import xpool

        contexts = kwds.pop("worker_contexts", None)
        if contexts is None:
            contexts = [f"context {i}" for i in range(processes)]
        pool = getattr(xpool, name)(processes, *args, worker_contexts=contexts, **kwds)
        return ContextFree(pool)

    return build


def _std(method: str) -> Callable[..., Any]:
    def build(*args: Any, **kwds: Any) -> Any:
        return multiprocessing.get_context(method).Pool(*args, **kwds)

    return build


def _over_hosts(processes: Any, *args: Any, **kwds: Any) -> Any:
    """Build a pool over two hosts, or over one host if the number of workers is odd."""
    import xpool
    import xpool.ray

    n = 2 if processes % 2 == 0 else 1
    return xpool.Pool(None, *args, hosts=xpool.ray.hosts(n=n, per_host=processes // n), **kwds)


if STDLIB:
    KINDS = [
        Kind("std-forkserver", _std("forkserver"), True),
        Kind("std-thread", multiprocessing.pool.ThreadPool, False),
    ]
    METHODS = [Kind("std-spawn", _std("spawn"), True)]
elif OVER_HOSTS:
    # See docs/hosts.md, "What is different over hosts".
    without = {
        "test_workers_are_children_that_leave": "workers are children of their host's agent",
        "test_workers_have_a_parent": "the parent of workers is their host's agent",
        "test_deleted_without_close": "workers are children of their host's agent",
        "test_short_tasks_one_after_the_other_use_all_workers": "their host's agent chooses one",
        "test_a_retry_keeps_the_priority": "tasks that a host may begin already go first",
        "test_calls_that_wait": "their host's agent knows what waits",
        "test_what_a_worker_holds_is_overtaken": "their host's agent knows what workers hold",
        "test_a_default_goes_before_what_is_below": "their host's agent knows what workers hold",
    }
    KINDS, METHODS = [Kind("hosts", _over_hosts, True, without)], []
else:
    bound = {
        "test_short_tasks_queued_first_do_not_wait_behind_a_long_one": (
            "its tasks are bound to a worker when they are submitted"
        )
    }
    wrapped = {
        "test_a_call_that_the_pool_does_not_take_counts_for_nothing": (
            "ContextFree's function hides the name of the test's"
        )
    }
    KINDS = [
        Kind("pool", _xpool("Pool"), True),
        Kind("p2p", _xpool("P2PPool"), True, bound),
        Kind("ctx", _context_pool("CtxPool"), True, wrapped),
        Kind("thread", _xpool("ThreadPool"), False),
        Kind("ctxthread", _context_pool("CtxThreadPool"), False, wrapped),
    ]
    METHODS = [
        Kind("pool-spawn", _xpool("Pool", context="spawn"), True),
        Kind("pool-fork", _xpool("Pool", context="fork"), True),
    ]

PROCESS_KINDS = [kind for kind in KINDS if kind.processes]
"""Kinds whose workers are processes, with the default start method."""

THREAD_KINDS = [kind for kind in KINDS if not kind.processes]

START_METHODS = PROCESS_KINDS[:1] + METHODS
"""`Pool` with every start method, for the core of a suite (spawn costs a second a pool)."""
