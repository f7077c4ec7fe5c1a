"""`progress=`: shows how many items of a job are done.

The items are counted where answers arrive, once for each message.  A thread reads the count ten
times a second and shows it: by tqdm, else by rich, else as a line on stderr; or it calls the
caller's function.

The job does not depend on the display: stderr may be closed, or a pipe that nobody reads, and the
display may raise anything.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from xpool._python.waiters import Flag

INTERVAL = 0.1
"""Seconds between two updates."""

LAST_LOOK = 5.0
"""Seconds for which a finished job waits for the last state of a bar: the terminal may be blocked,
or the program may hold tqdm's lock.  For a callable, the job waits until it has returned."""


class Display(Protocol):
    """Shows progress.  Called by one thread."""

    def show(self, done: int, total: int | None) -> None:
        """Show that ``done`` of ``total`` items are done; None: the total is not known."""

    def close(self) -> None:
        """End the display."""


class Progress:
    """Counts the done items of one job, and shows the count in a thread.

    ``title`` is that for ``how=True``.  A task has ``size`` items; the last may have fewer.
    ``drawn()`` returns the number of items that have been drawn.
    """

    def __init__(
        self, how: Any, title: str, total: int | None, size: int, drawn: Callable[[], int]
    ) -> None:
        self._is_bar = not callable(how)
        self._display = _display(title if how is True else how) if self._is_bar else _Calls(how)
        self._total, self._size, self._drawn = total, size, drawn
        self._tasks = 0  # number of answered tasks; guarded by the pool's lock
        self._over = Flag()
        self._shown = Flag()  # the last state
        # The thread holds neither the job nor the pool, which may be dropped.
        self._thread = threading.Thread(target=self._run, name="xpool-progress", daemon=True)

    @property
    def on_terminal(self) -> bool:
        """Whether it is a bar on a terminal, where workers may print as well."""
        return self._is_bar and _is_terminal(sys.stderr)

    def begin(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # the system refuses a thread
            self._shown.set()
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))

    def add(self, tasks: int) -> None:
        self._tasks += tasks

    def end(self) -> None:
        self._over.set()

    def wait(self) -> None:
        """Wait until the last state is shown; `end` was called or will be."""
        # In a forked child the thread does not live.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._shown.wait(LAST_LOOK if self._is_bar else None)

    def _run(self) -> None:
        try:
            # The display closes before the waiting threads are woken.
            with contextlib.closing(self._display):
                shown = -1
                while not self._over.wait(INTERVAL):
                    shown = self._show(shown)
                # The last state, which was reached after the last update.
                self._show(shown)
        finally:
            self._shown.set()

    def _show(self, shown: int) -> int:
        # The last task may have fewer items than the others.
        done = min(self._tasks * self._size, self._drawn())
        if done != shown or self.on_terminal:  # on a terminal, workers may have printed over it
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
            continue  # the package is installed incompletely
    return _Line(title)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except Exception:  # the stream is closed, None, or an object of the program
        return False


class _Stderr:
    """The program's stderr without errors: it may be closed, or a pipe without a reader."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def write(self, text: str) -> int:
        # Any error: the program may have replaced stderr by any object.
        with contextlib.suppress(Exception):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.flush()

    def isatty(self) -> bool:
        return _is_terminal(self._stream)

    def __getattr__(self, name: str) -> Any:
        # tqdm and rich use its descriptor and encoding if it has them.
        return getattr(self._stream, name)


class _Tqdm:
    def __init__(self, title: str) -> None:
        with warnings.catch_warnings():
            # Of a notebook without ipywidgets: tqdm's line of text is as good there.
            warnings.filterwarnings("ignore", "IProgress not found")
            from tqdm.auto import tqdm  # in notebooks, tqdm's bar for notebooks

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
        """Release the lock of all bars if tqdm raises while it holds it; tqdm would keep it."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # raised if this thread does not hold the lock
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
            # If a write to its stream fails, rich redirects stdout to /dev/null and exits.
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
    """A line that changes on a terminal; elsewhere, its last state only."""

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
