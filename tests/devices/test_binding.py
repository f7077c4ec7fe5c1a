"""A worker sets its device's variables before it imports any module that may read them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import scripts
from support.tiers import also

from xpool import (
    CtxPool,
    DeviceError,
    OptionError,
    PoolClosed,
    WorkerDied,
    WorkerStartFailed,
    current_worker,
)
from xpool.devices import devices

METHODS = ["forkserver", "fork", *also("spawn")]


class Bound:
    """A context whose module is imported after the binding."""

    def __init__(self, **env: str | None) -> None:
        self.env = env
        self.cpus: tuple[int, ...] = ()

    def __reduce__(self) -> Any:
        # Unpickling the context imports a module that records the variables.
        return _restore, (self.env, self.cpus)

    def enter(self) -> None:
        from . import witness

        self.seen = witness.ENVIRON


def _restore(env: dict[str, str | None], cpus: tuple[int, ...]) -> Bound:
    from . import witness  # noqa: F401 -- records now

    bound = Bound(**env)
    bound.cpus = cpus
    return bound


def seen(context: Bound, name: str) -> str | None:
    return context.seen.get(name)


def cpus(context: Bound) -> list[int]:
    from . import witness

    return witness.CPUS


def die(context: Bound) -> None:
    os._exit(3)


@pytest.mark.parametrize("method", METHODS)
def test_variables_are_set_before_any_import(
    make_pool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, method: str
):
    """The variables of `env` are set before the context's module is imported."""
    monkeypatch.setenv("XPOOL_TEST_STALE", "from the parent")
    monkeypatch.setenv("XPOOL_TEST_MANY_A", "1")
    monkeypatch.setenv("XPOOL_TEST_MANY_B", "2")
    monkeypatch.setenv("XPOOL_TEST_KEPT", "kept")
    contexts = [
        Bound(
            XPOOL_TEST_STALE=None,
            **{"XPOOL_TEST_MANY_*": None},
            XPOOL_TEST_MANY_B=f"own {i}",
            XPOOL_TEST_DEVICE=str(i),
        )
        for i in range(2)
    ]
    pool = make_pool(CtxPool, worker_contexts=contexts, context=method)
    for _ in range(8):
        device = pool.apply(seen, ("XPOOL_TEST_DEVICE",))
        assert device in ("0", "1")
    assert pool.apply(seen, ("XPOOL_TEST_STALE",)) is None
    assert pool.apply(seen, ("XPOOL_TEST_MANY_A",)) is None
    assert (pool.apply(seen, ("XPOOL_TEST_MANY_B",)) or "").startswith("own ")
    assert pool.apply(seen, ("XPOOL_TEST_KEPT",)) == "kept"


