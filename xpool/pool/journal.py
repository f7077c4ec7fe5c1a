"""`journal=`: what was done is written down, and not done again by the next run of the program.

Answers of tasks go to a thread that writes them to an SQLite database, some at a time, and only
then to the consumer.  So what a program has seen is there after any crash of it; of what workers
were at, nothing is.
"""

from __future__ import annotations

import functools
import hashlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

from xpool.errors import OptionError
from xpool.options import check_callable
from xpool.pickle import decode, dumps
from xpool.results import Parcel, Unopened
from xpool.streams import IMapIterator, Stream

__all__ = ["Journal", "Recorded", "Stored"]

AT_ONCE = 1000
"""Answers that are written together, at most."""

PATIENCE = 30.0
"""Seconds to wait for another program that writes to the same journal."""

Key = str | bytes | int


class Stored(Parcel):
    """A result that was found in a journal."""

    __slots__ = ("_data",)

    count = 1

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def open(self) -> list[Any]:
        return [decode(self._data)]


class Journal:
    """The results of one function, by the keys of its items.  Any thread may call its methods.

    Args:
        path: of the database; made where there is none.
        func: the function, by whose name another's journal is known.
        key: returns a str, bytes or an int for an item; None: the digest of its pickle.

    Raises:
        OptionError: the journal is of another function, or no journal.
        OSError, sqlite3.Error: there can be no such file.
    """

    def __init__(
        self, path: str | os.PathLike[str], func: Any, key: Callable[[Any], Key] | None
    ) -> None:
        if key is not None:
            check_callable("key", key)
        self._key = key
        self._lock = threading.Lock()  # guards the connection
        self._base = sqlite3.connect(os.fspath(path), timeout=PATIENCE, check_same_thread=False)
        try:
            self._begin(os.fspath(path), _name(func))
        except sqlite3.DatabaseError as exc:
            self._base.close()
            # Locked, or no such folder: that says nothing about what is in the file.
            if isinstance(exc, sqlite3.OperationalError):
                raise
            raise OptionError(f"{os.fspath(path)} is not a journal: {exc}") from exc
        except BaseException:
            self._base.close()
            raise

    def _begin(self, path: str, name: str) -> None:
        base = self._base
        # Commits wait for no disk: a crash of the program loses none of them, one of the machine
        # maybe the last (sqlite.org/pragma.html#pragma_synchronous).
        base.execute("PRAGMA journal_mode=WAL")
        base.execute("PRAGMA synchronous=NORMAL")
        with base:
            base.execute("CREATE TABLE IF NOT EXISTS xpool_function (name TEXT)")
            base.execute("CREATE TABLE IF NOT EXISTS xpool_done (key PRIMARY KEY, value BLOB)")
            row = base.execute("SELECT name FROM xpool_function").fetchone()
            if row is None:
                base.execute("INSERT INTO xpool_function VALUES (?)", (name,))
            elif row[0] != name:
                raise OptionError(
                    f"{path} is the journal of {row[0]}, not of {name}: give this one another path"
                )

    def key(self, item: Any) -> Key:
        """Return the key of an item.

        Raises:
            TypeError: ``key=`` has returned something else than a str, bytes or an int.
        """
        if self._key is None:
            return hashlib.sha256(dumps(item)).digest()
        key = self._key(item)
        if not isinstance(key, (str, bytes, int)):
            raise TypeError(f"key must return a str, bytes or an int, not {key!r}")
        return key

    def find(self, key: Key) -> Stored | None:
        """Return the result of an item; None: it is not done."""
        with self._lock:
            row = self._base.execute(
                "SELECT value FROM xpool_done WHERE key = ?", (key,)
            ).fetchone()
        return None if row is None else Stored(row[0])

    def write(self, results: list[tuple[Key, Any]]) -> None:
        """Write results down, all or none."""
        rows = [(key, dumps(value)) for key, value in results]
        with self._lock, self._base:
            self._base.executemany("INSERT OR REPLACE INTO xpool_done VALUES (?, ?)", rows)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._base.close()


