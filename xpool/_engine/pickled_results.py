"""Values as workers sent them, still pickled: the thread that asks for a value unpickles it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

from xpool._calls.results import PickledResult, Unopened
from xpool._pickling.frame import PLAIN, Leased, unpack, weight
from xpool._pickling.policy import INLINE_BELOW
from xpool._python.interrupt import by_handler
from xpool._wire.outbox import entries
from xpool._wire.wire import ENTRY
from xpool.errors import WorkerStartFailed
from xpool.pickle import decode

PLAIN_BELOW = 1 << 16
"""Bytes of a pickle below which a thread may unpickle it while signal handlers are deferred."""


class _Plain(pickle.Unpickler):
    """Loads builtin types only: no other code runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


class Encoded(PickledResult):
    """Answers as a worker sent them: one payload, or (``run``) ``count`` entries of an outbox."""

    __slots__ = ("_data", "_run", "count")

    def __init__(self, data: bytes | memoryview, count: int, run: bool) -> None:
        self._data = data
        self._run = run
        self.count = count

    def __reduce__(self) -> Any:
        """Pickle it for another host; contents of blocks are out-of-band buffers, not copied."""
        if type(self._data) is Leased:
            pickled, buffers = unpack(self._data)
            return BufferedResult, ([PickleBuffer(part) for part in (pickled, *buffers)],)
        # A `memoryview` cannot be pickled; a large one becomes an out-of-band buffer.
        large = len(self._data) >= INLINE_BELOW
        data = PickleBuffer(self._data) if large else bytes(self._data)
        return Encoded, (data, self.count, self._run)

    @property
    def nbytes(self) -> int:
        return weight(self._data)

    def payloads(self) -> list[bytes | memoryview]:
        """Return the pickle of each answer."""
        return [data for _, data in entries(bytes(self._data))] if self._run else [self._data]

    def open(self) -> list[Any]:
        data = self._data
        if not self._run:
            # Same as `_opened`, but inlined, because each `apply` runs this.
            try:
                return [decode(data)]
            except Exception as exc:
                # A signal handler raised it, such as a time limit: the caller may ask again.
                if by_handler(exc):
                    raise
                return [Unopened(exc)]
        # Same as `entries`, but in one pass, because each result of a stream runs this.
        values: list[Any] = []
        at, end, size = 0, len(data), ENTRY.unpack_from
        # No entry has the error bit here: `Answers._split` has taken out answers with errors.
        while at + 4 <= end:
            stop = at + 4 + size(data, at)[0]
            values.append(_opened(data[at + 4 : stop]))
            at = stop
        if len(values) != self.count or at != end:
            story = f"a worker wrote {len(values)} answers in place of {self.count}"
            return [Unopened(ValueError(story))] * self.count
        return values

    def open_plain(self) -> list[Any] | None:
        data = self._data
        if self._run or not data or data[0] != PLAIN or len(data) >= PLAIN_BELOW:
            return None
        try:
            return [_Plain(io.BytesIO(data)).load()]
        except Exception:
            return None  # `open` gets the value, or the error


class BufferedResult(PickledResult):
    """An answer from another host: its pickle, then its out-of-band buffers."""

    __slots__ = ("_parts",)

    count = 1

    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def open(self) -> list[Any]:
        return [_opened(self._parts, _load)]


def _load(parts: list[memoryview]) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def _opened(payload: Any, load: Callable[[Any], Any] = decode) -> Any:
    """Return ``load(payload)``, or `Unopened` if it raised an error."""
    try:
        return load(payload)
    except Exception as exc:
        # As in `Encoded.open`.
        if by_handler(exc):
            raise
        return Unopened(exc)


class StartFailure(PickledResult):
    """`WorkerStartFailed` whose cause, the exception of the initializer, is still pickled.

    Unpickling may run users' code, so each caller that asks for the error unpickles it; the engine
    never does.
    """

    __slots__ = ("_error", "_pickled")

    count = 1

    def __init__(self, error: WorkerStartFailed, pickled: bytes | memoryview) -> None:
        self._error, self._pickled = error, pickled

    def __str__(self) -> str:
        return str(self._error)

    def __reduce__(self) -> Any:
        return StartFailure, (self._error, bytes(self._pickled))

    @property
    def nbytes(self) -> int:
        return len(self._pickled)

    def open(self) -> list[Any]:
        error = type(self._error)(*self._error.args)
        try:
            error.__cause__ = decode(self._pickled)
        except Exception as exc:
            # The text of the cause is in the error in any case.
            error.__cause__ = exc
        return [error]
