"""Raises an exception in another thread.  Only CPython's C API can do this."""

from __future__ import annotations

import ctypes
import threading


class _Withdrawn(BaseException):
    """Takes the place of the exception that is withdrawn."""


def raise_in_thread(ident: int | None, what: type[BaseException]) -> None:
    """Raise ``what`` in a thread when it next runs Python code, instead of a pending exception."""
    # The thread id is an unsigned long (Python/pystate.c).
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(what))


def withdraw() -> None:
    """Withdraw the exception that is pending in the calling thread, if there is one.

    NULL would withdraw it too, but leaves a flag set that only the raising of an exception clears.
    With this flag, CPython 3.11 never ends the first call that is profiled or traced.
    """
    try:
        raise_in_thread(threading.get_ident(), _Withdrawn)
        while True:
            continue
    except _Withdrawn:
        return
