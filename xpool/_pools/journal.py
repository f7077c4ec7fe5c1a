"""`journal=`: results are stored, and the next run of the program does not compute them again.

`Recorded` writes results to the `Journal`, an SQLite database, before the consumer gets them.  So
each result that a program has received survives any crash of the program.

A journal belongs to one function in one state, which `Identity` describes by parts.  If a part has
changed, the journal is refused with an error that names the part.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from xpool._calls.options import check_callable
from xpool._calls.results import PickledResult, Unopened, tasks_in
from xpool._calls.streams import IMapIterator, Stream, weigh
from xpool._pools.identity import Identity
from xpool._pools.job_table import JobTable
from xpool._pools.values import Unknown, name_of
from xpool._python import at_fork
from xpool._python.interrupt import deliver, interruptible, pass_on, pending
from xpool._python.starting import PromptThread
from xpool.errors import OptionError
from xpool.pickle import decode, dumps

LOCK_SECONDS = 30.0
"""Seconds to wait for another program that writes to the same journal."""

NAMED = 5
"""The most changed parts that an error names."""

_APPLICATION = 0x78504A4C  # SQLite's application id of a journal: "xPJL"
_FORMAT = 3

_lock = threading.RLock()
"""Held while a journal uses SQLite, and during a fork: a child would keep the locks that SQLite has
for the process, and wait in its own calls for ever.  Reentrant, since a finalizer may fork."""

_TABLES = (
    "CREATE TABLE function (name TEXT NOT NULL, version TEXT NOT NULL)",
    "CREATE TABLE parts (name TEXT PRIMARY KEY, digest TEXT NOT NULL, of_items INTEGER NOT NULL)",
    "CREATE TABLE results (key TEXT PRIMARY KEY, value BLOB NOT NULL)",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_FORMAT}",
)

Key = str | bytes | int
Version = str | int


class Stored(PickledResult):
    """A result that was found in a journal."""

    __slots__ = ("_data", "_key", "_path")

    count = 1

    def __init__(self, data: bytes, path: str, key: str) -> None:
        self._data, self._path, self._key = data, path, key

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def open(self) -> list[Any]:
        try:
            return [decode(self._data)]
        except Exception as exc:
            pass_on(exc)
            error = _unreadable(self._path, self._key, f"{type(exc).__name__}: {exc}")
            error.__cause__ = exc
            return [Unopened(error)]


def _unreadable(path: str, key: str, why: str) -> OptionError:
    literal = "'{}'".format(key.replace("'", "''"))
    return OptionError(
        f"the result of {key} in the journal {path} cannot be read ({why}). Give another path, or "
        "remove this result, so that its item runs again: DELETE FROM results WHERE key = "
        f"{literal}"
    )


class Journal:
    """The results of one function, by the keys of its items.  Any thread may call its methods.

    ``beside``: further objects that results depend on, such as the initializer, by name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        func: Any,
        key: Callable[[Any], Key] | None,
        version: Version | None,
        beside: dict[str, Any],
    ) -> None:
        if key is not None:
            check_callable("key", key)
        self._key = key
        self._taken: set[int] = set()  # hashes of the keys that `key=` returned
        # Make it absolute: SQLite makes a database without a file for "" and ":memory:".
        self.path = os.path.abspath(os.fsdecode(path))
        folder = os.path.dirname(self.path)
        if os.path.isdir(self.path):
            raise OptionError(f"the journal {self.path} is a folder; give the path of a file")
        if not os.path.isdir(folder):
            raise OptionError(f"the folder of the journal {self.path} is missing; make {folder}")
        self._name = name_of(func)
        self._identity = Identity()
        # None: the version identifies the function, so its parts are not computed.
        of_function = functools.partial(self._identity.of_function, func, beside)
        self._parts = self._described(of_function) if version is None else None
        self._known: set[str] = set()  # names of parts that `_compare_others` has compared
        with _lock, self._named():
            self._base = sqlite3.connect(
                self.path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
        try:
            with _lock, self._named():
                self._begin(version)
            self._file = self._identify()
            self._compare_others({})
        except BaseException:
            self.close()
            raise

    def _described(self, parts: Callable[[], dict[str, str]]) -> dict[str, str]:
        try:
            return parts()
        except Unknown as exc:
            raise OptionError(
                f"the journal {self.path} cannot tell whether {self._name} is the same in the next "
                f"run: {exc.part} is, or holds, {exc}, which cannot be compared. Give version=, a "
                "str or an int that you change whenever the results would change"
            ) from exc

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Add the path to SQLite's errors."""
        try:
            yield
        except sqlite3.Error as exc:
            # A subclass means that the file is locked, full or missing; it may still be a journal.
            if type(exc) is not sqlite3.DatabaseError:
                raise type(exc)(f"{exc} (the journal {self.path})") from exc
            raise OptionError(f"{self.path} is not a journal: {exc}") from exc

    def _begin(self, version: Version | None) -> None:
        base = self._base
        # Check before changing the file.  In a transaction, since another program may be making it.
        with self._transaction("DEFERRED"):
            self._check_kind()
        # Commits do not wait for the disk: a crash of the program loses none of them, a crash of
        # the machine may lose the last (sqlite.org/pragma.html#pragma_synchronous).
        self._use_wal()
        base.execute("PRAGMA synchronous=NORMAL")
        # A write transaction: of two programs that begin the journal, one finds the other's tables.
        with self._transaction():
            if self._check_kind():
                self._compare(version)
                return
            for statement in _TABLES:
                base.execute(statement)
            parts = self._parts or {}
            written = json.dumps(sorted(parts.items())).encode()
            said = hashlib.sha256(written).hexdigest()[:16] if version is None else str(version)
            base.execute("INSERT INTO function VALUES (?, ?)", (self._name, said))
            self._add_parts(parts, False)

    def _use_wal(self) -> None:
        # If two programs change the mode of a new file at once, SQLite refuses one without waiting
        # for `timeout`, since each reads the file and waits for the other reader.
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self._base.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as exc:
                if "locked" not in str(exc) or time.monotonic() >= until:
                    raise
            time.sleep(random.uniform(0.001, 0.01))

    def _check_kind(self) -> bool:
        """Whether the file is a journal; False: it is new.  Any other file is refused."""
        base = self._base
        (application,) = base.execute("PRAGMA application_id").fetchone()
        (version,) = base.execute("PRAGMA user_version").fetchone()
        tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}
        if application == _APPLICATION:
            if version == _FORMAT:
                return True
            raise OptionError(
                f"{self.path} is a journal of format {version}, and this xpool writes format "
                f"{_FORMAT}: give another path"
            )
        if application or version or tables:
            raise OptionError(f"{self.path} is not a journal: it is another program's database")
        return False

    def _compare(self, version: Version | None) -> None:
        """Refuse a function that is not the journal's."""
        base = self._base
        name, written = base.execute("SELECT name, version FROM function").fetchone()
        if name != self._name:
            raise OptionError(
                f"{self.path} is the journal of {name}, not of {self._name}: give another path"
            )
        if version is not None:
            if str(version) != written:
                raise OptionError(
                    f"{self.path} has results of version {written!r} of {name}, not of version "
                    f"{str(version)!r}: give another path to compute them again"
                )
            return
        rows = base.execute("SELECT name, digest FROM parts WHERE NOT of_items")
        before: dict[str, str] = dict(rows.fetchall())
        if not before:
            raise OptionError(
                f"{self.path} has results of version {written!r} of {name}: give that version=, or "
                "another path"
            )
        self._refuse_changes(written, before, self._parts or {})

    def _refuse_changes(self, version: str, before: dict[str, str], now: dict[str, str]) -> None:
        names = sorted(before.keys() | now.keys())
        # Versions first, since another version of Python may have changed other parts, too.
        names.sort(key=lambda name: not name.startswith("the version of "))
        changes = [
            _change(name, before.get(name), now.get(name))
            for name in names
            if before.get(name) != now.get(name)
        ]
        if changes:
            more = f" and {len(changes) - NAMED} more" if len(changes) > NAMED else ""
            raise OptionError(
                f"{self.path} has results of {self._name} from before a change of "
                f"{', '.join(changes[:NAMED])}{more}. Give another path to compute them again; or "
                f"version={version!r}, if they are still right"
            )

    @contextlib.contextmanager
    def _transaction(self, lock: str = "IMMEDIATE") -> Iterator[None]:
        try:
            self._base.execute(f"BEGIN {lock}")
            yield
            self._base.execute("COMMIT")
        except BaseException:
            # After some errors, such as a full disk, SQLite has rolled back itself.
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            raise

    def _add_parts(self, parts: dict[str, str], of_items: bool) -> None:
        rows = [(name, digest, of_items) for name, digest in parts.items()]
        self._base.executemany("INSERT OR IGNORE INTO parts VALUES (?, ?, ?)", rows)

    @interruptible  # runs code of the program
    def key(self, item: Any) -> str:
        """Return the key of an item, as text.  Refuse the item if one of its parts has changed."""
        if pending:
            deliver()
        if self._key is not None:
            key = _as_text(self._key(item))
            if hash(key) in self._taken:
                raise OptionError(
                    f"key= returns {key} for two items: return a different one for each"
                )
            self._taken.add(hash(key))
            return key
        try:
            digest, parts = self._identity.of_item(item)
        except Unknown as exc:
            raise OptionError(
                f"the journal {self.path} cannot recognise an item that is, or holds, {exc}: give "
                "key=, a function that returns a name for each item"
            ) from exc
        self._compare_others(parts)
        return f"item {digest.hex()}"

    def _compare_others(self, parts: dict[str, str]) -> None:
        """Refuse changes of parts of items, and of modules that functions import when they run.

        A call may lack some of these parts.
        """
        if self._parts is None:
            return
        parts = {**self._described(self._identity.of_imports), **parts}
        if parts.keys() <= self._known:
            return
        base = self._base
        with _lock, self._named(), self._transaction():
            self._add_parts(parts, True)
            before: dict[str, str] = dict(base.execute("SELECT name, digest FROM parts").fetchall())
            (version,) = base.execute("SELECT version FROM function").fetchone()
            self._refuse_changes(version, {name: before[name] for name in parts}, parts)
        self._known.update(parts)

    def find(self, key: str) -> Stored | None:
        """Return the stored result of an item; None: there is none."""
        with _lock, self._named():
            row = self._base.execute("SELECT value FROM results WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        if type(row[0]) is not bytes:  # another program has written there
            raise _unreadable(self.path, key, f"it is {row[0]!r}, and not a pickle")
        return Stored(row[0], self.path, key)

    def write(self, results: list[tuple[str, bytes]]) -> None:
        """Store pickled results by key, all or none."""
        if results:
            with _lock, self._named():
                with self._transaction():
                    self._base.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", results)
                # SQLite goes on writing to a removed file without an error.
                if self._identify() != self._file:
                    raise sqlite3.OperationalError(
                        "the file was removed or replaced while it was in use"
                    )

    def _identify(self) -> tuple[int, int] | None:
        """Return device and inode of the path's file; None: it does not exist."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def close(self) -> None:
        with _lock:
            self._base.close()


def _as_text(key: Any) -> str:
    """Return the text of a user's key in the database, different for each key."""
    # Use the methods of the built-in classes, since subclasses may override them.
    if isinstance(key, int):
        # Hexadecimal if large: Python limits the length of decimal numbers.
        return int.__repr__(key) if abs(key) < 1 << 64 else hex(key)
    if isinstance(key, str):
        return ascii(str.__str__(key))
    if isinstance(key, bytes):
        return bytes.__repr__(key)
    raise TypeError(f"key must return a str, bytes or an int, not {key!r}")


def _change(part: str, before: str | None, now: str | None) -> str:
    # Short texts are numbers and versions, which are shown; digests would say nothing.
    if before is not None and now is not None and max(len(before), len(now)) < 32:
        return f"{part} ({before}, now {now})"
    if before is None:
        return f"{part} (new)"
    return f"{part} (gone)" if now is None else part


AT_ONCE = 1000
"""The most answers that are written in one transaction."""

_Answer = tuple[int, bool, Any, int]  # with the weight that is counted while it waits
_Arrivals: TypeAlias = "queue.SimpleQueue[_Answer | int | None]"  # answers, input's length, or end


class Recorded(Stream):
    """A stream whose answers are stored in a journal before its iterator gets them.

    ``deliver`` passes answers to a thread, which stores them and then delivers them.  The stream
    ends when the journal is closed: until then its file lacks what SQLite keeps beside it.
    """

    def __init__(
        self,
        iterator: IMapIterator[Any],
        number: int,
        gone: Callable[[], None],
        journal: Journal,
        jobs: JobTable,
    ) -> None:
        super().__init__(iterator, number, gone)
        self._journal, self._jobs = journal, jobs
        self._keys: dict[int, str] = {}  # keys of submitted items, by index
        self._count: Callable[[int], object] | None = None  # the stream's `answers`
        # The thread does not hold the job, so that a dropped iterator is noticed.
        self._arrivals: _Arrivals = queue.SimpleQueue()
        self._thread = PromptThread(
            target=_write_all,
            args=(self._arrivals, self._keys, journal, jobs, number),
            name="xpool-journal",
            daemon=True,
        )
        self._thread.start()

    def around(self, put: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        """Return a function that puts an item, or delivers its stored result."""
        journal, keys, jobs, number = self._journal, self._keys, self._jobs, self.number
        # `deliver` counts the answers, since stored items and those without a key are never put.
        self._count, self.answers = self.answers, None

        def put_or_find(index: int, item: Any) -> int:
            key = journal.key(item)
            stored = journal.find(key)
            if stored is not None:
                jobs.deliver(number, index, True, stored)
                return 0
            # Set it before `put`: the answer may arrive before `put` returns.
            keys[index] = key
            return put(index, item)

        return put_or_find

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self._count is not None and index in self._keys:
            self._count(1)
        # Count it now, since an answer that waits to be stored takes memory, too.
        weight = weigh(value)
        self.hold_back(weight)
        self._arrivals.put((index, ok, value, weight))
        return False

    def record(self, answer: _Answer) -> bool:
        """As `Stream.deliver`, for an answer that is written in the journal."""
        *told, weight = answer
        self.hold_back(-weight)
        return super().deliver(*told)

    def end(self, length: int) -> bool:
        self._arrivals.put(length)
        return False

    def release(self) -> None:
        self._arrivals.put(None)
        super().release()


def _write_all(
    arrivals: _Arrivals, keys: dict[int, str], journal: Journal, jobs: JobTable, number: int
) -> None:
    """Store answers as they arrive, until all tasks of the input are answered, or None arrives."""
    length, answered = None, 0
    released = False
    try:
        while answered != length and not released:
            answers: list[_Answer] = []
            for one in _next(arrivals):
                if isinstance(one, int):
                    length = one
                elif one is None:
                    released = True
                else:
                    answers.append(one)
            answered += sum(tasks_in(value) for _, _, value, _ in answers)
            answers = _store(answers, keys, journal)
            answers.reverse()
            while answers:  # removes them, since they may be large
                jobs.advance(number, functools.partial(Recorded.record, answer=answers.pop()))
            del one
        journal.close()
        if length is not None:
            jobs.advance(number, lambda job: Stream.end(job, length))
    except BaseException as exc:
        journal.close()
        job = jobs.unanswered.get(number)
        if job is not None:
            jobs.fail([job], exc)


def _next(arrivals: _Arrivals) -> list[_Answer | int | None]:
    """Wait for an arrival; return it and those that have come since, to store all at once."""
    there = [arrivals.get()]
    while len(there) < AT_ONCE and not arrivals.empty():
        there.append(arrivals.get())
    return there


def _store(answers: list[_Answer], keys: dict[int, str], journal: Journal) -> list[_Answer]:
    """Store the results among these answers; return them, with errors for those that cannot be
    pickled."""
    rows: list[tuple[str, bytes]] = []
    told: list[_Answer] = []
    for index, ok, value, weight in answers:
        values = _pickled(index, value, keys, rows) if ok and type(value) is not Stored else None
        for n, one in enumerate(values or ()):
            failed = type(one) is Unopened
            told.append((index + n, not failed, one.exc if failed else one, 0 if n else weight))
        if values is None:
            told.append((index, ok, value, weight))
    journal.write(rows)
    return told


def _pickled(
    index: int, value: Any, keys: dict[int, str], rows: list[tuple[str, bytes]]
) -> list[Any] | None:
    """Add the results of an answer to the rows to be stored.  Return None.  If a result cannot be
    pickled, return all results of the answer, with an `Unopened` in its place.

    The answer is unpickled here, and again by the consumer.  If this unpickling raises, nothing is
    stored, and the consumer gets the exception.
    """
    try:
        values = value.open() if isinstance(value, PickledResult) else [value]
    except BaseException:
        return None
    written = True
    for n, one in enumerate(values):
        # None: the input or the item's key raised.
        key = keys.pop(index + n, None)
        if key is not None and type(one) is not Unopened:
            try:
                rows.append((key, dumps(one)))
            except BaseException as exc:  # raised by any object's __reduce__
                values[n] = Unopened(exc)
                written = False
    return None if written else values


def inputs_of_workers(pool: Any) -> dict[str, Any]:
    """Return the objects that results depend on besides function and item, by name."""
    found: dict[str, Any] = {}
    if pool.initializer is not None:
        found = {"the initializer": pool.initializer, "the initargs": pool.initargs}
    if pool._gives_context:
        # Contexts of `devices()` decide where a worker runs, and not its results.
        contexts = [
            context
            for context in pool._contexts or ()
            if not type(context).__module__.startswith("xpool.")
        ]
        found["the worker_contexts"] = contexts
    return found


# Before a fork, this lock is taken before those of modules that were imported earlier.
at_fork.at_fork(before=lambda: _lock.acquire(), in_parent=lambda: _lock.release())
at_fork.renew(globals(), _lock=threading.RLock)
