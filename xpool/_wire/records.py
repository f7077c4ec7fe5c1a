"""Packs and unpacks the log records and warnings that a worker sends to its parent.

A packet is JSON, so that unpacking it runs no code that the worker has chosen.  It has at most
`LARGEST` bytes, so that it fits into one packet of a socket.  Longer texts are cut, with a note.
The packet does not name its worker, because the parent knows it by the socket.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from xpool._python.failures import safe_repr

if TYPE_CHECKING:
    import logging

LOG, WARNING = "log", "warning"

LARGEST = 128 * 1024
"""The largest packet, in bytes.  Linux lets about 200 KiB wait in a socket
(net.core.wmem_default)."""

LONGEST = 32 * 1024
"""The longest text, in characters.  If a packet would be too large, its texts are cut further."""

MOST_ITEMS = 1000
"""The largest number of items in a container.  A hostile worker could send many items with equal
hashes, which would take long to unpack."""

_LARGEST_INT = 14_000  # in bits; these are 4,300 digits (see sys.set_int_max_str_digits)

_NONE = type(None)
_NUMBER = (int, float)
_TEXT = (str, _NONE)
# Handlers and formatters rely on these fields of every `logging.LogRecord`, and on their types.
_FIELDS: dict[str, tuple[type, ...]] = {
    "name": (str,), "msg": (str, dict), "levelname": (str,), "levelno": (int,), "pathname": (str,),
    "filename": (str,), "module": (str,), "lineno": (int,), "funcName": _TEXT, "created": _NUMBER,
    "msecs": _NUMBER, "relativeCreated": _NUMBER, "thread": (int, _NONE), "threadName": _TEXT,
    "processName": _TEXT, "process": (int, _NONE), "exc_text": _TEXT, "stack_info": _TEXT,
    "taskName": _TEXT,  # from Python 3.12 on
}  # fmt: skip
_HIGHEST_LEVEL = 2**16  # limited, because loggers keep an entry for each level that they see


def pack(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Return a packet of kind `LOG` or `WARNING`.  If it would be too large, its texts are cut."""
    most = LONGEST
    while most >= 64:
        data = _packed(kind, fields, most)
        if len(data) <= LARGEST:
            return data
        most //= 4
    # The record has thousands of extra fields, so leave these out; or its message has.
    left_out = [name for name in fields if name not in _FIELDS]
    rest = {name: value for name, value in fields.items() if name in _FIELDS}
    note = f" [xpool left out {len(left_out)} extra fields: they are too large]" if left_out else ""
    rest["msg"] = _cut(str(rest.get("msg")), 1024) + note
    return _packed(kind, rest, 1024)


def _packed(kind: str, fields: Mapping[str, Any], most: int) -> bytes:
    plain = {name: _plain(value, most) for name, value in fields.items() if type(name) is str}
    msg = fields.get("msg")
    if (
        type(msg) is dict and len(msg) <= MOST_ITEMS
    ):  # each value arrives, as plain data or as its repr
        pairs = [[_plain(key, most), _plain(one, most)] for key, one in msg.items()]
        plain["msg"] = {"dict": pairs}
    import json  # late: few workers log

    text: str = json.dumps([kind, plain], ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def unpack(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return the kind and the fields of a packet.

    Raises:
        ValueError: the data is not a packet of `pack`.
    """
    import json  # late: few programs get records

    try:
        kind, fields = json.loads(data.decode("utf-8", "surrogatepass"))
        if kind not in (LOG, WARNING):
            raise ValueError(f"it begins with {kind!r}")
        return kind, {name: _opened(value) for name, value in fields.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise ValueError(f"it is no log record or warning ({type(exc).__name__}: {exc})") from exc


def record_from(fields: dict[str, Any]) -> "logging.LogRecord":
    """Return a log record with these fields.

    Raises:
        ValueError: a field is missing, or has another type than in a log record.
    """
    import logging  # late: few programs log

    for name, types in _FIELDS.items():
        if type(fields.get(name)) not in types:
            raise ValueError(f"the field {name!r} of a log record is {type(fields.get(name))}")
    if not 0 <= fields["levelno"] < _HIGHEST_LEVEL:
        raise ValueError(f"the level of a log record is {fields['levelno']}")
    # A field with the name of a method would hide the method.
    extra = {name: x for name, x in fields.items() if not hasattr(logging.LogRecord, name)}
    return logging.makeLogRecord({**extra, "args": (), "exc_info": None})


# -- values ----------------------------------------------------------------------------------------


def _plain(value: Any, most: int) -> Any:
    """Return a JSON form of plain data, or the repr of any other value."""
    if type(value) is str:
        return _cut(value, most)
    try:
        return _as_json(value, _Room(most))
    except Exception:
        pass  # no plain data, or too long, or changed by another thread
    return _cut(safe_repr(value), most)


def _cut(text: str, most: int) -> str:
    """Return the text or, if it is too long, its beginning and its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... xpool cut {len(text) - 2 * half} characters ...] {text[-half:]}"


class _Room:
    """Counts how many characters a value may still take."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, n: int) -> None:
        self._left -= n
        if self._left < 0:
            raise ValueError("it is too long")


def _as_json(value: Any, room: _Room) -> Any:
    """Return the JSON form of plain data.  Raise an exception for any other value."""
    kind = type(value)
    room.take(4)
    if value is None or kind is bool:
        return value
    # `isinstance` also accepts subclasses such as an `IntEnum` or `numpy.float64`.
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, int):
        if value.bit_length() > _LARGEST_INT:
            raise ValueError("Python refuses to make a text of it")
        room.take(value.bit_length() // 3)
        return int.__pos__(value)
    if isinstance(value, str):
        room.take(len(value))
        return str.__str__(value)
    if kind is bytes:
        room.take(len(value))
        return {"bytes": value.decode("latin-1")}
    if kind is dict:
        pairs = ([_as_json(key, room), _as_json(one, room)] for key, one in value.items())
        return {"dict": _few(pairs)}
    if kind in _CONTAINERS:
        items = _few(_as_json(one, room) for one in value)
        return items if kind is list else {kind.__name__: items}
    raise TypeError(f"{kind} is no plain data")


def _few(items: Iterable[Any]) -> list[Any]:
    found = list(items)
    if len(found) > MOST_ITEMS:
        raise ValueError("it has too many items")
    return found


def _opened(value: Any) -> Any:
    """Undo `_as_json`."""
    if type(value) is list:
        return _few(map(_opened, value))
    if type(value) is dict:
        ((kind, items),) = value.items()
        return _OPENERS[kind](items)
    return value


def _open_container(kind: type, items: Any) -> Any:
    return kind(_few(map(_opened, items)))


_CONTAINERS = list, tuple, set, frozenset
_OPENERS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda text: text.encode("latin-1"),
    "dict": lambda pairs: dict(_few((_opened(key), _opened(one)) for key, one in pairs)),
    **{kind.__name__: functools.partial(_open_container, kind) for kind in _CONTAINERS[1:]},
}
