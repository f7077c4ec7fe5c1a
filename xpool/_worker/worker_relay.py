"""Sends a worker's log records and warnings to the loggers of its parent.

Each worker has a socket of packets for them, so a record arrives whole or not at all.  This holds
when the worker is killed, for every thread, and for processes that a task has forked.  If the
parent does not keep up, the worker waits for a second.  Then it drops records, and counts them,
until the socket has room again.
"""

from __future__ import annotations

import functools
import io
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

from xpool._python import descriptors
from xpool._python.at_fork import renew
from xpool._python.exits import forget_log_handlers
from xpool._python.hidden import SHOWS_WARNING
from xpool._python.import_hooks import when_imported
from xpool._wire.outbox import Outbox
from xpool._wire.records import LOG, WARNING, pack
from xpool._worker.worker_context import current_worker

if TYPE_CHECKING:
    import logging


class Lines:
    """A text stream that adds a prefix to each line, and writes whole lines in one piece."""

    def __init__(self, stream: Any, before: Callable[[], str]) -> None:
        self.stream, self.before = stream, before
        # By thread, so that the lines of two threads do not mix: the beginning of an incomplete
        # line, and the threads whose current line has been written in part.
        self._begun: dict[int, str] = {}
        self._continues: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        me = threading.get_ident()
        whole, end, rest = (self._begun.pop(me, "") + text).rpartition("\n")
        if rest:
            self._begun[me] = rest
        if end:
            self._hand_on(me, whole + end)
            self._continues.discard(me)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Also write the incomplete lines of this thread and of threads that have ended."""
        if self._begun:
            me, running = threading.get_ident(), sys._current_frames()
            for thread in list(self._begun):
                if thread == me or thread not in running:
                    self._hand_on(thread, self._begun.pop(thread))
                    self._continues.add(thread)
        self.stream.flush()

    def _hand_on(self, thread: int, text: str) -> None:
        before = self.before()
        # Do not use `splitlines`, which also cuts at form feeds and the like.
        lines = list(io.StringIO(text, newline=""))
        # If `flush` has written the beginning of a line, its rest gets no prefix.
        head = lines.pop(0) if thread in self._continues else ""
        self.stream.write(head + "".join(before + line for line in lines))


def _name() -> str:
    try:
        return f"[worker {current_worker().index}] "
    except RuntimeError:
        return "[worker] "  # workers are threads, and a task has started this thread


ROOM_WAIT_SECONDS = 1.0
"""Seconds that a record may wait for room."""

_relay: _Relay | None = None  # the relay of this process

_counting = threading.RLock()  # reentrant, since a signal handler may log
renew(globals(), _counting=threading.RLock)


def open_relay(fd: int, config: dict[str, Any], box: Outbox) -> None:
    """Send the log records and warnings of this process to the parent.

    ``fd`` is the socket of this worker, which may be one of several in this process.  ``box`` tells
    the parent how many could not be sent.
    """
    global _relay
    channel = _Channel(fd, box)
    # A relay with another pid belongs to the process from which this one was forked.
    if _relay is not None and _relay.pid == os.getpid():
        _relay.channels[config["index"]] = channel
        return
    _relay = relay = _Relay(config["index"], channel, config["forked"])
    if config["output"] == "prefix":
        streams: Any = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (one if one is None else Lines(one, _name) for one in streams)
    when_imported("logging", relay.take_logging)
    when_imported("warnings", relay.take_warnings)


def outbox() -> Outbox:
    """Return the outbox of the worker that runs this thread's task."""
    assert _relay is not None
    return _relay.channel().box


class _Channel:
    def __init__(self, fd: int, box: Outbox) -> None:
        self._sock = descriptors.on(fd)
        # The option's value is a `struct timeval`: seconds and microseconds, two longs (socket(7)).
        seconds = int(ROOM_WAIT_SECONDS)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, 0))
        self._flags = 0
        self.box = box

    def count(self, counter: str, n: int = 1) -> None:
        """Count something for the worker's report: see `COUNTERS`.

        A process that a task has forked has the same page, and another lock.  So if both count at
        the same time, some counts are lost.
        """
        with _counting:
            self.box.count(counter, n)

    def send(self, kind: str, fields: dict[str, Any]) -> None:
        try:
            self._sock.send(pack(kind, fields), self._flags)
        except OSError:
            # The socket has no room, or the parent has ended.  The next record does not wait.
            self._flags = socket.MSG_DONTWAIT
            self.count("dropped_records")
        else:
            self._flags = 0


