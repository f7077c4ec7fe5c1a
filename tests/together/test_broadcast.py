"""`broadcast` makes one copy for the machine, and one object for each worker."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from typing import Any

import pytest

pytest.importorskip("torch", reason="the tests broadcast tensors")

import torch
from support import work
from support.scripts import run_ok
from support.tiers import also
from support.waiting import eventually

from xpool import P2PPool, Pool, TaskNotPicklable, current_worker
from xpool._memory.arena import Arena
from xpool._pickling.by_value.broadcast import Objects

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]

N = 1 << 20  # elements: 4 MiB


def table(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((N,), value), "names": ["a", "b"], "n": list(range(100))}


def seen(obj: Any, *rest: Any) -> tuple[int, float, int]:
    return current_worker().index, float(obj["w"].sum()), id(obj)


def private_kb(obj: Any) -> int:
    """Return how many KiB of the object's memory are private to this process."""
    address = obj["w"].data_ptr()
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                start, stop = (int(part, 16) for part in head.split("-"))
                inside = start <= address < stop
            elif inside and head == "Private_Dirty:":
                return int(line.split()[1])
    raise AssertionError("the object lies in no mapping")


def write(obj: Any) -> float:
    obj["w"][0] = 100.0
    return float(obj["w"].sum())


def kept(*_: Any) -> int:
    """Return how many objects this worker keeps. Objects without a reference do not count."""
    objects = Objects.here.get()
    assert objects is not None
    objects.collect()
    return len(objects._kept)


