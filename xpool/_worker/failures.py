"""Messages of a worker about failed tasks and about its own failed start."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

from xpool import errors
from xpool._pickling.by_value.exceptions import add_note, encode_exception
from xpool._pickling.diagnose import at
from xpool._python import error_imports
from xpool._python.item_notes import safe_repr, without_places
from xpool._wire.wire import Refusal
from xpool._worker import callables
from xpool._worker.worker_context import current_worker
from xpool.errors import TaskNotPicklable

_FOLDER = os.path.dirname(__file__)
_OWN_FILES = (
    os.path.join(_FOLDER, "loop.py"),
    callables.__file__,
    os.path.join(os.path.dirname(_FOLDER), "data", "_loader_worker.py"),
)


def refusal(reason: BaseException) -> Refusal:
    """Return the reason why this worker cannot start.  Call it while the exception is handled.

    The worker makes the text, since this runs code of the exception's class; the parent runs none.
    """
    pickled = encode_exception(reason, _text_of(reason, reason.__traceback__))
    try:
        line = f"{type(reason).__name__}: {reason}"
    except Exception as exc:
        line = f"{type(reason).__name__}, whose text cannot be made ({type(exc).__name__})"
    return Refusal(line, pickled)


_ADVICE = (
    ("generator object", "Return list(...) of it, or use imap(..., yields=True)."),
    ("TextIOWrapper object", "Return the file's path."),
    ("BufferedReader object", "Return the file's path."),
    ("BufferedWriter object", "Return the file's path."),
)
"""What to return in place of some objects."""


def refused(exc: BaseException, value: Any) -> bytes | memoryview:
    """Return the message that a result cannot be sent, and release the result."""
    traceback = error_imports.ready()
    reason = exc.__cause__ if isinstance(exc, TaskNotPicklable) else None
    failure = errors.ResultNotPicklable(reason or exc, safe_repr(value, 500))
    if isinstance(exc, TaskNotPicklable) and exc.parts is not None:
        what, path, why, _ = exc.parts
        failure.why = f"{what}{at(path)}: {why}"
        failure.advice = next((a for kind, a in _ADVICE if f" {kind} " in what), failure.advice)
    payload = encode_exception(failure, traceback_of(exc))
    # The frames hold each other and the objects that they pickled, such as tensors on a device.
    raised, seen = list[BaseException | None]([exc]), set[int]()
    while raised:
        one = raised.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            raised += [one.__cause__, one.__context__]
    return payload


def traceback_of(exc: BaseException) -> str:
    """Return the traceback as text, without the worker's own frames at its beginning."""
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in _OWN_FILES:
        tb = tb.tb_next
    return without_places(_text_of(exc, tb))


def _text_of(exc: BaseException, tb: TracebackType | None) -> str:
    """Return the traceback from ``tb`` on as text."""
    traceback = error_imports.ready()
    if isinstance(exc, ModuleNotFoundError):
        _say_where(exc)
    return "".join(traceback.format_exception(type(exc), exc, tb))


def _say_where(exc: ModuleNotFoundError) -> None:
    """On a host other than the program's, add a note that names the host and a remedy."""
    try:
        host = current_worker().host
    except RuntimeError:  # the worker has not begun
        return
    if host:
        add_note(
            exc,
            f"On host {host}: the program's folder and path are not sent to hosts; install the "
            "module there, for example by runtime_env= of xpool.ray.hosts().",
        )


def has_lost_gpu(exc: BaseException) -> bool:
    """Whether a task's error has ended CUDA in this process, so that all later tasks would fail.

    A kernel's failed assertion or wrong address does so; a lack of memory does not.
    """
    if not any("CUDA error" in _text(one) for one in (exc, exc.__cause__)):
        return False
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return False
    try:
        cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _text(exc: BaseException | None) -> str:
    return safe_repr(exc, 500) if isinstance(exc, RuntimeError) else ""
