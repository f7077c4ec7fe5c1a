"""Packages that a script imports, sorted by what their import may change."""

from __future__ import annotations

import os
import sys

__all__ = [
    "LIBRARY",
    "SELF_CONTAINED",
    "is_installed",
    "is_silent",
    "library_of",
    "stands_on_torch",
]

# Those three print, open a browser, and change how the terminal is read.
_SILENT = (sys.stdlib_module_names - {"this", "antigravity", "readline"}) | {
    "numpy",
    "torch",
    "xpool",
}
"""Modules that change nothing when they are imported but what belongs to them."""

LIBRARY = "library"
"""Any installed package but numpy and those that use torch: one may change another's state."""

SELF_CONTAINED = {"pandas", "polars", "matplotlib", "seaborn", "plotly", "scipy", "sklearn", "PIL"}
"""Libraries whose functions, called by themselves, change settings of libraries alone."""

_OF_WORKERS = {"numpy", "torch", "xpool", "dill", "pytest"}
"""Packages that a worker may import without a task that uses them."""


def is_silent(module: str, folder: str) -> bool:
    """Whether importing a module changes nothing else; ``folder``: that of the script."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    # One of the program's own may hide the one meant.
    own = os.path.dirname(file) in (folder, os.path.join(folder, top))
    return top in _SILENT and (not own or top == "xpool")


def library_of(top: str) -> str | None:
    """Return the library of a package: "torch", "numpy", `LIBRARY`; None: it is not installed."""
    if stands_on_torch(top):
        return "torch"
    return top if top == "numpy" else LIBRARY if is_installed(top) else None


def is_installed(top: str) -> bool:
    """Whether a package that the program has imported is neither its own nor Python's."""
    if "." in top or top in _OF_WORKERS or top in sys.stdlib_module_names:
        return False
    return "-packages" in (getattr(sys.modules.get(top), "__file__", None) or "")


def stands_on_torch(top: str) -> bool:
    """Whether a package is torch, or an installed one that the program has, and that uses torch."""
    torch = sys.modules.get("torch")
    if top == "torch" or torch is None or top not in sys.modules:
        return top == "torch"
    if "-packages" not in (getattr(sys.modules[top], "__file__", None) or ""):
        return False
    return any(
        getattr(module, "__dict__", {}).get("torch") is torch  # not `getattr`, which may import
        for name, module in list(sys.modules.items())
        if name == top or name.startswith(top + ".")
    )
