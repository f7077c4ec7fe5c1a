"""Two errors that derive from those of `multiprocessing.pool`.  Import them from `xpool.errors`."""

from __future__ import annotations

from multiprocessing.pool import MaybeEncodingError  # type: ignore[attr-defined]
from multiprocessing.pool import RemoteTraceback as _RemoteTraceback  # type: ignore[attr-defined]
from pickle import PicklingError

from xpool._python.failures import XPoolError


class ResultNotPicklable(XPoolError, MaybeEncodingError, PicklingError):  # type: ignore[misc]
    """The task ran, but its result or exception cannot be sent back.

    This is a subclass of `pickle.PicklingError`, which executors raise.  ``exc`` and ``value`` are
    the reprs of the pickling error and of the value, as in
    `multiprocessing.pool.MaybeEncodingError`.
    """

    why = ""  # the part that cannot be pickled, its place, and the reason
    advice = "Return data that can be pickled (numbers, strings, lists, arrays, tensors)."

    def __str__(self) -> str:
        return (
            f"The result cannot be sent back from the worker: {self.why or self.exc}."
            f"{self.advice and ' '}{self.advice} The result is {self.value}"
        )


class RemoteTraceback(_RemoteTraceback):  # type: ignore[misc]
    """The worker's traceback as text.  It is the ``__cause__`` of a task's own exception.

    Attributes:
        text: the traceback.
        tb: the text as it is printed, as in `multiprocessing.pool`.
        worker: the index of the worker if `run_all` raised the error, else None.
    """

    worker: int | None = None

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self.text = text

    @property
    def tb(self) -> str:
        where = "" if self.worker is None else f"In worker {self.worker}:\n"
        return f'\n"""\n{where}{self.text}"""'


for _one in (RemoteTraceback, ResultNotPicklable):
    _one.__module__ = "xpool.errors"  # the public name, in pickles and tracebacks
