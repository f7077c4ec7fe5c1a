"""Seeds the random generators of a worker, each when its module has been imported.

Without this, all workers forked from one process would draw the same numbers.  With `seed=`, all
seeds are derived from it, including those of modules that a task imports later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from xpool._pickling.by_value.standard import sow_own_generators
from xpool._python.import_hooks import when_imported

_MODULES = ("random", "numpy.random", "torch")


class Seeds:
    """Derives the seeds, and seeds each module when it is imported."""

    here: Seeds | None = None
    """The seeds of this worker."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        for name in _MODULES:
            when_imported(name, self.sow)
        Seeds.here = self

    def number(self, name: str) -> int:
        import random  # imported here because few tasks draw random numbers

        # `random` hashes the seed with SHA-512.  `hashlib` would make a server load OpenSSL.
        return random.Random(self._seed + name.encode()).getrandbits(64)

    def sow(self, module: Any) -> None:
        """Seed the generator of a module that has just been imported."""
        if module.__name__ == "random":
            module.seed(self._seed + b"random")
            return
        number = self.number(module.__name__)
        if module.__name__ == "numpy.random":
            # numpy's legacy generator takes 32 bits.
            module.seed(number & 0xFFFF_FFFF)
            return
        # Without a device to seed, `manual_seed` would take a fifth of a worker's start.
        owner = module.default_generator if _device_module(module) is None else module
        owner.manual_seed(number & 0x7FFF_FFFF_FFFF_FFFF)

    def sow_again(self) -> None:
        """Seed all generators again, after code that may have seeded them."""
        for module in _imported():
            self.sow(module)

    def keep(self, module: Any) -> Callable[[], None]:
        """Return a function that restores the generator of a module to its current state."""
        if module.__name__ == "random":
            drawn = module.getstate()
            return lambda: module.setstate(drawn)
        if module.__name__ == "numpy.random":
            state = module.get_state()
            return lambda: module.set_state(state)
        of_cpu = module.get_rng_state()
        device = _device_module(module)
        if not hasattr(device, "get_rng_state_all"):
            device = None
        of_device = device.get_rng_state_all() if device and device.is_initialized() else None

        def restore() -> None:
            module.set_rng_state(of_cpu)
            if of_device is not None:
                device.set_rng_state_all(of_device)
            elif device and device.is_initialized():  # the item was the first to use it
                device.manual_seed_all(self.number("torch.cuda") >> 1)

        return restore


@contextmanager
def seeded(seed: bytes) -> Iterator[None]:
    """Seed the generators by ``seed``, including those of modules imported in the block.

    Afterwards their states from before the block are restored.
    """
    seeds = Seeds.here
    assert seeds is not None
    own, there = seeds._seed, _imported()
    restores: list[Callable[[], object]] = [seeds.keep(module) for module in there]
    try:
        seeds._seed = seed
        for module in there:
            seeds.sow(module)
        restores += sow_own_generators(seeds.number)
        yield
    finally:
        seeds._seed = own
        for restore in restores:
            restore()
        for module in _imported():
            if module not in there:
                seeds.sow(module)


def _device_module(torch: Any) -> Any:
    """Return torch's module for its devices, such as `torch.cuda`; None: it has no devices."""
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        built = torch.version.cuda is not None or torch.version.hip is not None
        return torch.cuda if built else None
    device = torch.accelerator.current_accelerator()
    return None if device is None else getattr(torch, device.type, None)


def _imported() -> list[Any]:
    found = [sys.modules[name] for name in _MODULES if name in sys.modules]
    # Leave out modules that another thread is importing.
    return [module for module in found if not getattr(module.__spec__, "_initializing", False)]
