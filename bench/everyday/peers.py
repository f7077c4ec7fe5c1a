"""The first part of each program: the same functions for each peer's pool."""

from __future__ import annotations

_AS_A_POOL = """
        def run(pool, func, items):
            return pool.map(func, items, 1)
        def spread(pool, func, items):
            return pool.map(func, items)
        def star(pool, func, items):
            return pool.starmap(func, items)
        def notify(pool, func, items, callback):
            for one in [pool.apply_async(func, (item,), callback=callback) for item in items]:
                one.get()
        def stream(pool, func, items, chunk):
            return pool.imap(func, items, chunk)
        def finish(pool):
            pool.close()
            pool.join()
"""

_AS_AN_EXECUTOR = """
        def run(pool, func, items):
            return list(pool.map(func, items))
        def spread(pool, func, items):
            return list(pool.map(func, items, chunksize=max(1, len(items) // 8)))
        def star(pool, func, items):
            return list(pool.map(func, *zip(*items), chunksize=max(1, len(items) // 8)))
        def notify(pool, func, items, callback):
            for item in items:
                pool.submit(func, item).add_done_callback(lambda one: callback(one.result()))
            pool.shutdown()
        def stream(pool, func, items, chunk):
            return pool.map(func, items, chunksize=chunk)
        def finish(pool):
            pool.shutdown()
"""

PEERS = {
    "xpool": """
        import xpool
        from xpool import Pool
        def start(n, **options):
            return Pool(n, **options)
    """
    + _AS_A_POOL,
    "fork": """
        import multiprocessing.pool
        def start(n, **options):
            return multiprocessing.get_context("fork").Pool(n, **options)
    """
    + _AS_A_POOL,
    "forkserver": """
        import multiprocessing.pool
        def start(n, **options):
            return multiprocessing.get_context("forkserver").Pool(n, **options)
    """
    + _AS_A_POOL,
    "futures": """
        from concurrent.futures import ProcessPoolExecutor
        def start(n, maxtasksperchild=None):
            if maxtasksperchild is not None:
                unable()
            return ProcessPoolExecutor(n)
    """
    + _AS_AN_EXECUTOR,
    "torch": """
        import torch.multiprocessing
        def start(n, **options):
            return torch.multiprocessing.get_context("fork").Pool(n, **options)
    """
    + _AS_A_POOL,
    "loky": """
        import loky
        def start(n, maxtasksperchild=None):
            if maxtasksperchild is not None:
                unable()
            return loky.ProcessPoolExecutor(n)
    """
    + _AS_AN_EXECUTOR,
}
THREADS = {
    "xpool": """
        from xpool import ThreadPool
        start = ThreadPool
    """
    + _AS_A_POOL,
    "fork": """
        from multiprocessing.pool import ThreadPool
        start = ThreadPool
    """
    + _AS_A_POOL,
    "futures": """
        from concurrent.futures import ThreadPoolExecutor
        start = ThreadPoolExecutor
    """
    + _AS_AN_EXECUTOR,
    "interpreters": """
        if sys.version_info < (3, 14):
            unable("needs 3.14")
        from concurrent.futures import InterpreterPoolExecutor
        start = InterpreterPoolExecutor
    """
    + _AS_AN_EXECUTOR,
}
"""Pools of threads.  `fork` stands for the standard library's `ThreadPool`.

Each worker of `interpreters` is a thread with its own interpreter.
"""

PACKAGES = {"loky": "loky", "torch": "torch", "joblib": "joblib"}

PRELUDE = """
    import sys, time
    def tell(seconds):
        print(seconds, flush=True)
    def unable(why="-"):
        print("unable", why, flush=True)
        sys.exit()
"""
