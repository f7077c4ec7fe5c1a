"""`progress=`: how far a job is, for people.

What has been done is counted where answers arrive, a message at a time.  A thread looks at the
count ten times a second and shows it: by tqdm, else by rich, else as a line on stderr; or it calls
the caller's function.

The job does not depend on any of it: stderr may be closed, or a pipe that nobody reads, and the
display may raise anything.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from xpool._python.waiters import Flag, Waiters

__all__ = ["Progress"]

INTERVAL = 0.1
"""Seconds between two looks."""

LAST_LOOK = 5.0
"""Seconds for which a finished job waits for the last state of a bar: the terminal may be blocked,
or the program hold tqdm's lock.  For a callable, it waits until that has returned."""


class Display(Protocol):
    """What shows progress.  Called by one thread."""

    def show(self, done: int, total: int | None) -> None:
        """Show that ``done`` items of ``total`` are done; None: it is not known how many."""

    def close(self) -> None:
        """Nothing more comes."""


class Progress:
    """Counts the items of one job that are done, and has a thread show them.

    Args:
        how: True; a title; or a callable ``(done, total)``.
        title: for True.
        total: number of items, where that is known.
        size: items of a task; the last may have fewer.
        drawn: returns how many items there are by now.
    """

    def __init__(
        self, how: Any, title: str, total: int | None, size: int, drawn: Callable[[], int]
    ) -> None:
        self._is_bar = not callable(how)
        self._display = _display(title if how is True else how) if self._is_bar else _Calls(how)
        self._total, self._size, self._drawn = total, size, drawn
        self._tasks = 0  # answered ones; changed by one thread at a time, under the pool's lock
        self._over = Flag()
        self._waiters = Waiters()  # those who wait for the last of it to be shown
        # It does not hold the job, nor so the pool, which may be dropped meanwhile.
        self._thread = threading.Thread(target=self._run, name="xpool-progress", daemon=True)

    @property
    def on_terminal(self) -> bool:
        """Whether a bar stands on a terminal, where workers may print as well."""
        return self._is_bar and _is_terminal(sys.stderr)

    def begin(self) -> None:
        """Start to show it."""
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread for it now
            self._shown_all = True
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))

    def add(self, tasks: int) -> None:
        """Note that so many more tasks were answered."""
        self._tasks += tasks

    def end(self) -> None:
        """Note that no more will be answered."""
        self._over.set()

    def wait(self) -> None:
        """Wait until the last of it is shown; `end` was called, or is about to be."""
        if self._thread is not threading.current_thread():
            # Also for the child of a fork, where that thread has ended.
            over = LAST_LOOK if self._is_bar else None
            self._waiters.wait(lambda: not self._thread.is_alive() or self._shown_all, over)

    _shown_all = False

    def _run(self) -> None:
        try:
            # The display ends before those who wait for it go on.
            with contextlib.closing(self._display):
                shown = -1
                while not self._over.wait(INTERVAL):
                    shown = self._show(shown)
                # The last state, which came after the last look.
                self._show(shown)
        finally:
            self._shown_all = True
            self._waiters.wake()

    def _show(self, shown: int) -> int:
        # The last task may have fewer items than the others.
        done = min(self._tasks * self._size, self._drawn())
        if done != shown or self.on_terminal:  # there, what a worker prints takes its place
            self._display.show(done, self._total)
        return done


class _Calls:
    def __init__(self, call: Callable[[int, int | None], object]) -> None:
        self.show = call

    def close(self) -> None:
        pass


def _display(title: str) -> Display:
    """Return the best display that is installed."""
    for name, make in (("tqdm", _Tqdm), ("rich", _Rich)):
        try:
            if importlib.util.find_spec(name) is not None:
                return make(title)
        except Exception:
            continue  # its installation is broken
    return _Line(title)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except Exception:  # it is closed, None, or some object of the program's
        return False


class _Stderr:
    """The program's stderr, which never raises: it may be closed, or its reader be gone."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def write(self, text: str) -> int:
        # Of all kinds: the program may have any object in the place of stderr.
        with contextlib.suppress(Exception):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.flush()

    def isatty(self) -> bool:
        return _is_terminal(self._stream)

    def __getattr__(self, name: str) -> Any:
        # tqdm and rich ask for its descriptor and encoding, and do without.
        return getattr(self._stream, name)


class _Tqdm:
    def __init__(self, title: str) -> None:
        from tqdm.auto import tqdm  # in notebooks, this is theirs

        self._class: Any = tqdm
        self._title = title
        self._bar: Any = None

    def show(self, done: int, total: int | None) -> None:
        with self._releasing_lock():
            if self._bar is None:
                self._bar = self._class(
                    total=total,
                    desc=self._title,
                    mininterval=0,
                    dynamic_ncols=True,
                    file=_Stderr(),
                )
            self._bar.n = done
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            with self._releasing_lock():
                self._bar.close()

    @contextlib.contextmanager
    def _releasing_lock(self) -> Iterator[None]:
        """Release the lock of all bars if tqdm raises while it holds that: it does not itself."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # this thread does not hold it
                self._class.get_lock().release()
            raise


class _Rich:
    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            # With a stream that raises, rich would lead stdout nowhere and exit.
            console=Console(file=_Stderr()),  # type: ignore[arg-type]
            auto_refresh=False,
        )
        self._task = self._bars.add_task(title, total=None)

    def show(self, done: int, total: int | None) -> None:
        self._bars.start()
        self._bars.update(self._task, completed=done, total=total, refresh=True)

    def close(self) -> None:
        self._bars.stop()


class _Line:
    """On a terminal, a line that changes; elsewhere its last state only."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._text = ""
        self._stderr: Any = _Stderr()
        self._live = self._stderr.isatty()

    def show(self, done: int, total: int | None) -> None:
        self._text = f"{self._title}: {done}" + ("" if total is None else f" of {total}")
        if self._live:
            print(f"\r{self._text}", end="", file=self._stderr, flush=True)

    def close(self) -> None:
        print("\r" * self._live + self._text, file=self._stderr, flush=True)
