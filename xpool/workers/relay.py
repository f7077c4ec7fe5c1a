"""The parent's end of what workers say besides answers: see `xpool.worker.relay`.

The engine only sees that something has come.  Then a thread is started which unpickles it and hands
it to loggers and to `warnings`, whose handlers and filters are the program's.
"""

from __future__ import annotations

import builtins
import pickle
import select
import socket
import sys
import threading
from typing import Any

from xpool.worker.relay import LOG

__all__ = ["Relay", "levels"]

# Bytes of a message: the parts of a record are cut (`LONGEST` in worker/relay).
LARGEST = 1 << 20
END_LIMIT = 5.0
"""Seconds for which the end of a pool waits for handlers of loggers."""

_KIND = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)


def levels() -> dict[str, int] | None:
    """Return the levels of this program's loggers; None: nothing has imported logging."""
    logging: Any = sys.modules.get("logging")
    if logging is None:
        return None
    root = logging.getLogger()
    found = {"": root.level, " disabled": root.manager.disable}
    # A copy: other threads may make loggers meanwhile.
    for name, logger in list(root.manager.loggerDict.items()):
        level = getattr(logger, "level", 0)  # a placeholder has none
        if level:
            found[name] = level
    return found


class Relay:
    """A socket from all workers of a pool, and the thread that reads it."""

    def __init__(self, name: str) -> None:
        self._name = name
        # `theirs` stays open here: each worker that starts gets a copy of it.
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, _KIND)
        self._thread: threading.Thread | None = None
        self._places: set[tuple[Any, ...]] = set()  # of warnings that were shown

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when something has come."""
        return self._ours.fileno()

    def begin(self) -> None:
        """Start to read."""
        # No lock: it is called with the engine's, or when the engine has ended.
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"{self._name}-logs", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Read what has come, and close; the workers have ended.  Called once, by the engine."""
        # Something may have come since the engine's thread last looked.
        # `poll`: `select` takes no descriptor above 1023 (FD_SETSIZE), whatever ulimit -n allows.
        look = select.poll()
        look.register(self._ours, select.POLLIN)
        if look.poll(0):
            self.begin()
        # What has come is read all the same, and then there is no more.
        self._ours.shutdown(socket.SHUT_RD)
        self.theirs.close()
        if self._thread is None:
            self._ours.close()
        else:
            # A handler that hangs must not keep the pool from ending.
            self._thread.join(END_LIMIT)

    def after_fork_in_child(self) -> None:
        """These workers are the parent's."""
        self._ours.close()
        self.theirs.close()

    def _run(self) -> None:
        with self._ours:
            while message := self._ours.recv(LARGEST):
                try:
                    kind, worker, dropped, what = pickle.loads(message)
                    if dropped:
                        _lost(worker, dropped)
                    if kind == LOG:
                        _log(worker, *what)
                    else:
                        self._warn(*what)
                except Exception:
                    # Of a handler, or of what a record was given: it must not end the others.
                    threading.excepthook(
                        threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                    )

    def _warn(self, text: str, kind: tuple[str, str, str], filename: str, lineno: int) -> None:
        import warnings

        # Each worker would show it once; the program shows it once.
        place = kind, filename, lineno
        if place in self._places:
            return
        self._places.add(place)
        module, name, base = kind
        # Filters can name its class only where this program has it.
        category: Any = getattr(sys.modules.get(module), name, None)
        if not (isinstance(category, type) and issubclass(category, Warning)):
            category = type(name, (getattr(builtins, base),), {})
        try:
            warnings.warn_explicit(text, category, filename, lineno)
        except Warning as error:  # as the filters want it; but there is nobody to catch it
            warnings.showwarning(error, category, filename, lineno)


def _log(worker: int, attributes: dict[str, Any]) -> None:
    import logging

    record = logging.makeLogRecord(attributes)
    vars(record).setdefault("xpool_worker", worker)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _lost(worker: int, count: int) -> None:
    import logging

    logging.getLogger("xpool").warning(
        "worker %d has dropped %d log records or warnings: they came faster than they are handled",
        worker,
        count,
    )
