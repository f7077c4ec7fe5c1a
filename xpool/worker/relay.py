"""What a worker says besides answers: log records and warnings, to its parent's loggers.

They go through a socket of their own, a message each, that all workers of a pool share: whole or
not at all, also when the worker is killed, and from whatever thread.  When the parent does not keep
up, the worker waits for a second, and then drops and counts until there is room again.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xpool.worker.arrivals import when_imported
from xpool.worker.context import current_worker
from xpool.worker.lines import Lines

if TYPE_CHECKING:
    import logging

__all__ = ["LOG", "WARNING", "open_relay"]

LOG, WARNING = "log", "warning"

PATIENCE = 1.0
"""Seconds that a record may wait for room."""

LONGEST = 32 * 1024
"""Characters of a message, or bytes of what a record was given as ``extra``; more is cut off."""

_relay: _Relay | None = None  # this process's


def open_relay(fd: int, orders: dict[str, Any]) -> None:
    """Have what this process logs, and its warnings, sent to the parent through ``fd``.

    Once for a process; another worker of it closes its descriptor.
    """
    global _relay
    # One with another pid is that of the process that this one was forked from.
    if _relay is not None and _relay.pid == os.getpid():
        os.close(fd)
        return
    _relay = relay = _Relay(fd, orders["index"], orders["levels"])
    if orders["output"] == "prefix":
        sys.stdout, sys.stderr = Lines.prefixed(sys.stdout), Lines.prefixed(sys.stderr)
    when_imported("logging", relay.take_logging)
    when_imported("warnings", relay.take_warnings)


class _Relay:
    def __init__(self, fd: int, index: int, levels: dict[str, int] | None) -> None:
        self.pid = os.getpid()
        self._index, self._levels = index, levels
        self._sock = socket.socket(fileno=fd)
        # A `struct timeval` of two longs: seconds and microseconds (socket(7), SO_SNDTIMEO).
        seconds = int(PATIENCE)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, 0))
        self._flags = 0
        self._dropped = 0  # since the last that was sent

    def send(self, kind: str, *what: Any) -> None:
        """Send it, or count it as dropped."""
        try:
            index = current_worker().index
        except RuntimeError:
            index = self._index  # a thread that a task has started
        # Read before the message is sent: other threads may drop theirs meanwhile.
        dropped = self._dropped
        try:
            self._sock.send(pickle.dumps((kind, index, dropped, what)), self._flags)
        except OSError:
            # There is no room, or no parent any more.  The next does not wait for it.
            self._dropped += 1
            self._flags = socket.MSG_DONTWAIT
        else:
            self._dropped -= dropped
            self._flags = 0

    # -- logging -----------------------------------------------------------------------------------

    def take_logging(self, logging: Any) -> None:
        """Add a handler to the root logger, and take over the parent's levels."""
        forward = self._forward

        # Made here, since logging is imported late or never; so another one is told by its name.
        class ToParent(logging.Handler):  # type: ignore[misc]
            """Sends records to the parent, where nobody else in the worker handles them."""

            def emit(self, record: Any) -> None:
                """Send it, unless the worker has a handler of its own for it."""
                logger = logging.getLogger(record.name)
                while logger is not None:
                    if any(type(one).__name__ != "ToParent" for one in logger.handlers):
                        return
                    logger = logger.parent if logger.propagate else None
                try:
                    forward(self.format, record)
                except Exception:
                    self.handleError(record)

        root = logging.getLogger()
        for old in [one for one in root.handlers if type(one).__name__ == "ToParent"]:
            root.removeHandler(old)  # of the worker that this one was forked from
        root.addHandler(ToParent())
        for name, level in (self._levels or {}).items():
            # Of `logging.disable`, which `levels` lists under this name.
            if name == " disabled":
                logging.disable(level)
            else:
                logging.getLogger(name or None).setLevel(level)

    def _forward(self, text_of: Callable[[Any], str], record: logging.LogRecord) -> None:
        # As text: the arguments may not be picklable, and are formatted as they are now.
        record.message = message = record.getMessage()[:LONGEST]
        if record.exc_info and not record.exc_text:
            text_of(record)  # sets `exc_text`
        known = {**vars(record), "msg": message, "args": None, "exc_info": None}
        for name, value in known.items():
            if type(value) not in (str, int, float, bool, type(None)):
                known[name] = _sendable(value)
        self.send(LOG, known)

    # -- warnings ----------------------------------------------------------------------------------

    def take_warnings(self, warnings: Any) -> None:
        """Show warnings in the parent: which of them are shown, the worker's filters say."""
        shown_here = warnings.showwarning

        def showwarning(
            message: Any,
            category: Any,
            filename: str,
            lineno: int,
            file: Any = None,
            line: Any = None,
        ) -> None:
            if file is not None:
                shown_here(message, category, filename, lineno, file, line)
            else:
                # The parent may not have the class: it makes one of the built-in one below it.
                base = next(one for one in category.__mro__ if one.__module__ == "builtins")
                kind = category.__module__, category.__name__, base.__name__
                self.send(WARNING, str(message)[:LONGEST], kind, filename, lineno)

        warnings.showwarning = showwarning


def _sendable(value: Any) -> Any:
    """Return what can be sent for something that a record was given as ``extra``."""
    try:
        if len(pickle.dumps(value)) <= LONGEST:
            return value
    except Exception:
        pass  # its text has to do
    return repr(value)[:LONGEST]
