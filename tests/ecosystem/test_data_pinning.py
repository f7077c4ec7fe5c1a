"""``pin_memory``: a thread pins each finished batch, and treats other objects as torch does."""

from __future__ import annotations

import gc
import threading
from collections import namedtuple
from typing import Any

import pytest
from support import scripts, waiting

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

import torch  # noqa: E402
from torch.utils import data as theirs  # noqa: E402

from xpool.data import DataLoader, _epoch  # noqa: E402

Pair = namedtuple("Pair", "batch text")

THREADS = {"num_workers": 2, "workers": "thread"}


class Batch:
    """A batch with torch's method `pin_memory`."""

    def __init__(self, items):
        self.items, self.pinned_by = items, None

    def pin_memory(self):
        if self.items == [13]:
            raise ValueError("cannot pin 13")
        self.pinned_by = threading.current_thread().name
        return self


@pytest.fixture(scope="module", autouse=True)
def started():
    """Let CUDA open its descriptors before the leak check."""
    if _epoch.can_pin():
        torch.ones(1).pin_memory()


@pytest.fixture(autouse=True)
def with_device(monkeypatch):
    """Allow pinning without a device. Only `pin_memory` of batches is called."""
    if not _epoch.can_pin():  # with CUDA, torch would ask the driver for a device
        monkeypatch.setattr(torch, "get_device_module", lambda: torch.cpu, raising=False)
    monkeypatch.setattr(_epoch, "can_pin", lambda: True)


def pin_threads():
    return [one for one in threading.enumerate() if one.name == "xpool-DataLoader-pin"]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("options", [{"num_workers": 2}, THREADS], ids=["processes", "threads"])
def test_batches_are_pinned_in_a_thread(options, in_order):
    """The thread pins each batch once. It ends after the epoch."""
    loader = DataLoader(
        range(12), 2, collate_fn=Batch, pin_memory=True, in_order=in_order, **options
    )
    for _ in range(2):
        got = list(loader)
        assert {batch.pinned_by for batch in got} == {"xpool-DataLoader-pin"}
        items = [batch.items for batch in got]
        assert (items if in_order else sorted(items)) == [[i, i + 1] for i in range(0, 12, 2)]
    waiting.eventually(lambda: not pin_threads(), "the thread has ended")


def test_the_batch_is_pinned_before_it_is_asked_for():
    """A batch is pinned before the program asks for it. Dropping the iterator ends the thread."""
    pinned = threading.Event()

    class Tells(Batch):
        def pin_memory(self):
            if self.items == [1]:
                pinned.set()
            return super().pin_memory()

    batches = iter(DataLoader(range(40), collate_fn=Tells, pin_memory=True, **THREADS))
    assert next(batches).items == [0]
    assert pinned.wait(60)
    del batches
    gc.collect()
    waiting.eventually(lambda: not pin_threads(), "the thread has ended")


@pytest.mark.parametrize("options", [{}, THREADS], ids=["inline", "threads"])
def test_an_error_of_pinning(options):
    """An error of pinning is raised in place of its batch, and the epoch continues."""
    batches = iter(DataLoader(range(12, 16), collate_fn=Batch, pin_memory=True, **options))
    assert next(batches).items == [12]
    with pytest.raises(ValueError, match="cannot pin 13"):
        next(batches)
    assert [batch.items for batch in batches] == [[14], [15]]


def test_leaves():
    """Containers, texts and other objects come out as from torch's pinning."""
    leaves: list[Any] = [
        "text", b"bytes", None, 3, {1, 2}, range(3), Pair(Batch([1]), "x"), {"a": [Batch([2])]},
    ]  # fmt: skip
    for leaf in leaves:
        got: Any
        wanted = theirs._utils.pin_memory.pin_memory(theirs.default_convert(leaf))
        (got,) = DataLoader([leaf], None, pin_memory=True, **THREADS)
        assert type(got) is type(wanted)
        if isinstance(got, tuple):
            assert got[1] == "x" and got[0].pinned_by == "xpool-DataLoader-pin"
        elif isinstance(got, dict):
            assert got["a"][0].pinned_by == "xpool-DataLoader-pin"
        else:
            assert got == wanted


ENDS = """
    import os, threading
    import torch
    from xpool.data import DataLoader
    from xpool.data import _epoch

    def work():
        for _ in range(6):
            torch.rand(700, 700) @ torch.rand(700, 700)

    class Items:
        def __len__(self):
            return 9

        def __getitem__(self, i):
            if i:
                begun.release()
                work()
            return i

    class Batch:
        def __init__(self, items):
            pass

        def pin_memory(self):
            work()
            return self

    begun = threading.Semaphore(0)
    child = os.fork()  # two programs, one after the other: importing torch takes a second
    if child:
        assert os.waitpid(child, 0)[1] == 0
        options = {"dataset": Items()}
    else:
        if not _epoch.can_pin():
            torch.get_device_module = lambda: torch.cpu
        _epoch.can_pin = lambda: True
        options = {"dataset": range(9), "collate_fn": Batch, "pin_memory": True}
        begun.release()
    batches = iter(DataLoader(num_workers=1, workers="thread", **options))
    next(batches)
    begun.acquire()
"""


def test_a_program_ends_while_batches_are_made_or_pinned():
    """The program's end waits for threads that make or pin batches. Otherwise they would abort
    it."""
    scripts.run_ok(["-"], ENDS)
