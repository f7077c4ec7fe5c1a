"""Receives log records and warnings from workers.

Each worker has a socket of its own for them, so the socket identifies the sender
(`xpool._worker.worker_relay`).  The engine's thread takes packets from the sockets, and puts them
into one queue for each pool.  A thread, which starts at the first packet, takes them from there and
passes them to `logging` and `warnings`, and so runs handlers and filters of the program.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import queue
import socket
import stat
import sys
import threading
import types
import warnings
from typing import TYPE_CHECKING, Any

from xpool._python import descriptors
from xpool._python.starting import PromptThread, print_error
from xpool._wire.outbox import COUNTERS, Outbox
from xpool._wire.records import LARGEST, LOG, record_from, unpack

if TYPE_CHECKING:
    import logging

STUCK = 10.0
"""Seconds that a handler of loggers may take for one record when the pool ends.  After that, the
pool ends without waiting for the handlers."""

MOST_WAITING = 256
"""So many packets may wait for the handlers; then further ones wait in the sockets."""

MOST_DROPPED = 2**40
"""The largest number of dropped notices that a worker may report."""

_MOST_SHOWN = 1 << 20
"""Most characters of warnings that are remembered as shown."""

_SOURCE_BYTES = 4 << 20
"""Size in bytes of the largest source file from which a warning shows its line."""

# Other systems have the constant, but macOS has no such sockets of AF_UNIX.
_KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM


class LogSocket:
    """The parent's end of the socket of one worker process."""

    def __init__(self, worker: int, fd: int, box: Outbox) -> None:
        self.worker, self.fd, self._box = worker, fd, box
        self.told = 0  # how many dropped notices were reported to the program
        self.ended = False  # no more packets will come
        self.invalid = False  # the worker has sent an invalid packet

    def dropped_since(self) -> int:
        """Return how many notices the worker has dropped since the last call."""
        told, self.told = self.told, self._box.counts[COUNTERS.index("dropped_records")]
        new = self.told - told
        return new if 0 < new <= MOST_DROPPED else 0  # else a task has written over the page


