"""Classifies packages by the effects that their import may have."""

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

# These three print, open a browser, and change how the terminal is read.
_SILENT = (sys.stdlib_module_names - {"this", "antigravity", "readline"}) | {
    "numpy",
    "torch",
    "xpool",
}
"""Modules whose import has no effects outside of themselves."""

LIBRARY = "library"
"""Any installed package except numpy and those that use torch; they may affect each other."""

SELF_CONTAINED = {"pandas", "polars", "matplotlib", "seaborn", "plotly", "scipy", "sklearn", "PIL"}
"""Libraries whose functions, called as statements, change only settings of libraries."""

_OF_WORKERS = {"numpy", "torch", "xpool", "dill", "pytest"}
"""Packages that a worker may import although no task uses them."""


def is_silent(module: str, folder: str) -> bool:
    """Whether importing a module has no other effects; ``folder``: that of the script."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    # A module of the program may have the same name.
    own = os.path.dirname(file) in (folder, os.path.join(folder, top))
    return top in _SILENT and (not own or top == "xpool")


def library_of(top: str) -> str | None:
    """Return the library of a package: "torch", "numpy" or `LIBRARY`; None: not installed."""
    if stands_on_torch(top):
        return "torch"
    return top if top == "numpy" else LIBRARY if is_installed(top) else None


def is_installed(top: str) -> bool:
    """Whether an imported package is neither the program's own nor Python's."""
    if "." in top or top in _OF_WORKERS or top in sys.stdlib_module_names:
        return False
    return "-packages" in (getattr(sys.modules.get(top), "__file__", None) or "")


def stands_on_torch(top: str) -> bool:
    """Whether a package is torch, or is imported and uses torch."""
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
