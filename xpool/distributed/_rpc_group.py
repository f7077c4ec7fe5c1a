"""`RpcGroup`: calls among some processes of the world, and the values and services they offer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from xpool.distributed._current import current, get_cur_name, the_world
from xpool.distributed._group_errors import NotAMember
from xpool.distributed._meetings import meet
from xpool.distributed._offers import Kind, Offers, not_found
from xpool.distributed._remote_calls import RRef, call, send, sendable
from xpool.distributed._rendezvous import check_timeout


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
        self.offers = Offers(group_name, self.group_members[0])
        self._lock = threading.Lock()
        self._barriers = 0  # guarded by _lock: how often this process has called `barrier`

    @property
    def destroyed(self) -> bool:
        """Whether the group has been destroyed in this process."""
        return self.offers.destroyed

    # -- calls --------------------------------------------------------------------------------

    def rpc_sync(
        self,
        to: str,
        func: Callable[..., Any],
        timeout: float = -1,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func(*args, **kwargs)`` in ``to`` and return its result."""
        return self.rpc_async(to, func, timeout, args, kwargs).wait()

    def rpc_async(
        self,
        to: str,
        func: Callable[..., Any],
        timeout: float = -1,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Future[Any]:
        """As `rpc_sync`, but return a future at once. Its ``wait()`` returns the result."""
        return call(self._member(to), func, args, kwargs, timeout)

    def remote(
        self,
        to: str,
        func: Callable[..., Any],
        timeout: float = -1,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> RRef:
        """Run ``func`` in ``to``, leave its result there, and return a reference to it at once.

        If ``func`` raises an error, torch makes a new one for ``to_here()``: see `RRef`.
        """
        return send(
            lambda *what: _remote(self._member(to), _call, what, timeout), func, args, kwargs
        )

    # -- values -------------------------------------------------------------------------------

    def pair(self, key: Hashable, value: Any) -> None:
        """Offer a value to the group under a key; it stays in this process.

        Raises:
            GroupKeyError: the key is taken.
            NotAMember: this process is not in the group.
        """
        self._member(get_cur_name())
        self.offers.add("value", key, value)

    def unpair(self, key: Hashable) -> None:
        """Withdraw a value. Raises `GroupKeyError` unless this process has paired it."""
        self._member(get_cur_name())
        self.offers.withdraw("value", key)

    def is_paired(self, key: Hashable) -> bool:
        """Whether a member has paired this key."""
        return self.offers.find("value", key)[0] is not None

    def get_paired(self, key: Hashable) -> RRef:
        """Return a reference to a paired value; ``to_here()`` fetches a copy of it.

        Raises:
            GroupKeyError: no member has paired this key. The text lists the paired keys.
        """
        holder = self.offers.holder("value", key)
        return _remote(holder, _offered, (self.group_name, "value", key), -1)

    # -- services -----------------------------------------------------------------------------

    def register(self, key: Hashable, service: Callable[..., Any]) -> None:
        """Offer a function to the group under a key; it runs in this process.

        Raises:
            GroupKeyError: the key is taken.
            NotAMember: this process is not in the group.
        """
        self._member(get_cur_name())
        self.offers.add("service", key, service)

    def deregister(self, key: Hashable) -> None:
        """Withdraw a service. Raises `GroupKeyError` unless this process has registered it."""
        self._member(get_cur_name())
        self.offers.withdraw("service", key)

    def is_registered(self, key: Hashable) -> bool:
        """Whether a member has registered this key."""
        return self.offers.find("service", key)[0] is not None

    def registered_sync(
        self,
        key: Hashable,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float = -1,
    ) -> Any:
        """Call a registered service and return its result.

        Raises:
            GroupKeyError: no member has registered this key. The text lists the registered keys.
        """
        return self.registered_async(key, args, kwargs, timeout=timeout).wait()

    def registered_async(
        self,
        key: Hashable,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float = -1,
    ) -> Future[Any]:
        """As `registered_sync`, but return a future. An unknown key raises at once."""
        holder = self.offers.holder("service", key)
        return call(
            holder, _serve_and_send, (self.group_name, key, args, kwargs or {}), None, timeout
        )

    def registered_remote(
        self,
        key: Hashable,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float = -1,
    ) -> RRef:
        """As `registered_sync`, but leave the result in the holder and return a reference to it."""
        holder = self.offers.holder("service", key)
        what = self.group_name, key, args, kwargs or {}
        return send(lambda *call: _remote(holder, _call, call, timeout), _serve, what, None)

    # -- the group ----------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all members have called this.

        Raises:
            PeerLost: a member has died.
            GroupTimeout: a member did not call this within the world's ``rpc_timeout``.
        """
        self._member(get_cur_name())
        with self._lock:
            number, self._barriers = self._barriers, self._barriers + 1
        key = ("barrier", self.group_name, number)
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
        self.offers.destroyed = True

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

    @staticmethod
    def get_cur_name() -> str:
        """Return the name of the calling process."""
        return get_cur_name()

    def __reduce__(self) -> Any:
        return _arrived, (self.group_name, self.group_members)

    def __repr__(self) -> str:
        return f"<RpcGroup {self.group_name!r} of {', '.join(self.group_members)}>"

    def _member(self, to: str) -> str:
        self.offers.check_usable()
        if to not in self.group_members:
            raise NotAMember(
                f"{to!r} is not a member of group {self.group_name!r}; "
                f"members: {', '.join(self.group_members)}."
            )
        return to


def _remote(to: str, func: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> RRef:
    the_world().peers.check(to)
    check_timeout("timeout", timeout)
    return RRef(rpc.remote(to, func, args=args, timeout=timeout))


def _arrived(name: str, members: list[str]) -> RpcGroup:
    """Return the receiver's own group of this name, or a new object if it has none."""
    world = current()
    own = world.groups.get(name) if world is not None else None
    return own if own is not None else RpcGroup(name, members)


# -- in the process that holds the value or service ---------------------------------------------


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


_NOTHING = object()


def _offered(group_name: str, kind: Kind, key: Any) -> Any:
    # Needs no lock: reading a dict is atomic.
    group = the_world().groups.get(group_name)
    offers = group.offers.own[kind] if group is not None else {}
    found = offers.get(key, _NOTHING)
    if found is _NOTHING:
        raise not_found(group_name, kind, key, list(offers))
    return found


def _serve(group_name: str, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _offered(group_name, "service", key)(*args, **kwargs)


def _serve_and_send(
    group_name: str, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return sendable(f"service {key!r}", _serve(group_name, key, args, kwargs))
