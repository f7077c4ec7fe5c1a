"""Lazy imports of Python 3.15 (PEP 810) travel as the import that they stand for.

``lazy import torch`` binds an object that becomes the module when a global of that name is first
used.  What has not been used stays so in the worker, which imports the module when a task uses it.
"""

from __future__ import annotations

import gc
import types
from typing import Any

from xpool._pickling.reducers import builder, register

__all__ = ["lazy_import"]

_KIND: type = types.LazyImportType  # type: ignore[attr-defined]
_REPR = "<lazy_import '", "'>"


@builder
def lazy_import(module: str, name: str) -> Any:
    """Return what ``lazy import module`` binds; with a name, ``lazy from module import name``."""
    statement = f"lazy from {module} import {name} as it" if name else f"lazy import {module}"
    namespace: dict[str, Any] = {}
    exec(statement, namespace)
    # Not by a name of this module's, at which the import would be done.
    return namespace["it" if name else module.partition(".")[0]]


@register(_KIND)
def _reduce_lazy_import(pickler: Any, obj: Any) -> Any:
    # The object tells what it stands for in its repr only; one that stands for an attribute of a
    # module refers to another, for the module.
    text = repr(obj)
    module, name = text[len(_REPR[0]) : -len(_REPR[1])], ""
    if any(type(part) is _KIND for part in gc.get_referents(obj)):
        module, _, name = module.rpartition(".")
    return lazy_import, (module, name)