def model_output(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("options", [{}, {"memory_limit": 0}, {"is_copy_tensor": False}], ids=str)
def test_each_worker_keeps_one(make_pool, options):
    """All tasks of a worker get the same object, whether as an argument or in a closure."""
    pool = make_pool(Pool, 3, **options)
    ref = pool.broadcast(table())
    assert "dict" in repr(ref)
    assert ref.nbytes > 4 * N
    first = pool.run_all(seen, ref)
    assert [one[:2] for one in first] == [(i, float(N)) for i in range(3)]
    assert pool.run_all(seen, ref) == first
    assert pool.run_all(lambda: seen(ref)) == first
    assert pool.apply(seen, (ref,)) in first
    assert set(pool.starmap(seen, [(ref, i) for i in range(20)], 1)) <= set(first)
    assert set(pool.map(lambda i: seen(ref, i), range(20))) <= set(first)
    assert set(pool.imap(lambda i: seen([ref][0]), range(5))) <= set(first)


def test_context_pools(make_pool):
    """The context is still the first argument."""
    from xpool import CtxPool

    pool = make_pool(CtxPool, worker_contexts=["a", "b"])
    ref = pool.broadcast([1, 2])
    assert pool.run_all(lambda ctx, obj: (ctx, obj), ref) == [("a", [1, 2]), ("b", [1, 2])]


def test_one_copy_until_written(make_pool):
    """Workers share the pages. A worker that writes gets its own pages."""
    pool = make_pool(P2PPool, 3)
    ref = pool.broadcast(table())
    assert [one[1] for one in pool.run_all(seen, ref)] == [N] * 3
    assert pool.run_all(private_kb, ref) == [0, 0, 0]
    assert pool.apply(write, (ref,), worker=1) == N + 99
    assert [one[1] for one in pool.run_all(seen, ref)] == [N, N + 99, N]
    after = pool.run_all(private_kb, ref)
    assert after[0] == after[2] == 0
    assert 0 < after[1] <= 64


def test_a_snapshot(make_pool):
    """Later changes by the caller are invisible to workers."""
    pool = make_pool(Pool, 2)
    obj = table()
    ref = pool.broadcast(obj)
    obj["w"].zero_()
    assert [one[1] for one in pool.run_all(seen, ref)] == [N, N]


def test_a_model(make_pool):
    """A module works, with its views and shared parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3))
    model[2].weight.data[:] = 0.5
    pool = make_pool(Pool, 2)
    ref = pool.broadcast(model)
    x = torch.rand(5, 300)
    want = model_output(model, x)
    for out in pool.run_all(model_output, ref, x):
        assert torch.allclose(out, want)


def test_small_and_odd_objects(make_pool):
    """Any object that can be pickled may be broadcast."""
    pool = make_pool(Pool, 2)
    for obj in (None, 0, "text", [], b"x" * 100_000, lambda: 5):
        ref = pool.broadcast(obj)
        want = 5 if callable(obj) else obj
        assert pool.run_all(lambda got: got() if callable(got) else got, ref) == [want, want]


@pytest.mark.parametrize("options", [{}, {"memory_limit": 0}], ids=str)
def test_a_replacement_gets_the_object(make_pool, options):
    """A worker that replaces a dead one unpickles the object again."""
    pool = make_pool(P2PPool, 2, **options)
    ref = pool.broadcast(table())
    pool.run_all(seen, ref)
    os.kill(pool.run_all(work.pid)[0], signal.SIGKILL)
    assert [one[1] for one in pool.run_all(seen, ref)] == [N, N]
    assert pool.run_all(kept) == [1, 1]


def test_workers_drop_an_object_without_references(make_pool):
    """After the last reference, workers drop the object, and its memory is reused."""
    pool = make_pool(Pool, 2)
    arena = Arena.own()
    assert arena is not None
    refs = [pool.broadcast(table(i)) for i in range(3)]
    for i, ref in enumerate(refs):
        assert [one[1] for one in pool.run_all(seen, ref)] == [i * N] * 2
    assert pool.run_all(kept) == [3, 3]
    del ref
    refs.clear()
    gc.collect()
    assert pool.run_all(kept) == [0, 0]
    before = arena.statistics()["blocks"]
    for i in range(5):
        again = pool.broadcast(table(i))
        assert [one[1] for one in pool.run_all(seen, again)] == [i * N] * 2
        del again
        assert pool.run_all(kept) == [0, 0]
    assert arena.statistics()["blocks"] <= before + 1


def keep_tensor(obj: Any) -> None:
    keep_tensor.tensor = obj["w"]  # type: ignore[attr-defined]


def kept_sum() -> float:
    return float(keep_tensor.tensor.sum())  # type: ignore[attr-defined]


def test_a_stored_tensor_keeps_its_values(make_pool):
    """A tensor that a task has stored keeps its values after the reference is gone."""
    pool = make_pool(P2PPool, 1)
    ref = pool.broadcast(table(3))
    pool.apply(keep_tensor, (ref,))
    del ref
    gc.collect()
    assert pool.apply(kept) == 0
    others = [pool.broadcast(table(9)) for _ in range(4)]
    assert pool.run_all(seen, others[3])[0][1] == 9 * N
    assert pool.apply(kept_sum) == 3 * N


def test_descriptors(make_pool):
    """A broadcast opens no descriptor in the program."""
    pool = make_pool(Pool, 2)
    pool.run_all(kept)
    before = len(os.listdir("/proc/self/fd"))
    refs = [pool.broadcast(i) for i in range(20)]
    assert [pool.run_all(lambda got: got, ref) for ref in refs] == [[i, i] for i in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_refused(make_pool):
    """Other pools, nested references, unpicklable objects and large objects are refused."""
    pool = make_pool(Pool, 1)
    other = make_pool(Pool, 1)
    ref = pool.broadcast(5)
    with pytest.raises(TaskNotPicklable, match="the pool that made it"):
        other.apply(abs, (ref,))
    with pytest.raises(TaskNotPicklable, match="the pool that made it"):
        pool.broadcast([ref])
    with pytest.raises(LookupError, match="only the workers"):
        pickle.loads(pickle.dumps(ref))
    with pytest.raises(TaskNotPicklable):
        pool.broadcast(threading.Lock())
    small = make_pool(Pool, 1, memory_limit=1 << 20)
    with pytest.raises(TaskNotPicklable, match="memory_limit"):
        small.broadcast(table())
    assert pool.apply(abs, (ref,)) == 5


def test_the_interpreters_end():
    """A reference that lives until the end of the program causes no message."""
    run_ok(
        ["-"],
        """
        from xpool import Pool
        pool = Pool(1)
        ref = pool.broadcast(bytearray(1 << 20))
        assert pool.run_all(len, ref) == [1 << 20]
        pool.terminate()
        """,
    )


@pytest.mark.parametrize("options", ["", "context='fork'", *also("memory_limit=0")])
def test_functions_of_the_object_see_globals_as_they_are_at_the_call(options):
    """So do functions of other tasks, which read the same globals."""
    run_ok(
        ["-"],
        f"""
        from xpool import Pool

        class Box:
            def get(self):
                return rate

        def get(box):
            return box.get()

        rate = 1
        with Pool(1, {options}) as pool:
            pool.apply(abs, (1,))
            rate = 2
            ref = pool.broadcast(Box())
            rate = 3
            assert pool.apply(get, (ref,)) == 3
            rate = 4
            assert pool.apply(lambda: rate) == 4
            rate = 5
            assert pool.apply(get, (ref,)) == 5
            rate = 6
            assert pool.map(get, [ref, ref]) == [6, 6]
            rate = 7
            assert pool.apply(lambda: ref.get()) == 7
        """,
    )


def test_dropped_while_tasks_use_it(make_pool):
    """References are dropped while tasks still use them. Each task gets its object."""
    pool = make_pool(Pool, 2)
    results = []
    for i in range(60):
        results.append(
            (i, pool.apply_async(seen, (pool.broadcast({"w": torch.full((N // 8,), float(i))}),)))
        )
    for i, result in results:
        assert result.get()[1] == i * N // 8
    eventually(lambda: pool.run_all(kept) == [0, 0], "nothing is kept")


def test_the_reference_is_not_the_object_in_the_program():
    """Outside of tasks, items and attributes are refused, with the reason."""
    with Pool(1) as pool:
        names = pool.broadcast(["a", "b"])
        assert pool.apply(work.echo, (names,)) == ((["a", "b"],), {})
        reason = r"<Broadcast of a list, .*>.*: only tasks get the object itself"
        with pytest.raises(TypeError, match=reason):
            names[0]
        with pytest.raises(TypeError, match=reason):
            list(names)
        with pytest.raises(AttributeError, match=reason):
            names.index("a")
        assert not hasattr(names, "shape")
