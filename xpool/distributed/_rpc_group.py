"""`RpcGroup`: calls among some processes of the world, and the values and services they offer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

from torch.distributed import rpc
from torch.futures import Future

from xpool.distributed._current import (
    GroupError,
    GroupKeyError,
    NotAMember,
    current,
    get_cur_name,
    the_world,
)
from xpool.distributed._remote_calls import RRef, call, meet, send, sendable, waited
from xpool.distributed._rendezvous import check_timeout

Kind = Literal["service", "value"]
_DONE = {"service": "registered in", "value": "paired to"}

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any] | None


def not_found(group_name: str, kind: Kind, key: Any, keys: list[Any]) -> GroupKeyError:
    there = ", ".join(sorted(map(repr, keys))) or "none"
    return GroupKeyError(
        f"{kind.capitalize()} {key!r} was not found on Group [{group_name}]; "
        f"{_DONE[kind]} it: {there}."
    )


class Register:
    """The holder of each key, for the groups whose first member is this process."""

    def __init__(self) -> None:
        # Threads of torch's RPC run the calls of members, several at a time.
        self._lock = threading.Lock()
        self._holders: dict[tuple[str, Kind, Any], str] = {}  # guarded by _lock

    def enter(self, group_name: str, kind: Kind, key: Any, name: str) -> str | None:
        """Enter ``name`` as holder.  If a rank that is not lost holds the key, return that one."""
        place, lost = (group_name, kind, key), the_world().peers.lost()
        with self._lock:
            holder = self._holders.get(place)
            if holder is not None and holder not in lost:
                return holder
            self._holders[place] = name
            return None

    def strike(self, group_name: str, kind: Kind, key: Any, name: str) -> None:
        with self._lock:
            if self._holders.get((group_name, kind, key)) == name:
                del self._holders[group_name, kind, key]

    def look_up(self, group_name: str, kind: Kind, key: Any) -> tuple[str | None, list[Any]]:
        """Return the holder and ``[]``, or None and all keys."""
        with self._lock:
            holder = self._holders.get((group_name, kind, key))
            every = () if holder else tuple(self._holders)
        return holder, [one for *place, one in every if place == [group_name, kind]]

    def drop(self, group_name: str) -> None:
        with self._lock:
            self._holders = {p: n for p, n in self._holders.items() if p[0] != group_name}


def _in_register(method: str, *args: Any) -> Any:
    return getattr(the_world().register, method)(*args)


class RpcGroup:
    """Calls among some processes of the world; made by `World.create_rpc_group`.

    ``to`` is the name of a member. ``timeout`` is in seconds: -1 is the world's ``rpc_timeout``, 0
    is no timeout. The callee imports functions by name. Functions without an importable name
    (lambdas, local functions) are sent by value, and so are arguments and results that torch cannot
    pickle. The caller gets the function's error, with the remote traceback as ``__cause__``.

    A key belongs to the process that has paired or registered it, until that process withdraws it
    or dies. A process that receives a group and has one of the same name gets its own group.

    All calls raise:
        NotAMember: ``to`` is not in the group.
        PeerLost: the process ``to`` died before or during the call.
        GroupTimeout: there was no answer within the timeout.
        TaskNotPicklable: the function or an argument cannot be sent.
        ResultNotPicklable: the function has run, but its result cannot be sent. The text names
            both.
        GroupError: the group was destroyed in this process.
    """

    def __init__(self, group_name: str, group_members: Sequence[str]) -> None:
        self.group_name = group_name
        self.group_members = list(group_members)
        self.destroyed = False
        """Whether the group has been destroyed in this process."""
        # The offers of this process, each in a tuple.  Single operations of a dict need no lock.
        self.offers: dict[Kind, dict[Any, tuple[Any]]] = {"service": {}, "value": {}}
        self._barriers = itertools.count()

    # -- calls --------------------------------------------------------------------------------

    def rpc_sync(
        self, to: str, func: Func, timeout: float = -1, args: Args = (), kwargs: Kwargs = None
    ) -> Any:
        """Run ``func(*args, **kwargs)`` in ``to`` and return its result."""
        return waited(self.rpc_async(to, func, timeout, args, kwargs))

    def rpc_async(
        self, to: str, func: Func, timeout: float = -1, args: Args = (), kwargs: Kwargs = None
    ) -> Future[Any]:
        """Run ``func(*args, **kwargs)`` in ``to``; return a `torch.futures.Future` at once. The
        future's ``wait()`` returns the result.
        """
        return call(self._member(to), func, args, kwargs, timeout)

    def remote(
        self, to: str, func: Func, timeout: float = -1, args: Args = (), kwargs: Kwargs = None
    ) -> RRef:
        """Run ``func`` in ``to``, leave its result there, and return a reference to it at once.

        If ``func`` raises an error, torch makes a new one for ``to_here()``: see `RRef`.
        """
        return _remote(self._member(to), func, args, kwargs, timeout)

    # -- values -------------------------------------------------------------------------------

    def pair(self, key: Hashable, value: Any) -> None:
        """Offer a value to the group under a key; it stays in this process.

        Raises:
            GroupKeyError: the key is taken.
            NotAMember: this process is not in the group.
        """
        self._offer("value", key, value)

    def unpair(self, key: Hashable) -> None:
        """Withdraw a value. Raises `GroupKeyError` unless this process has paired it."""
        self._withdraw("value", key)

    def is_paired(self, key: Hashable) -> bool:
        """Whether a member has paired this key."""
        return self._find("value", key)[0] is not None

    def get_paired(self, key: Hashable) -> RRef:
        """Return a reference to a paired value; ``to_here()`` fetches a copy of it.

        Raises:
            GroupKeyError: no member has paired this key. The text lists the paired keys.
        """
        holder = self._holder("value", key)
        return _remote(holder, _offered, (self.group_name, "value", key), None, -1)

    # -- services -----------------------------------------------------------------------------

    def register(self, key: Hashable, service: Func) -> None:
        """Offer a function to the group under a key; it runs in this process.

        Raises:
            GroupKeyError: the key is taken.
            NotAMember: this process is not in the group.
        """
        self._offer("service", key, service)

    def deregister(self, key: Hashable) -> None:
        """Withdraw a service. Raises `GroupKeyError` unless this process has registered it."""
        self._withdraw("service", key)

    def is_registered(self, key: Hashable) -> bool:
        """Whether a member has registered this key."""
        return self._find("service", key)[0] is not None

    def registered_sync(
        self, key: Hashable, args: Args = (), kwargs: Kwargs = None, *, timeout: float = -1
    ) -> Any:
        """Call a registered service and return its result.

        Raises:
            GroupKeyError: no member has registered this key. The text lists the registered keys.
        """
        return waited(self.registered_async(key, args, kwargs, timeout=timeout))

    def registered_async(
        self, key: Hashable, args: Args = (), kwargs: Kwargs = None, *, timeout: float = -1
    ) -> Future[Any]:
        """Call a registered service; return a `torch.futures.Future` at once. An unknown key
        raises `GroupKeyError` at once.
        """
        service = self.group_name, key, args, kwargs or {}
        return call(self._holder("service", key), _serve_and_send, service, None, timeout)

    def registered_remote(
        self, key: Hashable, args: Args = (), kwargs: Kwargs = None, *, timeout: float = -1
    ) -> RRef:
        """Call a registered service, leave the result there, and return an `RRef` to it."""
        service = self.group_name, key, args, kwargs or {}
        return _remote(self._holder("service", key), _serve, service, None, timeout)

    # -- offers -------------------------------------------------------------------------------

    def _offer(self, kind: Kind, key: Hashable, offered: Any) -> None:
        me, entry = self._member(get_cur_name()), (offered,)
        # Stored before it is registered, because a member that finds the key may call at once.
        new = self.offers[kind].setdefault(key, entry) is entry
        try:
            holder = self._ask("enter", kind, key, me) if new else me
            # If this process is the holder, an earlier call has registered the offer, and the
            # answer to that call was lost.
            if holder is None or (new and holder == me):
                return
            raise GroupKeyError(
                f"{key!r} is already {_DONE[kind]} Group [{self.group_name}], by {holder!r}; "
                "take another key, or withdraw that one there."
            )
        except BaseException:
            if new:
                del self.offers[kind][key]
            raise

    def _withdraw(self, kind: Kind, key: Hashable) -> None:
        me, own = self._member(get_cur_name()), self.offers[kind]
        if key not in own:
            raise GroupKeyError(
                f"{key!r} was not {_DONE[kind]} Group [{self.group_name}] by {me!r}, which alone "
                f"could withdraw it; its own: {', '.join(map(repr, list(own))) or 'none'}."
            )
        # Removed from the register first: members that have found the key may still call.
        self._ask("strike", kind, key, me)
        own.pop(key, None)

    def _find(self, kind: Kind, key: Hashable) -> tuple[str | None, list[Any]]:
        """Return the holder of a key and ``[]``, or None and all keys of this kind."""
        self._check_usable()
        if key in self.offers[kind]:
            return get_cur_name(), []
        found: tuple[str | None, list[Any]] = self._ask("look_up", kind, key)
        return found

    def _holder(self, kind: Kind, key: Hashable) -> str:
        holder, keys = self._find(kind, key)
        if holder is None:
            raise not_found(self.group_name, kind, key, keys)
        return holder

    def _ask(self, method: str, *args: Any) -> Any:
        register = self.group_members[0]
        return waited(call(register, _in_register, (method, self.group_name, *args)))

    # -- the group ----------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all members have called this.

        Raises:
            PeerLost: a member has died.
            GroupTimeout: a member did not call this within the world's ``rpc_timeout``.
        """
        self._member(get_cur_name())
        key = ("barrier", self.group_name, next(self._barriers))
        meet(self.group_members[0], key, tuple(self.group_members))

    def destroy(self) -> None:
        """Remove the group, with the values and services that this process offers in it.

        Only this process forgets the group. Its methods then raise `GroupError` here.
        """
        world = the_world()
        # If the group was sent here and is not this process's own, there is nothing to remove.
        if not self.destroyed and world.groups.get(self.group_name) is self:
            del world.groups[self.group_name]
            world.register.drop(self.group_name)
        self.destroyed = True

    def size(self) -> int:
        """Return the number of members."""
        return len(self.group_members)

    def is_member(self, target: str | None = None) -> bool:
        """Whether the process named ``target`` is in the group. None: the calling process."""
        return (self.get_cur_name() if target is None else target) in self.group_members

    def get_group_name(self) -> str:
        """Return the name of the group."""
        return self.group_name

    def get_group_members(self) -> list[str]:
        """Return the names of the members."""
        return list(self.group_members)

    get_cur_name = staticmethod(get_cur_name)

    def __reduce__(self) -> Any:
        return _arrived, (self.group_name, self.group_members)

    def __repr__(self) -> str:
        return f"<RpcGroup {self.group_name!r} of {', '.join(self.group_members)}>"

    def _check_usable(self) -> None:
        if self.destroyed:
            raise GroupError(
                f"Group {self.group_name!r} was destroyed in {get_cur_name()!r}; make a new one."
            )

    def _member(self, to: str) -> str:
        self._check_usable()
        if to not in self.group_members:
            raise NotAMember(
                f"{to!r} is not a member of group {self.group_name!r}; "
                f"members: {', '.join(self.group_members)}."
            )
        return to


def _remote(to: str, func: Func, args: Args, kwargs: Kwargs, timeout: float) -> RRef:
    the_world().peers.check(to)
    check_timeout("timeout", timeout)

    def start(*what: Any) -> RRef:
        return RRef(rpc.remote(to, _call, args=what, timeout=timeout))

    return send(start, func, args, kwargs)


def _arrived(name: str, members: list[str]) -> RpcGroup:
    """Return the receiver's own group of this name, or a new object if it has none."""
    world = current()
    own = world.groups.get(name) if world is not None else None
    return own if own is not None else RpcGroup(name, members)


# -- in the process that holds the value or service ---------------------------------------------


def _call(func: Func, args: Args, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _offered(group_name: str, kind: Kind, key: Any) -> Any:
    group = the_world().groups.get(group_name)
    offers = group.offers[kind] if group is not None else {}
    found = offers.get(key)
    if found is None:
        raise not_found(group_name, kind, key, list(offers))
    return found[0]


def _serve(group_name: str, key: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    return _offered(group_name, "service", key)(*args, **kwargs)


def _serve_and_send(group_name: str, key: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    return sendable(f"service {key!r}", _serve(group_name, key, args, kwargs))
