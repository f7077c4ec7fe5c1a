"""Text streams that write whole lines, for a stream with several writers."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from xpool._worker.worker_context import current_worker


class Lines:
    """A text stream that adds a prefix to each line, and writes whole lines in one piece."""

    def __init__(self, stream: Any, before: Callable[[], str]) -> None:
        self.stream, self.before = stream, before
        # By thread, so that the lines of two threads do not mix: the beginning of an incomplete
        # line, and the threads whose current line has been written in part.
        self._begun: dict[int, str] = {}
        self._continues: set[int] = set()

    @classmethod
    def prefixed(cls, stream: Any) -> Any:
        """Return a stream that puts ``[worker i]`` before each line."""
        return None if stream is None else cls(stream, _name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
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
