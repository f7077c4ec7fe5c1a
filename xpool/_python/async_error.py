"""Raises an exception in another thread.  Only CPython's C API can do this."""

from __future__ import annotations

import ctypes


def raise_in_thread(ident: int | None, what: type[BaseException] | None) -> None:
    """Raise ``what`` in a thread when it next runs Python code.  None withdraws the exception."""
    # NULL clears the pending exception.  The thread id is an unsigned long (Python/pystate.c).
    obj = ctypes.c_void_p() if what is None else ctypes.py_object(what)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), obj)
