"""The keys under which members of an `RpcGroup` offer values and services to each other.

The first member of a group keeps its `Register`, which maps each key to the member that holds it.
The value or service itself stays in the `Offers` of this holder.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, Literal

from xpool.distributed._current import get_cur_name, the_world
from xpool.distributed._group_errors import GroupError, GroupKeyError
from xpool.distributed._remote_calls import call

Kind = Literal["service", "value"]
_DONE = {"service": "registered in", "value": "paired to"}


class Offers:
    """The values and services that this process offers in one group.

    ``first`` is the member that keeps the group's register.
    """

    def __init__(self, group_name: str, first: str) -> None:
        self.destroyed = False
        self._group_name, self._first = group_name, first
        # Not held during a remote call, which may last until its timeout.
        self._lock = threading.Lock()
        self.own: dict[Kind, dict[Any, Any]] = {"service": {}, "value": {}}  # guarded by _lock

    def check_usable(self) -> None:
        if self.destroyed:
            raise GroupError(
                f"Group {self._group_name!r} was destroyed in {get_cur_name()!r}; make a new one."
            )

    def add(self, kind: Kind, key: Hashable, offered: Any) -> None:
        """Offer a value or service under a key.  Raises `GroupKeyError` if the key is taken."""
        with self._lock:
            # Stored before it is registered, because a member that finds the key may call at once.
            new = key not in self.own[kind]
            if new:
                self.own[kind][key] = offered
        me = get_cur_name()
        holder: str | None = me
        if new:
            try:
                holder = self._ask("enter", kind, key, me)
            except BaseException:
                self._forget(kind, key)
                raise
            if holder == me:  # an earlier call registered it, but its answer was lost
                return
        if holder is not None:
            if new:
                self._forget(kind, key)
            raise GroupKeyError(
                f"{key!r} is already {_DONE[kind]} Group [{self._group_name}], by {holder!r}; "
                "take another key, or withdraw that one there."
            )

    def _forget(self, kind: Kind, key: Hashable) -> None:
        with self._lock:
            del self.own[kind][key]

    def withdraw(self, kind: Kind, key: Hashable) -> None:
        """Withdraw a value or service.  Raises `GroupKeyError` if this process has not added it."""
        with self._lock:
            if key not in self.own[kind]:
                own = ", ".join(map(repr, self.own[kind])) or "none"
                raise GroupKeyError(
                    f"{key!r} was not {_DONE[kind]} Group [{self._group_name}] by "
                    f"{get_cur_name()!r}, which alone could withdraw it; its own: {own}."
                )
        # Removed from the register first: members that have found the key may still call.
        self._ask("strike", kind, key, get_cur_name())
        with self._lock:
            self.own[kind].pop(key, None)

    def _ask(self, method: str, *args: Any) -> Any:
        return call(self._first, _in_register, (method, self._group_name, *args)).wait()

    def find(self, kind: Kind, key: Hashable) -> tuple[str | None, list[Any]]:
        """Return the holder of a key and ``[]``, or None and all keys of this kind."""
        self.check_usable()
        with self._lock:
            if key in self.own[kind]:
                return get_cur_name(), []
        found: tuple[str | None, list[Any]] = self._ask("look_up", kind, key)
        return found

    def holder(self, kind: Kind, key: Hashable) -> str:
        holder, keys = self.find(kind, key)
        if holder is None:
            raise not_found(self._group_name, kind, key, keys)
        return holder


def not_found(group_name: str, kind: Kind, key: Any, keys: list[Any]) -> GroupKeyError:
    there = ", ".join(sorted(map(repr, keys))) or "none"
    return GroupKeyError(
        f"{kind.capitalize()} {key!r} was not found on Group [{group_name}]; "
        f"{_DONE[kind]} it: {there}."
    )


# -- in the first member ------------------------------------------------------------------------


class Register:
    """The holder of each key, for the groups whose first member is this process."""

    def __init__(self) -> None:
        # Threads of torch's RPC run the calls of members, several at a time.
        self._lock = threading.Lock()
        self._holders: dict[tuple[str, Kind], dict[Any, str]] = {}  # guarded by _lock

    def enter(self, group_name: str, kind: Kind, key: Any, name: str) -> str | None:
        """Enter ``name`` as holder.  If a rank that is not lost holds the key, return that one."""
        lost = the_world().peers.lost()
        with self._lock:
            holders = self._holders.setdefault((group_name, kind), {})
            if key in holders and holders[key] not in lost:
                return holders[key]
            holders[key] = name
            return None

    def strike(self, group_name: str, kind: Kind, key: Any, name: str) -> None:
        with self._lock:
            holders = self._holders.get((group_name, kind), {})
            if holders.get(key) == name:
                del holders[key]

    def look_up(self, group_name: str, kind: Kind, key: Any) -> tuple[str | None, list[Any]]:
        """Return the holder and ``[]``, or None and all keys."""
        with self._lock:
            holders = self._holders.get((group_name, kind), {})
            holder = holders.get(key)
            return holder, [] if holder else list(holders)

    def drop(self, group_name: str) -> None:
        with self._lock:
            self._holders.pop((group_name, "service"), None)
            self._holders.pop((group_name, "value"), None)


def _in_register(method: str, *args: Any) -> Any:
    return getattr(the_world().register, method)(*args)
