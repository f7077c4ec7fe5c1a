"""The parent's end of what workers say besides answers: log records and warnings.

Each worker has a socket of its own for them, so the parent knows the sender by the socket (see
`xpool._worker.relay`).  The engine only sees that something has come.  Then a thread is started,
one for each pool, which hands it to loggers and to `warnings`, whose handlers and filters are the
program's.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import select
import socket
import stat
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from xpool._wire.records import LARGEST, LOG, MOST_DROPPED, record_from, unpack

__all__ = ["Channel", "Relay", "levels"]

STUCK = 10.0
"""Seconds that a handler of loggers may take for one record when the pool ends.  Then the end of
the pool no longer waits for the handlers."""

_PLACES = 10_000
"""Places of warnings that are remembered as shown."""

_SOURCE_BYTES = 4 << 20
"""Of a source file; the line that a warning names is not shown from a larger one."""

_KIND = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
_GONE: int = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_READ: int = select.POLLIN | getattr(select, "POLLRDHUP", 0)  # epoll's numbers are the same


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


class Channel:
    """The parent's end of the socket of one worker process."""

    def __init__(self, worker: int, fd: int, close: Callable[[int], object]) -> None:
        self.worker, self.fd, self.close = worker, fd, close
        self.told = 0  # notices that the worker has dropped, as far as the program was told
        self.dropped = 0  # as the worker's page says; set when the worker has ended
        self.ended = False  # the worker process has ended
        self.silent = False  # the other end is closed, and the process has not been seen to end
        self.invalid = False  # it has sent something that is no notice

    def shut(self) -> None:
        """Let nothing more come in; what has come can still be read."""
        # Borrowed for the call: `detach` leaves the descriptor open.
        sock = socket.socket(fileno=self.fd)
        try:
            sock.shutdown(socket.SHUT_RD)
        except OSError:
            return  # the other end is closed, and the system has shut this one
        finally:
            sock.detach()

    def has_something(self) -> bool:
        """Whether something waits to be read; the end of the socket is nothing."""
        sock = socket.socket(fileno=self.fd)
        try:
            return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except OSError:
            return False
        finally:
            sock.detach()


