"""The workers of a loader: processes, threads, or the caller's thread.

Each kind has two methods: `make` lets a worker make a batch, and `end` ends the loader's own pool,
in a thread.  The loader's own worker processes are forks of the program or of the fork server.
"""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import queue
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from xpool import pickle
from xpool._calls.results import AsyncResult
from xpool._engine.launch import (
    ForkServer,
    Handle,
    ProcessLauncher,
    import_for_arrays,
    wanted_modules,
)
from xpool._pickling.by_value.checks import SharedMemory, refusing_shared_memory
from xpool._pools.base import BasePool, at_exit
from xpool._pools.ctx_pools import CtxPool, CtxThreadPool
from xpool._pools.preloading import preload
from xpool._pools.process import P2PPool, Pool
from xpool._pools.thread import ThreadPool
from xpool._python.starting import PromptThread
from xpool._python.uncollected import uncollected
from xpool.data._loader_worker import (
    AtStart,
    WorkerCopy,
    after,
    begin,
    in_thread,
    is_pipe,
    own_generators,
    receive,
    use_threads,
    with_copy,
    without_context,
)  # fmt: skip
from xpool.devices._host import running_runtime
from xpool.errors import OptionError

_NEEDED = (
    "multiprocessing.popen_fork", "xpool._pools.assembly", "xpool._worker.loop",
    "xpool.data._loader_worker",
)  # fmt: skip
"""Modules that a pool and its forked workers need."""

ENDING_SECONDS = 30.0
"""How long a new epoch waits until the workers of the last one have ended.  The program then has
one thread again and may fork.

Workers end at once, but the replacement of a dead one may still wait until the fork server has
imported torch.  New workers of that server would wait for this, too.
"""


def prepare(context: Any) -> None:
    """Import the modules that workers with this ``multiprocessing_context`` need.

    The fork server, which imports torch while the program makes its model, takes as much memory as
    the program.  So it is started only if the workers will most likely not be forks.
    """
    if context == "forkserver" or (context is None and not _will_fork()):
        preload()
    with uncollected():
        import_for_arrays()
        for name in _NEEDED:
            importlib.import_module(name)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # `generators` seeds it and reads its state
        # This call fills caches.  Forks inherit them.
        pickle.loads(pickle.dumps(torch.empty(1)))


def find_context(context: Any, size: int) -> Any:
    """Return the ``context=`` of a pool of ``size`` workers that starts now."""
    # This must not depend on whether the fork server is ready: forks have the values that the
    # program has assigned to globals of its modules, but workers of the server do not.
    if context is None and sys.platform == "linux":
        wait_for_ends(ENDING_SECONDS)
        if _may_fork():
            return _ForkedFirst(ForkServer.get(wanted_modules()), size)
    return context


