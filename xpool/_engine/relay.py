"""Receives log records and warnings from workers.

Each worker has a socket of its own for them, so the socket identifies the sender
(`xpool._worker.worker_relay`).  When data arrive, the engine starts a thread, one for each pool.
The thread passes them to `logging` and `warnings`, and so runs handlers and filters of the program.
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
import warnings
from collections.abc import Callable
from typing import Any

from xpool._python import descriptors
from xpool._wire.records import (
    LARGEST,
    LOG,
    MOST_DROPPED,
    logging_module,
    record_from,
    unpack,
)

STUCK = 10.0
"""Seconds that a handler of loggers may take for one record when the pool ends.  After that, the
pool ends without waiting for the handlers."""

_PLACES = 10_000
"""Most places in the code whose warnings are remembered as shown."""

_SOURCE_BYTES = 4 << 20
"""Size in bytes of the largest source file from which a warning shows its line."""

_KIND = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
_GONE: int = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_READ: int = select.POLLIN | getattr(select, "POLLRDHUP", 0)  # epoll's numbers are the same


class Channel:
    """The parent's end of the socket of one worker process."""

    def __init__(self, worker: int, fd: int, close: Callable[[int], object]) -> None:
        self.worker, self.fd, self.close = worker, fd, close
        self.told = 0  # dropped notices that the program was told of
        self.dropped = 0  # the same by the worker's own count; set when it has ended
        self.ended = False  # the worker process has ended
        self.silent = False  # the other end is closed, and `finish` was not called yet
        self.invalid = False  # it has sent an invalid packet

    def shut(self) -> None:
        """Refuse further packets; those that have arrived can still be read."""
        with descriptors.borrowed(self.fd, _KIND) as sock:
            try:
                sock.shutdown(socket.SHUT_RD)
            except OSError:
                return  # the other end is closed, so this one is shut already

    def has_something(self) -> bool:
        """Whether a packet can be read; the end of the socket does not count."""
        with descriptors.borrowed(self.fd, _KIND) as sock:
            try:
                return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
            except OSError:
                return False


