"""`SharedList` and `SharedDict`: all processes read the same memory."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import signal
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from support import work
from support.limits import WAIT
from support.scripts import run_ok

from xpool import (
    ResultNotPicklable,
    SharedDict,
    SharedList,
    TaskNotPicklable,
    WorkerDied,
    XPoolError,
)
from xpool._memory.anonymous_files import File
from xpool._pools.shared_data import _opened

pytestmark = pytest.mark.xpool_only

VALUES = ["a", "", "é\ud800", 1, -(2**70), 2.5, None, True, b"\0", (1, "x"), {"k": [1, {2}]}]


@dataclass
class Box:
    inside: Any


def item(held: Any, key: Any) -> Any:
    return held[key]


def whole(held: Any) -> Any:
    return dict(held) if hasattr(held, "keys") else list(held)


def same(held: Any) -> Any:
    return held


def private_kb(_held: Any) -> list[int]:
    """Return the KiB of each mapping of shared data of which this process has its own copy."""
    found = []
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = "xpool-shared-data" in line
            elif inside and line.startswith("Anonymous:"):
                found.append(int(line.split()[1]))
    return found


def read_and_measure(held: Any) -> tuple[int, list[int]]:
    return sum(map(len, held)), private_kb(held)


def read_and_die(held: Any) -> None:
    assert held[0]
    os.kill(os.getpid(), signal.SIGKILL)


def make_there() -> Any:
    return SharedList(["made in a worker"])


def test_as_the_list():
    """Length, indices, slices, iteration and searches are those of the list."""
    plain = [*VALUES, Box([1])]
    held = SharedList(plain)
    assert len(held) == len(plain) and list(held) == plain
    assert [held[i] for i in range(-len(plain), len(plain))] == plain * 2
    assert held[2:9:3] == plain[2:9:3] and held[::-1] == plain[::-1]
    assert Box([1]) in held and "missing" not in held
    assert held.index(2.5) == 5 and held.count(1) == 2
    assert list(reversed(held)) == plain[::-1]
    for index in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 12 items"):
            held[index]
    with pytest.raises(TypeError, match="not str"):
        held["0"]  # type: ignore[call-overload]
    assert list(SharedList()) == [] and list(SharedList(iter("ab"))) == ["a", "b"]


def test_as_the_dict():
    """Look-ups find the keys that a dict finds, in the order of the dict."""
    plain: dict[Any, Any] = {f"k{i}": i for i in range(3000)}
    plain.update(
        {1: "one", 2.5: 2, None: 3, b"b": 4, (1, "x", (2.0,)): 5, "": 6, -1: 7, 10**5000: 8}
    )
    held = SharedDict(plain)
    assert len(held) == len(plain) and list(held.items()) == list(plain.items())
    for key in [*plain, True, 1.0, (1.0, "x", (2,)), -1.0]:
        assert key in held and held[key] == plain[key]
    for key in ("k3000", 2, 0, "1", b"", (1,), 0.1, frozenset()):
        assert key not in held
    assert held.get("missing", 9) == 9
    with pytest.raises(KeyError, match="missing"):
        held["missing"]
    assert dict(SharedDict([("a", 1), ("b", 2), ("a", 3)])) == {"a": 3, "b": 2}
    assert dict(SharedDict()) == {}


def test_what_is_refused():
    """Unsuitable keys and values are refused where the object is made."""
    with pytest.raises(TypeError, match="keys of a SharedDict are str, .*, not frozenset"):
        SharedDict({frozenset(): 1})
    with pytest.raises(TypeError, match="unhashable"):
        assert [] in SharedDict({1: 2})
    with pytest.raises(TaskNotPicklable, match=r"lock object .* at \['k'\] of item 5000"):
        SharedList([*range(5000), {"k": threading.Lock()}])


def test_in_workers(make_pool, process_kind):
    """Tasks get items of all kinds, by arguments, closures, defaults and globals."""
    plain = [*VALUES, Box([1]), lambda x: x + 1]
    held = SharedList(plain)
    index = SharedDict({"a": Box(1), "b": held})
    pool = make_pool(process_kind, 2)
    assert pool.apply(whole, (held,))[:-1] == plain[:-1]
    assert pool.apply(item, (held, 12))(1) == 2
    assert pool.map(lambda i: held[i], range(11)) == VALUES
    assert pool.apply(item, (index, "a")) == Box(1)
    assert list(pool.apply(item, (index, "b")))[:2] == ["a", ""]
    assert pool.apply(same, (held,)) is held


def test_in_threads(make_pool, thread_kind):
    """Threads read the object itself."""
    held = SharedDict({"a": [1]})
    pool = make_pool(thread_kind, 2)
    assert pool.map(lambda key: held[key], ["a", "a"]) == [[1], [1]]


def test_arrays_are_not_copied(make_pool, process_kind):
    """Large arrays are views of the memory. A write stays in its process."""
    np = pytest.importorskip("numpy")
    held = SharedList([np.arange(20_000), Box(np.ones((300, 300)))])
    address = held[0].__array_interface__["data"][0]
    assert held[0].__array_interface__["data"][0] == address
    pool = make_pool(process_kind, 1)

    def write() -> float:
        held[1].inside[0] = 5
        return float(held[1].inside.sum())

    assert pool.apply(write) == 300 * 299 + 1500
    assert float(held[1].inside.sum()) == 300 * 300


def test_tensors(make_pool, process_kind):
    """Tensors arrive with their values, and large ones use the memory."""
    torch = pytest.importorskip("torch")
    held = SharedList([torch.arange(50_000), torch.ones(2)])
    assert held[0].data_ptr() == held[0].data_ptr()
    pool = make_pool(process_kind, 2)
    assert pool.apply(item, (held, 0)).sum() == held[0].sum()
    assert pool.apply(item, (held, 1)).tolist() == [1, 1]


def test_memory_is_shared(make_pool, process_kind):
    """Reading all items makes no page private."""
    held = SharedList("x" * 50 + str(i) for i in range(100_000))
    pool = make_pool(process_kind, 1)
    total, private = pool.apply(read_and_measure, (held,))
    assert total == sum(map(len, held))
    assert private == [0]
    assert held.nbytes > total


def test_a_message_keeps_it(make_pool, process_kind, mailbox, gate):
    """A task that waits gets its list, even if the program has dropped it since."""
    pool = make_pool(process_kind, 1)
    first = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
    mailbox.lines(1)
    later = [pool.apply_async(item, (SharedList([i]), 0)) for i in range(3)]
    gc.collect()
    gate.open(1)
    first.get(WAIT)
    assert [one.get(WAIT) for one in later] == [0, 1, 2]


def test_made_in_a_worker(make_pool, process_kind):
    """A worker cannot return what it has made, since nothing would keep the memory."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(ResultNotPicklable, match="was made in this worker, .* return its items"):
        pool.apply(make_there)
    assert pool.apply(abs, (-1,)) == 1


