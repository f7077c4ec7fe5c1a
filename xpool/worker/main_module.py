"""The worker's own ``__main__``: the caller's script, run when something of it is needed.

A function of the caller's ``__main__`` that travels by reference must be found in the worker's.
`multiprocessing` runs the whole script again in every child, needed or not.  Here it is run when
the first name of it is looked up, under the name ``__mp_main__`` as there, so that the part behind
``if __name__ == "__main__"`` is left out.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import multiprocessing
import sys
import threading
import types
from types import FrameType
from typing import Any

from xpool.pickle.main import is_replica, note_born
from xpool.worker_local import process_is_shared

__all__ = ["imported_by_worker", "install"]

_turn = threading.RLock()
"""Held while the script is run in a process of several workers: the others wait for its names."""


class _Main(types.ModuleType):
    """A ``__main__`` that fills itself at the first name it does not have."""

    def __getattr__(self, name: str) -> Any:
        if not process_is_shared():
            return self._run_for(name)
        with _turn:
            return self.__dict__[name] if name in self.__dict__ else self._run_for(name)

    def _run_for(self, name: str) -> Any:
        where = self.__dict__.pop("_xpool_where", None)
        if where is None or (name.startswith("__") and name.endswith("__")):
            if where is not None:
                self.__dict__["_xpool_where"] = where
            raise AttributeError(f"module '__main__' of the worker has no attribute {name!r}")
        self.__dict__["_xpool_running"] = True
        try:
            _run(where, self.__dict__)
            note_born()
        except BaseException:
            self.__dict__["_xpool_where"] = where  # the next task gets the same, true reason
            raise
        finally:
            self.__dict__["_xpool_running"] = False
        return getattr(self, name)


def _run(where: tuple[str, str], namespace: dict[str, Any]) -> None:
    kind, place = where
    if kind == "path":
        with io.open_code(place) as file:
            code: Any = compile(file.read(), place, "exec")
        namespace["__file__"] = place
    else:
        spec = importlib.util.find_spec(place)
        loader: Any = spec.loader if spec is not None else None
        code = loader.get_code(place) if loader is not None else None
        if spec is None or code is None:
            raise ImportError(f"the program's main module {place!r} is not found in the worker")
        namespace.update(__file__=spec.origin, __spec__=spec, __package__=spec.parent)
    namespace["__name__"] = "__mp_main__"
    exec(code, namespace)


def install(where: tuple[str, str] | None) -> None:
    """Put a fresh ``__main__`` in place.

    ``where`` is ("path", file) or ("name", module) to run for its names, or None: then it stays
    empty, and what the caller defines in its own arrives by value.
    """
    module = _Main("__main__")
    module.__dict__["__builtins__"] = builtins  # as in every module; torch's C code looks for it
    if where is not None:
        module.__dict__["_xpool_where"] = where
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def imported_by_worker() -> str | None:
    """Say what this thread is importing if this process is a worker; None: it imports nothing.

    That is the caller's script, run for its names, or any other module that a task needs.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return "the program's main module"  # in a child of multiprocessing that just begins
    if not is_replica():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            facts = frame.f_globals
            if facts.get("_xpool_running"):
                return "the program's main module"
            if getattr(facts.get("__spec__"), "_initializing", False):
                return f"module {facts.get('__name__')}"
        frame = frame.f_back
    return None