class Relay:
    """The sockets from the workers of a pool, and the thread that reads them.

    ``first``: the pool's number of the engine's first worker.

    `add`, `finish` and `begin` are called with the engine's lock, so one at a time.
    """

    def __init__(self, name: str, first: int = 0) -> None:
        self._name, self._first = name, first
        self._poller: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
        # Made with the thread: tells it that no channel will be added any more.
        self._wake: tuple[int, int] | None = None
        self._lock = threading.Lock()  # guards the closing of channels, between thread and engine
        self._channels: dict[int, Channel] = {}  # by descriptor
        self._thread: threading.Thread | None = None
        self._handled = 0
        self._places: set[tuple[Any, ...]] = set()  # of warnings that were shown

    def fileno(self) -> int | None:
        """Return the descriptor that is readable when something has come; None: there is none,
        and the thread has to run from the start."""
        return self._poller.fileno() if hasattr(self._poller, "fileno") else None

    @staticmethod
    def pair() -> tuple[int, int]:
        """Return the two ends of a socket for one worker: the parent's, and the worker's."""
        ours, theirs = (end.detach() for end in socket.socketpair(socket.AF_UNIX, _KIND))
        os.set_blocking(ours, False)
        return ours, theirs

    def add(self, worker: int, fd: int, close: Callable[[int], object]) -> Channel:
        """Read from the parent's end of a socket; it is closed by ``close(fd)``.

        Raises:
            OSError: the system cannot watch another descriptor.
        """
        channel = Channel(self._first + worker, fd, close)
        self._channels[fd] = channel
        try:
            self._poller.register(fd, _READ)
        except BaseException:
            del self._channels[fd]
            raise
        return channel

    def finish(self, channel: Channel, dropped: int) -> None:
        """Read what is left in a channel and close it: its worker process has ended.

        ``dropped``: notices that the worker could not send, by its own count.
        """
        with self._lock:
            channel.ended = True
            if dropped <= MOST_DROPPED:  # else a task has written over the page
                channel.dropped = dropped
            nothing_dropped = channel.dropped <= channel.told
            if self._thread is None and nothing_dropped and not channel.has_something():
                self._close(channel)
                return
            # The thread reads what has come, then the end.
            channel.shut()
            if channel.silent:
                self._poller.register(channel.fd, _READ)
                channel.silent = False
        self.begin()

    def is_needed(self) -> bool:
        """Whether there is something to read, while no thread reads: not the mere end of a socket.

        Workers that stand in for others end without a word.
        """
        needed = False
        for fd, events in self._poller.poll(0):
            channel = self._channels.get(fd)
            if channel is not None and events & _GONE and not channel.has_something():
                channel.silent = True  # until `finish` is called
                self._poller.unregister(fd)
            else:
                needed = True
        return needed

    def begin(self) -> bool:
        """Start to read; False: the system has no thread now, or no descriptors."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"{self._name}-logs", daemon=True)
            try:
                if self._wake is None:
                    self._wake = os.pipe()
                self._poller.register(self._wake[0], select.POLLIN)
                thread.runs_only_xpool = True  # type: ignore[attr-defined] # until the first record
                thread.start()
            except (RuntimeError, OSError):
                if self._wake is not None:
                    with contextlib.suppress(KeyError, OSError):  # it was not registered
                        self._poller.unregister(self._wake[0])
                return False
            self._thread = thread
        return True

    def end(self) -> None:
        """Wait until all that workers have sent is handled; all their channels are finished.

        A handler that takes `STUCK` seconds for one record is left alone.
        """
        if self._channels:
            self.begin()
        if self._wake is not None:
            # Not by closing it alone: a process that some library has forked may have a copy.
            os.write(self._wake[1], b"!")
            os.close(self._wake[1])
        thread = self._thread
        if thread is None:
            self._run(over=True)  # there is nothing to read, or no thread for it
            return
        handled = -1
        while thread.is_alive() and handled != self._handled:
            handled = self._handled
            thread.join(STUCK)
        if thread.is_alive():
            with contextlib.suppress(Exception):  # stderr may be closed
                print(
                    f"xpool: pool {self._name} has ended, and a handler of loggers or warnings has "
                    f"not returned for {STUCK:g} s: log records of its workers wait for it, and "
                    "are lost if the program ends before they are handled",
                    file=sys.stderr,
                    flush=True,
                )

    def after_fork_in_child(self) -> None:
        """These workers are the parent's."""
        # The channels are closed already: `_engine.channel` knows them.
        self._channels.clear()
        for fd in self._wake or ():
            os.close(fd)
        if hasattr(self._poller, "close"):
            self._poller.close()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, over: bool = False) -> None:
        """Read until all channels are finished; ``over``: no channel will be added any more."""
        # Milliseconds, for `poll`; a change does not wake it up as it does `epoll`.
        wait = () if self.fileno() is not None else (200,)
        while not over or self._channels:
            for fd, events in self._poller.poll(*wait):
                channel = self._channels.get(fd)
                if channel is not None:
                    self._read(channel, events)
                elif self._wake is not None and fd == self._wake[0]:
                    self._poller.unregister(fd)
                    over = True
        if self._wake is not None:
            os.close(self._wake[0])
        if hasattr(self._poller, "close"):
            self._poller.close()

    def _close(self, channel: Channel) -> None:
        """Close a channel; called with the lock held."""
        if not channel.silent:
            self._poller.unregister(channel.fd)
        # Before it is closed: then the number may be another channel's at once.
        del self._channels[channel.fd]
        channel.close(channel.fd)

    def _read(self, channel: Channel, events: int) -> None:
        """Take one packet out, so that every worker has its turn."""
        try:
            data = os.read(channel.fd, LARGEST + 1)
        except BlockingIOError:
            return
        except OSError:
            data, events = b"", _GONE
        if not data:
            with self._lock:
                if channel.ended:
                    self._close(channel)
                elif events & _GONE:
                    # It would be reported at every turn until `finish` is called.
                    channel.silent = True
                    self._poller.unregister(channel.fd)
                # Else it is an empty packet, which no worker of ours sends.
            if channel.ended:
                self._tell_dropped(channel, channel.dropped)
            return
        if self._thread is not None:
            # Handlers are the program's: they may compute with tensors (`tensors.sharing` asks).
            self._thread.runs_only_xpool = False  # type: ignore[attr-defined]
        try:
            self._handle(channel, data)
        except Exception:
            # Of a handler, or of a field that it was given: it must not end the others.
            threading.excepthook(
                threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
            )
        self._handled += 1

    def _handle(self, channel: Channel, data: bytes) -> None:
        try:
            kind, dropped, fields = unpack(data)
            told = _make_record(channel, fields) if kind == LOG else _Shown(fields)
        except ValueError as exc:
            self._reject(channel, exc)
            return
        self._tell_dropped(channel, dropped)
        if isinstance(told, _Shown):
            self._warn(told)
        else:
            _log(told)

    def _reject(self, channel: Channel, exc: ValueError) -> None:
        # Once for each process: it may send any number of them.
        if not channel.invalid:
            channel.invalid = True
            _own_logger().warning(
                "worker %d has written to the socket for log records, and %s; this packet is left "
                "out, and all like it",
                channel.worker,
                exc,
            )

    def _tell_dropped(self, channel: Channel, dropped: int) -> None:
        count = dropped - channel.told
        if count > 0:
            channel.told = dropped
            _own_logger().warning(
                "worker %d has dropped %d log records or warnings: they came faster than they are "
                "handled",
                channel.worker,
                count,
            )

    def _warn(self, shown: _Shown) -> None:
        import warnings

        # Each worker would show it once; the program shows it once.
        if shown.place in self._places:
            return
        if len(self._places) >= _PLACES:
            self._places.clear()
        self._places.add(shown.place)
        message = shown.message()
        category, filename = type(message), _readable(shown.filename)
        try:
            warnings.warn_explicit(message, category, filename, shown.lineno)
        except Warning as error:  # as the filters want it; but there is nobody to catch it
            warnings.showwarning(error, category, filename, shown.lineno)


