"""The rows of the table.  To add a row, append a `Row` to `ROWS`.

A program calls the functions of `peers`:

* ``start(n, **options)`` returns a pool of n workers, and ``finish(pool)`` waits for their end;
* ``run(pool, func, items)`` runs a task for each item;
* ``spread(pool, func, items)`` lets the peer cut the items into chunks, and ``star`` does the same
  with tuples of arguments;
* ``notify(pool, func, items, callback)`` calls ``callback`` with each result;
* ``stream(pool, func, items, chunk)`` returns an iterator of results.

A program calls ``tell(seconds)``, except where the time of the whole process is measured.  A row
about another package, such as joblib, has its own program for each peer.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from bench.everyday import programs as t
from bench.everyday.peers import THREADS


class Row(NamedTuple):
    """One everyday program."""

    name: str
    program: str
    whole: bool = False  # the time of the whole process is measured
    needs: str = ""  # packages, separated by spaces
    programs: Mapping[str, str] = MappingProxyType({})  # for each peer, instead of `program`
    unit: str = "ms"
    once: bool = False  # one round only: the program is slow, and its figures vary little


def _program(main: str, top: str = "") -> str:
    return top + textwrap.dedent(t.TASKS) + textwrap.dedent(main)


def _data(items: str, how: str, func: str) -> str:
    return textwrap.dedent(t.DATA_TASKS) + _program(t.DATA.format(items=items, how=how, func=func))


def _memory(n: int, work: str, what: str) -> str:
    return _program(t.MEMORY.format(n=n, work=work, what=what))


_LOADERS = {
    # xpool's documentation recommends this beginning for programs that use torch.
    "xpool": 'import xpool\nif __name__ == "__main__":\n    xpool.preload("torch")\n'
    "from xpool.data import DataLoader\n" + textwrap.dedent(t.IMAGES),
    "torch": "from torch.utils.data import DataLoader\n" + textwrap.dedent(t.IMAGES),
}


def _with_joblib(program: str) -> Mapping[str, str]:
    return MappingProxyType(
        {
            "xpool": textwrap.dedent(
                program.format(importing="import xpool.joblib", backend="xpool")
            ),
            "joblib": textwrap.dedent(program.format(importing="", backend="loky")),
        }
    )


def _with_threads(program: str) -> Mapping[str, str]:
    return MappingProxyType(
        {peer: textwrap.dedent(top) + _program(program) for peer, top in THREADS.items()}
    )


def _with_threads_and_arrays(program: str) -> Mapping[str, str]:
    """As `_with_threads`.  A sub-interpreter that imports numpy gets an ImportError."""
    whole = t.DATA_TASKS + program
    return MappingProxyType({**_with_threads(whole), "interpreters": 'unable("no numpy")\n'})


ROWS = [
    Row("whole script: Pool(2), map of 9", _program(t.WHOLE), whole=True),
    Row("the same, with torch", _program(t.WHOLE, t.IMPORT_TORCH), whole=True, needs="torch"),
    Row("first pool to first answer", _program(t.FIRST)),
    Row("the same, with torch", _program(t.FIRST, t.IMPORT_TORCH), needs="torch"),
    Row("the same, torch set up at the top", _program(t.FIRST, t.SET_TORCH), needs="torch"),
    Row("the same, with pandas", _program(t.FIRST, t.PANDAS_TOP), needs="pandas"),
    Row("the same, a top that loads for 2 s", _program(t.FIRST, t.LOADING_TOP), once=True),
    Row("the same, torch preloaded", _program(t.PRELOADED), needs="torch"),
    Row("second pool to first answer", _program(t.SECOND)),
    Row("the same, with torch", _program(t.SECOND, t.IMPORT_TORCH), needs="torch"),
    Row("maxtasksperchild=1, a worker", _program(t.REPLACED)),
    Row("the same, a top of 150 MB", _program(t.REPLACED, t.LARGE_TOP)),
    Row("the same, a top of 150 MB of lists", _program(t.REPLACED, t.LISTS_TOP)),
    Row("the same, 4 tasks, a top of 2 s", _program(t.RELOADED, t.LOADING_TOP), once=True),
    Row("open, 10 tasks, close, join", _program(t.TEN)),
    Row("the same, a top of 150 MB", _program(t.TEN, t.LARGE_TOP)),
    Row("the same, a top of 150 MB of lists", _program(t.TEN, t.LISTS_TOP)),
    Row("Pool(32), 320 tasks", _program(t.MANY)),
    Row("the same, a top of 150 MB", _program(t.MANY, t.LARGE_TOP)),
    Row("the same, a top of 150 MB of lists", _program(t.MANY, t.LISTS_TOP), once=True),
    Row("a pool in a test", _program(t.TESTED), needs="pytest"),
    Row("map of 20,000 records", _data(t.RECORDS, "spread", "record"), needs="numpy"),
    Row("map of 50,000 strings", _data(t.STRINGS, "spread", "shout"), needs="numpy"),
    Row(
        "starmap of 50,000 pairs",
        _data("[(i, 1) for i in range(50_000)]", "star", "add"),
        needs="numpy",
    ),
    Row("2,000 callbacks", _program(t.CALLBACKS)),
    Row("200 tasks of 5 ms, program computes", _program(t.BUSY)),
    Row(
        "4,000 arrays of 1 KB there",
        _data("[numpy.ones(128) + i for i in range(4_000)]", "spread", "size"),
        needs="numpy",
    ),
    Row("4,000 arrays of 1 KB back", _data("[1_000] * 4_000", "spread", "make"), needs="numpy"),
    Row(
        "500 arrays of 100 KB both ways",
        _data("[numpy.ones(12_800) + i for i in range(500)]", "run", "twice"),
        needs="numpy",
    ),
    Row(
        "100 arrays of 1 MB there",
        _data("[numpy.ones(1 << 17) + i for i in range(100)]", "run", "size"),
        needs="numpy",
    ),
    Row("100 arrays of 1 MB back", _data("[1 << 20] * 100", "run", "make"), needs="numpy"),
    Row(
        "192 photos into batches", "", needs="torch PIL sklearn",
        programs=MappingProxyType(_LOADERS),
    ),
    Row("grid search", "", needs="joblib sklearn", programs=_with_joblib(t.SEARCH)),
    Row("10,000 joblib calls of 1 ms", "", needs="joblib", programs=_with_joblib(t.JOBS)),
    Row("threads: open, 10 tasks, close, join", "", programs=_with_threads(t.TEN)),
    Row(
        "threads: imap of 20,000", "",
        programs=_with_threads(t.STREAMED_THROUGH.format(n=20_000, times=1)),
    ),
    Row(
        "threads: 100 imaps of 8", "",
        programs=_with_threads(t.STREAMED_THROUGH.format(n=8, times=100)),
    ),
    Row("threads: 1,000 calls of apply", "", programs=_with_threads(t.ONE_BY_ONE)),
    Row(
        "threads: map of 20,000", "",
        programs=_with_threads(t.DATA.format(items="range(20_000)", how="spread", func="square")),
        needs="numpy",
    ),
    Row(
        "threads: starmap of 100,000", "",
        programs=_with_threads_and_arrays(
            t.DATA.format(items="[(i, 1) for i in range(100_000)]", how="star", func="add")
        ),
        needs="numpy",
    ),
    Row(
        "threads: imap of 300 arrays of 1 MiB", "",
        programs=_with_threads_and_arrays(t.ARRAYS_STREAMED), needs="numpy",
    ),
    Row("threads: 2,000 callbacks", "", programs=_with_threads(t.CALLBACKS)),
    Row("threads: 40 tasks of pure Python", "", programs=_with_threads(t.COMPUTED)),
    Row(
        "threads: 500 arrays of 100 KB", "",
        programs=_with_threads_and_arrays(
            t.DATA.format(
                items="[numpy.ones(12_800) + i for i in range(500)]", how="run", func="twice"
            )
        ),
        needs="numpy",
    ),
    Row("1,000 calls of apply", _program(t.ONE_BY_ONE)),
    Row("100 imaps of 8", _program(t.STREAMED_THROUGH.format(n=8, times=100))),
    Row("a call with a shared tensor", _program(t.SHARED, t.IMPORT_TORCH), needs="torch"),
    Row(
        "memory, map of 1,000,000: parent", _memory(1_000_000, t.MAPPED, t.OF_PARENT),
        unit="B/task", once=True,
    ),
    Row(
        "memory, map of 1,000,000: worker", _memory(1_000_000, t.MAPPED, t.OF_WORKER),
        unit="B/task", once=True,
    ),
    Row(
        "memory, imap of 1,000,000: parent", _memory(1_000_000, t.STREAMED, t.OF_PARENT),
        unit="B/task", once=True,
    ),
    Row(
        "memory, imap of 1,000,000: worker", _memory(1_000_000, t.STREAMED, t.OF_WORKER),
        unit="B/task", once=True,
    ),
]  # fmt: skip
