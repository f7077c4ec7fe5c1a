"""The table of statements of which scripts are made (`scripts_generator.py`).

The texts have a line for each thing, and lines of the script between them::

    = kind: name        a statement begins
    ? expression        a probe, of the item ``x``
    > line              a change that may follow; "| line" continues it
    %names a b %once    fields of `Statement`
    %inside, %file p    the lines below are of the main part, or of this file
    %after expression   several are joined by "and"

``~`` is the statement's number; ``@`` in a link is the object of another statement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from differential import (
    statements_of_code,
    statements_of_data,
    statements_of_programs,
    statements_of_things,
)

__all__ = ["LINKS", "MODES", "STATEMENTS", "Statement"]

MODES = ("script", "module", "stdin", "bare", "runpy")
"""Ways to run a script.  `bare` is one without a guard."""


@dataclass(frozen=True)
class Statement:
    """Lines of a script, and what workers are asked about them.  ``~`` is the statement's number.

    ``top``: lines of the script; leading imports go to its beginning.  ``inside``: lines of its
    main part.  ``probes``: expressions of the item ``x``.  ``changes``: lines that may follow at
    ``places``.  ``names``: the globals that they bind.  ``gives``: an object that a link may use.
    ``after``: an expression that is true in the program at the end.  ``unsent``: why a worker may
    refuse it by name.  ``differs``: why a worker may differ, which the documentation says.
    """

    name: str
    top: str = ""
    probes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    names: str = ""
    gives: str = ""
    inside: str = ""
    after: str = ""
    files: dict[str, str] = field(default_factory=dict)
    once: bool = False
    places: tuple[str, ...] = ("top", "guard", "between")
    modes: tuple[str, ...] = MODES
    unsent: str = ""
    differs: str = ""

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]


def _read(name: str, lines: list[str]) -> Statement:
    """Return the statement that has these lines of the table."""
    top: list[str] = []
    inside: list[str] = []
    files: dict[str, list[str]] = {}
    probes, changes, block = [], [], top
    fields: dict[str, Any] = {}
    for line in lines:
        if line.startswith("? "):
            probes.append(line[2:])
        elif line.startswith("> "):
            changes.append(line[2:])
        elif line.startswith("| "):
            changes[-1] += "\n" + line[2:]
        elif line == "%inside":
            block = inside
        elif line.startswith("%file "):
            block = files.setdefault(line[6:], [])
        elif line.startswith("%"):
            for one in line[1:].split(" %"):
                key, _, value = one.partition(" ")
                if key == "after" and key in fields:
                    value = f"{fields[key]} and {value}"
                listed = key in ("places", "modes")
                fields[key] = tuple(value.split()) if listed else value or True
        else:
            block.append(line)
    texts = {path: "".join(f"{one}\n" for one in text) for path, text in files.items()}
    where = {"inside": "\n".join(inside), "files": texts, **fields}
    return Statement(name, "\n".join(top), tuple(probes), tuple(changes), **where)


_TABLE = "".join(
    part.TEXT
    for part in (
        statements_of_data, statements_of_code, statements_of_things, statements_of_programs
    )
)  # fmt: skip
_FOUND = re.findall(r"^= (.*)\n((?:(?!= ).*\n)*)", _TABLE, re.MULTILINE)
_ALL = [_read(name, rest.rstrip("\n").split("\n")) for name, rest in _FOUND]

STATEMENTS = {one.name: one for one in _ALL if one.kind != "link"}
LINKS = {one.name: one for one in _ALL if one.kind == "link"}
"""Statements that use the object of another, ``@``."""