def _will_fork() -> bool:
    """Whether workers will be forks: the program may fork now, and torch has no device to start."""
    has_device = any(getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    return sys.platform == "linux" and not has_device and _may_fork()


def _may_fork() -> bool:
    """Whether torch's loader would fork this program, and no other thread can hold a lock then."""
    method = multiprocessing.get_start_method(allow_none=True)
    if (method or multiprocessing.get_all_start_methods()[0]) != "fork":
        return False
    if multiprocessing.current_process().daemon or running_runtime() is not None:
        return False
    # `_current_frames` also has threads of C code that run Python.  Cleaners hold no lock.
    cleaners = {thread.ident for thread in threading.enumerate() if thread.name == CLEANER}
    return sys._current_frames().keys() - cleaners == {threading.get_ident()}


class _ForkedFirst:
    """Forks the program for a pool's first workers; the fork server starts their replacements.

    Forks begin at once.  But when a worker dies, the program has threads and may have started a
    device, so it cannot be forked safely any more.
    """

    inherits = False

    def __init__(self, server: ForkServer, size: int) -> None:
        self._server, self._left = server, size
        self._forking = ProcessLauncher(multiprocessing.get_context("fork"))

    @property
    def forks(self) -> bool:
        """Whether the next worker is a fork of the program."""
        return self._left > 0

    def launch(self, boot: socket.socket, name: str, daemon: bool, inherited: Any) -> Handle:
        if not self.forks:
            return self._server.launch(boot, name, daemon, inherited)
        with warnings.catch_warnings():
            # From 3.12 on, Python warns because OpenMP has threads.  The workers do not use them.
            warnings.simplefilter("ignore", DeprecationWarning)
            handle = self._forking.launch(boot, name, daemon, inherited)
        self._left -= 1
        return handle


CLEANER = "xpool-DataLoader-cleaner"
"""The name of these threads."""


def end_later(pool: BasePool | None) -> Callable[[Iterable[Any]], None]:
    """Return a function that makes a waiting thread cancel the given results and end the pool.

    The garbage collector may call this function, in any thread and with any locks held.  So it only
    puts the results into a `SimpleQueue`, which never waits.
    """
    orders: queue.SimpleQueue[Iterable[Any]] = queue.SimpleQueue()

    def clean() -> None:
        for result in orders.get():  # waits as long as the epoch or the loader lives
            result.cancel()
        if pool is not None:
            pool.terminate()
            pool.join()

    thread = PromptThread(target=clean, name=CLEANER, daemon=True)
    thread.start()
    thread.await_begin()  # `_may_fork` finds it by its `ident`

    def end(results: Iterable[Any]) -> None:
        thread.is_ending = True  # type: ignore[attr-defined]
        orders.put(results)

    return end


def wait_for_ends(seconds: float) -> None:
    """Wait, at most ``seconds``, for the pools that the threads of `end_later` are ending."""
    until = time.monotonic() + seconds
    for thread in threading.enumerate():
        if getattr(thread, "is_ending", False):
            thread.join(max(0.0, until - time.monotonic()))


RETRIES = 2
"""How many times a batch is made again if its worker dies."""


def check_pool(pool: BasePool, has_parts: bool) -> None:
    """Raise `OptionError` if the pool cannot make the batches of a loader."""
    if not isinstance(pool, (Pool, ThreadPool)):
        raise OptionError(
            "pool= must be one of processes (Pool, CtxPool, P2PPool) or a ThreadPool, not "
            f"{type(pool).__name__}"
        )
    if has_parts and isinstance(pool, Pool) and not isinstance(pool, P2PPool):
        raise OptionError(
            "an iterable dataset, and one with a state_dict, lives in its workers, each with its "
            f"part: its pool must be a P2PPool or a ThreadPool, not {type(pool).__name__}"
        )


def check_auto(
    pool: BasePool | None, is_iterable: bool, has_state: bool, initialize: Any, context: Any
) -> None:
    """Raise `OptionError` if the number of a loader's workers must be given."""
    if pool is not None:
        reason = "with pool=, it is the size of the pool"
    elif is_iterable:
        reason = "each worker iterates over its own part of an iterable dataset"
    elif has_state:
        reason = "each worker has its own copy of a dataset with a state_dict"
    elif initialize is not None:
        reason = (
            "with worker_init_fn, worker i % num_workers makes batch i, so the batches would "
            "depend on the number"
        )
    elif context is not None and (
        (context if isinstance(context, str) else context.get_start_method()) == "fork"
    ):
        reason = "workers that start later would be forks of a program that has threads"
    else:
        return
    raise OptionError(f'num_workers="auto" cannot be used here: {reason}; give a number')


class Inline:
    """No workers: the caller's thread makes a batch when the program takes it."""

    size = 0

    def __init__(self, loader: Any) -> None:
        self.made = WorkerCopy(loader)
        self.made.is_inline = True

    def make(
        self, label: str, func: Callable[..., Any], *args: Any, shard: int | None = None
    ) -> Any:
        """Return a result whose `get` calls ``func(copy, *args)``."""
        return _Later(func, (self.made, *args))

    def end(self, results: Iterable[Any] = ()) -> None:
        """Do nothing, because there is no pool."""


class _Later:
    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._func, self._args = func, args

    def ready(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None

    def get(self) -> Any:
        return self._func(*self._args)


class _Pooled:
    """Workers of a pool, which is the loader's own or was given to it."""

    _pool: Any
    _end: Callable[[Iterable[Any]], None]
    size: int

    def _apply(self, label: str, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Let a worker call ``func(*args)``; return the result.  ``label`` names the call in error
        texts."""
        if isinstance(self._pool, (CtxPool, CtxThreadPool)):
            func, args = without_context, (func, *args)
        result = self._pool.apply_async(func, args, **options)
        result.label = label
        return result

    def resize(self, size: int) -> None:
        """Have another number of workers."""
        self._pool.resize(size)
        self.size = size

    def end(self, results: Iterable[Any] = ()) -> None:
        """Cancel these results, and end the workers if they are the loader's own."""
        self._end(results)

    def __del__(self) -> None:
        # Ends persistent workers, and those of an epoch that could not begin.
        if hasattr(self, "_end"):
            self._end(())


class Processes(_Pooled):
    """Worker processes, each with a copy of the loader's dataset."""

    def __init__(self, loader: Any, has_parts: bool) -> None:
        self._pool, self._ref, made = loader._given_pool, None, WorkerCopy(loader)
        self.size = loader._size()
        if self._pool is None:
            self._pool = self._start(loader, P2PPool if has_parts else Pool, made)
            self._end = end_later(self._pool)
        else:
            self._ref = self._pool.broadcast(made)
            self._end = end_later(None)

    def _start(self, loader: Any, pool_class: type[Pool], made: WorkerCopy) -> Pool:
        """Start workers with the dataset, which may hold locks and open files."""
        context = loader._context
        # How workers inherit a dataset that cannot be pickled, or would be copied.
        heirs: Any = context
        if context is None or context == "forkserver":
            heirs = multiprocessing.get_context(context)
        method = heirs if isinstance(heirs, str) else heirs.get_start_method()
        shared = False
        if method != "fork" or context is None:  # forks need no pickle
            pool = self._empty(pool_class, context)
            try:
                with refusing_shared_memory(files=method == "fork"):
                    self._send(pool, made)
                return pool
            except (Exception, SharedMemory) as error:  # an object's `__reduce__` may raise any
                # Such a dataset can only be passed to a starting process, as in torch's loader.
                shared = isinstance(error, SharedMemory)
                pool.terminate()
                pool.join()
        try:
            return pool_class(
                self.size, receive, (AtStart(made),), context=heirs, name="DataLoader"
            )
        except Exception:
            if not shared or method == "fork":
                raise
        pool = self._empty(pool_class, context)  # the standard library cannot pickle this dataset
        self._send(pool, made)
        return pool

    def _empty(self, pool_class: type[Pool], context: Any) -> Pool:
        """Start workers without a dataset."""
        # The initializer imports torch, which each batch needs, before a worker is ready.
        return pool_class(
            self.size, begin, context=find_context(context, self.size), name="DataLoader"
        )

    def _send(self, pool: Pool, made: WorkerCopy) -> None:
        reference: Any = pool.broadcast(made)
        # As in torch's loader, workers keep the globals of the time when they were started.
        reference.names = frozenset()
        self._ref = reference

    def make(
        self, label: str, func: Callable[..., Any], *args: Any, shard: int | None = None
    ) -> Any:
        """Let worker ``shard`` (None: any worker) call ``func(copy, *args)``; return the result."""
        where = {} if shard is None else {"worker": shard}
        return self._apply(label, with_copy, func, self._ref, *args, retries=RETRIES, **where)

    def end(self, results: Iterable[Any] = ()) -> None:
        """As `_Pooled.end`; let the workers drop the dataset."""
        self._ref = None
        super().end(results)


joined_at_exit: weakref.WeakSet[Any] = weakref.WeakSet()
"""Threads, and pools of threads, for which the end of the program waits.

Before Python 3.14, a thread that still runs is ended when it next takes the interpreter's lock.  If
it is in C++ code like torch's, this ends the process with SIGABRT.
"""


def _join_all() -> None:
    for one in list(joined_at_exit):
        one.join()


at_exit.append(_join_all)


class Threads(_Pooled):
    """Worker threads, which share the loader's dataset.

    If each worker has its own part of the dataset, each gets a shallow copy of it.
    """

    def __init__(self, loader: Any, has_parts: bool) -> None:
        use_threads()
        self._pool = loader._given_pool
        owns, self.size = self._pool is None, loader._size()
        if owns:
            self._pool = ThreadPool(self.size, name="DataLoader")
        self._end = end_later(self._pool if owns else None)
        joined_at_exit.add(self._pool)
        self._copies = []
        for _ in range(loader.num_workers):
            made = WorkerCopy(loader)
            made.is_thread, made._generators = True, own_generators()
            if has_parts:
                made.dataset = _own(loader.dataset)
            self._copies.append(made)
        self._latest: list[AsyncResult[Any] | None] = [None] * loader.num_workers

    def make(
        self, label: str, func: Callable[..., Any], *args: Any, shard: int | None = None
    ) -> Any:
        """Let a thread call ``func(copy, *args)``.  Calls of one part run one after the other."""
        if shard is None:
            return self._apply(label, in_thread, func, self._copies, *args)
        # Threads that wait for `before` cannot block each other: tasks begin in order.
        before, made = self._latest[shard], self._copies[shard]
        result = self._latest[shard] = self._apply(label, after, before, func, made, *args)
        return result


def _own(dataset: Any) -> Any:
    # Sharding changes all pipes of a graph, so each worker needs a copy of the whole graph.
    return copy.deepcopy(dataset) if is_pipe(dataset) else copy.copy(dataset)
