"""The same verbs for each peer, with the settings that its documentation recommends.

Each peer is a class.  `open` starts the pool, `close` ends it, and the verbs call the library as
its users do.  `open` imports the library, because it may not be installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

WORKERS = 2
Func = Callable[..., Any]


def fair_chunk(count: int) -> int:
    """The default chunk size of `multiprocessing.pool.Pool.map`.

    Used for peers whose own default is 1, because their documentation recommends larger chunks
    for long iterables.
    """
    chunk, rest = divmod(count, WORKERS * 4)
    return chunk + bool(rest)


class Peer:
    """A library with a pool of two workers."""

    name: str
    distribution: str | None = None
    """The distribution that must be installed; None for the standard library."""
    missing = "not installed"
    """The text of the table if `version` is None."""
    without_torch = ""
    """The reason why the workers cannot use torch; empty if they can."""
    lambdas = False
    """Can the pool send a lambda?"""
    pool_a_work = False
    """Does each work need a new pool?"""
    one_process = False
    """Do all works run in one process, because the library takes seconds to start?"""
    pool: Any

    @classmethod
    def version(cls) -> str | None:
        """The installed version; "" for the standard library, None if it is missing."""
        if cls.distribution is None:
            return ""
        try:
            return importlib.metadata.version(cls.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def share_tensors(self) -> None:
        """Share tensors from now on instead of copying, if the library has such a setting."""

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        """Start the pool, with the library's settings for torch or for lambdas."""
        raise NotImplementedError

    def imap_unordered(self, func: Func, items: Sequence[Any]) -> Iterable[Any]:
        """All results in any order, with one task for each item."""
        raise NotImplementedError

    def map(self, func: Func, items: Sequence[Any]) -> Iterable[Any]:
        """All results in order, with chunks of the default size."""
        raise NotImplementedError

    def submit(self, func: Func, *args: Any) -> Any:
        """Start one task; return a handle for `result`."""
        raise NotImplementedError

    def result(self, handle: Any, timeout: float) -> Any:
        """Wait for the result of a task.

        Raises:
            TimeoutError: (the library's) the result has not come after `timeout` seconds.
        """
        raise NotImplementedError

    def apply(self, func: Func, *args: Any) -> Any:
        """Run one task and return its result."""
        return self.result(self.submit(func, *args), 60)

    def close(self) -> None:
        """End the workers without waiting for tasks."""
        raise NotImplementedError


class PoolPeer(Peer):
    """A pool with the interface of `multiprocessing.pool.Pool`."""

    def imap_unordered(self, func: Func, items: Sequence[Any]) -> Iterator[Any]:
        return self.pool.imap_unordered(func, items, chunksize=1)

    def map(self, func: Func, items: Sequence[Any]) -> list[Any]:
        return self.pool.map(func, items)

    def submit(self, func: Func, *args: Any) -> Any:
        return self.pool.apply_async(func, args)

    def result(self, handle: Any, timeout: float) -> Any:
        return handle.get(timeout)

    def apply(self, func: Func, *args: Any) -> Any:
        return self.pool.apply(func, args)

    def close(self) -> None:
        self.pool.terminate()
        self.pool.join()


class XPool(PoolPeer):
    name = "xpool"
    lambdas = True

    @classmethod
    def version(cls) -> str | None:
        """As `Peer.version`; also finds an xpool that is not installed, beside this package."""
        try:
            import xpool

            xpool.Pool  # noqa: B018  (the names are lazy)
        except (ImportError, AttributeError):
            return None
        return getattr(xpool, "__version__", "")

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        from xpool import Pool

        self.pool = Pool(WORKERS)

    def share_tensors(self) -> None:
        from xpool import Pool

        self.close()
        self.pool = Pool(WORKERS, is_copy_tensor=False)


class Standard(PoolPeer):
    method: str

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import multiprocessing

        context = multiprocessing.get_context(self.method)
        if self.method == "forkserver":
            # The documented way to import once instead of in each worker.
            context.set_forkserver_preload(
                ["bench.tensor_tasks"] if with_torch else ["bench.tasks"]
            )
        self.pool = context.Pool(WORKERS)


class StandardFork(Standard):
    name, method = "stdlib fork", "fork"


class StandardSpawn(Standard):
    name, method = "stdlib spawn", "spawn"


class StandardForkserver(Standard):
    name, method = "stdlib forkserver", "forkserver"


class TorchMultiprocessing(PoolPeer):
    name, distribution = "torch.multiprocessing", "torch"

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import torch.multiprocessing

        # Twice as fast for small tensors as the default on Linux, "file_descriptor".  The rows of
        # the standard library show the default, because importing torch sets it for them too.
        torch.multiprocessing.set_sharing_strategy("file_system")
        self.pool = torch.multiprocessing.Pool(WORKERS)


