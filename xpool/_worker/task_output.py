"""Where the output of a task goes: into a file of its own, or above the progress bar of its job.

With ``output="files"``, a file takes the place of the descriptors 1 and 2 while the task runs.  So
it also gets what C code and child processes write, and what a logging handler of an earlier task
writes.  Workers call `output_to`; the pool names the files (`TaskFiles`).

On a terminal that shows a progress bar, lines go above that bar (`above_bar`).  A bar that the task
draws (tqdm, rich, click) is not written: its text goes to the outbox's page, and the program draws
it below its own bar (`xpool._calls.progress`).  A bar is text that a return or another movement of
the cursor precedes, without an end of line.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from xpool._python.exits import flush
from xpool._python.hidden import flush_c
from xpool._worker.worker_context import current_worker
from xpool._worker.worker_relay import Lines, outbox

if TYPE_CHECKING:
    from xpool._calls.results import Job

_MODE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)

# The process, and copies of its descriptors 1 and 2 from before its first task.
_before: tuple[int, int, int] | None = None


@contextlib.contextmanager
def output_to(path: str) -> Iterator[None]:
    """Make the descriptors 1 and 2 a file in the block."""
    global _before
    if _before is None or _before[0] != os.getpid():
        _before = os.getpid(), os.dup(1), os.dup(2)
        sys.stdout, sys.stderr = _stream(sys.stdout, 1), _stream(sys.stderr, 2)
    _, *before = _before
    _flush()
    try:
        fd = os.open(path, _MODE, 0o666)
    except FileNotFoundError:  # on another host, or removed
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, _MODE, 0o666)
    try:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        yield
    finally:
        try:
            _flush()
            if os.fstat(fd).st_size == 0:
                os.unlink(path)
        finally:
            os.dup2(before[0], 1)
            os.dup2(before[1], 2)
            os.close(fd)


def _stream(stream: Any, fd: int) -> Any:
    """Return a stream that writes each line to ``fd`` at once, so that a killed task leaves it."""
    try:
        if stream.fileno() == fd:
            stream.reconfigure(line_buffering=True)
            return stream
    # The stream is None, or an object of a notebook or a test that writes elsewhere.
    except (AttributeError, OSError, ValueError):
        pass
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _flush() -> None:
    flush()
    flush_c()


class TaskFiles:
    """A new folder, and the names of the tasks' files in it."""

    # Ends of the names of the files of single items, and of single workers.
    ITEM, WORKER = "-{number:06}", "-worker-{worker}"

    def __init__(self, pool: str) -> None:
        name = os.path.abspath(f"xpool-output/{time.strftime('%Y%m%d-%H%M%S')}-{_plain(pool)}")
        for end in chain([""], (f"-{n}" for n in count(2))):
            try:
                os.makedirs(name + end)
            except FileExistsError:
                continue
            self.folder = name + end
            break

    def of(self, job: Job, called: str, end: str = "") -> tuple[str, str]:
        """Return the ``file`` of a `TaskFunction`; ``called`` names the function."""
        return os.path.join(self.folder, f"{job.number:04}-{_plain(called)}"), end


def _plain(name: str) -> str:
    """Return the part of a text that a file's name may have."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:80] or "task"


ERASE = "\r\x1b[J"
"""Erases the bar of the job and all below it.  They are drawn again a moment later."""

_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor; rich and click do this around a bar
_HEAVY = "\u2501"  # the horizontal line of which rich makes bars

# Escape sequences of terminals (ECMA-48), of which those that end in "m" set colours.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])")
_MOVEMENT = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|[78DEM])")
_RETURN = re.compile(r"\r(?!\n)")
_ENDS = {"\n" * n for n in range(1, 100)}  # what tqdm writes to get to the line of another bar
_UP = re.compile(r"\x1b\[(\d*)A")


@contextlib.contextmanager
def above_bar() -> Iterator[None]:
    """In the block, lines on a terminal go above the progress bar, and bars go below it."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_divided(one) for one in before)
    mine = [one for one in (sys.stdout, sys.stderr) if isinstance(one, _Divided)]
    try:
        yield
    finally:
        for one in mine:
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                one.flush()
            one.end()
        sys.stdout, sys.stderr = before


def _divided(stream: Any) -> Any:
    try:
        terminal = stream.isatty()
    except Exception:  # the stream is closed, None, or an object of the task
        return stream
    if not terminal:
        return stream
    if isinstance(stream, _Divided):  # the stream of another worker in this process
        stream = stream.under
    return _Divided(stream)


class _Divided(Lines):
    """A terminal for lines; it hands bars to the program."""

    def __init__(self, under: Any) -> None:
        # The stream below may add a prefix, which must follow the movement.
        has_prefix = isinstance(under, Lines)
        before = under.before if has_prefix else str
        super().__init__(under.stream if has_prefix else under, lambda: ERASE + before())
        self.under = under
        self._draws = not current_worker().host  # the program shows no bars of other hosts
        self._bar = ""  # the bar that is shown
        self._is_in_bar = False  # the cursor is in the line of a bar, which may be blank now
        self._is_hidden = False  # the cursor is
        self._over = False

    def end(self) -> None:
        """Remove the bar.  A thread of the task may still write, but draws no bar."""
        if self._bar:
            self._show("")
        self._over = True

    def write(self, text: str) -> int:
        if not self._draws:
            return super().write(text)
        moves = "\x1b" in text and _MOVEMENT.search(text) is not None
        returns = "\r" in text and _RETURN.search(text) is not None
        if moves or returns or (self._is_hidden and _HEAVY in text):
            self._divide(text)
        elif self._is_in_bar and text in _ENDS and threading.get_ident() not in self._begun:
            self._is_in_bar = False
            self._show("")
        else:
            super().write(text)
        return len(text)

    def flush(self) -> None:
        me = threading.get_ident()
        if self._is_in_bar and me in self._begun:
            self._show((self._bar + self._begun.pop(me))[:1000])  # the bar is written in pieces
        super().flush()

    def _divide(self, text: str) -> None:
        """Write the lines that text with a bar has above the bar, and show the bar."""
        me = threading.get_ident()
        *lines, last = (self._begun.pop(me, "") + text).split("\n")
        # A bar of several lines begins with a movement up.
        above = max(0, len(lines) - sum(int(n or 1) for n in _UP.findall(text)))
        self._is_in_bar = bool(last) and _SHOW not in text
        if _SHOW in text:
            self._is_hidden = False
            above = max(0, above - 1)  # the last line is the bar, which ends
        elif _HIDE in text:
            self._is_hidden = True
        while above and self._is_hidden and _HEAVY in lines[above - 1]:
            above -= 1  # the bar has got more lines
        if above:
            self._hand_on(me, _MOVEMENT.sub("", "\n".join(lines[:above]) + "\n"))
        shown = next(filter(None, map(_last, (last, *reversed(lines[above:])))), "")
        if shown or "\r" in text or "\n" in text:
            self._show("" if _SHOW in text else shown)

    def _show(self, bar: str) -> None:
        self._bar = bar
        if not self._over:
            outbox().draw(bar)


def _last(line: str) -> str:
    """Return what a terminal shows at the end of such a text, without colours."""
    plain = _SEQUENCE.sub("", line)
    return next((part for one in reversed(plain.split("\r")) if (part := one.rstrip())), "")