class _Shown:
    """A warning that a worker has shown.

    Raises:
        ValueError: a field is missing or has another type.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        texts = [fields.get(name) for name in ("text", "module", "name", "base", "filename")]
        self.lineno: Any = fields.get("lineno")
        if any(type(one) is not str for one in texts) or type(self.lineno) is not int:
            raise ValueError(f"its fields are no warning's: {sorted(fields)}")
        self.text, self._module, self._name, self._base, self.filename = map(str, texts)
        self.place = self._module, self._name, self.filename, self.lineno

    def message(self) -> Warning:
        """Return the warning, made without its constructor, which takes what it likes."""
        category = self._category()
        # A class with a text of its own needs what its constructor sets.  Filters see through the
        # class that is derived from it here.
        if category.__str__ is not Warning.__str__:
            body = {"__module__": self._module, "__str__": Warning.__str__}
            try:
                category = type(self._name, (category,), body)
            except Exception:  # it allows no such class
                category = Warning
        try:
            return Warning.__new__(category, self.text)
        except TypeError:  # its memory is laid out by another built-in class, an `OSError` say
            return Warning(self.text)

    def _category(self) -> type[Warning]:
        # Filters can name its class only where this program has it.  Looked up in the dictionary:
        # a module may run code for a name that it does not have.
        module = sys.modules.get(self._module)
        found = vars(module).get(self._name) if isinstance(module, types.ModuleType) else None
        if isinstance(found, type) and issubclass(found, Warning):
            return found
        base = vars(builtins).get(self._base)
        if not (isinstance(base, type) and issubclass(base, Warning)):
            base = Warning
        return type(self._name, (base,), {"__module__": self._module})


def _readable(filename: str) -> str:
    """Return a file's name, so marked that its lines are not read if that could take for ever.

    To show the line that a warning names, `warnings` reads all of the file (`linecache`).
    """
    try:
        found = os.stat(filename)
    except (OSError, ValueError):
        return filename  # there is nothing to read, or it is in an archive
    usual = stat.S_ISREG(found.st_mode) and found.st_size <= _SOURCE_BYTES
    return filename if usual else f"<{filename}>"


def _make_record(channel: Channel, fields: dict[str, Any]) -> Any:
    record: Any = record_from(fields)
    record.xpool_worker = channel.worker
    return record


def _log(record: Any) -> None:
    logger = _logger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _own_logger() -> Any:
    import logging

    return logging.getLogger("xpool")


def _logger(name: str) -> Any:
    """Return the logger of this name, or the nearest one above it that exists.

    A logger that does not exist has no handler and no level: those above it handle its records.  To
    make it would let workers fill the program with loggers.
    """
    import logging

    root = logging.getLogger()
    while name:
        found = root.manager.loggerDict.get(name)
        if isinstance(found, logging.Logger):
            return found
        name = name.rpartition(".")[0]
    return root
