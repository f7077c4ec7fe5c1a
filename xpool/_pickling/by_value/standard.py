"""Reducers of objects of the standard library that have none, although they could."""

from __future__ import annotations

from typing import Any

from xpool._pickling.by_value import registry
from xpool._pickling.by_value.origin import MISSING
from xpool._pickling.reducers import LAZY, Context, builder, register


def _lazy_struct() -> None:
    import struct

    @register(struct.Struct)
    def reduce(pickler: Context, obj: Any) -> Any:
        return struct.Struct, (obj.format,)


def _lazy_contextvars() -> None:
    import contextvars

    @register(contextvars.ContextVar)
    def reduce(pickler: Context, var: Any) -> Any:
        """Pickle a variable with its value in this context; in the receiver it is the same one."""
        if pickler.group is None:
            return NotImplemented
        default = contextvars.Context().run(var.get, MISSING)
        value = var.get(MISSING)
        given = () if default is MISSING else (default,)
        state = None if value is MISSING or value is default else (value,)
        return context_variable, (registry.token_of(var), var.name, given, state)


@builder
def context_variable(token: str, name: str, default: tuple[Any, ...], state: Any) -> Any:
    import contextvars

    options = {"default": default[0]} if default else {}
    var = registry.shell(token, lambda: contextvars.ContextVar(name, **options))
    if state is not None:
        var.set(state[0])
    return var


LAZY["_struct"] = _lazy_struct
LAZY["_contextvars"] = LAZY["contextvars"] = _lazy_contextvars