def _name(func: Any) -> str:
    """Return what a function is known by: its name, and its code where that says nothing."""
    if isinstance(func, functools.partial):
        given = hashlib.sha256(dumps((func.args, func.keywords))).hexdigest()[:16]
        return f"{_name(func.func)} with {given}"
    func = getattr(func, "__func__", func)
    kind = func if hasattr(func, "__qualname__") else type(func)
    name = f"{kind.__module__}.{kind.__qualname__}"
    code = getattr(func, "__code__", None)
    # A lambda or a local function: others have the same name.
    if "<" in name and code is not None:
        name += f" {hashlib.sha256(repr(_said(code)).encode()).hexdigest()[:16]}"
    return name


def _said(constant: Any) -> Any:
    """Return what a constant of some code says, the same in each run of the program.

    The text of inner code has its address; that of a set the order of its strings' hashes.
    """
    if isinstance(constant, CodeType):
        return constant.co_code, constant.co_names, [_said(one) for one in constant.co_consts]
    if isinstance(constant, frozenset):
        return sorted(repr(_said(one)) for one in constant)
    return [_said(one) for one in constant] if isinstance(constant, tuple) else constant


class Recorded(Stream):
    """A stream whose answers are written down before its iterator has them.

    ``deliver`` hands them to a thread, which calls ``hand_on(index, ok, value)`` with each when it
    is written, or ``fail_all(exc)``.  What the input reader finds there it gives to
    ``found(index, result)``.  None of the three may hold the pool.
    """

    def __init__(
        self,
        iterator: IMapIterator[Any],
        number: int,
        gone: Callable[[], None],
        journal: Journal,
        found: Callable[[int, Stored], None],
        hand_on: Callable[[int, bool, Any], None],
        fail_all: Callable[[BaseException], None],
    ) -> None:
        super().__init__(iterator, number, gone)
        self._journal, self._found = journal, found
        self._keys: dict[int, Key] = {}  # of items that are on their way
        # Not the job itself: an iterator that is dropped is to be seen.
        self._queue: queue.SimpleQueue[tuple[int, bool, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_write_all,
            args=(self._queue, self._keys, journal, hand_on, fail_all),
            name="xpool-journal",
            daemon=True,
        )

        self._thread.start()

    def around(self, put: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        """Return what puts an item, unless it is done: then its result is handed on."""
        journal, keys, found = self._journal, self._keys, self._found

        def put_or_find(index: int, item: Any) -> int:
            key = journal.key(item)
            stored = journal.find(key)
            if stored is not None:
                found(index, stored)
                return 0
            # Before it is put: its answer may come before `put` returns.
            keys[index] = key
            return put(index, item)

        return put_or_find

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        # Counted at once, though it arrives later: what waits to be written takes memory, too.
        self.hold_back(value)
        self._queue.put((index, ok, value))
        return False

    def record(self, index: int, ok: bool, value: Any) -> bool:
        self.hold_back(value, -1)
        return super().record(index, ok, value)

    def release(self) -> None:
        self._queue.put(None)
        super().release()


def _write_all(
    results: queue.SimpleQueue[tuple[int, bool, Any] | None],
    keys: dict[int, Key],
    journal: Journal,
    hand_on: Callable[[int, bool, Any], None],
    fail_all: Callable[[BaseException], None],
) -> None:
    """Write answers down as they come, until None comes."""
    end = False
    try:
        while not end:
            answers = [results.get()]
            # What has come during the last commit shares one.
            while len(answers) < AT_ONCE and not results.empty():
                answers.append(results.get())
            there = [answer for answer in answers if answer is not None]
            end = len(there) < len(answers)
            journal.write(_opened(there, keys))
            for answer in there:
                hand_on(*answer)
            del answers, there
    except Exception as exc:
        fail_all(exc)
    finally:
        journal.close()


def _opened(answers: list[tuple[int, bool, Any]], keys: dict[int, Key]) -> list[tuple[Key, Any]]:
    """Return the results that are to be written: each opened here, and again by the consumer."""
    found: list[tuple[Key, Any]] = []
    for index, ok, value in answers:
        if type(value) is Stored:
            continue
        values = value.open() if isinstance(value, Parcel) else [value]
        for i, one in enumerate(values, index):
            # None: the input has raised, or making the item's key has.
            key = keys.pop(i, None)
            if key is not None and ok and type(one) is not Unopened:
                found.append((key, one))
    return found
