"""Each peer behind the same few verbs, with the settings that its documentation recommends.

A peer is one class here: `open` starts the pool, the verbs are called as a user of that
library would call them, `close` ends it.  The modules of peers are imported in `open`, so
that one which is not installed is known by its `distribution` alone.
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
    """The chunk that `multiprocessing.pool.Pool.map` chooses by default.

    For peers whose own default is 1: their documentation says to give a larger one for
    long iterables.
    """
    chunk, rest = divmod(count, WORKERS * 4)
    return chunk + bool(rest)


class Peer:
    """One way to have two workers."""

    name: str
    distribution: str | None = None
    """What must be installed; None for the standard library."""
    missing = "not installed"
    """What the table says where `version` is None."""
    without_torch = ""
    """Why its workers cannot use torch; empty if they can."""
    lambdas = False
    """Can it send a lambda?"""
    pool_a_work = False
    """Does it need a new pool for each work?"""
    one_process = False
    """Do all works run in one process, because the library itself takes seconds to start?"""
    pool: Any

    @classmethod
    def version(cls) -> str | None:
        """Version of what is installed, "" for the standard library, None if it is missing."""
        if cls.distribution is None:
            return ""
        try:
            return importlib.metadata.version(cls.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def share_tensors(self) -> None:
        """From now on tensors are to be shared, not copied, where that is a setting."""

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        """Start the pool, for a program that uses torch, or for lambdas where that is a setting."""
        raise NotImplementedError

    def imap_unordered(self, func: Func, items: Sequence[Any]) -> Iterable[Any]:
        """All results, in whatever order, each item a task of its own."""
        raise NotImplementedError

    def map(self, func: Func, items: Sequence[Any]) -> Iterable[Any]:
        """All results in order, in chunks of the usual size."""
        raise NotImplementedError

    def submit(self, func: Func, *args: Any) -> Any:
        """Start one task; `result` waits for what this returns."""
        raise NotImplementedError

    def result(self, handle: Any, timeout: float) -> Any:
        """The result of `submit`.

        Raises:
            TimeoutError: (the one of the library) there is none after `timeout` seconds.
        """
        raise NotImplementedError

    def apply(self, func: Func, *args: Any) -> Any:
        """One round trip."""
        return self.result(self.submit(func, *args), 60)

    def close(self) -> None:
        """End the workers at once."""
        raise NotImplementedError


class PoolPeer(Peer):
    """Whatever has the interface of `multiprocessing.pool.Pool`."""

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
        """As `Peer.version`; the tree that this file is in will do, installed or not."""
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
            # The documented way to have the imports done once, not in every worker.
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

        # The other strategy, its default on Linux, is what the standard library gets here
        # as soon as torch is imported; for small tensors this one is twice as fast.
        torch.multiprocessing.set_sharing_strategy("file_system")
        self.pool = torch.multiprocessing.Pool(WORKERS)


class Multiprocess(PoolPeer):
    name, distribution, lambdas = "multiprocess", "multiprocess", True

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import multiprocess

        self.pool = multiprocess.get_context("fork").Pool(WORKERS)


class Executor(Peer):
    """Whatever has the interface of `concurrent.futures.Executor`."""

    def imap_unordered(self, func: Func, items: Sequence[Any]) -> Iterator[Any]:
        # In order: faster than submit() and as_completed(), and the tasks are all alike.
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
    """Threads that have an interpreter each, with a lock of its own: Python 3.14."""

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

        # Not get_reusable_executor: the start-up works ask for a new pool.
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
    # Workers that are kept alive do not survive a change of verb: they go on calling the
    # function as the last verb wanted it called.
    pool_a_work = True

    def open(self, *, with_torch: bool = False, with_lambdas: bool = False) -> None:
        import mpire

        self.pool = mpire.WorkerPool(
            WORKERS, start_method="fork", keep_alive=True, use_dill=with_lambdas
        )

    # An item that can be iterated over is unpacked into arguments, a tensor too: so each
    # goes as a tuple of one.

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
        # Both are read when ray is imported; the first is its documented setting for tensors.
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
        # Its own imap_unordered waits for a task before it sends the next: half as fast.
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
