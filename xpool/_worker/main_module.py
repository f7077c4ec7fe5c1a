"""The worker's ``__main__``: it runs the caller's script when a name of the script is needed.

If a function of the caller's ``__main__`` is sent by reference, the worker's must have it.
`multiprocessing` runs the whole script again in every child.  xpool runs it when a name is looked
up, and only the parts that the name needs (`xpool._pickling.by_value.units`).  Both run it under
the name ``__mp_main__``, so that the code below ``if __name__ == "__main__"`` does not run.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import pickle
import sys
import threading
import types
import zlib
from collections.abc import Collection
from typing import Any

from xpool._pickling.by_value.main import TOP, missing, record_initial, settled
from xpool._python.import_hooks import is_initializing, when_imported
from xpool._python.interrupt import uninterrupted
from xpool._python.worker_local import process_is_shared

# The first call makes the types of `ast`, which takes a millisecond.  Done here, the server does it
# once for all workers.
compile("", "", "exec")

_turn = threading.RLock()
"""Held while the script runs in a process of several workers; the other workers wait."""


class _NoSuchName(AttributeError):
    """The parts of the script that a name needs have run, and have not bound the name."""


class _Main(types.ModuleType):
    """A ``__main__`` that runs the script when a name is missing."""

    def __getattr__(self, name: str) -> Any:
        if not process_is_shared():
            return self._run_for(name)
        with _turn:
            return self.__dict__[name] if name in self.__dict__ else self._run_for(name)

    # As an import: a task that was stopped would leave statements half done, and they would run
    # again.
    @uninterrupted
    def _run_for(self, name: str) -> Any:
        script: _Script | None = self.__dict__.get("_xpool_script")
        # Libraries look up dunder names in any module, so these do not run the script.
        if script is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"module '__main__' of the worker has no attribute {name!r}")
        left: _Script | None = script  # kept if it fails, so that the next task gets the same error
        # A signal handler of the program may raise after any call, so none stands between a change
        # and its end.
        try:
            # Removed while the script runs, so that its lookups in `__main__` do not run it again.
            self.__dict__["_xpool_script"] = None
            # `xpool._worker.context.imported_by_worker` reads this.
            self.__dict__["_xpool_running"] = True
            left = script.run(name, self.__dict__)
        finally:
            self.__dict__["_xpool_script"] = left
            self.__dict__["_xpool_running"] = False
        self.__dict__["_xpool_top"] = True  # `xpool._pickling.by_value.main.fill` reads this
        if name in self.__dict__:
            return self.__dict__[name]
        # The script has just made its own, which Python did not find before.
        own = self.__dict__.get("__getattr__")
        if own is not None:
            return own(name)
        raise _NoSuchName(f"module '__main__' of the worker has no attribute {name!r}")


_Unit = tuple[
    int, int, tuple[str, ...], tuple[int, ...], tuple[str, ...], tuple[str, ...], int,
    tuple[str, ...], tuple[str, ...], tuple[str, ...],
]  # fmt: skip
"""The fields of an `xpool._pickling.by_value.units.Unit`."""

# Kinds of units, copied from there: importing that module would take longer than the work here.
_BINDS, _ACTS, _COMPUTES, _WAITS = range(4)


class _Script:
    """The caller's script, and the parts of it that have not run here."""

    def __init__(self, where: tuple[str, ...], units: bytes | None) -> None:
        self._kind, self._place = where[:2]
        self._file = where[-1]  # the file with the text; the script itself may be on another host
        self._spec: Any = None  # the spec of a module that ``python -m`` runs, once it is found
        self._units = units
        self._lines: list[bytes] = []
        self._flags = 0
        self._todo: dict[int, _Unit] | None = None  # units that have not run, by number
        self._begun = False
        self._packages: tuple[str, ...] = ()  # packages of `LIBRARY` in `units` not yet imported
        self._shared: frozenset[str] = frozenset()  # names that are computed even if they are sent
        self.awaited: set[str] = set()  # modules after whose import units may run

    def run(self, name: str, namespace: dict[str, Any]) -> _Script | None:
        """Run the units that a name needs; return self if other units are left to run."""
        namespace["__name__"] = "__mp_main__"
        self._place_in(namespace)
        if self._todo is None and not self._take_apart():
            exec(self._code_of_all(), namespace)
            record_initial()
            return None
        assert self._todo is not None
        chosen = self._chosen(name, namespace)
        waiting = [n for n, unit in self._todo.items() if unit[6] == _WAITS and n not in chosen]
        for one in waiting:
            if self._is_due(one, chosen):
                chosen |= self._closed([one], namespace)
            else:
                # The imports of these units may bring the library for which the next unit waits.
                before = {n for n in chosen if n < one}
                self._execute(before, namespace)
                chosen -= before
        self._execute(chosen, namespace)
        while due := [n for n in waiting if n in self._todo and self._is_due(n, ())]:
            self._execute(self._closed(due, namespace), namespace)
        if waiting and not self.awaited:
            labels = {label for n in waiting if n in self._todo for label in self._todo[n][8]}
            # Add torch, which imports packages before it is complete.
            self.awaited = {"torch", *(m for label in labels for m in self._modules_of(label))}
            for module in self.awaited:
                when_imported(module, _run_what_waits)
        return self if self._todo else None

    def leaves_out(self, name: str) -> bool:
        """Whether statements that have not run here compute a name."""
        todo = self._todo or {}
        return any(name in unit[2] for unit in todo.values() if unit[6] == _COMPUTES)

    def _is_due(self, number: int, chosen: Collection[int]) -> bool:
        """Whether a unit's library has been imported, or the chosen units import it."""
        assert self._todo is not None
        awaited = self._todo[number][8]
        if any(label in self._todo[n][7] for n in chosen for label in awaited):
            return True
        return any(name in sys.modules for label in awaited for name in self._modules_of(label))

    def _modules_of(self, label: str) -> tuple[str, ...]:
        return self._packages if label == "library" else (label,)

    def _execute(self, chosen: set[int], namespace: dict[str, Any]) -> None:
        assert self._todo is not None
        if not chosen:
            return
        text = [b"\n"] * len(self._lines)  # each line keeps its number
        bound: list[str] = []
        for number in chosen:
            first, last, names = self._todo[number][:3]
            text[first - 1 : last] = self._lines[first - 1 : last]
            bound += names
        # Remove the caller's values while the units compute these names; restore them afterwards.
        here = settled.intersection(bound)
        come = {name: namespace.pop(name) for name in here if name in namespace}
        # Use the flags of the script's ``from __future__``, not those of this file.
        code = compile(b"".join(text), self._place, "exec", flags=self._flags, dont_inherit=True)
        try:
            exec(code, namespace)
        finally:
            namespace.update(come)
            # The program has other values for these names, which cannot be sent.
            for name in here & missing - come.keys():
                namespace.pop(name, None)
        record_initial(bound if self._begun else None)
        self._begun, self._shared = True, self._shared.difference(bound)
        for number in chosen:
            # Units that compute stay: a later name may need them again, with all that they need.
            if self._todo[number][6] != _COMPUTES:
                del self._todo[number]

    def _take_apart(self) -> bool:
        """Read the units of the script; return False if all of it must run at once."""
        if self._units is None:
            return False
        check, flags, units, packages, shared = pickle.loads(self._units)
        with io.open_code(self._file) as file:
            text = file.read()
        if zlib.crc32(text) != check:
            return False  # the file has changed since the program began
        # Split lines as the compiler counts them: the line numbers of units come from it.
        self._lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").splitlines(True)
        self._flags, self._todo, self._shared = flags, dict(enumerate(units)), frozenset(shared)
        self._packages = tuple(name for name in packages if name not in sys.modules)
        return True

    def _chosen(self, name: str, namespace: dict[str, Any]) -> set[int]:
        """Return the numbers of the units to run; for an unknown name, all but computations."""
        assert self._todo is not None
        todo = self._todo.items()
        # These units may act on the name's value, so they run with the first name.
        pending = [n for n, unit in todo if unit[6] == _ACTS]
        if name == TOP:
            return self._closed(pending, namespace)
        owners = [n for n, unit in todo if name in unit[2]]
        if any(unit[6] == _COMPUTES for n, unit in todo if n in owners):
            wanted = () if name in settled - self._shared else (name,)
            return self._closed(pending, namespace, wanted)
        pending += owners or [n for n, unit in todo if unit[6] == _BINDS]
        return self._closed(pending, namespace)

    def _closed(
        self, pending: list[int], namespace: dict[str, Any], wanted: tuple[str, ...] = ()
    ) -> set[int]:
        """Return these units and all that they need; existing values are not computed again."""
        todo, here = self._todo, settled
        assert todo is not None
        chosen, anew = set[int](), set[str]()
        pending, names = list(pending), list(wanted)
        while pending or names:
            if names:
                name = names.pop()
                if name not in anew and name not in namespace:
                    anew.add(name)
                    pending += [n for n, unit in todo.items() if name in unit[2]]
                continue
            number = pending.pop()
            if number not in todo or number in chosen:
                continue
            chosen.add(number)
            _, _, binds, needs, wants, reads, kind, _, _, again = todo[number]
            pending += needs
            names += wants
            # Add names that the function reads when called; a message brought the settled ones.
            if kind == _BINDS:
                names += [name for name in reads if name not in here]
            if kind == _COMPUTES:
                # Compute from the beginning, with all units that bind or change these names.
                for name in (*binds, *again):
                    if name not in anew:
                        anew.add(name)
                        pending += [n for n, unit in todo.items() if name in unit[2]]
        return chosen

    def _place_in(self, namespace: dict[str, Any]) -> None:
        """Set the module attributes that the script may read: its file, spec and package."""
        if self._kind == "name" and self._spec is None:
            import importlib.util

            # This imports the packages that contain the module.
            spec = importlib.util.find_spec(self._place)
            if spec is None or spec.loader is None or spec.origin is None:
                raise ImportError(
                    f"the worker does not find the program's main module, {self._place!r}"
                )
            self._spec, self._place = spec, spec.origin
            self._file = spec.origin
        if self._spec is not None:
            namespace.update(__spec__=self._spec, __package__=self._spec.parent)
        namespace["__file__"] = self._place

    def _code_of_all(self) -> Any:
        if self._spec is not None:  # the module may be in an archive
            return self._spec.loader.get_code(self._spec.name)
        with io.open_code(self._file) as file:
            # Not with this file's ``from __future__``.
            return compile(file.read(), self._place, "exec", dont_inherit=True)


def _run_what_waits(library: Any) -> None:
    main = sys.modules["__main__"]
    # None if the running script imported the library: then it runs the waiting units itself.
    script = main.__dict__.get("_xpool_script")
    if not isinstance(main, _Main) or script is None:
        return
    # If another module imports the library now, the units run after that module's import.
    others = (sys.modules.get(name) for name in script.awaited - {library.__name__})
    if not any(is_initializing(getattr(other, "__dict__", {})) for other in others):
        with contextlib.suppress(_NoSuchName):
            main._run_for(TOP)


def install(
    where: tuple[str, ...] | None, units: bytes | None = None, package: str | None = None
) -> None:
    """Install a fresh ``__main__``.

    ``where`` names the script: ("path", file), the same with the file of its text as a third item,
    or ("name", module).  If it is None, ``__main__`` stays empty, and the caller's definitions
    arrive by value.  ``units`` are the parts of a file that can run separately, from
    `xpool._pickling.by_value.main.units`.  ``package`` is the caller's ``__package__``.
    """
    module = _Main("__main__")
    module.__package__ = package
    module.__dict__["__builtins__"] = builtins  # as in every module; torch's C code reads it
    if where is not None:
        module.__dict__["_xpool_script"] = _Script(where, units)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
