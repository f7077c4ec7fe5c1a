"""What a worker is told about the statements of a script; `units` finds it out."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Unit", "Units"]


class Unit(NamedTuple):
    """Whole lines of a script, which are run together."""

    first: int  # lines, from 1 on, the last included
    last: int
    names: tuple[str, ...]  # that it binds
    needs: tuple[int, ...]  # the units that bind what it uses
    always: bool  # it may do more than bind names


class Units(NamedTuple):
    """What a worker is told about a script; it has the script's text itself."""

    check: int  # CRC-32 of the file: of another text nothing is known
    flags: int  # of the compiler: those of its ``from __future__ import``
    units: tuple[Unit, ...]
