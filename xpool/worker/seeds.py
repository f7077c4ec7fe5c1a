"""Each random generator gets a seed of its own, when the module that has it is there.

Workers that are forked from one process would all draw the same numbers.  And with `seed=` given,
all is derived from it, also in a module that a task imports only later.
"""

from __future__ import annotations

import importlib.machinery
import random
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Seeds"]


class Seeds:
    """Derives the seeds, and finds the modules: also as the first finder of the import system."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._todo = {"numpy.random", "torch"}
        random.seed(self._number("random"))
        for name in list(self._todo):
            if name in sys.modules:
                self.sow(sys.modules[name])
        sys.meta_path.insert(0, self)

    def _number(self, name: str) -> int:
        # By way of SHA-512; `hashlib` would have a server load OpenSSL for it.
        return random.Random(self._seed + name.encode()).getrandbits(64)

    def sow(self, module: Any) -> None:
        """Seed the generator of a module that has just come."""
        self._todo.discard(module.__name__)
        number = self._number(module.__name__)
        if module.__name__ == "numpy.random":
            module.seed(number & 0xFFFF_FFFF)
            return
        number &= 0x7FFF_FFFF_FFFF_FFFF
        if module.version.cuda is None and module.version.hip is None:
            # Without a GPU to seed: the rest of `manual_seed` takes a fifth of a worker's start.
            module.default_generator.manual_seed(number)
        else:
            module.manual_seed(number)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system; leaves all but our modules to the next finder."""
        if name not in self._todo:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec, self)  # no `Loader`: importlib.abc imports much
            spec.loader = loader
        return spec


class _Loader:
    """Does what the module's own loader does, and sows; then leaves no trace of itself."""

    def __init__(self, spec: ModuleSpec, seeds: Seeds) -> None:
        assert spec.loader is not None
        self._own: Any = spec.loader
        self._spec = spec
        self._seeds = seeds

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._spec.loader = self._own
        self._own.exec_module(module)
        self._seeds.sow(module)
