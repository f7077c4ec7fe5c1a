"""Objects that `multiprocessing` passes in a special way also work in pools."""

import multiprocessing
import os

import pytest
from support import scripts
from support.kinds import STDLIB

POOL = "from multiprocessing import Pool" if STDLIB else "from xpool import Pool"

# These programs are separate, because the thread that sends descriptors lives as long as its
# process.
SENT = """
import multiprocessing, socket
{pool}

def answer(end, text):
    end.sendall(text) if hasattr(end, "sendall") else end.send(text)
    return end

def made(_):
    mine, theirs = multiprocessing.Pipe()
    mine.send("from a worker")
    return theirs

if __name__ == "__main__":
    with Pool(2) as pool:
        mine, theirs = multiprocessing.Pipe()
        back = pool.apply(answer, (theirs, "connection"))
        print(mine.recv(), type(back).__name__)
        mine, theirs = socket.socketpair()
        pool.starmap(answer, [(theirs, b"socket")])
        print(mine.recv(9).decode())
        print(pool.apply(made, (1,)).recv())
        print(pool.apply(abs, (-1,)), pool.apply(len, ("ab",)))
    pool.join()
"""

SHARED = """
import ctypes, multiprocessing
{pool}
from multiprocessing.reduction import ForkingPickler

class Odd:
    def __init__(self, value): self.value = value
    def __reduce__(self): raise TypeError("only by its registered reducer")

def reduce_odd(odd):
    return Odd, (odd.value + 1,)

def keep(*them):
    global array, value, end
    array, value, end = them

def use(i):
    array[i] = i * i
    value.value += 1
    end.send(i)

def odd(x):
    return x.value

if __name__ == "__main__":
    array, value = multiprocessing.RawArray("i", 3), multiprocessing.Value("i", 0, lock=False)
    mine, theirs = multiprocessing.Pipe()
    with Pool(1, keep, (array, value, theirs)) as pool:
        pool.map(use, range(3))
        print(list(array), value.value, sorted(mine.recv() for _ in range(3)))
        try:
            pool.apply(abs, (multiprocessing.RawArray("i", 3),))
        except RuntimeError as error:
            print("inheritance" in str(error))
        ForkingPickler.register(Odd, reduce_odd)
        print(pool.apply(odd, (Odd(1),)))
    pool.join()
"""


def test_connections_and_sockets_are_sent(tmp_path):
    """Workers receive connections and sockets and send them back. The workers stay alive."""
    assert scripts.program(tmp_path, SENT.format(pool=POOL)).splitlines() == [
        "connection Connection", "socket", "from a worker", "1 2"
    ]  # fmt: skip


def test_shared_ctypes_are_inherited(tmp_path):
    """Shared ctypes and connections work as initargs. A registered reducer is used."""
    assert scripts.program(tmp_path, SHARED.format(pool=POOL)).splitlines() == [
        "[0, 1, 4] 3 [0, 1, 2]",
        "True",
        "2",
    ]


def parent(*_):
    it = multiprocessing.parent_process()
    return None if it is None else (it.pid, it.name, it.is_alive())


def test_workers_have_a_parent(make_pool, method_kind):
    """In a worker, `multiprocessing.parent_process()` is the program's process."""
    pool = make_pool(method_kind, 1)
    assert pool.apply(parent) == (os.getpid(), "MainProcess", True)


@pytest.mark.xpool_only
def test_a_connection_is_not_retried(make_pool):
    """A connection in a task with ``retries=`` is refused, because it can be sent only once."""
    from xpool import Pool, TaskNotPicklable

    pool = make_pool(Pool, 1)
    mine, theirs = multiprocessing.Pipe()
    with mine, theirs, pytest.raises(TaskNotPicklable, match="can be sent only once"):
        pool.apply(parent, (theirs,), retries=1)
