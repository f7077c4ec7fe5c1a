"""Share mode: every process that has a tensor sees all writes to it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from support import scripts
from support import tensor_work as tasks
from support.leaks import descriptors
from support.memory import is_free, own_arena
from support.tiers import also
from support.waiting import eventually, together

import xpool
from xpool._pickling.tensors import mapped
from xpool._pickling.tensors import sharing as sharing_module

MIB = 1 << 20


@pytest.fixture
def sharing(make_pool: Callable[..., Any], warm: None) -> Any:
    return make_pool(xpool.P2PPool, 2, is_copy_tensor=False)


@pytest.fixture(autouse=True)
def let_go(warm: None) -> Iterator[None]:
    yield
    gc.collect()
    eventually(lambda: own_arena().statistics()["held"] == 0, "blocks released")


def test_both_ways(sharing: Any) -> None:
    """Each side sees the writes of the other, for every size."""
    for size in (1, 2, 4, 8, 1000, 70_000, MIB):
        tensor = torch.zeros(size, dtype=torch.uint8)
        sharing.apply(tasks.keep, ("x", tensor), worker=0)
        assert sharing.apply(tasks.kept_total, ("x",), worker=0) == 0, size
        tensor.fill_(1)
        assert sharing.apply(tasks.kept_total, ("x",), worker=0) == size
        sharing.apply(tasks.kept_fill, ("x", 2), worker=0)
        assert int(tensor.sum()) == 2 * size


def test_many_hops(sharing: Any) -> None:
    """A tensor goes to a worker, back, and to another worker. All see each other's writes."""
    tensor = torch.zeros(MIB, dtype=torch.int32)
    back = sharing.apply(tasks.add_one, (tensor,), worker=0)
    again = sharing.apply(tasks.add_one, (back,), worker=1)
    third = sharing.apply(tasks.add_one, (again,), worker=0)
    for one in (tensor, back, again, third):
        assert (one == 3).all()
        assert one.data_ptr() == tensor.data_ptr()
    third.fill_(9)
    assert (tensor == 9).all()


def test_made_by_a_worker(sharing: Any) -> None:
    """The parent and the other worker see a worker's tensor, even after its maker's death."""
    tensor = sharing.apply(tasks.make_and_keep, ("mine", MIB), worker=0)
    sharing.apply(tasks.keep, ("theirs", tensor), worker=1)
    sharing.apply(tasks.kept_fill, ("mine", 1), worker=0)
    assert int(tensor.sum()) == sharing.apply(tasks.kept_total, ("theirs",), worker=1) == MIB
    with pytest.raises(xpool.WorkerDied):
        sharing.apply(os._exit, (3,), worker=0)
    sharing.apply(tasks.kept_fill, ("theirs", 2), worker=1)
    assert int(tensor.sum()) == 2 * MIB
    sharing.apply(tasks.keep, ("again", tensor), worker=0)
    tensor.fill_(3)
    for worker, name in ((0, "again"), (1, "theirs")):
        assert sharing.apply(tasks.kept_total, (name,), worker=worker) == 3 * MIB
    # Later tensors do not get this memory.
    for i in range(20):
        other = sharing.apply(tasks.make_and_keep, (f"other{i}", MIB), worker=0)
        other.fill_(8)
    assert int(tensor.sum()) == 3 * MIB


def test_after_the_pool(sharing: Any) -> None:
    """A tensor outlives the pool that shared it, and can be shared again."""
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    made = sharing.apply(tasks.make_and_keep, ("x", MIB), worker=1)
    sharing.apply(tasks.write, (tensor, 5))
    sharing.close()
    sharing.join()
    assert int(tensor.sum()) == 5 * MIB and int(made.sum()) == 0
    made.fill_(4)
    with xpool.Pool(1, is_copy_tensor=False) as other:
        other.apply(tasks.add_one, (made,))
        other.apply(tasks.add_one, (tensor,))
    other.join()
    assert int(made.sum()) == 5 * MIB and int(tensor.sum()) == 6 * MIB


