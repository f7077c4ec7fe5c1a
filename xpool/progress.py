"""`progress=`: how far a job is, for people.

What has been done is counted where answers arrive, a message at a time.  A thread looks at the
count ten times a second and shows it: by tqdm, else by rich, else as a line on stderr; or it calls
the caller's function.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from xpool.waiters import Flag, Waiters

__all__ = ["Progress"]

INTERVAL = 0.1
"""Seconds between two looks."""


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
        self._display = _Calls(how) if callable(how) else _display(title if how is True else how)
        self._total, self._size, self._drawn = total, size, drawn
        self._tasks = 0  # answered ones; changed by one thread at a time, under the pool's lock
        self._over = Flag()
        self._waiters = Waiters()  # those who wait for the last of it to be shown
        # It does not hold the job, nor so the pool, which may be dropped meanwhile.
        self._thread = threading.Thread(target=self._run, name="xpool-progress", daemon=True)

    @property
    def on_terminal(self) -> bool:
        """Whether a bar stands on a terminal, where workers may print as well."""
        bar = not isinstance(self._display, _Calls)
        return bar and sys.stderr is not None and sys.stderr.isatty()

    def begin(self) -> None:
        """Start to show it.

        Raises:
            RuntimeError: the system has no thread for it.
        """
        self._thread.start()

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
            self._waiters.wait(lambda: not self._thread.is_alive() or self._shown_all, None)

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
    if importlib.util.find_spec("tqdm") is not None:
        return _Tqdm(title)
    if importlib.util.find_spec("rich") is not None:
        return _Rich(title)
    return _Line(title)


class _Tqdm:
    def __init__(self, title: str) -> None:
        from tqdm.auto import tqdm  # in notebooks, this is theirs

        self._make: Callable[..., Any] = tqdm
        self._title = title
        self._bar: Any = None

    def show(self, done: int, total: int | None) -> None:
        if self._bar is None:
            self._bar = self._make(total=total, desc=self._title, mininterval=0, dynamic_ncols=True)
        self._bar.n = done
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


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
            console=Console(stderr=True),
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
        self._live = sys.stderr is not None and sys.stderr.isatty()

    def show(self, done: int, total: int | None) -> None:
        self._text = f"{self._title}: {done}" + ("" if total is None else f" of {total}")
        if self._live:
            print(f"\r{self._text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if sys.stderr is not None:
            print("\r" * self._live + self._text, file=sys.stderr, flush=True)
