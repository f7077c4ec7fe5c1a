"""Reads, sets and seeds the random generators from which an epoch draws."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_DEPTH = 8  # how many nested samplers are searched for generators


class Generators:
    """The program's global generators, and those that a loader and its samplers own."""

    def __init__(self, loader: Any) -> None:
        found = [loader.generator]
        self._own: list[torch.Generator] = []
        sampler = loader._index_sampler
        for _ in range(_DEPTH):
            found.append(getattr(sampler, "generator", None))
            sampler = getattr(sampler, "sampler", None)
        for generator in found:
            if isinstance(generator, torch.Generator) and generator not in self._own:
                self._own.append(generator)

    def states(self) -> dict[str, Any]:
        """Return the state of each generator, for `as_in` and `encoded`."""
        return {**states_of_all(), "own": [own.get_state() for own in self._own]}

    @contextmanager
    def restored(self) -> Iterator[None]:
        states = self.states()
        try:
            yield
        finally:
            self._set(states)

    @contextmanager
    def as_in(self, states: dict[str, Any] | None) -> Iterator[None]:
        """Set the generators to ``states`` for the block; None: do not set them.

        After the block, the generators of the loader and its samplers keep their new states,
        because later epochs draw from them.  The program's generators are restored.  If they had
        exactly ``states`` before, they are not restored: a resumed program then goes on with the
        same numbers as the first one.
        """
        if states is None:
            yield
            return
        before = states_of_all()
        self._set(states)
        try:
            yield
        finally:
            if not all(_equal(state, states.get(name)) for name, state in before.items()):
                _set_all(before)

    def _set(self, states: dict[str, Any]) -> None:
        _set_all(states)
        for own, state in zip(self._own, states["own"]):
            own.set_state(state)


def encoded(states: dict[str, Any]) -> dict[str, Any]:
    """Return states as numbers and names, which can be written as JSON."""
    own = [state.tolist() for state in states["own"]]
    return {**states, "torch": states["torch"].tolist(), "own": own}


def decoded(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the states from which `encoded` made ``plain``.  JSON has turned tuples into lists."""
    states = {name: _as_tuple(state) for name, state in plain.items()}
    own = [torch.tensor(state, dtype=torch.uint8) for state in plain["own"]]
    return {**states, "torch": torch.tensor(plain["torch"], dtype=torch.uint8), "own": own}


def _as_tuple(state: Any) -> Any:
    return tuple(map(_as_tuple, state)) if isinstance(state, (list, tuple)) else state


def seed_all(seed: int, numpy_seed: Any = None, but: Iterable[str] = ()) -> None:
    """Seed the global generators, except those named in ``but``."""
    if "random" not in but:
        random.seed(seed)
    if "torch" not in but:
        _seed_torch(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" not in but:
        # numpy's global generator accepts only seeds of 32 bits.
        numpy.random.seed(seed % 2**32 if numpy_seed is None else numpy_seed)


def _seed_torch(seed: int) -> None:
    # `torch.manual_seed` is used only if a device has started: it takes 0.1 ms otherwise.
    torch.default_generator.manual_seed(seed)
    devices = (getattr(torch, kind, None) for kind in ("cuda", "xpu", "mtia"))
    if any(device is not None and device.is_initialized() for device in devices):
        torch.manual_seed(seed)


def states_of_all() -> dict[str, Any]:
    """Return the states of the global generators, by the names of their modules."""
    states = {"torch": torch.get_rng_state(), "random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, tuple(keys.tolist()), *rest)
    return states


def changed(before: dict[str, Any]) -> list[str]:
    """Return the names of the global generators whose states differ from these."""
    now = states_of_all()
    return [name for name, state in before.items() if not _equal(state, now[name])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)


def _set_all(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
