"""Versioned values.  The server accepts a new version only if it was made from the newest one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

from xpool.distributed._rpc_group import RpcGroup
from xpool.errors import OptionError, XPoolError


class VersionError(XPoolError, ValueError):
    """The pushed version cannot follow the newest version of its key."""

    __module__ = "xpool.server"  # the public name, in pickles and tracebacks


class OrderedServerBase(ABC):
    """A store of versioned values."""

    @abstractmethod
    def push(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        """Store ``value`` as the newest version of ``key`` if ``prev_version`` is the newest now.

        Returns whether it was stored.  The first push of a key may name any versions.  Versions are
        hashable values, usually numbers.  ``version == prev_version`` replaces the newest.

        Raises:
            VersionError: the server has ``version`` as an older version, or ``prev_version`` is
                greater than the newest, so it never existed.
        """

    @abstractmethod
    def pull(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        """Return a copy of a value and its version: ``version``, or the newest if None.

        Returns None if the server has no such version, or no longer has it.
        """


class OrderedServerSimple(OrderedServerBase):
    """The client of an `OrderedServerSimpleImpl`, which may be in another process.

    The client can be pickled.  ``server_name`` and ``group`` are those of the server.  Calls raise
    `GroupKeyError` if the group has no such server, and `PeerLost` if its process has died.
    """

    def __init__(self, server_name: str, group: RpcGroup) -> None:
        self.server_name, self.group = server_name, group

    def push(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        """As `OrderedServerBase.push`."""
        service = push_service(self.server_name)
        pushed: bool = self.group.registered_sync(service, (key, value, version, prev_version))
        return pushed

    def pull(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        """As `OrderedServerBase.pull`."""
        service = pull_service(self.server_name)
        pulled: tuple[Any, Any] | None = self.group.registered_sync(service, (key, version))
        return pulled

    def __repr__(self) -> str:
        return f"<OrderedServerSimple {self.server_name!r} in {self.group!r}>"


class OrderedServerSimpleImpl:
    """An ordered server that keeps its values in the memory of this process.

    It pairs a client, an `OrderedServerSimple`, to the group under its name.  Members get the
    client by ``group.get_paired(server_name).to_here()``.

    Args:
        server_name: a name that is unique in the group.
        group: an `RpcGroup` that contains this process.
        version_depth: how many versions before the newest one `pull` can return.

    Raises:
        OptionError: ``version_depth`` is not an int of at least 1.
        GroupKeyError: the name is taken.
        NotAMember: this process is not in the group.
    """

    def __init__(
        self, server_name: str, group: RpcGroup, version_depth: int = 1, **_: object
    ) -> None:
        if not isinstance(version_depth, int) or isinstance(version_depth, bool):
            raise OptionError(f"version_depth must be a whole number, not {version_depth!r}")
        if version_depth < 1:
            raise OptionError(f"version_depth must be 1 or more, not {version_depth}")
        self.server_name, self.group, self.version_depth = server_name, group, version_depth
        # Threads of torch's RPC run the pushes and pulls.
        self._lock = threading.Lock()
        # Guarded by _lock: the versions of each key, the newest last.  Values never change.
        self._storage: dict[Hashable, OrderedDict[Any, Any]] = {}
        with ExitStack() as undo:
            register(undo, group, push_service(server_name), self._push_service)
            register(undo, group, pull_service(server_name), self._pull_service)
            # Paired last, because a member that gets the client may call at once.
            group.pair(server_name, OrderedServerSimple(server_name, group))
            undo.callback(lambda: group.unpair(server_name))
            self.undo = undo.pop_all()  # withdraws the services and the client

    def _push_service(self, key: Hashable, value: Any, version: Any, prev_version: Any) -> bool:
        with self._lock:
            versions = self._storage.setdefault(key, OrderedDict())
            if versions:
                newest = next(reversed(versions))
                # Either another push came first, or the version has never existed.
                if newest != prev_version:
                    _check_previous(key, prev_version, newest)
                    return False
                if version in versions and version != newest:
                    raise VersionError(
                        f"Version {version!r} of {key!r} cannot follow {newest!r}: the server "
                        f"has that version already. Its versions, the newest last: "
                        f"{list(versions)}."
                    )
            versions[version] = value
            while len(versions) > self.version_depth + 1:
                versions.popitem(last=False)
        return True

    def _pull_service(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        with self._lock:
            versions = self._storage.get(key)
            if not versions:
                return None
            if version is None:
                version = next(reversed(versions))
            if version not in versions:
                return None
            value = versions[version]
        # The copy protects the stored value from a caller in this process.  It needs no lock,
        # because stored values never change.
        return deepcopy(value), version

    def __repr__(self) -> str:
        return f"<OrderedServerSimpleImpl {self.server_name!r} in {self.group!r}>"


def register(undo: ExitStack, group: RpcGroup, key: str, service: Callable[..., Any]) -> None:
    group.register(key, service)
    undo.callback(lambda: group.deregister(key))


def push_service(server_name: str) -> str:
    return f"{server_name}/_push_service"


def pull_service(server_name: str) -> str:
    return f"{server_name}/_pull_service"


def _check_previous(key: Hashable, prev_version: Any, newest: Any) -> None:
    """Raise `VersionError` if ``prev_version`` is greater than the newest version."""
    try:
        ahead = bool(prev_version > newest)
    except TypeError:
        return  # these versions have no order: it may be an old version
    if ahead:
        raise VersionError(
            f"prev_version {prev_version!r} of {key!r} has never existed: the newest is "
            f"{newest!r}. "
            "Pull first, and push a value that was made from that version."
        )
