"""Pickles a lazy import of Python 3.15 (PEP 810) as the import statement that made it.

``lazy import torch`` binds an object, which Python replaces by the module when the global is first
used.  If it has not been used, the object is sent as a lazy import, and the worker imports the
module when a task uses it.
"""

from __future__ import annotations

import gc
import types
from typing import Any

_KIND: type = types.LazyImportType  # type: ignore[attr-defined]
_REPR = "<lazy_import '", "'>"


def lazy_import(module: str, name: str) -> Any:
    """Return the object of ``lazy import module``, or of ``lazy from module import name``."""
    statement = f"lazy from {module} import {name} as it" if name else f"lazy import {module}"
    namespace: dict[str, Any] = {}
    exec(statement, namespace)
    # The namespace is separate, because the first use of a global would do the import.
    return namespace["it" if name else module.partition(".")[0]]


def reduce(obj: Any) -> Any:
    # Only the repr contains the name of the module.  The object of `lazy from` refers to another
    # such object, that of the module.
    text = repr(obj)
    module, name = text[len(_REPR[0]) : -len(_REPR[1])], ""
    if any(type(part) is _KIND for part in gc.get_referents(obj)):
        module, _, name = module.rpartition(".")
    return lazy_import, (module, name)
