"""A lazy import of Python 3.15 (PEP 810) is sent as the import statement that it stands for.

``lazy import torch`` binds an object, which Python replaces by the module when the global is first
used.  An object that has not been used is sent as a lazy import again: the worker imports the
module when a task uses it.
"""

from __future__ import annotations

import gc
import types
from typing import Any

from xpool._pickling.reducers import builder

_KIND: type = types.LazyImportType  # type: ignore[attr-defined]
_REPR = "<lazy_import '", "'>"


@builder
def lazy_import(module: str, name: str) -> Any:
    """Return the object of ``lazy import module``, or of ``lazy from module import name``."""
    statement = f"lazy from {module} import {name} as it" if name else f"lazy import {module}"
    namespace: dict[str, Any] = {}
    exec(statement, namespace)
    # Not by a global of this module, whose first use would do the import.
    return namespace["it" if name else module.partition(".")[0]]


def reduce(obj: Any) -> Any:
    """Reduce the object that a lazy import binds."""
    # Only its repr says which import it stands for.  The object of `lazy from` refers to another
    # such object, which stands for the module.
    text = repr(obj)
    module, name = text[len(_REPR[0]) : -len(_REPR[1])], ""
    if any(type(part) is _KIND for part in gc.get_referents(obj)):
        module, _, name = module.rpartition(".")
    return lazy_import, (module, name)
