"""Warns of globals whose comparison takes long, and of locks and shared tensors that are copied."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from xpool._pickling.by_value import main

_TOO_LONG = 1.0
"""If the checks of one global take more seconds in total, there is a warning."""


_seconds: dict[str, float] = {}  # the total time of the checks, by global


def took(name: str, nbytes: int, seconds: float) -> None:
    """Count the time of a check.  Warn once if the checks of this global have taken too long."""
    before = _seconds.get(name, 0.0)
    after = _seconds[name] = before + seconds
    if before < _TOO_LONG <= after:
        _warn(
            f"xpool compares the global {name!r} of __main__ ({nbytes:,} bytes pickled) at each "
            "call with the copy of the workers, since the program may have changed it in place. "
            f"The comparisons have taken {after:.1f} s. If it does not change, write "
            f"`{name.rpartition('.')[2]}: Final = ...` in the script, which ends them, or give it "
            "to the workers by `pool.broadcast` or an initializer."
        )


def keeps_lock(name: str) -> None:
    """Warn that a lock does not exclude two workers from each other.  Called once for each lock."""
    _warn(
        f"Each worker has its own copy of the lock {name!r} of __main__, so tasks of two workers "
        "can hold it at the same time. To prevent that, pass a multiprocessing.Lock in "
        "initargs=; if it is for the threads of one task, ignore this warning."
    )


def copies_shared(name: str, value: Any) -> None:
    """Warn if a global has tensors in shared memory, of which workers get copies."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, (torch.Tensor, torch.nn.Module)):
        return
    tensors = [value] if isinstance(value, torch.Tensor) else value.parameters()
    if any(one.is_shared() for one in tensors):
        _warn(
            f"Workers get a copy of the global {name!r} of __main__, also with "
            "is_copy_tensor=False. To share its tensors, pass it to the function as an argument, "
            "or to an initializer in initargs=."
        )


def _warn(text: str) -> None:
    """Warn, with the first caller outside of xpool as the place."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "xpool":
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def is_final(name: str) -> bool:
    """Whether the program declares a global or class attribute as ``NAME: Final = ...``."""
    owner, dot, attribute = name.rpartition(".")
    holder: Any = main.namespace().get(owner) if dot else sys.modules["__main__"]
    try:
        kind = _annotations(holder).get(attribute)
    except Exception:  # Python 3.14 evaluates them only now, and a name may be undefined
        return False
    if not isinstance(kind, str):
        kind = str(getattr(kind, "__origin__", kind))
    return kind.partition("[")[0].rpartition(".")[2] == "Final"


def _annotations(holder: Any) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib  # imported here, because few programs have a large global

        return annotationlib.get_annotations(holder, format=annotationlib.Format.STRING)
    found: dict[str, Any] = vars(holder).get("__annotations__", {})
    return found
