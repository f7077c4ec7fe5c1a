"""Shows how many items of a job are done, for ``progress=``.

The thread that receives answers counts the items.  Ten times a second, another thread shows the
count with tqdm, else with rich, else as a line on stderr, or calls the caller's function with it.

The job does not depend on the display: stderr may be closed, or a pipe without a reader, and the
display may raise any error.

Below a bar on a terminal, the thread draws the bars of the pool's tasks, one line for each worker.
Between two writes, the cursor is in the line of the pool's bar, so that workers can insert lines
there (`xpool._worker.task_output`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from xpool._python.at_fork import renew
from xpool._python.starting import PromptThread, print_error
from xpool._python.waiters import Flag

INTERVAL = 0.1
"""Seconds between two updates."""

LAST_LOOK = 5.0
"""How many seconds a finished job waits until the bar shows its last state.  The terminal may be
blocked, or the program may hold tqdm's lock.  For a callable, the job waits until it returns."""


class Display:
    """Shows progress.  Only one thread calls it.

    ``show(done, total)`` shows that so many items are done.  None: the total is not known.
    """

    show: Callable[[int, int | None], object]

    def close(self) -> None:
        """End the display."""

    def lines_below(self) -> int:
        """Return how many lines of the display are below the cursor."""
        return 0


class Progress:
    """Counts the done items of one job, and shows the count in a thread.

    ``how`` is the value of ``progress=``, and ``title`` is the title if ``how`` is True.  A task
    has ``size`` items, but the last may have fewer.  ``drawn()`` returns the number of drawn items.
    """

    def __init__(
        self, how: Any, title: str, total: int | None, size: int, drawn: Callable[[], int]
    ) -> None:
        self._is_bar = not callable(how)
        self._display = _display(title if how is True else how) if self._is_bar else _Calls(how)
        self._total, self._size, self._drawn = total, size, drawn
        self._tasks = 0  # number of answered tasks; guarded by the pool's lock
        self._over = Flag()
        self._shown = Flag()  # set when the last state has been shown
        self._stderr = _Stderr()
        self._rows = 0  # number of bars of tasks on the terminal
        # The thread keeps neither the job nor the pool alive.
        self._thread = PromptThread(target=self._run, name="xpool-progress", daemon=True)

    def begin(self, engine: Any = None) -> bool:
        """Show the progress; return whether tasks of ``engine`` write to the same terminal."""
        beside = engine is not None and self._on_terminal
        try:
            if beside and hasattr(engine, "bars"):  # bars of workers on other hosts are not shown
                _task_bars[self] = engine.bars
            self._thread.start()
        except RuntimeError:  # the system cannot start a thread
            _task_bars.pop(self, None)
            self._shown.set()
            print_error(self._thread)
        return beside

    @property
    def _on_terminal(self) -> bool:
        """Whether the display is a bar on a terminal, where workers may print, too."""
        return self._is_bar and _is_terminal(sys.stderr)

    def add(self, tasks: int) -> None:
        self._tasks += tasks

    def end(self) -> None:
        self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until the last state is shown.  `end` was called, or another thread will call it."""
        # In a forked child, the thread is not alive.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._shown.wait(LAST_LOOK if self._is_bar else None)

    def _run(self) -> None:
        try:
            # The display must close before the waiting threads wake.
            with contextlib.closing(self._display):
                shown = -1
                try:
                    while not self._over.wait(INTERVAL):
                        each = dict.fromkeys(list(_task_bars.values()))
                        self._draw([bar for bars in each for bar in bars()])
                        shown = self._show(shown)
                finally:
                    self._draw([])
                self._show(shown)
        finally:
            _task_bars.pop(self, None)
            self._shown.set()

    def _draw(self, bars: list[str]) -> None:
        """Draw the bars of tasks below the display."""
        if not (bars or self._rows):
            return
        below = self._display.lines_below()
        columns, lines = _size(self._stderr)
        rows = [_cut(bar, columns - 1) for bar in bars[: max(0, lines - 2 - below)]]
        self._rows = len(rows)
        # A line feed at the bottom of the terminal scrolls, which a movement of the cursor does
        # not.  One write, so that no worker writes in between.  First, erase what C code of a task
        # may have left of an earlier bar in this line.
        text = "\x1b[K" + "\n" * (below + 1) + "\r" + "\x1b[K\r\n".join(rows) + "\x1b[J"
        self._stderr.write(f"{text}\r\x1b[{below + max(len(rows), 1)}A")
        self._stderr.flush()

    def _show(self, shown: int) -> int:
        done = min(self._tasks * self._size, self._drawn())
        if done != shown or self._on_terminal:  # on a terminal, workers may have written over it
            self._display.show(done, self._total)
        return done


_task_bars: dict[Progress, Callable[[], list[str]]] = {}
"""For each display on a terminal, what returns the bars of the tasks of its pool.  Each display
draws the bars of all, since all are on one terminal."""

renew(globals(), _task_bars=dict)  # the displays belong to the parent


@atexit.register
def await_displays() -> None:
    """Wait until the displays of jobs that have ended have removed the bars of tasks, since the
    program may write to the terminal next."""
    for one in list(_task_bars):
        if one.is_over:
            one.wait()


class _Calls(Display):
    def __init__(self, call: Callable[[int, int | None], object]) -> None:
        self.show = call


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


def _size(stream: Any) -> tuple[int, int]:
    """Return how many columns and lines a terminal has."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except Exception:  # the stream is an object of the program
        columns = lines = 0
    return columns or 80, lines or 24


