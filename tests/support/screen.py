"""A small terminal: a program runs on it, and a test reads its lines."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

from support.limits import WAIT

ROOT = Path(__file__).resolve().parents[2]

_PIECE = re.compile(r"\x1b\[(?P<args>[0-?]*)(?P<final>[@-~])|(?P<one>[^\x1b])", re.DOTALL)


class Screen:
    """Lines of text and a cursor.  Lines that have scrolled out are kept, above the others."""

    def __init__(self, columns: int = 60, height: int = 10) -> None:
        self.columns, self.height = columns, height
        self._gone: list[str] = []
        self._rows = [""] * height
        self._x = self._y = 0
        self._rest = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    @property
    def lines(self) -> list[str]:
        """All lines down to the last one that is not blank."""
        return "\n".join(line.rstrip() for line in self._gone + self._rows).rstrip().split("\n")

    def feed(self, data: bytes) -> None:
        """Show these bytes.  Raises `ValueError` for a sequence that is not known here."""
        text, at = self._rest + self._decode(data), 0
        while (piece := _PIECE.match(text, at)) is not None:
            at = piece.end()
            if piece["one"]:
                self._put(piece["one"])
            else:
                self._control(piece["args"], piece["final"])
        self._rest = text[at:]
        if len(self._rest) > 20:
            raise ValueError(f"unknown to this terminal: {self._rest!r}")

    def _put(self, one: str) -> None:
        if one == "\r":
            self._x = 0
        elif one == "\n":
            if self._y == self.height - 1:
                self._gone.append(self._rows.pop(0))
                self._rows.append("")
            else:
                self._y += 1
        else:
            # A wide character is kept with a zero-width space, which takes its second column.
            wide = unicodedata.east_asian_width(one) in "WF"
            if self._x + 1 + wide > self.columns:
                self._put("\r")
                self._put("\n")
            row = self._rows[self._y].ljust(self._x)
            cells = one + "\u200b" * wide
            self._rows[self._y] = row[: self._x] + cells + row[self._x + len(cells) :]
            self._x += len(cells)

    def _control(self, args: str, final: str) -> None:
        n = int(args) if args.isdigit() else 0
        row, x, y = self._rows[self._y], self._x, self._y
        if final == "A":
            self._y = max(0, y - (n or 1))
        elif final == "K" and n in (0, 2):
            self._rows[y] = row[:x] if n == 0 else ""
        elif final == "J" and n == 0:
            self._rows[y:] = [row[:x]] + [""] * (self.height - y - 1)
        elif final == "L":
            self._rows.insert(y, "")
            del self._rows[self.height :]
        elif final != "m" and (args, final) not in (("?25", "l"), ("?25", "h")):
            raise ValueError(f"unknown to this terminal: {args!r} {final!r}")


class OnTerminal:
    """A Python script that runs on a terminal; use it in a `with` block, which kills it."""

    def __init__(self, script: Path, *args: str, columns: int = 60, height: int = 10) -> None:
        self.screen = Screen(columns, height)
        self.seen = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", height, columns, 0, 0))
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TERM": "xterm"}
        for name in ("COLUMNS", "LINES"):  # libraries believe them more than the terminal
            env.pop(name, None)
        with open(slave, "rb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *args],
                stdin=file, stdout=file, stderr=file, env=env, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    def until(self, fact: Callable[[list[str]], object]) -> list[str]:
        """Return the first lines of the screen for which ``fact`` is true."""
        end = time.monotonic() + WAIT
        while not fact(self.screen.lines):
            if time.monotonic() > end or not self._read(end - time.monotonic()):
                raise AssertionError(f"it never showed this: {self.screen.lines}")
        return self.screen.lines

    def end(self) -> list[str]:
        """Return the lines of the screen after the program's end."""
        while self._read(WAIT):
            pass
        self.process.wait()
        return self.screen.lines

    def _read(self, seconds: float) -> bool:
        """Show some output; False: it has ended."""
        if not select.select([self._master], [], [], max(0.0, seconds))[0]:
            raise AssertionError(f"it shows nothing more: {self.screen.lines}")
        try:
            data = os.read(self._master, 65536)
        except OSError:  # all its ends are closed
            return False
        self.seen += data
        self.screen.feed(data)
        return True
