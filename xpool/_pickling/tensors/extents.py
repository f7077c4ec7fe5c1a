"""Finds objects of a message that share memory, by arithmetic on addresses.

A tensor or an array is a start, and a step and a length for each axis.  Two of them *alias* if some
byte belongs to elements of both.  Objects that alias, directly or through others, are sent as one
`Piece`, which is the range that covers them, and arrive as views of one piece of memory.  All other
objects are sent alone.

Aliases are known only when the whole message has been pickled.  So the first run of the pickler
sends every object alone and records it (`Seen`).  If objects alias, a second run pickles the
message with the known pieces.  Until then the objects are kept alive, so that no address is reused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from operator import itemgetter
from typing import Any

Extent = tuple[int, int, tuple[tuple[int, int], ...]]
"""The address of the first byte, the address after the last, and, if the elements have gaps, the
(step, length) of each axis in bytes and of the element itself, else ``()``."""

Entry = tuple[int, int, tuple[tuple[int, int], ...], Any]
"""An extent and its object."""

_WORTH_A_LOOK = 2  # ranges that are this many times larger than the elements are compared exactly
_MEMBERS = 200  # more objects than this are not compared with one another
_STEPS = 2_000  # limits numpy's search in one comparison


def extent(
    address: int, shape: Sequence[int], steps: Sequence[int], itemsize: int
) -> tuple[Extent, int]:
    """Return the extent of a tensor or array that is not empty, and the most bytes it can have.

    Args:
        address: the address of the first element.
        shape, steps: the length of each axis, and its step in bytes, which may be negative or 0.
        itemsize: the size of an element in bytes.
    """
    low = high = 0
    own = itemsize
    axes = []
    for length, step in zip(shape, steps, strict=True):
        if length > 1 and step:
            # Axes that repeat the same elements (step 0) add no bytes.
            own *= length
            axes.append((abs(step), length))
            if step > 0:
                high += (length - 1) * step
            else:
                low += (length - 1) * step
    high += itemsize
    span = high - low
    # If `span` is less than `own`, elements overlap, as in windows, and `span` is the better bound.
    if span <= own:
        return (address + low, address + high, ()), span
    axes.append((1, itemsize))
    return (address + low, address + high, tuple(axes)), own


class _Bytes:
    """The bytes of an extent, for `numpy.asarray`.  They are never read."""

    def __init__(self, one: Extent | Entry) -> None:
        start, stop, axes, *_ = one
        steps, lengths = zip(*(axes or ((1, stop - start),)), strict=True)
        place = {"data": (start, True), "shape": lengths, "strides": steps}
        self.__array_interface__ = {"version": 3, "typestr": "|u1", **place}


def alias(one: Extent | Entry, two: Extent | Entry) -> bool:
    """Whether some byte belongs to both.  True if numpy cannot find out, or is not installed."""
    if one[0] >= two[1] or two[0] >= one[1]:
        return False
    numpy = sys.modules.get("numpy")  # torch imports it
    if numpy is None:
        return True
    try:
        arrays = [numpy.asarray(_Bytes(part)) for part in (one, two)]
        return bool(numpy.shares_memory(*arrays, max_work=_STEPS))
    except RuntimeError:  # numpy's TooHardError
        return True


class Piece:
    """Memory that several objects of a message share: bytes ``start`` to ``stop``."""

    __slots__ = ("owners", "start", "stop")

    def __init__(self, members: list[Entry]) -> None:
        self.start = min(one[0] for one in members)
        self.stop = max(one[1] for one in members)
        self.owners = [one[3] for one in members]  # keeps the memory alive


class Seen(list[Entry]):
    """The objects of one run of a pickler and, in the second run, the pieces (``plan``)."""

    plan: dict[Extent, Piece] | None = None  # None in the first run
    maps: list[Any] | None = None  # the mappings of this process, read on demand by `mapped`
    # By address, the first object of the message that uses a shared storage.
    users: dict[int, Any] | None = None
    exports = False  # whether the second run exports memory of GPUs (`cuda`)

    def __init__(self) -> None:
        self.arrays: list[Any] = []  # numpy's arrays, whose addresses are slow to get

    @classmethod
    def of(cls, pickler: Any) -> Seen:
        if pickler.tensors is None:
            pickler.tensors = cls()
        return pickler.tensors  # type: ignore[no-any-return]

    @property
    def again(self) -> bool:
        """Whether a second run must pickle the message."""
        if self.plan is not None:
            return False
        if self.exports:
            return True
        return len(self) + len(self.arrays) >= 2 and bool(self._pieces())

    def merged(self) -> Seen:
        known = Seen()
        known.plan = self._pieces()
        return known

    def _pieces(self) -> dict[Extent, Piece]:
        entries = list(self)
        # Arrays that all own their memory do not alias.
        if self or any(array.base is not None for array in self.arrays):
            entries += ((*of_array(array)[1], array) for array in self.arrays)
        plan: dict[Extent, Piece] = {}
        for members in _groups(entries):
            piece = Piece(members)
            for start, stop, axes, _ in members:
                # The key is the extent, because the second run makes new objects for pickling.
                plan[start, stop, axes] = piece
        return plan


def of_array(array: Any) -> tuple[int, Extent, int]:
    """Return the address of the first element of an array that is not empty, and its `extent`."""
    address: int = array.__array_interface__["data"][0]
    return (address, *extent(address, array.shape, array.strides, array.itemsize))


def _groups(entries: list[Entry]) -> list[list[Entry]]:
    """Return the groups of objects that alias one another, directly or through others."""
    entries.sort(key=itemgetter(0))
    groups = []
    at = 0
    while at < len(entries):
        first, stop = at, entries[at][1]
        at += 1
        # The entries are sorted, so ranges that overlap are consecutive.
        while at < len(entries) and entries[at][0] < stop:
            stop = max(stop, entries[at][1])
            at += 1
        if at - first > 1:
            groups.extend(_split(entries[first:at], stop - entries[first][0]))
    return groups


def _split(members: list[Entry], span: int) -> list[list[Entry]]:
    """Divide objects with overlapping ranges into groups that alias.  They are compared exactly if
    more than half of the range is gaps, and otherwise form one group."""
    if len(members) > _MEMBERS or span <= _WORTH_A_LOOK * sum(map(_bytes, members)):
        return [members]
    groups: list[list[Entry]] = []
    for one in members:
        joined = [one]
        apart = []
        for group in groups:
            if any(alias(one, other) for other in group):
                joined += group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return [group for group in groups if len(group) > 1]


def _bytes(entry: Entry) -> int:
    start, stop, axes, _ = entry
    return prod(length for _, length in axes) if axes else stop - start