class Relay:
    """The sockets from the workers of a pool, and the thread that reads them.

    ``first``: the index in the pool of the engine's first worker.

    `add`, `finish`, `is_needed` and `begin` are called with the engine's lock held.
    """

    def __init__(self, name: str, first: int = 0) -> None:
        self._name, self._first = name, first
        self._poller: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
        # A pipe made with the thread; tells it that no more channels will be added.
        self._wake: tuple[int, int] | None = None
        self._lock = threading.Lock()  # guards the closing of channels, between thread and engine
        self._channels: dict[int, Channel] = {}  # by descriptor
        self._thread: threading.Thread | None = None
        self._handled = 0
        self._places: set[tuple[Any, ...]] = set()  # of warnings that were shown

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when data have arrived; None: there is none, so the
        thread must run from the start."""
        return self._poller.fileno() if hasattr(self._poller, "fileno") else None

    @staticmethod
    def pair() -> tuple[int, int]:
        """Return the two ends of a socket for one worker: the parent's, and the worker's."""
        ours, theirs = (end.detach() for end in descriptors.pair(_KIND))
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
            # The thread reads the packets that have arrived, then the end.
            channel.shut()
            if channel.silent:
                self._poller.register(channel.fd, _READ)
                channel.silent = False
        self.begin()

    def is_needed(self) -> bool:
        """Whether the thread is needed: a packet can be read.  Ends of sockets do not count.

        Most workers end without having sent anything.
        """
        if self._thread is not None:  # `finish` has started it, and it may read the same events
            return True
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
        """Start the thread that reads; False: the system refuses a thread or descriptors now."""
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
        """Wait until all records are handled; `finish` was called for all channels.

        Stops waiting for a handler that takes `STUCK` seconds for one record.
        """
        if self._channels:
            self.begin()
        if self._wake is not None:
            # Closing alone may not wake the thread: a process that a library forked may hold it.
            os.write(self._wake[1], b"!")
            os.close(self._wake[1])
        thread = self._thread
        if thread is None:
            self._run(over=True)  # nothing is to be read, or no thread could be started
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

    def after_fork_in_child(self) -> None:
        """Forget the workers, which belong to the parent."""
        # `_engine.channel` has closed the channels already.
        self._channels.clear()
        for fd in self._wake or ():
            os.close(fd)
        if hasattr(self._poller, "close"):
            self._poller.close()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, over: bool = False) -> None:
        """Read until all channels are finished; ``over``: no more channels will be added."""
        # A timeout in milliseconds, because a change wakes epoll but not poll.
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
        # Delete it before it is closed: another channel may get the same number at once.
        del self._channels[channel.fd]
        channel.close(channel.fd)

    def _read(self, channel: Channel, events: int) -> None:
        """Handle one packet, so that every worker has its turn."""
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
                    # The end would be reported at every turn until `finish` is called.
                    channel.silent = True
                    self._poller.unregister(channel.fd)
                # Otherwise it is an empty packet, which xpool's workers never send.
            if channel.ended:
                self._tell_dropped(channel, channel.dropped)
            return
        if self._thread is not None:
            # Handlers of the program may compute with tensors (`tensors.sharing` checks this).
            self._thread.runs_only_xpool = False  # type: ignore[attr-defined]
        try:
            self._handle(channel, data)
        except Exception:
            # A handler or a field raised it: records of other workers must still be handled.
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
        # Warn once for each process, which may send any number of invalid packets.
        if not channel.invalid:
            channel.invalid = True
            _own_logger().warning(
                "worker %d sent an invalid packet to the socket for log records (%s); it is left "
                "out, and later ones are left out without a warning",
                channel.worker,
                exc,
            )

    def _tell_dropped(self, channel: Channel, dropped: int) -> None:
        count = dropped - channel.told
        if count > 0:
            channel.told = dropped
            _own_logger().warning(
                "worker %d dropped %d log records or warnings, because it made them faster than "
                "this process handles them",
                channel.worker,
                count,
            )

    def _warn(self, shown: _Shown) -> None:
        # Each worker sends a warning once; the program shows it only for the first worker.
        if shown.place in self._places:
            return
        if len(self._places) >= _PLACES:
            self._places.clear()
        self._places.add(shown.place)
        message = shown.message()
        category, filename = type(message), _readable(shown.filename)
        try:
            warnings.warn_explicit(message, category, filename, shown.lineno)
        except Warning as error:  # the filters made it an error, which nobody catches
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
            raise ValueError(f"its fields are not those of a warning: {sorted(fields)}")
        self.text, self._module, self._name, self._base, self.filename = map(str, texts)
        self.place = self._module, self._name, self.filename, self.lineno

    def message(self) -> Warning:
        """Return the warning, made without its constructor, whose arguments are unknown."""
        category = self._category()
        # A class with its own `__str__` needs fields that its constructor sets.  Filters match the
        # class derived from it here, too.
        if category.__str__ is not Warning.__str__:
            body = {"__module__": self._module, "__str__": Warning.__str__}
            try:
                category = type(self._name, (category,), body)
            except Exception:  # the class cannot be derived from
                category = Warning
        try:
            return Warning.__new__(category, self.text)
        except TypeError:  # its base is another built-in class, such as `OSError`
            return Warning(self.text)

    def _category(self) -> type[Warning]:
        # Filters can name its class only if this program has it.  Read from the dictionary, since
        # `getattr` may run code of the module.
        module = sys.modules.get(self._module)
        found = vars(module).get(self._name) if isinstance(module, types.ModuleType) else None
        if isinstance(found, type) and issubclass(found, Warning):
            return found
        base = vars(builtins).get(self._base)
        if not (isinstance(base, type) and issubclass(base, Warning)):
            base = Warning
        return type(self._name, (base,), {"__module__": self._module})


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


def _make_record(channel: Channel, fields: dict[str, Any]) -> Any:
    record: Any = record_from(fields)
    record.xpool_worker = channel.worker
    return record


def _log(record: Any) -> None:
    logger = _logger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _own_logger() -> Any:
    return logging_module().getLogger("xpool")


def _logger(name: str) -> Any:
    """Return the logger of this name, or its nearest ancestor that exists.

    A logger that does not exist has no handler and no level, so its ancestors handle its records.
    Creating it would let workers fill the program with loggers.
    """
    logging = logging_module()
    root = logging.getLogger()
    while name:
        found = root.manager.loggerDict.get(name)
        if isinstance(found, logging.Logger):
            return found
        name = name.rpartition(".")[0]
    return root