def test_two_pools(sharing: Any, make_pool: Callable[..., Any]) -> None:
    """Two pools of a program share the same tensor. A pool in copy mode copies it."""
    other = make_pool(xpool.Pool, 1, is_copy_tensor=False)
    copies = make_pool(xpool.Pool, 1)
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    sharing.apply(tasks.keep, ("x", tensor), worker=0)
    other.apply(tasks.write, (tensor, 1))
    assert sharing.apply(tasks.kept_total, ("x",), worker=0) == MIB
    copies.apply(tasks.write, (tensor, 2))
    assert int(tensor.sum()) == MIB
    received = copies.apply(tasks.same, (tensor,))  # already lies in a block
    sharing.apply(tasks.write, (received, 3))
    assert int(received.sum()) == 3 * MIB


counts = torch.zeros(2)


def bump(i: int) -> None:
    counts[i] += 1


def bump_argument(tensor: Any, i: int) -> None:
    tensor[i] += 1


def test_a_global_is_copied_with_a_warning(
    sharing: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Share mode shares arguments. A warning says once that a shared global is copied."""
    warnings.simplefilter("always")
    monkeypatch.setitem(globals(), "counts", torch.zeros(2).share_memory_())
    for _ in range(2):
        sharing.map(bump, [0, 1])
    assert counts.tolist() == [0, 0]
    sharing.starmap(bump_argument, [(counts, 0), (counts, 1)])
    assert counts.tolist() == [1, 1]
    (said,) = recwarn
    assert f"a copy of the global 'counts' of {__name__}" in str(said.message)
    assert "make the pool with is_copy_tensor=False and pass it as an argument" in str(said.message)


def test_views_and_modules(sharing: Any) -> None:
    """Views and parameters of a storage see the writes, even if made before the first send."""
    base = torch.zeros(1000, 1000)
    view, column = base[100:200], base.t()[3]
    module = torch.nn.Linear(500, 500)
    weight = module.weight.data
    sharing.apply(tasks.write, (view, 1.0))
    assert float(base.sum()) == 100_000 and float(column.sum()) == 100
    sharing.apply(tasks.fill_module, (module, 2.0))
    assert (weight == 2).all() and (module.bias == 2).all()
    alias_a, alias_b = sharing.apply(tasks.same, ((base, view),))
    alias_b.fill_(7)
    assert (base[100:200] == 7).all() and (alias_a[150] == 7).all()


@pytest.mark.parametrize("in_file", [False, True])
def test_one_storage_stays_one(sharing: Any, in_file: bool) -> None:
    """Tensors with the same storage share it in the worker, in the first message and later."""
    base = torch.zeros(1000).share_memory_() if in_file else torch.zeros(1000)
    pair = base.detach(), base[10:]
    for _ in range(3):
        assert sharing.apply(tasks.use_one_storage, (pair,))
        assert sharing.apply(tasks.use_one_storage, (pair[::-1],))
    base.copy_(torch.arange(1000))
    views = base[10:20], base[::7], base.view(10, 100).t(), base[:0], base.untyped_storage()
    for _ in range(2):
        *arrived, storage = sharing.apply(tasks.same, (views,))
        assert all(map(torch.equal, arrived, views[:4]))
        assert all(one.stride() == two.stride() for one, two in zip(arrived, views, strict=False))
        assert bytes(storage) == bytes(views[4])


def of_dead_view(tensor: Any) -> Any:
    """Return an array over a temporary view of the tensor."""
    return np.from_dlpack(tensor.view(-1))


@pytest.mark.parametrize(
    "alias", [np.asarray, of_dead_view, *also(lambda x: torch.from_dlpack(x).numpy())]
)
def test_alias_of_numpy(sharing: Any, alias: Any) -> None:
    """If a tensor moves, an array over it keeps its old memory and values."""
    tensor = torch.arange(MIB, dtype=torch.int32)
    array = alias(tensor)
    sharing.apply(tasks.write, (tensor, 5))
    assert (tensor == 5).all()
    for _ in range(20):  # would overwrite freed memory
        torch.full((MIB,), 77, dtype=torch.int32)
    assert (array == np.arange(MIB)).all()
    if array.flags.writeable:
        array[:] = 3
    assert (tensor == 5).all()
    before = array.copy()
    del tensor
    gc.collect()
    for _ in range(20):
        torch.full((MIB,), 77, dtype=torch.int32)
    assert (array == before).all()


def test_no_second_copy_is_kept(sharing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved tensor's old memory is freed at once if no other object uses it."""
    moved: list[bool] = []
    exchange = sharing_module._exchange

    def noted(*args: Any) -> Any:
        former = exchange(*args)
        moved.append(former is not None)
        return former

    monkeypatch.setattr(sharing_module, "_exchange", noted)
    # Ignore the threads of pytest-xdist.
    monkeypatch.setattr(sharing_module, "_other_threads_compute", bool)
    module = torch.nn.Linear(2000, 2000)
    plain = torch.zeros(4 * MIB, dtype=torch.float32)
    sharing.apply(tasks.same, (module,))
    sharing.apply(tasks.same, (plain,))
    sharing.apply(tasks.same, (plain[5:],))
    assert moved == [False] * 3
    viewed = torch.zeros(MIB)
    view = viewed[3:]
    sharing.apply(tasks.same, (viewed,))
    assert moved == [False] * 3 + [True]
    del view


ALONE = """
import sys, threading, torch, xpool

def former(pool):
    tensor = torch.zeros(100_000)
    pool.apply(id, (tensor,))
    return kept[-1]

if __name__ == "__main__":
    from xpool._pickling.tensors import sharing
    kept, exchange = [], sharing._exchange
    def noted(*args):
        former = exchange(*args)
        kept.append(former is not None)
        return former
    sharing._exchange = noted
    with xpool.Pool(1, is_copy_tensor=False) as pool:
        print(former(pool))
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        thread.start()
        print(former(pool))
        end.set()
        thread.join()
        print(former(pool))
        sys._is_gil_enabled = lambda: False
        print(former(pool))
"""


@pytest.mark.exhaustive
def test_old_memory_is_kept_if_there_are_threads(tmp_path: Path) -> None:
    """A moved tensor's old memory is kept if the program has threads or no interpreter lock."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = scripts.run([str(script)])
    assert done.stdout.split() == ["False", "True", "False", "True"], done.stderr


def test_memory_outlives_an_operation(sharing: Any) -> None:
    """If a thread computes on a tensor while another shares it, its old memory stays mapped."""
    moved: list[bool] = []
    begun, ended = threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        while not ended.is_set():
            tensor.digamma_()

    for _ in range(3):
        begun.clear()
        ended.clear()
        tensor = torch.ones(8 * MIB)
        address = tensor.data_ptr()
        thread = threading.Thread(target=compute)
        thread.start()
        begun.wait()
        sharing.apply(id, (tensor,))
        arena = own_arena()
        block = arena.holding(tensor.data_ptr())
        assert block is not None and tensor.data_ptr() != address
        moved.append(any(mapping_of(address)))
        ended.set()
        thread.join()
        del block
    assert moved == [True] * 3


def mapping_of(address: int) -> list[str]:
    """Return the lines of /proc/self/maps that contain an address."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(n, 16) for n in line.split()[0].split("-"))
        if start <= address < stop:
            found.append(line)
    return found


@pytest.mark.parametrize("how", ["share_memory_", *also("from_file", "memmap")])
def test_a_tensor_in_a_file_stays(sharing: Any, how: str, tmp_path: Path) -> None:
    """A tensor in a file stays there, so others that map the file see a worker's writes."""
    tensor = in_a_file(how, tmp_path / "file")
    address = tensor.data_ptr()
    other = mapped_once_more(tensor)
    for value in (5, 6):  # also the second time
        sharing.apply(tasks.write, (tensor[:MIB], value), worker=0)
        assert (tensor[:MIB] == value).all() and (other[:MIB] == value).all()
    assert tensor.data_ptr() == address and (tensor[MIB:] == 0).all()
    sharing.apply(tasks.keep, ("x", tensor), worker=1)
    other.fill_(1)
    assert sharing.apply(tasks.kept_total, ("x",), worker=1) == 2 * MIB
    back = sharing.apply(tasks.same, ((tensor, tensor[1:]),), worker=0)
    back[1].fill_(2)
    assert int(other.sum()) == int(back[0].sum()) == 4 * MIB - 1
    late = sharing.apply_async(tasks.same, (tensor[:3].clone().share_memory_(),))
    assert late.get().tolist() == [1, 2, 2]


def in_a_file(how: str, path: Path) -> Any:
    if how == "share_memory_":
        return torch.zeros(2 * MIB, dtype=torch.uint8).share_memory_()
    if how == "from_file":
        return torch.from_file(str(path), True, 2 * MIB, dtype=torch.uint8)
    # This offset is not the start of a page.
    whole = np.memmap(path, np.uint8, "w+", shape=(2 * MIB + 100,))
    return torch.from_numpy(whole[100:])


def mapped_once_more(tensor: Any) -> Any:
    """Return a tensor over the same file, made without xpool."""
    (line,) = mapping_of(tensor.data_ptr())
    inode = int(line.split()[4])
    paths = [line.split()[5], *(f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))]
    (path, *_) = [p for p in paths if os.path.exists(p) and os.stat(p).st_ino == inode]
    offset = tensor.data_ptr() - int(line.split("-")[0], 16)
    return torch.from_numpy(np.memmap(path, np.uint8, "r+", shape=(offset + 2 * MIB,))[offset:])