def test_binding_precedes_imports(tmp_path: Path):
    """A fresh process is bound before it imports its first module outside the standard library; an
    import hook records this."""
    scripts.write(
        tmp_path / "sitecustomize.py",
        """
            import os, sys

            class Recorder:
                def find_spec(self, name, path=None, target=None):
                    early = ("sitecustomize", "usercustomize", "xpool", "xpool._worker",
                             "xpool._worker.entry", "xpool._worker.server", "xpool._engine",
                             "xpool._engine.launch", "xpool.errors")
                    top = name.partition(".")[0]
                    if name in early or top in sys.stdlib_module_names or top == "_distutils_hack":
                        return None
                    if "XPOOL_TEST_SEEN" in os.environ:
                        with open(os.environ["XPOOL_TEST_SEEN"], "a") as file:
                            bound = os.environ.get("XPOOL_TEST_DEVICE", "unset")
                            print(os.getpid(), name, bound, file=file)
                    return None

            sys.meta_path.insert(0, Recorder())
        """,
    )
    # The fork server may have imported everything else that this worker needs.
    (tmp_path / "imported_when_bound.py").touch()
    log = tmp_path / "seen"
    script = scripts.write(
        tmp_path / "script.py",
        """
            import os
            from xpool import CtxPool

            class Bound:
                env = {"XPOOL_TEST_DEVICE": "7"}
                def enter(self):
                    import imported_when_bound

            if __name__ == "__main__":
                os.environ["XPOOL_TEST_SEEN"] = os.environ["XPOOL_TEST_LOG"]
                with CtxPool(worker_contexts=[Bound()], context="forkserver") as pool:
                    print(pool.apply(lambda c: (os.getpid(), os.environ["XPOOL_TEST_DEVICE"])))
        """,
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    pid, device = eval(scripts.run_ok([script], PYTHONPATH=path, XPOOL_TEST_LOG=str(log)))
    assert device == "7"
    lines = [line.split() for line in log.read_text().splitlines()]
    worker = [(name, bound) for number, name, bound in lines if int(number) == pid]
    assert worker, "the worker imports a module when it is bound"
    assert {bound for _, bound in worker} == {"7"}, worker


def test_a_replacement_gets_the_same_binding(make_pool: Callable[..., Any]):
    """A replacement for a dead worker has the same variables."""
    pool = make_pool(CtxPool, worker_contexts=[Bound(XPOOL_TEST_DEVICE="5")])
    with pytest.raises(WorkerDied, match="exit code 3"):
        pool.apply(die)
    assert pool.apply(seen, ("XPOOL_TEST_DEVICE",)) == "5"


@pytest.mark.skipif(sys.platform != "linux", reason="affinity masks are Linux's")
@pytest.mark.parametrize("method", METHODS)
def test_cores_are_bound_before_any_import(make_pool: Callable[..., Any], method: str):
    """A worker is bound to the cores of its context before it imports any module."""
    core = max(os.sched_getaffinity(0))
    context = Bound()
    context.cpus = (core,)
    pool = make_pool(CtxPool, worker_contexts=[context], context=method)
    assert pool.apply(cpus) == [core]


@pytest.mark.skipif(sys.platform != "linux", reason="affinity masks are Linux's")
def test_workers_follow_their_parents_cores():
    """A worker may use the cores that its parent may use now, not those at the fork server's
    start."""
    code = (
        "import os; from xpool import Pool\n"
        "with Pool(1) as pool: first = pool.apply(os.sched_getaffinity, (0,))\n"
        "mine = {max(os.sched_getaffinity(0))}; os.sched_setaffinity(0, mine)\n"
        "with Pool(1) as pool: print(pool.apply(os.sched_getaffinity, (0,)) == mine)\n"
    )
    assert scripts.run_ok(["-c", code]) == "True\n"


def number_of_threads(context: Bound) -> tuple[int, str | None]:
    import torch

    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


@pytest.mark.torch
@pytest.mark.skipif(sys.platform != "linux", reason="affinity masks are Linux's")
@pytest.mark.parametrize("method", METHODS)
def test_no_more_threads_than_cores(
    make_pool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, method: str
):
    """A worker with `cpus` has one thread for each of them, unless the program sets a number."""
    context = Bound()
    context.cpus = (max(os.sched_getaffinity(0)),)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pool = make_pool(CtxPool, worker_contexts=[context], context=method)
    assert pool.apply(number_of_threads) == (1, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    pool = make_pool(CtxPool, worker_contexts=[context], context=method)
    assert pool.apply(number_of_threads) == (1 if method == "fork" else 2, "2")


class Unopenable:
    """A device that another process uses."""

    env: dict[str, str] = {}

    def enter(self) -> None:
        raise DeviceError("worker 0 cannot open tpu device 0: in use. End the other process.")


def test_a_device_that_cannot_be_opened_ends_the_pool(make_pool: Callable[..., Any]):
    """The parent raises one error with the reason and the remedy, and starts no more workers."""
    pool = make_pool(CtxPool, worker_contexts=[Unopenable()])
    with pytest.raises(WorkerStartFailed, match="in use. End the other process") as caught:
        pool.apply(seen, ("x",))
    assert isinstance(caught.value.__cause__, DeviceError)
    assert caught.value.attempts == 3


class Member(Bound):
    """A worker of a replica group."""

    group = 2

    def __reduce__(self) -> Any:
        return Member, ()


def test_a_replica_group_ends_together(make_pool: Callable[..., Any]):
    """The death of one worker of a group stops the pool with the reason; the worker is not
    replaced."""
    pool = make_pool(CtxPool, worker_contexts=[Member(), Member()])
    assert pool.apply(seen, ("XPOOL_TEST_NOTHING",)) is None
    with pytest.raises(WorkerDied, match="exit code 3"):
        pool.apply(die)
    pool.join()
    with pytest.raises(PoolClosed, match="a worker of a replica group died"):
        pool.apply(seen, ("x",))
    assert pool.statistics()["deaths"] == 1


def test_a_group_refuses_replacements():
    """A group refuses to replace single workers."""
    with pytest.raises(OptionError, match="replica group.*leave it out"):
        CtxPool(worker_contexts=[Member()], maxtasksperchild=5)


def who(context: Any) -> tuple[int, str, bool]:
    return context.ordinal, str(current_worker().device), current_worker().context is context


@pytest.mark.torch
def test_the_device_in_the_worker(make_pool: Callable[..., Any]):
    """`ctx.device` and `current_worker()` return the same `torch.device`."""
    pool = make_pool(CtxPool, worker_contexts=devices("cpu", n=2))
    assert pool.apply(who) in [(0, "cpu", True), (1, "cpu", True)]


def test_devices_in_the_parent():
    """In the parent `context.devices` raises, because it would start a runtime."""
    with pytest.raises(RuntimeError, match="in the worker only"):
        _ = devices("cpu", n=1)[0].devices


NO_RUNTIME = """
import sys
before = open("/proc/self/maps").read()
from xpool import DeviceError
from xpool.devices import devices
for kind in ("cpu", "cuda", "tpu", "xla", "auto"):
    try:
        devices(kind)
    except DeviceError:
        pass
loaded = {"torch", "torch_xla", "torch_tpu", "libtpu", "_XLAC"} & set(sys.modules)
new = set(open("/proc/self/maps").read().split()) - set(before.split())
runtimes = "libcuda", "libtpu", "libtorch"
print(sorted(loaded), sorted(one for one in new if any(name in one for name in runtimes)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_devices_starts_no_runtime():
    """Counting devices of any kind imports no framework and loads no runtime library."""
    assert scripts.run_ok(["-c", NO_RUNTIME]) == "[] []\n"
