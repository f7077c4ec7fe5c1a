"""The progress of an epoch, and its form in `DataLoader.state_dict`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from xpool import pickle
from xpool.data._generators import decoded, encoded
from xpool.data._loader_worker import Base
from xpool.errors import OptionError

VERSION = 5


class EpochProgress:
    """The place in an epoch, counted by the batches that the program has taken.

    Attributes:
        seed, shared_seed: the seeds of the epoch, as in `EpochSpec`.
        turn: number of epochs, up to this one, whose seeds come from the same draw.
        had_workers: whether the loader that began the epoch had workers.  The sampler is then begun
            twice, as in torch.
        generators: the states of the generators when the epoch began.
        taken, beyond: the program has taken the batches before number ``taken``, and those with a
            number in ``beyond``.  ``in_order=False`` may leave a gap between the two.
        digest: the digest of the indices of the batches before ``taken``.
        drawn, sampler: a state of the sampler, and the number of batches before that state.
        parts: for each worker with its own part, the number of batches taken from the part.
        bases: the last state of each such part.
        ended: the parts that have ended.
        next_part: the part of the next batch.
    """

    def __init__(self, generators: dict[str, Any], parts: int) -> None:
        self.generators = generators
        self.seed, self.turn, self.had_workers = 0, 0, False
        self.shared_seed: int | None = None
        self.taken, self.digest = 0, 0
        self.beyond: set[int] = set()
        self.drawn = 0
        self.sampler: bytes | None = None
        self.parts = [0] * parts
        self.bases = [Base()] * parts
        self.ended: set[int] = set()
        self.next_part = 0
        self.yielded = 0
        self.is_over = False
        self.ask: Callable[[], bytes | None] | None = None  # without workers: returns the state

    def as_state(self) -> dict[str, Any]:
        self.learn()
        return {
            "epoch": {
                "seed": self.seed, "turn": self.turn, "had_workers": self.had_workers,
                "shared_seed": self.shared_seed, "taken": self.taken,
                "beyond": sorted(self.beyond), "digest": self.digest, "yielded": self.yielded,
            },
            "generators": encoded(self.generators),
            "sampler": {"drawn": self.drawn, "state": _opened(self.sampler)},
            "workers": [
                {"taken": taken, "ended": shard in self.ended, **_of_base(base)}
                for shard, (taken, base) in enumerate(zip(self.parts, self.bases))
            ],
            "next_worker": self.next_part,
        }  # fmt: skip

    def learn(self) -> None:
        """Without workers, read the dataset's present state."""
        state = None if self.ask is None else self.ask()
        if state is not None:
            taken = self.parts[0]
            self.bases = [Base(taken, state, taken if self.is_over or self.ended else None)]

    def left(self) -> list[Base]:
        """Return the states of the workers after this epoch.  The next epoch begins with them."""
        self.learn()
        return [Base(0, base.state, taken) for taken, base in zip(self.parts, self.bases)]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> EpochProgress:
        """Return the progress from which `as_state` made ``state``."""
        workers = state["workers"]
        progress = cls(decoded(state["generators"]), len(workers))
        for name, value in state["epoch"].items():
            setattr(progress, name, set(value) if name == "beyond" else value)
        progress.drawn = state["sampler"]["drawn"]
        progress.sampler = _closed(state["sampler"]["state"])
        progress.parts = [worker["taken"] for worker in workers]
        progress.bases = bases_of(state)
        progress.ended = {shard for shard, worker in enumerate(workers) if worker["ended"]}
        progress.next_part = state["next_worker"]
        return progress

    def share_among(self, parts: int) -> None:
        """Let this many workers go on with a dataset that has no state in its workers."""
        self.parts, self.bases, self.ended = [0] * parts, [Base()] * parts, set()
        self.next_part = self.taken % parts if parts else 0


def between(
    generators: dict[str, Any],
    seed: int | None,
    turn: int,
    sampler: bytes | None,
    bases: list[Base],
) -> dict[str, Any]:
    """Return the values of `DataLoader.state_dict` between two epochs."""
    return {
        "epoch": None,
        "next": {"seed": seed, "turn": turn},
        "generators": encoded(generators),
        "sampler": {"drawn": 0, "state": _opened(sampler)},
        "workers": [{"taken": 0, "ended": False, **_of_base(base)} for base in bases],
    }


def bases_of(state: Mapping[str, Any]) -> list[Base]:
    """Return the bases of the workers in a loader's state."""
    return [
        Base(worker["at"], _closed(worker["state"]), worker["end"]) for worker in state["workers"]
    ]


def _of_base(base: Base) -> dict[str, Any]:
    return {"at": base.place, "state": _opened(base.state), "end": base.end}


def facts(loader: Any) -> dict[str, Any]:
    """Return the values that must be equal in the loader that later loads the state."""
    try:
        length = len(loader.dataset)
    except (TypeError, NotImplementedError):
        length = None  # an iterable dataset without a length
    return {
        "version": VERSION, "num_workers": loader.num_workers, "batch_size": loader.batch_size,
        "length": length,
    }  # fmt: skip


def check_state(loader: Any, state: Any) -> None:
    """Raise `OptionError` if the state does not fit this loader."""
    if not isinstance(state, Mapping) or not {"version", "epoch", "generators"} <= set(state):
        raise OptionError(
            "load_state_dict takes what state_dict() of an xpool.data.DataLoader returned, not "
            f"{reprlib.repr(state)}"
        )
    why = ""
    for name, here in facts(loader).items():
        there = state.get(name)
        if there == here:
            continue
        if name == "num_workers":
            if not loader._has_state:
                continue
            why = _PARTS if loader._iterable else _STATES
        raise OptionError(
            f"load_state_dict: the state has {_NAMES[name]} {there!r}, but this loader has "
            f"{here!r}{why}; make the loader as it was when it returned the state"
        )


_NAMES = {
    "version": "the version",
    "num_workers": "num_workers =",
    "batch_size": "batch_size =",
    "length": "a dataset of length",
}

_PARTS = (
    ". Each worker iterates over its own part of an iterable dataset, and the state holds the "
    "place in each part. With another number of workers, there are other parts"
)

_STATES = (
    ". Each worker has its own copy of a dataset with a state_dict, and the states of the copies "
    "cannot be divided among other workers"
)


def _opened(state: bytes | None) -> Any:
    return None if state is None else pickle.loads(state)


def _closed(state: Any) -> bytes | None:
    return None if state is None else pickle.dumps(state)