def test_dropped_where_it_was_made():
    """What its maker has dropped cannot be opened. The error says so."""
    held = SharedList([1])
    message = pickle.dumps(held)
    del held
    gc.collect()
    with pytest.raises(XPoolError, match="has dropped it, or has ended; keep it there"):
        pickle.loads(message)


def test_another_host():
    """A file that happens to have the same place on another host is not read."""
    file, mark = File(b"not this one" * 10), bytes(16)
    with pytest.raises(XPoolError, match="only on the host where it was made"):
        _opened(None, SharedList, file, mark, 16, (1,), set())


def test_a_worker_dies(make_pool, process_kind):
    """The replacement of a killed worker reads the same memory."""
    held = SharedList(["a", "b"])
    pool = make_pool(process_kind, 1)
    with pytest.raises(WorkerDied):
        pool.apply(read_and_die, (held,))
    assert pool.apply(item, (held, 1)) == "b"


def test_broadcast_and_retries(make_pool, process_kind):
    """It may be part of a broadcast, and of a task that is tried again."""
    held = SharedList(["a", "b"])
    pool = make_pool(process_kind, 2)
    if hasattr(pool, "broadcast"):
        assert pool.apply(item, (pool.broadcast({"k": held}), "k"))[:] == ["a", "b"]
    assert pool.apply(item, (held, 1), retries=2) == "b"
    assert pool.map(lambda i: held[i], [0, 1, 0], retries=1) == ["a", "b", "a"]


def test_copies():
    """It does not change, so a copy is the object. A pickle is a handle."""
    held = SharedDict({"a": [1]})
    assert copy.copy(held) is held and copy.deepcopy({"k": held})["k"] is held
    assert len(pickle.dumps(held)) < 500
    assert pickle.loads(pickle.dumps(held)) is held
    assert repr(held) == f"<SharedDict of 1 items, {held.nbytes} bytes>"


PROGRAM = """
import multiprocessing
import xpool

def show(held, queue):
    queue.put((held["k"], list(held)))

class Data:
    def __init__(self, held):
        self.held = held
    def __len__(self):
        return len(self.held)
    def __getitem__(self, i):
        return self.held[i]

if __name__ == "__main__":
    held = xpool.SharedDict({"k": [1], "l": 2})
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=show, args=(held, queue))
        process.start()
        print(queue.get())
        process.join()
    import torch  # here, because each process above would import it
    import xpool.data
    numbers = Data(xpool.SharedList(range(8)))
    for loader in (xpool.data.DataLoader, torch.utils.data.DataLoader):
        print([batch.tolist() for batch in loader(numbers, batch_size=4, num_workers=2)])
"""


@pytest.mark.torch
def test_in_other_processes(tmp_path):
    """Processes of multiprocessing and of torch's loader get it, too."""
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out = run_ok([str(program)]).splitlines()
    assert out[:3] == ["([1], ['k', 'l'])"] * 3
    assert out[3:] == ["[[0, 1, 2, 3], [4, 5, 6, 7]]"] * 2