def test_a_sent_tensor_in_a_file_is_kept(sharing: Any) -> None:
    """A sent tensor in a file is kept until it is unpickled, even if the sender drops it."""
    fds = len(descriptors())
    results = [
        sharing.apply_async(tasks.total, (torch.ones(MIB, dtype=torch.uint8).share_memory_(),))
        for _ in range(10)
    ]
    assert [result.get() for result in results] == [MIB] * 10
    made = [sharing.apply_async(tasks.made_shared, (i, MIB)) for i in range(4)]
    for result in made:
        result.wait()
    assert [int(result.get().sum()) for result in made] == [i * MIB for i in range(4)]
    del made, results, result
    gc.collect()
    eventually(lambda: mapped.collect() or len(descriptors()) <= fds, "descriptors closed")


def test_a_place_is_looked_up_once(sharing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor's file is found once, and again in a fork or if its descriptor was closed."""
    look_up, looks = mapped._shared_maps, []
    monkeypatch.setattr(mapped, "_shared_maps", lambda: looks.append(1) or look_up())
    tensor = torch.zeros(MIB, dtype=torch.uint8).share_memory_()
    storage = tensor.untyped_storage()
    if not hasattr(storage, "__dict__") or storage is not tensor.untyped_storage():
        pytest.skip("this torch makes a new storage object for each access")

    def written(value: int) -> int:
        sharing.apply(tasks.write, (tensor, value))
        assert (tensor == value).all()
        return len(looks)

    assert written(1) == written(2) == 1
    process, address, place = storage.xpool_place
    fd = int(place[0].rpartition("/")[2])
    other, null = os.dup(fd), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd, inheritable=False)
    try:
        assert written(3) == written(4) == 2
    finally:
        os.dup2(other, fd, inheritable=False)
        os.close(other)
        os.close(null)
    storage.xpool_place = process + 1, address, place
    assert written(5) == 3 and storage.xpool_place[0] == process


