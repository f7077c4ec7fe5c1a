"""What can go wrong between processes, under `XPoolError`.

::

    GroupError         also RuntimeError   the group or world cannot be used so
    |-- NotAMember                         the process is not a member of the group
    |-- PeerLost       also xpool.PeerLost a process has died or left; the message names it
    `-- GroupTimeout   also TimeoutError   it took longer than its timeout
    GroupKeyError      also KeyError       no such service or value, or its name is taken

The classes beside `XPoolError` are those that `torch.distributed` and programs written for
`machin.parallel` raise and catch.  A value that makes no sense is an `OptionError`.
"""

from __future__ import annotations

from xpool import errors
from xpool.errors import TimeoutError, XPoolError


class GroupError(XPoolError, RuntimeError):
    """The group or the world cannot be used in this way, or not any more."""


class NotAMember(GroupError):
    """The calling or the called process is not a member of the group."""


class PeerLost(GroupError, errors.PeerLost):
    """A process that is needed has died or has left the world."""


class GroupTimeout(GroupError, TimeoutError):
    """The others did not do their part within the timeout."""


class GroupKeyError(XPoolError, KeyError):
    """No service or value of this name in the group, or the name is taken."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show its repr
