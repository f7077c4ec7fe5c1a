"""Pickles one small tensor or array without a pickler.

In many pools most messages are of this kind, and preparing a pickler takes longer than writing a
few opcodes: a function, a buffer, and the function's other arguments.  The result is an ordinary
pickle, which any unpickler can load.

In messages between processes of one program, a number in `copyreg`'s table of extensions replaces
the function's name, because looking up a name would be a third of the receiver's work.  A pickle of
`dumps` contains the name, because the process that loads it may not have imported this package.
"""

from __future__ import annotations

import copyreg
import pickle
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

SHORT: dict[type, Callable[[Any, bool], bytes | None]] = {}
"""The functions that pickle objects, by type.  If the second argument is true, the pickle contains
a number and not a name.  They return None for an object that is large or has more than elements."""

_NUMBERS = 0x78706F00  # the first number in `copyreg`'s table; other programs use small numbers

_FUNCTIONS = (
    ("xpool._pickling.tensors.dense", "_tensor"),
    ("xpool._pickling.tensors.arrays", "_array"),
)

# A message with such a number imports the module, so the module need not be imported before.
for _number, (_module, _name) in enumerate(_FUNCTIONS, _NUMBERS):
    copyreg.add_extension(_module, f"extension{_name}", _number)


class Head:
    """The opcodes that precede the length of the buffer, for one of these functions."""

    __slots__ = ("by_name", "by_number")

    def __init__(self, function: Callable[..., Any]) -> None:
        module, name = function.__module__, function.__name__
        # The opcodes (Lib/pickle.py) are PROTO 5, the two names, STACK_GLOBAL and BYTEARRAY8.
        self.by_name = b"\x80\x05" + _text(module) + _text(name) + b"\x93\x96"
        # The extension has a second name, so that other picklers still write the first one.
        setattr(sys.modules[module], f"extension{name}", function)
        number = _NUMBERS + _FUNCTIONS.index((module, name))
        # The opcodes are PROTO 5, EXT4 and BYTEARRAY8.
        self.by_number = b"\x80\x05\x84" + struct.pack("<I", number) + b"\x96"

    def __call__(self, size: int, by_number: bool) -> bytes:
        """Return the opcodes that precede the ``size`` bytes of the buffer."""
        return (self.by_number if by_number else self.by_name) + _length(size)


_length = struct.Struct("<Q").pack


@lru_cache(4096)
def tail(*args: Any) -> bytes:
    """Return the opcodes after the buffer: one or two more (hashable) arguments, and the call."""
    # A pickle of protocol 2 begins with two bytes (PROTO) and ends with one (STOP).
    body = b"".join(pickle.dumps(one, 2)[2:-1] for one in args)
    # TUPLE2 or TUPLE3 (the tuple contains the buffer), REDUCE and STOP.
    return body + (b"\x86R." if len(args) == 1 else b"\x87R.")


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()  # SHORT_BINUNICODE: at most 255 bytes
