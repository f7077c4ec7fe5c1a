"""Pickles of one small tensor or array, written without a pickler.

Such messages are what many pools see most, and starting a pickler costs more than writing the
few opcodes that it would write: a function, a buffer, what else the function takes.  It is an
ordinary pickle; any unpickler reads it.

Between processes of one program the function goes by its number in `copyreg`'s table of
extensions: looking up a name is a third of the receiver's work.  What `dumps` returns may be
read where nothing has imported this package, so there the function goes by name.
"""

from __future__ import annotations

import copyreg
import pickle
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = ["SHORT", "Head", "tail"]

SHORT: dict[type, Callable[[Any, bool], bytes | None]] = {}
"""By type: pickles an object, by number if the second argument is true; None if it is not such
an easy one, or not small."""

_NUMBERS = 0x78706F00  # of the extensions; copyreg's small ones are for others to use

_FUNCTIONS = (
    ("xpool._pickling.tensors.dense", "_tensor"),
    ("xpool._pickling.tensors.arrays", "_array"),
)

# Known before these modules are: a number is all that some messages have of them.
for _number, (_module, _name) in enumerate(_FUNCTIONS, _NUMBERS):
    copyreg.add_extension(_module, f"extension{_name}", _number)


class Head:
    """The opcodes before the length of the buffer, for one of our functions."""

    __slots__ = ("by_name", "by_number")

    def __init__(self, function: Callable[..., Any]) -> None:
        module, name = function.__module__, function.__name__
        # Opcodes of Lib/pickle.py: PROTO 5, the two names, STACK_GLOBAL, BYTEARRAY8.
        self.by_name = b"\x80\x05" + _text(module) + _text(name) + b"\x93\x96"
        # Under a second name: so picklers that meet the function still write the first.
        setattr(sys.modules[module], f"extension{name}", function)
        number = _NUMBERS + _FUNCTIONS.index((module, name))
        # PROTO 5, EXT4 in the place of the names, BYTEARRAY8.
        self.by_number = b"\x80\x05\x84" + struct.pack("<I", number) + b"\x96"

    def __call__(self, size: int, by_number: bool) -> bytes:
        """Return all that stands before the ``size`` bytes of the buffer."""
        return (self.by_number if by_number else self.by_name) + _length(size)


_length = struct.Struct("<Q").pack


@lru_cache(4096)
def tail(*args: Any) -> bytes:
    """Return the opcodes after the buffer: one or two more (hashable) arguments, and the call."""
    # A pickle of protocol 2 begins with PROTO, two bytes, and ends with STOP.
    body = b"".join(pickle.dumps(one, 2)[2:-1] for one in args)  # without begin and end
    # TUPLE2 or TUPLE3, the buffer included, REDUCE and STOP.
    return body + (b"\x86R." if len(args) == 1 else b"\x87R.")


def _text(text: str) -> bytes:
    # SHORT_BINUNICODE, for at most 255 bytes.
    return b"\x8c" + bytes([len(text)]) + text.encode()
