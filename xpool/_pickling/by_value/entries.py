"""The format of a state: what `sent` writes and `received` reads."""

from __future__ import annotations

import itertools
import struct
from typing import Any

from xpool._memory.holds import Block
from xpool._pickling import Key
from xpool._pickling.by_value.origin import owner_of
from xpool._pickling.by_value.registered_calls import CALLS
from xpool._pickling.pickler import Pickled, write_group
from xpool._pickling.reducers import Group, Instead


class Kind:
    """The kinds of entries."""

    SETTINGS, IMPORTS, MODULE, FUNCTION, CLASS, VALUES, PLACED = range(7)
    REFUSED, LEFT_NONE, REMOVED, CALL, IMPORTED_AS, USED, DEFAULTS = range(7, 14)


Entry = tuple[Any, ...]
"""``(kind, serial, first, keys, data)``.  With ``first``, the program has not changed it since it
was first sent."""

HEAD = struct.Struct("<16sQQ??")
"""The sender, the serial number, the epoch, whether the state is exact, and whether it is a place.

States of one epoch have the same values, so a receiver sets each of them once in an epoch."""


serials = itertools.count(1)


class SentGroup:
    """A group of globals that share an object, with the data that workers were sent for it."""

    def __init__(self, keys: tuple[Key, ...], kind: int, data: Any) -> None:
        self.keys, self.kind, self.data = keys, kind, data
        self.serial = next(serials)
        self.first = True
        self.defined: dict[Key, Any] = {}
        self.leads = False  # whether the values use other globals

    def entry(self) -> Entry:
        data = self.data._about if self.kind == Kind.PLACED else self.data
        return self.kind, self.serial, self.first, self.keys, data


class State(bytes):
    """The pickled beginning of messages, with the globals that it brings."""

    by_name: bytes  # the same for a receiver without the extension code
    tokens: list[Block]  # blocks that the state names
    place: Any  # the broadcast, if the state is large
    brings: frozenset[Key]


def order(keys: tuple[Key, ...], leads: bool) -> tuple[Any, ...]:
    """Return the sort key of an entry of values; ``leads``: they use other globals."""
    # Attributes come after their owners, values that use others after these, and calls after all.
    # Plain attributes of classes come first, because code that loads a value may use them.
    dotted = ["." in path for _, path in keys]
    plain = all(dotted) and not leads and isinstance(owner_of(keys[0]), type)
    return keys[0][0] == CALLS, not plain, any(dotted), leads, keys


def write_values(
    keys: tuple[Key, ...],
    values: list[Any],
    named: dict[int, tuple[Any, ...]],
    maps: bool,
    out_of_band: bool,
) -> Pickled:
    """Pickle the values of a group: of one global its value, of several a list."""
    own = {id(value): key for key, value in zip(keys, values, strict=True)}
    group = Group(own, named, maps=maps)
    if len(values) == 1:
        return write_group(values[0], group, out_of_band)
    pairs = zip(keys, values)
    written = [
        Instead(early_attribute, (*key, value)) if "." in key[1] else value for key, value in pairs
    ]
    return write_group(written, group, out_of_band)


def early_attribute(module: str, path: str, value: Any) -> Any:
    """Set an attribute before the rest of its group has arrived: code that loads the rest may use
    it."""
    owner, name = owner_of((module, path)), path.rpartition(".")[2]
    if isinstance(owner, type) and vars(owner).get(name, owner) is None:
        type.__setattr__(owner, name, value)
    return value