def test_a_file_is_mapped_once(sharing: Any) -> None:
    """A worker maps a file once although it is sent again. It never confuses two files."""
    tensor = torch.zeros(MIB, dtype=torch.uint8).share_memory_()
    places = {sharing.apply(tasks.address, (tensor,), worker=0) for _ in range(3)}
    assert len(places) == 1
    # More than are kept. Some get the address or descriptor of an earlier one.
    for value in range(40):
        other = torch.full((MIB,), value, dtype=torch.uint8).share_memory_()
        assert sharing.apply(tasks.total, (other,), worker=0) == value * MIB


def test_kept_mappings_are_few_and_dropped(
    warm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept mappings have few descriptors, and are dropped when they have been idle."""
    monkeypatch.setattr(mapped, "keeps_opened", True)
    before = len(descriptors())

    def opened(index: int) -> Any:
        path = tmp_path / str(index)
        path.write_bytes(bytes([index]) * 100)
        found = path.stat()
        return mapped.open_file(None, str(path), found.st_dev, found.st_ino, 50, 50)

    assert [opened(index)[0] for index in range(40)] == list(range(40))
    assert len(descriptors()) == before + len(mapped._opened) <= before + 16
    alive = opened(39)
    monkeypatch.setattr(mapped, "IDLE_SECONDS", 0)
    assert not mapped.collect() and not mapped._opened and alive[49] == 39
    del alive
    assert len(descriptors()) == before


def test_idle_workers_drop_mappings(sharing: Any) -> None:
    """An idle worker drops a mapping without another task."""
    tensor = torch.ones(MIB, dtype=torch.uint8).share_memory_()
    (line,) = mapping_of(tensor.data_ptr())
    inode = f" {line.split()[4]} "
    pid = sharing.apply(os.getpid, worker=0)
    sharing.apply(tasks.total, (tensor,), worker=0)

    def be_impatient() -> None:
        # Not by `sys.modules` or `vars`: then all globals of all test modules would come, in a
        # block that the pool holds.
        from xpool._pickling.tensors import mapped
        from xpool._worker import loop

        setattr(loop, "IDLE_SECONDS", 0.2)  # noqa: B010 - mypy
        setattr(mapped, "IDLE_SECONDS", 0.2)  # noqa: B010 - mypy

    def is_mapped() -> bool:
        return inode in Path(f"/proc/{pid}/maps").read_text()

    assert is_mapped()
    sharing.apply(be_impatient, worker=0)
    eventually(lambda: not is_mapped(), "mapping dropped")


def test_a_truncated_file(sharing: Any, tmp_path: Path) -> None:
    """A file that was truncated is refused, even if it was sent before. No worker gets a SIGBUS."""
    tensor = in_a_file("from_file", tmp_path / "file")
    sharing.apply(tasks.write, (tensor, 1), worker=0)
    os.truncate(tmp_path / "file", MIB)
    with pytest.raises(xpool.TaskNotPicklable, match="no other process can open its file"):
        sharing.apply(tasks.total, (tensor,), worker=0)


def test_shared_memory_without_a_file(sharing: Any) -> None:
    """Shared memory is refused if no other process can open its file. It stays unchanged."""
    pages = mmap.mmap(-1, MIB)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    address = tensor.data_ptr()
    with pytest.raises(xpool.TaskNotPicklable, match="no other process can open its file"):
        sharing.apply(tasks.write, (tensor, 5))
    assert tensor.data_ptr() == address and int(tensor.sum()) == 0


def test_received_as_numpy(sharing: Any) -> None:
    """An array over an already shared tensor is shared too."""
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    sharing.apply(tasks.keep, ("x", tensor), worker=0)
    array = tensor.numpy()
    sharing.apply(tasks.kept_fill, ("x", 4), worker=0)
    assert (array == 4).all()
    del tensor
    gc.collect()
    assert (array == 4).all()
    sharing.apply(tasks.kept_fill, ("x", 6), worker=0)
    assert (array == 6).all()


def test_a_second_send_takes_nothing(sharing: Any) -> None:
    """Sending a tensor again takes no memory and no descriptor, because only its name is sent."""
    tensor = torch.zeros(64 * MIB, dtype=torch.uint8)
    sharing.apply(tasks.same, (tensor,), worker=0)
    arena = own_arena()
    used, fds = arena.file.used(), len(descriptors())
    for _ in range(50):
        back = sharing.apply(tasks.same, (tensor,), worker=0)
        assert back.data_ptr() == tensor.data_ptr()
    assert arena.file.used() == used and len(descriptors()) == fds


def test_memory_is_freed(sharing: Any) -> None:
    """The memory is freed when the last user in any process drops it."""
    arena = own_arena()
    tensor = torch.zeros(32 * MIB, dtype=torch.uint8)
    sharing.apply(tasks.keep, ("x", tensor), worker=0)
    number = arena._number_at(tensor.data_ptr())
    assert number is not None
    del tensor
    assert not is_free(arena, number)  # the worker still has it
    assert sharing.apply(tasks.kept_total, ("x",), worker=0) == 0
    sharing.apply(tasks.forget, worker=0)
    sharing.apply(tasks.nothing, worker=0)
    eventually(lambda: is_free(arena, number), "block free")


def test_passed_between_workers_while_the_parent_drops_it(sharing: Any) -> None:
    """A tensor passed between workers is never freed, even if the parent drops it."""
    for i in range(200):
        made = sharing.apply_async(tasks.filled, (i % 250, 100_000), worker=i % 2)
        kept = sharing.apply_async(tasks.keep, ("x", made.get()), worker=(i + 1) % 2)
        del made
        kept.get()
        assert sharing.apply(tasks.kept_total, ("x",), worker=(i + 1) % 2) == i % 250 * 100_000


@pytest.mark.exhaustive
def test_nested_pool_refuses(make_pool: Callable[..., Any]) -> None:
    """A worker cannot share its parent's tensor with its own pool. The error says what to do."""
    pool = make_pool(xpool.Pool, 1, is_copy_tensor=False, is_daemon=False)
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    text = pool.apply(tasks.share_with_a_pool, (tensor,))
    assert "came from another pool" in text and "clone()" in text
    pool.apply(tasks.write, (tensor, 1))
    assert int(tensor.sum()) == MIB


def test_from_many_threads(sharing: Any) -> None:
    """If threads share a tensor for the first time at once, it moves once."""
    tensor = torch.zeros(4 * MIB, dtype=torch.uint8)
    places: list[int] = []

    def share(i: int) -> None:
        places.append(sharing.apply(tasks.same, (tensor,), worker=i % 2).data_ptr())

    together(share, 8)
    assert set(places) == {tensor.data_ptr()}


def names_of_torch() -> set[str]:
    """Return the names of this process's shared memory of torch."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}


@pytest.mark.usefixtures("torch_files")
def test_dumps() -> None:
    """`dumps(copy_tensor=False)` writes a name. The memory is freed after the last use."""
    before = names_of_torch()
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    data = xpool.pickle.dumps([tensor, tensor[5:]], copy_tensor=False)
    assert len(data) < 1000
    assert len(names_of_torch() - before) == 1
    alias, part = pickle.loads(data)
    alias.fill_(3)
    assert int(tensor.sum()) == 3 * MIB
    assert int(part.sum()) == 3 * (MIB - 5)
    del tensor, alias, part
    gc.collect()
    assert names_of_torch() == before


@pytest.mark.usefixtures("torch_files")
def test_dumps_keeps_what_others_use() -> None:
    """An array over the tensor's old memory stays usable."""
    array = np.ones(MIB)
    tensor = torch.from_numpy(array)
    back = xpool.pickle.loads(xpool.pickle.dumps(tensor, copy_tensor=False))
    del tensor
    array += 1
    assert array.sum() == 2 * MIB
    assert back.sum() == MIB


@pytest.mark.usefixtures("torch_files")
def test_dumps_is_refused(sharing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dumps` refuses shared tensors. Without free memory it raises an error."""
    shared = torch.ones(MIB)
    sharing.apply(tasks.keep, ("shared", shared), worker=0)
    with pytest.raises(xpool.TaskNotPicklable, match=r"workers of a pool. Send a clone\(\)"):
        xpool.pickle.dumps(shared, copy_tensor=False)
    sharing.apply(tasks.keep, ("shared", None), worker=0)
    in_file = torch.from_file(str(tmp_path / "tensor"), shared=True, size=MIB)
    with pytest.raises(xpool.TaskNotPicklable, match=f"lies in {tmp_path}/tensor"):
        xpool.pickle.dumps(in_file, copy_tensor=False)

    def refuse(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(xpool.TaskNotPicklable, match=r"No space left.*copy_tensor=True"):
        xpool.pickle.dumps(torch.ones(MIB), copy_tensor=False)


METHODS = ["fork", "spawn"]


def write_and_answer(pipe: Any, keep: bool) -> None:
    """Unpickle the received data, write to the tensors, and answer with their earlier sums."""
    torch.set_num_threads(1)  # a fork does not have OpenMP's threads, but would wait for them
    opened = []
    while (data := pipe.recv()) is not None:
        try:
            tensors = xpool.pickle.loads(data)
            pipe.send([int(one.sum()) for one in tensors])
        except RuntimeError as exc:
            pipe.send(str(exc))
            continue
        for one in tensors:
            one.fill_(7)
        opened.append(tensors if keep else None)
        del tensors
        pipe.send("written")
    for tensors in filter(None, opened):
        pipe.send([int(one.sum()) for one in tensors])


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.usefixtures("torch_files")
@pytest.mark.parametrize("method", METHODS)
def test_dumps_by_a_pipe(method: str) -> None:
    """Any process can unpickle the data from a pipe. Both sides see each other's writes."""
    context = multiprocessing.get_context(method)
    mine, its = context.Pipe()
    process = context.Process(target=write_and_answer, args=(its, True))  # type: ignore[attr-defined]
    process.start()
    its.close()
    tensors = [torch.ones(MIB, dtype=torch.uint8), torch.ones(10)]
    for total in ([MIB, 10], [7 * MIB, 70]):  # the second time, the memory is shared already
        data = xpool.pickle.dumps(tensors, copy_tensor=False)
        mine.send(data)
        assert mine.recv() == total
        assert mine.recv() == "written"
        assert [int(one.sum()) for one in tensors] == [7 * MIB, 70]
    tensors[0].fill_(1)
    del data, tensors  # the process keeps its tensors
    mine.send(None)
    assert [mine.recv() for _ in range(2)] == [[MIB, 70]] * 2
    process.join()
    assert process.exitcode == 0


@pytest.mark.exhaustive
def test_dumps_whose_sender_has_ended() -> None:
    """A tensor outlives its process, in a function and in shared memory too."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    # Not unpickled here, because a connection to the sender's server of torch would stay. The
    # receiver starts first, because that server ends two seconds after the sender.
    receiver = context.Process(target=answer_totals, args=(its,))
    receiver.start()
    assert mine.recv() == "ready"
    from_sender, to_us = context.Pipe()
    sender = context.Process(target=send_two, args=(to_us,))
    sender.start()
    data = [from_sender.recv(), from_sender.recv()]
    sender.join()
    mine.send(data)
    its.close()  # if the receiver fails, `recv` raises
    assert mine.recv() == [MIB, 3]
    receiver.join()


def answer_totals(pipe: Any) -> None:
    pipe.send("ready")
    tensor, function = map(xpool.pickle.loads, pipe.recv())
    pipe.send([int(tensor.sum()), int(function().sum())])


def send_two(pipe: Any) -> None:
    """Send a tensor, and a function that uses one."""
    torch.set_num_threads(1)  # as in `write_and_answer`
    shared = torch.ones(3).share_memory_()
    pipe.send(xpool.pickle.dumps(torch.ones(MIB), copy_tensor=False))
    pipe.send(xpool.pickle.dumps(lambda: shared, copy_tensor=False))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("torch_files")
def test_dumps_of_a_worker(sharing: Any) -> None:
    """A process outside the pool can unpickle a worker's data."""
    data = sharing.apply(tasks.kept_pickle, (MIB,), worker=0)
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=write_and_answer, args=(its, False))
    process.start()
    mine.send(data)
    assert mine.recv() == [MIB]
    assert mine.recv() == "written"
    mine.send(None)
    process.join()
    assert sharing.apply(tasks.kept_total, ("pickled",), worker=0) == 7 * MIB


def test_an_unknown_layout_of_storages() -> None:
    """Storages with an unknown layout are not changed. The error says what to do."""
    words = (ctypes.c_size_t * 8)()

    class Storage:
        _cdata = ctypes.addressof(words)

        def data_ptr(self) -> int:
            return 4096

    with pytest.raises(xpool.TaskNotPicklable, match="2.13 or later"):
        sharing_module._swap(torch, Storage(), Storage())
    assert not any(words)


def test_the_storage_may_come_first(make_pool: Any) -> None:
    """All objects of a message that use a storage share it, whichever comes first."""
    pool = make_pool(xpool.Pool, 1, is_copy_tensor=False)
    x = torch.arange(12.0).reshape(3, 4)
    odd = torch.zeros(7, dtype=torch.uint8).untyped_storage()
    for _ in range(2):  # the second time, it is in shared memory already
        for message in (
            [x, x[1:], x.t(), torch.nn.Parameter(x), x.untyped_storage()],
            [x.untyped_storage(), x.detach(), x],
            [torch.empty(0, dtype=torch.uint8).set_(odd), odd],
            [torch.empty(0, dtype=torch.int16).set_(odd, 0, (3,)), odd],
        ):
            assert pool.apply(storages, (message,)) == 1
    assert pool.apply(tensor_facts, (x[1:, ::2],)) == (4, (4, 2), [[4.0, 6.0], [8.0, 10.0]], 48)


def storages(parts: list[Any]) -> int:
    found = {
        (one if isinstance(one, torch.UntypedStorage) else one.untyped_storage())._cdata
        for one in parts
    }
    return len(found)


def tensor_facts(x: Any) -> Any:
    return x.storage_offset(), x.stride(), x.tolist(), x.untyped_storage().nbytes()
