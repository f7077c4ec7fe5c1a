"""The joblib backends ``"xpool"`` and ``"xpool-threads"``.  Importing this module registers them.

    >>> import joblib, xpool.joblib
    >>> with joblib.parallel_config("xpool", n_jobs=2):
    ...     joblib.Parallel()(joblib.delayed(abs)(-n) for n in range(3))
    [0, 1, 2]

The workers stay for the next call with the same options, as loky's do.  `shutdown` ends them.  When
a worker dies, its batch runs again, up to `RETRIES` times.

``"xpool-threads"`` runs the batches in threads, as joblib's ``"threading"`` does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import joblib
from joblib._parallel_backends import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)

from xpool._calls.results import AsyncResult
from xpool._pickling.by_value import settings
from xpool._pools.base import BasePool
from xpool._pools.process import Pool
from xpool._pools.thread import ThreadPool
from xpool._python import at_fork
from xpool._worker.worker_context import current_worker

__all__ = ["RETRIES", "Backend", "ThreadsBackend", "shutdown"]

RETRIES = 2
"""How often a batch runs again after its worker has died."""


_Outcome = tuple[Any, BaseException | None]
"""The value of a batch, or its error."""

# Options for arrays in files, which joblib passes to every backend of processes.
_OF_FILES = frozenset({"max_nbytes", "mmap_mode", "temp_folder", "verbose"})

# Options of `Pool` that this module passes to its initializer `_set_up`.
_OF_WORKERS = frozenset({"initializer", "initargs"})


class _PoolBackend(ParallelBackendBase):  # type: ignore[misc]
    """Runs the batches of one `joblib.Parallel` in a pool, which `_take` of a subclass sets."""

    supports_retrieve_callback = True

    _retries = 0
    _pool: BasePool | None = None
    """The pool of this call of `Parallel`."""

    _jobs: set[AsyncResult[Any]]
    """The unfinished batches.  They need no lock, because each operation on a set is atomic."""

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(joblib.cpu_count() + 1 + n_jobs, 1)

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        prefer: str | None = None,
        require: str | None = None,
        **options: Any,
    ) -> int:
        """Set the pool for the next calls, and return its number of workers.

        Options for arrays in files have no effect, because arrays do not travel in files.
        """
        workers: int = self.effective_n_jobs(n_jobs)
        if workers == 1:
            # joblib catches this and runs the batches in this process.
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        self._jobs = set()
        self._take(workers, {name: options[name] for name in options.keys() - _OF_FILES})
        return workers

    def start_call(self) -> None:
        super().start_call()
        self._caller, self._settings = threading.get_ident(), settings.snapshot()

    def submit(
        self, func: Callable[[], Any], callback: Callable[[_Outcome], object] | None = None
    ) -> AsyncResult[Any]:
        """Submit a batch.  A thread of the pool calls ``callback`` with its value or error."""
        pool = self._pool
        if pool is None:
            raise RuntimeError(
                "this backend is not configured; a generator of an earlier call to Parallel may "
                "have been dropped: exhaust it first"
            )
        if threading.get_ident() != self._caller:  # a callback submits the next batch
            settings.take_over(self._settings)
        jobs, over = self._jobs, False
        job: AsyncResult[Any] | None = None

        def done(value: Any, error: BaseException | None = None) -> None:
            nonlocal over
            over = True
            jobs.discard(job)
            if callback is not None:
                callback((value, error))

        failed = functools.partial(done, None)
        job = pool.apply_async(func, callback=done, error_callback=failed, retries=self._retries)
        jobs.add(job)
        if over:  # `done` may have run before `job` was set
            jobs.discard(job)
        return job

    def retrieve_result_callback(self, out: _Outcome) -> Any:
        """Return the batch's result, or raise its error."""
        value, error = out
        if error is not None:
            raise error
        return value

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel all batches.  A worker that does not stop is replaced."""
        for job in list(self._jobs):  # a copy, because callbacks remove jobs in another thread
            job.cancel()
        if not ensure_ready:
            self.terminate()


class _InFile:
    """Stands for a `numpy.memmap` in a message."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __reduce__(self) -> Any:
        one = self._array
        mode = "r+" if one.flags.writeable else "r"
        order = "C" if one.flags.c_contiguous else "F"
        return type(one), (one.filename, one.dtype, mode, one.offset, one.shape, order)


def _is_file(array: Any) -> bool:
    """Whether this `numpy.memmap` is a whole file, which a worker finds by its name."""
    if type(array.base) is not mmap.mmap or array.mode == "c" or array.filename is None:
        return False
    with contextlib.suppress(OSError):
        return bool(os.path.getsize(array.filename) >= array.offset + array.nbytes)
    return False  # it was removed