class Relay:
    """Passes the records of a pool's workers to the program, in a thread of its own.

    ``first``: the index in the pool of the engine's first worker.

    `receive` and `finish` are called with the engine's lock held.
    """

    def __init__(self, name: str, first: int = 0) -> None:
        self._name, self._first = name, first
        # A socket, a packet of it or b"", and how many notices its worker has dropped before.
        self._waiting: queue.SimpleQueue[tuple[LogSocket, bytes, int] | None]
        self._waiting = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._handled = 0
        self._shown: dict[str, dict[Any, Any]] = {}  # by file, as `__warningregistry__`
        self._shown_size = 0

    def pair(self, worker: int, box: Outbox) -> tuple[LogSocket, int]:
        """Return the two ends of a socket for one worker: the parent's, and the worker's."""
        ours, theirs = descriptors.pair(_KIND)
        if _KIND == socket.SOCK_DGRAM:  # which macOS gives room for 2 KiB
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * LARGEST)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST)
        ours.setblocking(False)
        return LogSocket(self._first + worker, ours.detach(), box), theirs.detach()

    def receive(self, logs: LogSocket) -> bool:
        """Take a packet, so that every worker has its turn; False: no more can be taken now."""
        if self._waiting.qsize() >= MOST_WAITING:
            self._begin()
            return False
        try:
            data = os.read(logs.fd, LARGEST + 1)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        # An empty packet, which xpool's workers never send, looks like the end of the socket.
        logs.ended = not data
        if data:
            self._put(logs, data)
        return bool(data)

    def finish(self, logs: LogSocket) -> None:
        """Take what is left in a socket: its worker process has ended."""
        with descriptors.borrowed(logs.fd, _KIND) as sock:
            with contextlib.suppress(OSError):  # the other end is closed, so this one is shut
                sock.shutdown(socket.SHUT_RD)  # refuses further packets
            with contextlib.suppress(OSError):
                while data := sock.recv(LARGEST + 1):
                    self._put(logs, data)
        self._put(logs, b"")

    def _put(self, logs: LogSocket, data: bytes) -> None:
        dropped = logs.dropped_since()
        if data or dropped:
            self._waiting.put((logs, data, dropped))
            self._begin()

    def _begin(self) -> None:
        """Start the thread.  If the system refuses it, the next packet or `end` tries again."""
        if self._thread is None:
            thread = PromptThread(target=self._run, name=f"{self._name}-logs", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def end(self) -> None:
        """Wait until all records are handled; `finish` was called for all sockets.

        Stops waiting for a handler that takes `STUCK` seconds for one record.
        """
        self._waiting.put(None)
        if self._waiting.qsize() > 1:
            self._begin()
        thread = self._thread
        if thread is None:
            self._run()
            return
        handled = -1
        while thread.is_alive() and handled != self._handled:
            handled = self._handled
            thread.join(STUCK)
        if thread.is_alive():
            with contextlib.suppress(Exception):  # stderr may be closed
                print(
                    f"xpool: pool {self._name} has ended, but a handler of log records or warnings "
                    f"has not returned for {STUCK:g} s. Records of its workers wait for the "
                    "handler; they are lost if the program ends first",
                    file=sys.stderr,
                    flush=True,
                )

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while (one := self._waiting.get()) is not None:
            try:
                self._handle(*one)
            except Exception:
                # A handler or a field raised it: records of other workers must still be handled.
                print_error()
            self._handled += 1

    def _handle(self, logs: LogSocket, data: bytes, dropped: int) -> None:
        if dropped:
            _logger(_OWN).warning(
                "worker %d dropped %d log records or warnings, because it made them faster than "
                "this process handles them",
                logs.worker,
                dropped,
            )
        if not data:
            return
        try:
            kind, fields = unpack(data)
            told = record_from(fields) if kind == LOG else _Shown(fields)
        except ValueError as exc:
            self._reject(logs, exc)
            return
        if isinstance(told, _Shown):
            self._warn(told)
            return
        vars(told)["xpool_worker"] = logs.worker
        logger = _logger(told.name)
        if logger.isEnabledFor(told.levelno):
            logger.handle(told)

    def _reject(self, logs: LogSocket, exc: ValueError) -> None:
        # Warn once for each process, which may send any number of invalid packets.
        if not logs.invalid:
            logs.invalid = True
            _logger(_OWN).warning(
                "worker %d sent an invalid packet to the socket for log records (%s); it is left "
                "out, and later ones are left out without a warning",
                logs.worker,
                exc,
            )

    def _warn(self, shown: _Shown) -> None:
        message = shown.message()
        category, filename = type(message), _readable(shown.filename)
        # As Python remembers for a module what it has shown: by text, class and line.
        shown_here = self._shown.setdefault(filename, {})
        if (shown.text, category, shown.lineno) not in shown_here:
            self._shown_size += len(shown.text) + len(filename) + 100
            if self._shown_size > _MOST_SHOWN:
                self._shown, self._shown_size, shown_here = {}, 0, {}
        where = shown.where or filename.removesuffix(".py") or "<unknown>"  # as Python does
        try:
            warnings.warn_explicit(message, category, filename, shown.lineno, where, shown_here)
        except Warning as error:  # the filters made it an error, which nobody catches
            warnings.showwarning(error, category, filename, shown.lineno)


class _Shown:
    """A warning that a worker has shown.

    Raises:
        ValueError: a field is missing or has another type.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        names = "text", "module", "name", "base", "filename", "where"
        texts = [fields.get(name) for name in names]
        self.lineno: Any = fields.get("lineno")
        if any(type(one) is not str for one in texts) or type(self.lineno) is not int:
            raise ValueError(f"its fields are not those of a warning: {sorted(fields)}")
        self.text, self._module, self._name, self._base, self.filename, self.where = map(str, texts)

    def message(self) -> Warning:
        """Return the warning, made without its constructor, whose arguments are unknown."""
        category: Any = self._category()
        # A class with its own `__str__` needs fields that its constructor sets.  Filters match the
        # class derived from it here, too.
        if category.__str__ is not Warning.__str__:
            try:
                category = _derived(self._name, category, self._module, True)
            except Exception:  # the class cannot be derived from
                category = Warning
        try:
            made: Warning = Warning.__new__(category, self.text)
            return made
        except TypeError:  # the class has another built-in base, such as `OSError`
            return Warning(self.text)

    def _category(self) -> type[Warning]:
        # A filter can name the warning's class only if the program has imported the class's module.
        # The dictionary is read, because `getattr` may run code of the module.
        module = sys.modules.get(self._module)
        found = vars(module).get(self._name) if isinstance(module, types.ModuleType) else None
        if isinstance(found, type) and issubclass(found, Warning):
            return found
        base = vars(builtins).get(self._base)
        if not (isinstance(base, type) and issubclass(base, Warning)):
            base = Warning
        return _derived(self._name, base, self._module)


@functools.lru_cache(maxsize=256)  # the same class, so that its warnings are found to be shown
def _derived(name: str, base: Any, module: str, own_text: bool = False) -> type[Warning]:
    text = {"__str__": Warning.__str__} if own_text else {}
    return type(name, (base,), {"__module__": module, **text})


def _readable(filename: str) -> str:
    """Return a file's name, in angle brackets if reading the file could take for ever.

    To show the line of a warning, `warnings` reads the whole file (`linecache`), but not a name in
    angle brackets.
    """
    try:
        found = os.stat(filename)
    except (OSError, ValueError):
        return filename  # the file does not exist, or lies in an archive
    usual = stat.S_ISREG(found.st_mode) and found.st_size <= _SOURCE_BYTES
    return filename if usual else f"<{filename}>"


_OWN = "xpool"


def _logger(name: str) -> logging.Logger:
    """Return the logger of this name, or its nearest ancestor that exists; xpool's own always does.

    A logger that does not exist has no handler and no level, so its ancestors handle its records.
    Creating it would let workers fill the program with loggers.
    """
    import logging  # late: few programs log

    if name == _OWN:
        return logging.getLogger(name)
    root = logging.getLogger()
    while name:
        found = root.manager.loggerDict.get(name)
        if isinstance(found, logging.Logger):
            return found
        name = name.rpartition(".")[0]
    return root
