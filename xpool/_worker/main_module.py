"""The worker's own ``__main__``: the caller's script, run when something of it is needed.

A function of the caller's ``__main__`` that travels by reference must be found in the worker's.
`multiprocessing` runs the whole script again in every child, needed or not.  Here it is run when
a name of it is looked up, as far as that needs (`xpool._pickling.by_value.units`), under the name
``__mp_main__`` as there, so that the part behind ``if __name__ == "__main__"`` is left out.
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

from xpool._pickling.by_value.main import TOP, note_born, settled
from xpool._python.import_hooks import when_imported
from xpool._python.worker_local import process_is_shared

__all__ = ["install"]

# The first call makes the types of `ast`, a millisecond: here, in the server, instead of in each
# worker.
compile("", "", "exec")

_turn = threading.RLock()
"""Held while the script is run in a process of several workers: the others wait for its names."""


class _NoSuchName(AttributeError):
    """The script was run as far as a name needs, and does not bind it."""


class _Main(types.ModuleType):
    """A ``__main__`` that fills itself at the first name it does not have."""

    def __getattr__(self, name: str) -> Any:
        if not process_is_shared():
            return self._run_for(name)
        with _turn:
            return self.__dict__[name] if name in self.__dict__ else self._run_for(name)

    def _run_for(self, name: str) -> Any:
        # Taken out while it runs: what the script asks of its own `__main__` does not run it again.
        script: _Script | None = self.__dict__.pop("_xpool_script", None)
        # Libraries ask any module for such names: they do not have the script run.
        if script is None or (name.startswith("__") and name.endswith("__")):
            if script is not None:
                self.__dict__["_xpool_script"] = script
            raise AttributeError(f"module '__main__' of the worker has no attribute {name!r}")
        # For `xpool._worker.context.imported_by_worker`.
        self.__dict__["_xpool_running"] = True
        left: _Script | None = script  # if it fails, the next task gets the same, true reason
        try:
            left = script.run(name, self.__dict__)
        finally:
            if left is not None:
                self.__dict__["_xpool_script"] = left
            self.__dict__["_xpool_running"] = False
        self.__dict__["_xpool_top"] = True  # for `xpool._pickling.by_value.main.fill`
        if name in self.__dict__:
            return self.__dict__[name]
        raise _NoSuchName(f"module '__main__' of the worker has no attribute {name!r}")


_Unit = tuple[
    int, int, tuple[str, ...], tuple[int, ...], tuple[str, ...], tuple[str, ...], int,
    tuple[str, ...], tuple[str, ...],
]  # fmt: skip
"""The fields of an `xpool._pickling.by_value.units.Unit`."""

# Kinds of units, as there: to import that would take longer than all that is done here.
_BINDS, _ACTS, _COMPUTES, _WAITS = range(4)


class _Script:
    """The caller's script, and what of it has been run here."""

    def __init__(self, where: tuple[str, ...], units: bytes | None) -> None:
        self._kind, self._place = where[:2]
        self._file = where[-1]  # the text of a file that may be another host's
        self._spec: Any = None  # of a module that ``python -m`` runs, once it was found here
        self._units = units
        self._lines: list[bytes] = []
        self._flags = 0
        self._todo: dict[int, _Unit] | None = None  # what has not been run, by number
        self._begun = False
        self._packages: tuple[str, ...] = ()  # of `LIBRARY` in `units`, not imported here before
        self._listens = False

    def run(self, name: str, namespace: dict[str, Any]) -> _Script | None:
        """Run what a name needs; return this if something is left to run."""
        namespace["__name__"] = "__mp_main__"
        self._place_in(namespace)
        if self._todo is None and not self._take_apart():
            exec(self._code_of_all(), namespace)
            note_born()
            return None
        assert self._todo is not None
        chosen = self._chosen(name, namespace)
        waiting = [n for n, unit in self._todo.items() if unit[6] == _WAITS and n not in chosen]
        for one in waiting:
            if self._is_due(one, chosen):
                chosen |= self._closed([one], namespace)
            else:
                # What these import may bring the library that the next one waits for.
                before = {n for n in chosen if n < one}
                self._execute(before, namespace)
                chosen -= before
        self._execute(chosen, namespace)
        while due := [n for n in waiting if n in self._todo and self._is_due(n, ())]:
            self._execute(self._closed(due, namespace), namespace)
        if not self._listens:
            self._listens = True
            awaited = {label for n in waiting if n in self._todo for label in self._todo[n][8]}
            for label in awaited:
                for package in self._modules_of(label):
                    when_imported(package, _run_what_waits)
        return self if self._todo else None

    def leaves_out(self, name: str) -> bool:
        """Whether a name is computed by statements that were not run here."""
        todo = self._todo or {}
        return any(name in unit[2] for unit in todo.values() if unit[6] == _COMPUTES)

    def _is_due(self, number: int, chosen: Collection[int]) -> bool:
        """Whether a library that a unit waits for is here, or is imported by the chosen units."""
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
        text = [b"\n"] * len(self._lines)  # so that each line keeps its number
        bound: list[str] = []
        for number in chosen:
            first, last, names = self._todo[number][:3]
            text[first - 1 : last] = self._lines[first - 1 : last]
            bound += names
        # The caller's values are put aside, for what is computed anew, and come back.
        here = settled().intersection(bound)
        come = {name: namespace.pop(name) for name in here if name in namespace}
        # With the flags of the script's own ``from __future__``, not of this file's.
        code = compile(b"".join(text), self._place, "exec", flags=self._flags, dont_inherit=True)
        try:
            exec(code, namespace)
        finally:
            namespace.update(come)
        note_born(bound if self._begun else None)
        self._begun = True
        for number in chosen:
            # Of what computes, any part may be wanted again, with all that makes it.
            if self._todo[number][6] != _COMPUTES:
                del self._todo[number]

    def _take_apart(self) -> bool:
        """Read what can be run by parts; False: all of it is to be run."""
        if self._units is None:
            return False
        check, flags, units, packages = pickle.loads(self._units)
        with io.open_code(self._file) as file:
            text = file.read()
        if zlib.crc32(text) != check:
            return False  # it was changed after the program had begun
        # Lines as the compiler counts them, which has given the units their numbers.
        self._lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").splitlines(True)
        self._flags, self._todo = flags, dict(enumerate(units))
        self._packages = tuple(name for name in packages if name not in sys.modules)
        return True

    def _chosen(self, name: str, namespace: dict[str, Any]) -> set[int]:
        """Numbers of the units to run: of an unknown name, all that are left but computations."""
        assert self._todo is not None
        todo = self._todo.items()
        # These may act on what the name binds, so they come with the first name.
        pending = [n for n, unit in todo if unit[6] == _ACTS]
        if name == TOP:
            return self._closed(pending, namespace)
        owners = [n for n, unit in todo if name in unit[2]]
        if any(unit[6] == _COMPUTES for n, unit in todo if n in owners):
            wanted = () if name in settled() else (name,)
            return self._closed(pending, namespace, wanted)
        pending += owners or [n for n, unit in todo if unit[6] == _BINDS]
        return self._closed(pending, namespace)

    def _closed(
        self, pending: list[int], namespace: dict[str, Any], wanted: tuple[str, ...] = ()
    ) -> set[int]:
        """These units and all that they need; values that are there are not computed."""
        todo, here = self._todo, settled()
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
            _, _, binds, needs, wants, reads, kind, _, _ = todo[number]
            pending += needs
            names += wants
            # What a function reads when it is called: a message with it has brought the values.
            if kind == _BINDS:
                names += [name for name in reads if name not in here]
            if kind == _COMPUTES:
                # From the beginning, with whatever else makes what this binds or changes.
                for name in binds:
                    if name not in anew:
                        anew.add(name)
                        pending += [n for n, unit in todo.items() if name in unit[2]]
        return chosen

    def _place_in(self, namespace: dict[str, Any]) -> None:
        """Set what the text may ask of the module that it is in."""
        if self._kind == "name" and self._spec is None:
            import importlib.util

            # Imports the packages that the module is in.
            spec = importlib.util.find_spec(self._place)
            if spec is None or spec.loader is None or spec.origin is None:
                raise ImportError(
                    f"the program's main module {self._place!r} is not found in the worker"
                )
            self._spec, self._place = spec, spec.origin
            self._file = spec.origin
        if self._spec is not None:
            namespace.update(__spec__=self._spec, __package__=self._spec.parent)
        namespace["__file__"] = self._place

    def _code_of_all(self) -> Any:
        if self._spec is not None:  # its text may be in an archive
            return self._spec.loader.get_code(self._spec.name)
        with io.open_code(self._file) as file:
            return compile(file.read(), self._place, "exec")


def _run_what_waits(library: Any) -> None:
    main = sys.modules["__main__"]
    # Not while the script is run, which has imported it: it goes on with what waits itself.
    if isinstance(main, _Main) and "_xpool_script" in main.__dict__:
        with contextlib.suppress(_NoSuchName):
            main._run_for(TOP)


def install(
    where: tuple[str, ...] | None, units: bytes | None = None, package: str | None = None
) -> None:
    """Put a fresh ``__main__`` in place.

    ``where`` is ("path", file), the same and where its text is, or ("name", module) to run for its
    names; or None: then it stays empty, and what the caller defines in its own arrives by value.
    ``units``: what of a file can be left out, as `xpool._pickling.by_value.main.units` says.
    ``package``: the caller's ``__package__``.
    """
    module = _Main("__main__")
    module.__package__ = package
    module.__dict__["__builtins__"] = builtins  # as in every module; torch's C code looks for it
    if where is not None:
        module.__dict__["_xpool_script"] = _Script(where, units)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
