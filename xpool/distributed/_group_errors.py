"""The errors of worlds and groups, under `XPoolError`.

::

    GroupError         also RuntimeError   the group or world cannot be used in this way
    |-- NotAMember                         the process is not a member of the group
    |-- PeerLost       also xpool.PeerLost a process has died or left; the message names it
    `-- GroupTimeout   also TimeoutError   the others took longer than the timeout
    GroupKeyError      also KeyError       no such service or value, or its name is taken

`torch.distributed` raises the classes in the middle column, and programs written for
`machin.parallel` catch them.  A wrong value of an argument raises `OptionError`.  Most errors of
torch itself are plain `RuntimeError`: the functions here distinguish them by their texts.
"""

from __future__ import annotations

from torch.distributed import DistNetworkError

from xpool import errors
from xpool.errors import TimeoutError, XPoolError


class GroupError(XPoolError, RuntimeError):
    """The group or the world was destroyed, or does not allow this call."""


class NotAMember(GroupError):
    """The calling or the called process is not a member of the group."""


class PeerLost(GroupError, errors.PeerLost):
    """A process that this call needs has died or left the world."""


class GroupTimeout(GroupError, TimeoutError):
    """Other processes did not answer, or did not make the same call, within the timeout."""


class GroupKeyError(XPoolError, KeyError):
    """The group has no service or value of this name, or the name is taken."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show its repr


for _one in (GroupError, NotAMember, PeerLost, GroupTimeout, GroupKeyError):
    _one.__module__ = "xpool.distributed"  # the public name, in pickles and tracebacks


def connection_lost(exc: BaseException) -> bool:
    """Whether a connection to another process has ended.

    The texts of gloo and TensorPipe contain the path of a source file in a folder ``transport``.
    A store at a TCP address raises `DistNetworkError`.
    """
    network = isinstance(exc, DistNetworkError) and not timed_out(exc)
    return network or "transport" in str(exc) or "tensorpipe" in str(exc)


def timed_out(exc: BaseException) -> bool:
    # The first letter is left out: torch writes "Timed out" and "timed out".
    text = str(exc)
    return "imed out" in text or "imeout" in text


def first_line(exc: BaseException) -> str:
    """Return torch's text without the C++ stack trace."""
    return str(exc).strip().partition("\n")[0].rstrip(". ")