def _cut(text: str, columns: int) -> str:
    """Return the beginning of a text that takes at most so many columns of a terminal."""
    import unicodedata  # late: most programs draw no bar

    shown = ""
    for one in filter(str.isprintable, text):
        if not unicodedata.combining(one):
            columns -= 2 if unicodedata.east_asian_width(one) in "WF" else 1
        if columns < 0:
            break
        shown += one
    return shown


class _Stderr:
    """The program's stderr, but writing to it never raises an error."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def write(self, text: str) -> int:
        # The program may have replaced stderr by an object that raises any error.
        with contextlib.suppress(Exception):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.flush()

    def isatty(self) -> bool:
        return _is_terminal(self._stream)

    def __getattr__(self, name: str) -> Any:
        # tqdm and rich use the descriptor and the encoding, if they exist.
        return getattr(self._stream, name)


class _Tqdm(Display):
    def __init__(self, title: str) -> None:
        with warnings.catch_warnings():
            # tqdm warns in a notebook without ipywidgets, but its line of text is enough there.
            warnings.filterwarnings("ignore", "IProgress not found")
            from tqdm.auto import tqdm  # chooses tqdm's bar for notebooks in a notebook

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

    def lines_below(self) -> int:
        # Bars of tqdm, also those of the program, have a line each.
        bars = list(getattr(self._class, "_instances", ()))
        return max((abs(getattr(one, "pos", 0)) for one in bars), default=0)

    def close(self) -> None:
        if self._bar is not None:
            with self._releasing_lock():
                self._bar.close()

    @contextlib.contextmanager
    def _releasing_lock(self) -> Iterator[None]:
        """If tqdm raises while it holds the lock of all bars, release it, because tqdm does not."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # `release` raises if this thread has no lock
                self._class.get_lock().release()
            raise


class _Rich(Display):
    def __init__(self, title: str) -> None:
        from rich import console, progress

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            # If a write to its stream fails, rich redirects stdout to /dev/null and exits.
            console=console.Console(file=_Stderr()),  # type: ignore[arg-type]
            auto_refresh=False,
        )
        self._task = self._bars.add_task(title, total=None)

    def show(self, done: int, total: int | None) -> None:
        self._bars.start()
        self._bars.update(self._task, completed=done, total=total, refresh=True)

    def close(self) -> None:
        self._bars.stop()


class _Line(Display):
    """A line that is updated on a terminal.  Elsewhere only its last state is written."""

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
