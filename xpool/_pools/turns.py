"""What the engine's thread of a pool does, from the first task to the last worker's end."""

from __future__ import annotations

import weakref
from typing import Protocol, TypeVar

from xpool._calls.results import Parcel
from xpool._engine.protocols import WorkerBackend
from xpool._pools.callbacks import Callbacks
from xpool._pools.input_reader import InputReader
from xpool.errors import InternalError

__all__ = ["stop_input_readers", "take_turns"]


class _Pool(Protocol):
    """What is called of a pool."""

    name: str

    def _turn(self) -> bool: ...

    def _break(self, exc: BaseException | Parcel) -> None: ...

    def _finish(self) -> None: ...


Some = TypeVar("Some", bound=_Pool)


def take_turns(
    ref: weakref.ref[Some],
    backend: WorkerBackend | None,
    callbacks: Callbacks,
    input_readers: set[InputReader],
) -> None:
    """Take turns until the end.  Between two of them, no pool is held: so one can be dropped."""
    go_on = True
    while go_on:
        trouble: BaseException | None = None
        try:
            if backend is not None:
                backend.wait()
        except BaseException as exc:
            trouble = exc
        pool = ref()
        # A pool that another thread is just finalizing can still be had here, and would come to
        # life again; hence the flag.
        if pool is None or (backend is not None and backend.dropped):
            del pool
            stop_input_readers(input_readers)
            _disband(backend)
            callbacks.stop()
            return
        try:
            if trouble is not None:
                raise trouble
            go_on = pool._turn()
        except BaseException as exc:
            story = InternalError(
                f"{type(exc).__name__} in the engine of {pool.name}: {exc}. If the pool has hooks "
                "of your own, look at the cause first; else this is a bug in xpool"
            )
            story.__cause__ = exc
            pool._break(story)
            go_on = False
        if not go_on:
            pool._finish()
        del pool


def stop_input_readers(input_readers: set[InputReader]) -> None:
    """Draw no more of any input."""
    for input_reader in list(input_readers):
        input_reader.flow.stop()


def _disband(backend: WorkerBackend | None) -> None:
    """End the workers of a pool that nobody holds any more."""
    if backend is not None:
        backend.terminate()
        while not backend.ended:
            backend.wait()
        backend.close()