class _Relay:
    def __init__(self, index: int, channel: _Channel, forked: bool) -> None:
        self.pid = os.getpid()
        self.channels = {index: channel}  # by the worker's index
        self._default = channel  # for threads that a task has started
        self._forked = forked

    def channel(self) -> _Channel:
        """Return the channel of the worker that runs in this thread."""
        try:
            return self.channels.get(current_worker().index, self._default)
        except RuntimeError:
            return self._default

    # -- logging -----------------------------------------------------------------------------------

    def take_logging(self, logging: Any) -> None:
        """Forward records for which this process has no handler."""
        if self._forked:
            _remove_handlers(logging)
        # Do not add a handler: `logging.basicConfig`, and other code that checks for handlers,
        # would then do nothing.
        call_handlers = logging.Logger.callHandlers
        reporter = logging.Handler()
        format_exception = logging.Formatter().formatException

        def callHandlers(logger: Any, record: Any) -> None:
            if _is_handled(logging, logger):
                call_handlers(logger, record)
                return
            try:
                self._forward(record, format_exception)
            except Exception:
                reporter.handleError(record)

        logging.Logger.callHandlers = callHandlers
        configure = logging.basicConfig

        @functools.wraps(configure)
        def basicConfig(**options: Any) -> None:
            # `logging.warning` and its like call this too, where the root logger has no handler.
            if sys._getframe(1).f_globals is not vars(logging):
                # `configure` does nothing if there are handlers, so those that only stand for the
                # program's handlers are removed.
                handlers = logging.getLogger().handlers
                if all(hasattr(one, "_xpool_of_program") for one in handlers):
                    handlers.clear()
                configure(**options)

        logging.basicConfig = basicConfig

    def _forward(self, record: logging.LogRecord, format_exception: Callable[[Any], str]) -> None:
        fields = dict(vars(record))
        args = fields.pop("args")
        if args or type(record.msg) is not dict:  # else it is an event, for a formatter
            fields["msg"] = record.getMessage()
        exc_info = fields.pop("exc_info")
        if exc_info and not record.exc_text:
            fields["exc_text"] = format_exception(exc_info)
        self.channel().send(LOG, fields)

    # -- warnings ----------------------------------------------------------------------------------

    def take_warnings(self, warnings: Any) -> None:
        """Show warnings in the parent; the worker's filters select them."""
        show_here = getattr(warnings, SHOWS_WARNING)

        def show(warning: Any) -> None:
            if warning.file is not None:
                show_here(warning)
                return
            # The parent may lack the class: it makes one from the built-in base class.
            category = warning.category
            builtin = (one for one in category.__mro__ if one.__module__ == "builtins")
            fields = {
                "text": str(warning.message),
                "module": category.__module__,
                "name": category.__name__,
                "base": next(one.__name__ for one in builtin if issubclass(one, Warning)),
                "filename": warning.filename,
                "lineno": warning.lineno,
                "where": _module_of(warning),
            }
            self.channel().send(WARNING, fields)

        # A `warnings.showwarning` of the program comes first, as in a fork.
        setattr(warnings, SHOWS_WARNING, show)


def _module_of(warning: Any) -> str:
    """Return the name of the module in which a warning was given; "": it is not on the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        place = frame.f_code.co_filename, frame.f_lineno
        if place == (warning.filename, warning.lineno):
            return str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return ""


def _is_handled(logging: Any, logger: Any) -> bool:
    """Whether this process has a handler for the records of a logger."""
    while logger is not None:
        # A `NullHandler` does not count: libraries add it to leave handling to the program.
        # Other handlers stand for the program's handlers, which get the records.
        for one in logger.handlers:
            if type(one) is not logging.NullHandler and not hasattr(one, "_xpool_of_program"):
                return True
        logger = logger.parent if logger.propagate else None
    return False


def _remove_handlers(logging: Any) -> None:
    """Remove the program's handlers, which a fork has inherited: the parent uses them."""
    root = logging.getLogger()
    for logger in (root, *root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):  # otherwise it is a placeholder
            logger.handlers.clear()
            logger.propagate = True
    forget_log_handlers(logging)
