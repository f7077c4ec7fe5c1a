"""Large initargs are pickled once, and copied once by each worker."""

from __future__ import annotations

import os
import threading
import tracemalloc

import pytest

from xpool import Pool
from xpool._worker.entry import _read

pytestmark = pytest.mark.xpool_only

kept: tuple[object, ...] = ()


def keep(*args):
    global kept
    kept = args


def describe(_=None):
    """Return the process id, each argument's length and end, and the bytes that the process has
    read."""
    with open("/proc/self/io") as file:
        read = dict(line.split(": ") for line in file.read().splitlines())["rchar"]
    return os.getpid(), [(len(arg), bytes(arg[-2:])) for arg in kept], int(read)


@pytest.mark.parametrize("limit", [None, 0])
def test_large_initargs(make_pool, limit):
    """All workers get the initargs. With shared memory they do not read them from a pipe."""
    size = 8 << 20
    given = (b"a" * size, bytearray(b"b" * size))
    pool = make_pool(Pool, 2, keep, given, 1, memory_limit=limit)
    seen = pool.map(describe, range(6), 1)
    assert len({pid for pid, _, _ in seen}) == 6
    assert [args for _, args, _ in seen] == [[(size, b"aa"), (size, b"bb")]] * 6
    assert all((read < size) == (limit is None) for _, _, read in seen)


def write_name(index):
    before = int(kept[0][0])
    kept[0][0] = index
    return before


def test_each_worker_has_initargs_of_its_own(make_pool):
    """A worker's changes of a large argument are invisible to other workers and replacements."""
    numpy = pytest.importorskip("numpy")
    pool = make_pool(Pool, 2, keep, (numpy.full(1 << 20, 7),), 1)
    assert pool.map(write_name, range(6), 1) == [7] * 6


def test_a_configuration_is_read_in_place():
    """Reading a configuration from a pipe needs memory for one copy only."""
    size = 4 << 20
    read, write = os.pipe()

    def send():
        with open(write, "wb", buffering=0) as file:
            for _ in range(size >> 14):
                file.write(b"x" * (1 << 14))

    thread = threading.Thread(target=send)
    tracemalloc.start()
    try:
        thread.start()
        got = _read(read, size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        thread.join()
        os.close(read)
    assert got == b"x" * size
    assert peak < 1.5 * size
