"""Each random generator gets a seed of its own, when the module that has it is there.

Workers that are forked from one process would all draw the same numbers.  And with `seed=` given,
all is derived from it, also in a module that a task imports only later.
"""

from __future__ import annotations

import random
from typing import Any

from xpool._python.import_hooks import when_imported

__all__ = ["Seeds"]

# Python 3.14 imports SHA-512 when it first hashes a seed: now, in the process that workers are
# forked from, and not in each worker.
random.Random(b"")


class Seeds:
    """Derives the seeds, and sows them as the modules come."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        random.seed(self._seed + b"random")
        for name in ("numpy.random", "torch"):
            when_imported(name, self.sow)

    def _number(self, name: str) -> int:
        # By way of SHA-512; `hashlib` would have a server load OpenSSL for it.
        return random.Random(self._seed + name.encode()).getrandbits(64)

    def sow(self, module: Any) -> None:
        """Seed the generator of a module that has just come."""
        number = self._number(module.__name__)
        if module.__name__ == "numpy.random":
            # numpy's legacy generator takes 32 bits.
            module.seed(number & 0xFFFF_FFFF)
            return
        number &= 0x7FFF_FFFF_FFFF_FFFF
        if module.version.cuda is None and module.version.hip is None:
            # Without a GPU to seed: the rest of `manual_seed` takes a fifth of a worker's start.
            module.default_generator.manual_seed(number)
        else:
            module.manual_seed(number)