class Backend(AutoBatchingMixin, _PoolBackend):  # type: ignore[misc]
    """Runs the batches of one `joblib.Parallel` in the workers of a `Pool`.

    Keyword arguments of ``parallel_config`` and ``Parallel`` that joblib does not know are passed
    to `Pool`, for example ``task_timeout=60``, ``maxtasksperchild=100``, or ``initializer`` and
    ``initargs``.  Workers are started by xpool's fork server, unless ``parallel_config`` has a
    ``context=`` or the environment variable ``JOBLIB_START_METHOD`` names a start method.
    """

    supports_inner_max_num_threads = True

    _retries = RETRIES
    _kept: _Kept | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of workers.  It is 1 in a worker, whose process then runs the batches.

        It is also 1, with a warning, in daemonic processes, which may not have children.
        """
        workers: int = super().effective_n_jobs(n_jobs)
        with contextlib.suppress(RuntimeError):
            current_worker()
            return 1
        if multiprocessing.current_process().daemon:
            if workers != 1:
                warnings.warn(
                    "the xpool backend of joblib has no workers inside a daemonic process of "
                    "multiprocessing: n_jobs is 1",
                    stacklevel=3,
                )
            return 1
        return workers

    def submit(
        self, func: Any, callback: Callable[[_Outcome], object] | None = None
    ) -> AsyncResult[Any]:
        """Submit a batch; a worker maps its arguments that are files in memory, as loky's does."""
        memmap = getattr(sys.modules.get("numpy"), "memmap", None)
        pool: Any = self._pool  # another host may not have the file
        if memmap is not None and pool is not None and pool._options.hosts is None:
            # The same one for an array that several calls have: the worker maps the file once.
            found: dict[int, Any] = {}

            def sent(value: Any) -> Any:
                if type(value) is not memmap:
                    return value
                if id(value) not in found:
                    found[id(value)] = _InFile(value) if _is_file(value) else value
                return found[id(value)]

            func.items = [
                (call, [*map(sent, args)], {name: sent(one) for name, one in kwds.items()})
                for call, args, kwds in func.items
            ]
        return super().submit(func, callback)

    def _take(self, workers: int, options: dict[str, Any]) -> None:
        # joblib always passes a ``context``.  This one is None unless the user has chosen it.
        options["context"] = self.backend_kwargs.get("context", joblib.parallel.DEFAULT_MP_CONTEXT)
        threads = self._prepare_worker_env(workers)
        self._kept = _take(workers, threads, {**self.backend_kwargs, **options})
        self._pool = self._kept.pool

    def terminate(self) -> None:
        """Give the workers back, for the next call."""
        # joblib may call this several times, so give them back only once.
        kept, self._kept, self._pool = self._kept, None, None
        if kept is not None:
            kept.give_back()
        self.reset_batch_stats()


class ThreadsBackend(_PoolBackend):
    """Runs the batches of one `joblib.Parallel` in the threads of a `ThreadPool`.

    Objects are passed by reference, so ``require="sharedmem"`` accepts this backend.  Threads
    cannot be stopped: after an error or joblib's ``timeout=``, batches that run continue.

    Keyword arguments that joblib does not know are passed to `ThreadPool`.
    """

    uses_threads = supports_sharedmem = True

    def _take(self, workers: int, options: dict[str, Any]) -> None:
        options = {**self.backend_kwargs, **options}
        others = {name: options[name] for name in options.keys() - _OF_FILES - {"context"}}
        self._pool = ThreadPool(workers, name="joblib", **others)

    def terminate(self) -> None:
        pool, self._pool = self._pool, None  # joblib may call this several times
        if pool is not None:
            pool.terminate()


def _set_up(
    variables: Mapping[str, str],
    initializer: Callable[..., object] | None,
    initargs: Iterable[Any],
) -> None:
    # Limit the threads of numerical libraries.  Variables do this for libraries loaded later; the
    # loaded ones can be limited if there is threadpoolctl, which scikit-learn installs.
    os.environ.update(variables)
    with contextlib.suppress(ImportError):
        limits = importlib.import_module("threadpoolctl").threadpool_limits
        limits(int(variables["OMP_NUM_THREADS"]))
    if initializer is not None:
        initializer(*initargs)


# -- workers that stay between calls ---------------------------------------------------------------


class _Kept:
    """A pool, and the number of backends that use it now."""

    def __init__(self, key: object, pool: Pool) -> None:
        self.key, self.pool, self.users = key, pool, 0

    def give_back(self) -> None:
        with _lock:
            self.users -= 1
            # Another pool may be kept now, or `shutdown` was called while this one was in use.
            unwanted = self.users == 0 and _kept is not self
        # Not under the lock, because the end of a pool waits for its workers.
        if unwanted:
            self.end()

    def end(self) -> None:
        self.pool.terminate()
        self.pool.join()


# `_kept` is the pool for the next call with the same options; `_lock` guards it and `users`.
_lock = threading.Lock()
_kept: _Kept | None = None
at_fork.renew(globals(), _lock=threading.Lock)


def _take(n_jobs: int, threads: Mapping[str, str], options: Mapping[str, Any]) -> _Kept:
    global _kept
    # The key contains the pid, because a forked child must not use the parent's workers.
    key = os.getpid(), n_jobs, sorted(threads.items()), sorted(options.items(), key=lambda o: o[0])
    old = None
    with _lock:
        kept = _kept
        if kept is None or not _is_same(kept.key, key) or kept.pool.state != "RUN":
            # The last user ends a pool in use, and the parent ends its own pool.
            if kept is not None and kept.users == 0 and kept.key[0] == os.getpid():  # type: ignore[index]
                old = kept
            # Made under the lock, although this takes a while, so that concurrent calls share it.
            begin = dict(threads), options.get("initializer"), options.get("initargs", ())
            others = {name: options[name] for name in options.keys() - _OF_WORKERS}
            pool = Pool(n_jobs, _set_up, begin, name="joblib", **others)
            kept = _kept = _Kept(key, pool)
        kept.users += 1
    if old is not None:
        old.end()
    return kept


def _is_same(one: object, other: object) -> bool:
    try:
        return one == other
    except Exception:
        return False  # for example, initargs contain arrays, whose comparison is an array


def shutdown() -> None:
    """End the workers that are kept for the next call.  A running call keeps its workers."""
    global _kept
    with _lock:
        kept, _kept = _kept, None
        idle = kept is not None and kept.users == 0
    if idle and kept is not None:
        kept.end()


joblib.register_parallel_backend("xpool", Backend)
joblib.register_parallel_backend("xpool-threads", ThreadsBackend)
