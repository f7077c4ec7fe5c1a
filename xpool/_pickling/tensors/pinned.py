"""Copies between a GPU and the memory of the machine, through pinned memory, in turns.

A GPU reaches pinned memory by itself, at the speed of its bus.  Blocks of the arena are not pinned,
and cannot be: their pages go back to the system (`Arena.trim`, in whatever process), and a
registration with CUDA would go on writing to the pages that were there before.  So what travels
goes through two parts of pinned memory: while the GPU fills or reads one, this process empties or
fills the other, straight from or into the block.
"""

from __future__ import annotations

import sys
from itertools import cycle
from typing import Any

__all__ = ["Stage", "download", "upload"]

PART = 4 << 20
"""Bytes of a part: at these a copy's start costs little, and two cost a process little memory."""


class Stage:
    """Two parts of pinned memory, each with the event of the copy that used it last.

    All memory is given as flat tensors of bytes.
    """

    def __init__(self, parts: list[tuple[Any, Any]]) -> None:
        self._parts = parts

    def download(self, source: Any, target: Any) -> None:
        """Copy from the GPU; it has been done when this returns."""
        behind = None
        for (pinned, event), there, here in self._turns(source, target):
            part = pinned[: len(there)]
            part.copy_(there, non_blocking=True)
            event.record()
            # While the GPU fills this part, the one before it is emptied.
            if behind is not None:
                _land(*behind)
            behind = event, part, here
        if behind is not None:
            _land(*behind)

    def upload(self, source: Any, target: Any) -> None:
        """Copy to the GPU; it has been done when this returns."""
        for (pinned, event), here, there in self._turns(source, target):
            event.synchronize()  # it has read what lay here before
            part = pinned[: len(here)]
            part.copy_(here)
            there.copy_(part, non_blocking=True)
            event.record()
        # An event that was not recorded counts as past.
        for _, event in self._parts:
            event.synchronize()

    def _turns(self, source: Any, target: Any) -> Any:
        return zip(cycle(self._parts), source.split(PART), target.split(PART))


def _land(event: Any, part: Any, target: Any) -> None:
    event.synchronize()
    target.copy_(part)


# Those not in use, by number of the GPU: an event is one device's.  `pop` and `append` are atomic.
_at_rest: dict[int, list[Stage]] = {}


def download(source: Any, target: Any) -> None:
    """Copy bytes from a GPU into memory of the machine, both as flat tensors."""
    _with_stage(Stage.download, source.device.index, source, target)


def upload(source: Any, target: Any) -> None:
    """Copy bytes from memory of the machine to a GPU, both as flat tensors."""
    _with_stage(Stage.upload, target.device.index, source, target)


def _with_stage(copy: Any, gpu: int, source: Any, target: Any) -> None:
    torch = sys.modules["torch"]
    resting = _at_rest.setdefault(gpu, [])
    # Copies and events go to this GPU's current stream, whatever the caller's GPU is.
    with torch.cuda.device(gpu):
        try:
            stage = resting.pop()
        except IndexError:
            stage = _make(torch)
        copy(stage, source, target)
    resting.append(stage)  # not after an error: its events may be of any state


def _make(torch: Any) -> Stage:
    pinned = (torch.empty(PART, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    return Stage([(part, torch.cuda.Event()) for part in pinned])
