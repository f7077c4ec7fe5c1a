"""What to do with a block of bytes that someone wants to send: a pure function of its size.

This is the seam for a transport of big blocks (shared memory): it would add a `Placement`
and decide here when to use it.  Nothing else in the package compares sizes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from xpool.errors import OptionError

__all__ = ["INLINE_BELOW", "Placement", "Policy", "check_copy_tensor", "placement"]

#: Bytes.  Below this, a copy in the message costs less than an entry in its table.
INLINE_BELOW = 64 * 1024


class Placement(enum.Enum):
    """Where the bytes of a buffer go."""

    INLINE = "in the pickle itself"
    OUT_OF_BAND = "beside the pickle, copied once, used in place by the receiver"


@dataclass(frozen=True)
class Policy:
    """How one message is to be laid out."""

    out_of_band: bool = True
    inline_below: int = INLINE_BELOW


def placement(nbytes: int, policy: Policy) -> Placement:
    """Say where a buffer of ``nbytes`` bytes (of an array or of a CPU tensor) goes."""
    if not policy.out_of_band or nbytes < policy.inline_below:
        return Placement.INLINE
    return Placement.OUT_OF_BAND


def check_copy_tensor(copy_tensor: bool) -> None:
    """Refuse what this version cannot do.

    Raises:
        OptionError: ``copy_tensor`` is false.
    """
    if not copy_tensor:
        raise OptionError(
            "copy_tensor=False asks for tensors to be shared with the receiver, which this "
            "version cannot do: it always copies. Leave copy_tensor out, or pass True."
        )