class Multiprocess(PoolPeer):
    name, distribution, lambdas = "multiprocess", "multiprocess", True

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import multiprocess

        self.pool = multiprocess.get_context("fork").Pool(WORKERS)


class Executor(Peer):
    """A pool with the interface of `concurrent.futures.Executor`."""

    def imap_unordered(self, func: Func, items: Sequence[Any]) -> Iterator[Any]:
        # map() keeps the order, but is faster than submit() and as_completed().
        return self.pool.map(func, items, chunksize=1)

    def map(self, func: Func, items: Sequence[Any]) -> Iterator[Any]:
        return self.pool.map(func, items, chunksize=fair_chunk(len(items)))

    def submit(self, func: Func, *args: Any) -> Any:
        return self.pool.submit(func, *args)

    def result(self, handle: Any, timeout: float) -> Any:
        return handle.result(timeout)

    def close(self) -> None:
        self.pool.shutdown(wait=True)


class Futures(Executor):
    name = "concurrent.futures"

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import concurrent.futures
        import multiprocessing

        self.pool = concurrent.futures.ProcessPoolExecutor(
            WORKERS, mp_context=multiprocessing.get_context("fork")
        )


class Interpreters(Executor):
    """Threads that have their own interpreter and GIL.  Needs Python 3.14."""

    name, lambdas = "interpreters", True
    missing = "needs Python 3.14"
    without_torch = "cannot: torch ends the process when a sub-interpreter imports it"

    @classmethod
    def version(cls) -> str | None:
        return "" if sys.version_info >= (3, 14) else None

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import concurrent.futures

        self.pool = concurrent.futures.InterpreterPoolExecutor(WORKERS)  # type: ignore[attr-defined]


class Loky(Executor):
    name, distribution, lambdas = "loky", "loky", True

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import loky

        # Not get_reusable_executor, because some works measure the start of a new pool.
        self.pool = loky.ProcessPoolExecutor(max_workers=WORKERS)


class Pebble(Peer):
    name, distribution = "pebble", "pebble"

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import multiprocessing

        import pebble

        self.pool = pebble.ProcessPool(
            max_workers=WORKERS, context=multiprocessing.get_context("fork")
        )

    def imap_unordered(self, func: Func, items: Sequence[Any]) -> Iterator[Any]:
        return self.pool.map(func, items, chunksize=1).result()

    def map(self, func: Func, items: Sequence[Any]) -> Iterator[Any]:
        return self.pool.map(func, items, chunksize=fair_chunk(len(items))).result()

    def submit(self, func: Func, *args: Any) -> Any:
        return self.pool.schedule(func, args=args)

    def result(self, handle: Any, timeout: float) -> Any:
        return handle.result(timeout)

    def close(self) -> None:
        self.pool.stop()
        self.pool.join()


class Mpire(Peer):
    name, distribution, lambdas = "mpire", "mpire", True
    # Workers that are kept alive call the function as the last verb did, so another verb needs a
    # new pool.
    pool_a_work = True

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import mpire

        self.pool = mpire.WorkerPool(
            WORKERS, start_method="fork", keep_alive=True, use_dill=with_lambdas
        )

    # mpire unpacks an iterable item, such as a tensor, into arguments.  So each item is put into
    # a tuple.

    def imap_unordered(self, func: Func, items: Sequence[Any]) -> Iterator[Any]:
        return self.pool.imap_unordered(
            func,
            ((item,) for item in items),
            iterable_len=len(items),
            chunk_size=1,
            max_tasks_active=len(items),
        )

    def map(self, func: Func, items: Sequence[Any]) -> list[Any]:
        return self.pool.map(func, ((item,) for item in items), iterable_len=len(items))

    def submit(self, func: Func, *args: Any) -> Any:
        return self.pool.apply_async(func, args)

    def result(self, handle: Any, timeout: float) -> Any:
        return handle.get(timeout=timeout)

    def close(self) -> None:
        self.pool.terminate()


class Ray(PoolPeer):
    name, distribution, lambdas = "ray", "ray", True
    pool_a_work = one_process = True

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        # ray reads these when it is imported.  The first is its documented setting for tensors.
        os.environ.setdefault("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        from ray.util.multiprocessing import Pool

        if not ray.is_initialized():
            ray.init(
                num_cpus=WORKERS,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
            )
        self.pool = Pool(processes=WORKERS)

    def imap_unordered(self, func: Func, items: Sequence[Any]) -> Iterator[Any]:
        # ray's imap_unordered waits for a task before it sends the next: half as fast.
        return iter(self.pool.map(func, items, chunksize=1))


PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        XPool,
        StandardFork,
        StandardSpawn,
        StandardForkserver,
        TorchMultiprocessing,
        Futures,
        Interpreters,
        Mpire,
        Loky,
        Pebble,
        Multiprocess,
        Ray,
    )
}
