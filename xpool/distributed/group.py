"""`RpcGroup`: calls between some processes of the world, and what they offer to each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any, Literal

from torch.distributed import rpc
from torch.futures import Future

from xpool.distributed.calls import call, send, sendable
from xpool.distributed.current import current, get_cur_name, the_world
from xpool.distributed.errors import GroupError, GroupKeyError, NotAMember
from xpool.distributed.meetings import meet
from xpool.distributed.rendezvous import check_timeout
from xpool.distributed.rref import RRef

__all__ = ["RpcGroup"]

Kind = Literal["service", "value"]
_DONE = {"service": "registered in", "value": "paired to"}


class RpcGroup:
    """Calls between some processes of the world; made by `World.create_rpc_group`.

    ``to`` is the name of a member. ``timeout`` is in seconds, as torch documents it: -1 is the
    world's ``rpc_timeout``, 0 is none. Functions are found by name in the callee, or travel by
    value when they have no importable name (lambdas, local functions); so do arguments that torch
    cannot pickle. What they raise is raised
    in the caller as it was, with the remote traceback as its ``__cause__``.

    A key that a process has paired or registered is its own until it withdraws it or dies: then
    another may take it.

    A group can be sent: in a process that has a group of this name, it arrives as that group.

    All calls raise:
        NotAMember: ``to`` is not in the group.
        PeerLost: the process has died, before or during the call.
        GroupTimeout: there was no answer within the timeout.
        TaskNotPicklable: the function or an argument cannot be sent.
        ResultNotPicklable: the function has run, and its result cannot be sent back; the message
            names both. A result that torch cannot pickle travels by value, as arguments do.
    """

    def __init__(self, group_name: str, group_members: Sequence[str]) -> None:
        self.group_name = group_name
        self.group_members = list(group_members)
        self.destroyed = False
        # Never held while another process is asked, which may take as long as a timeout.
        self._lock = threading.Lock()
        # Guarded by _lock: what this process offers, and how many barriers it has called.
        self._offers: dict[Kind, dict[Any, Any]] = {"service": {}, "value": {}}
        self._barriers = 0

    # -- calls --------------------------------------------------------------------------------

    def rpc_sync(
        self,
        to: str,
        func: Callable[..., Any],
        timeout: float = -1,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func(*args, **kwargs)`` in ``to`` and return what it returns."""
        return self.rpc_async(to, func, timeout, args, kwargs).wait()

    def rpc_async(
        self,
        to: str,
        func: Callable[..., Any],
        timeout: float = -1,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Future[Any]:
        """As `rpc_sync`, and return a future at once; its ``wait()`` returns or raises."""
        return call(self._member(to), func, args, kwargs, timeout)

    def remote(
        self,
        to: str,
        func: Callable[..., Any],
        timeout: float = -1,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> RRef:
        """Run ``func`` in ``to``, leave its result there, and return a reference to it.

        ``to_here()`` raises what it raised, of the same class where that takes one text: torch
        makes it anew, with the remote traceback in its message.
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
        self._offer("value", key, value)

    def unpair(self, key: Hashable) -> None:
        """Withdraw a value that this process has paired; `GroupKeyError` when it has not."""
        self._withdraw("value", key)

    def is_paired(self, key: Hashable) -> bool:
        """Whether a member has paired this key."""
        return self._holder("value", key)[0] is not None

    def get_paired(self, key: Hashable) -> RRef:
        """Return a reference to a paired value; ``to_here()`` fetches a copy of it.

        Raises:
            GroupKeyError: nobody has paired this key; the message says which there are.
        """
        holder = self._must_hold("value", key)
        return _remote(holder, _offered, (self.group_name, "value", key), -1)

    # -- services -----------------------------------------------------------------------------

    def register(self, key: Hashable, service: Callable[..., Any]) -> None:
        """Offer a function to the group under a key; it will run in this process.

        Raises:
            GroupKeyError: the key is taken.
            NotAMember: this process is not in the group.
        """
        self._offer("service", key, service)

    def deregister(self, key: Hashable) -> None:
        """Withdraw a service that this process has registered; `GroupKeyError` otherwise."""
        self._withdraw("service", key)

    def is_registered(self, key: Hashable) -> bool:
        """Whether a member has registered this key."""
        return self._holder("service", key)[0] is not None

    def registered_sync(
        self,
        key: Hashable,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float = -1,
    ) -> Any:
        """Call a registered service and return what it returns.

        Raises:
            GroupKeyError: nobody has registered this key; the message says which there are.
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
        """As `registered_sync`, and return a future; an unknown key still raises at once."""
        holder = self._must_hold("service", key)
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
        """As `registered_sync`, and return a reference to the result, which stays there."""
        holder = self._must_hold("service", key)
        what = self.group_name, key, args, kwargs or {}
        return send(lambda *call: _remote(holder, _call, call, timeout), _serve, what, None)

    # -- the group ----------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all members have called this.

        Raises:
            PeerLost: a member has died.
            GroupTimeout: a member did not come within the world's ``rpc_timeout``.
        """
        self._check_member()
        with self._lock:
            # The number tells this meeting from the next one of the same group.
            number, self._barriers = self._barriers, self._barriers + 1
        key = ("barrier", self.group_name, number)
        meet(self.group_members[0], key, tuple(self.group_members))

    def destroy(self) -> None:
        """Take the group, and what this process offers in it, away from this process.

        From then on the group refuses whatever is asked of it here, with `GroupError`.
        """
        world = the_world()
        # A group that was sent here, and is not this process's own, takes nothing along.
        if not self.destroyed and world.groups.get(self.group_name) is self:
            del world.groups[self.group_name]
            world.register.drop(self.group_name)
        self.destroyed = True

    def size(self) -> int:
        """Number of members."""
        return len(self.group_members)

    def is_member(self, target: str | None = None) -> bool:
        """Whether a process, or the calling one, is in the group."""
        return (self.get_cur_name() if target is None else target) in self.group_members

    def get_group_name(self) -> str:
        """The name of the group."""
        return self.group_name

    def get_group_members(self) -> list[str]:
        """The names of the members."""
        return list(self.group_members)

    @staticmethod
    def get_cur_name() -> str:
        """The name of the calling process."""
        return get_cur_name()

    def __reduce__(self) -> Any:
        return _arrived, (self.group_name, self.group_members)

    def __repr__(self) -> str:
        return f"<RpcGroup {self.group_name!r} of {', '.join(self.group_members)}>"

    # -- behind them --------------------------------------------------------------------------

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

    def _check_member(self) -> None:
        self._member(get_cur_name())

    def _offer(self, kind: Kind, key: Hashable, offered: Any) -> None:
        self._check_member()
        with self._lock:
            # First here: who learns of the key may call at once.
            new = key not in self._offers[kind]
            if new:
                self._offers[kind][key] = offered
        me = get_cur_name()
        holder = me
        if new:
            try:
                holder = self._ask(_enter, kind, key, me).wait()
            except BaseException:
                self._forget(kind, key)
                raise
            if holder == me:  # by an earlier try, whose answer did not come
                return
        if holder is not None:
            if new:
                self._forget(kind, key)
            raise GroupKeyError(
                f"{key!r} is already {_DONE[kind]} Group [{self.group_name}], by {holder!r}; "
                "take another key, or withdraw that one there."
            )

    def _forget(self, kind: Kind, key: Hashable) -> None:
        with self._lock:
            del self._offers[kind][key]

    def _withdraw(self, kind: Kind, key: Hashable) -> None:
        self._check_member()
        with self._lock:
            if key not in self._offers[kind]:
                own = ", ".join(map(repr, self._offers[kind])) or "none"
                raise GroupKeyError(
                    f"{key!r} was not {_DONE[kind]} Group [{self.group_name}] by "
                    f"{get_cur_name()!r}, which alone could withdraw it; its own: {own}."
                )
        # The register first: calls by those who have found the key are still served meanwhile.
        self._ask(_strike, kind, key, get_cur_name()).wait()
        with self._lock:
            self._offers[kind].pop(key, None)

    def _ask(self, func: Callable[..., Any], *args: Any) -> Future[Any]:
        """Ask the register, which is in the first member."""
        return call(self.group_members[0], func, (self.group_name, *args))

    def _holder(self, kind: Kind, key: Hashable) -> tuple[str | None, list[Any]]:
        self._check_usable()
        with self._lock:
            # What this process offers itself takes no call.
            if key in self._offers[kind]:
                return get_cur_name(), []
        found: tuple[str | None, list[Any]] = self._ask(_look_up, kind, key).wait()
        return found

    def _must_hold(self, kind: Kind, key: Hashable) -> str:
        holder, keys = self._holder(kind, key)
        if holder is None:
            raise _not_found(self.group_name, kind, key, keys)
        return holder


def _remote(to: str, func: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> RRef:
    the_world().peers.check(to)
    check_timeout("timeout", timeout)
    return RRef(rpc.remote(to, func, args=args, timeout=timeout))


def _not_found(group_name: str, kind: Kind, key: Any, keys: list[Any]) -> GroupKeyError:
    there = ", ".join(sorted(map(repr, keys))) or "none"
    return GroupKeyError(
        f"{kind.capitalize()} {key!r} was not found on Group [{group_name}]; "
        f"{_DONE[kind]} it: {there}."
    )


def _arrived(name: str, members: list[str]) -> RpcGroup:
    """A group that was sent: the receiver's own of this name, else a view from outside."""
    world = current()
    # By name: the sender's object and the receiver's are one group.
    own = world.groups.get(name) if world is not None else None
    return own if own is not None else RpcGroup(name, members)


# -- what runs in the holder --------------------------------------------------------------------


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


_NOTHING = object()


def _offered(group_name: str, kind: Kind, key: Any) -> Any:
    # Without the lock: one look into a dict, and what is found there was offered.
    group = the_world().groups.get(group_name)
    offers = group._offers[kind] if group is not None else {}
    found = offers.get(key, _NOTHING)
    if found is _NOTHING:
        raise _not_found(group_name, kind, key, list(offers))
    return found


def _serve(group_name: str, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _offered(group_name, "service", key)(*args, **kwargs)


def _serve_and_send(
    group_name: str, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return sendable(f"service {key!r}", _serve(group_name, key, args, kwargs))


# -- what runs in the first member --------------------------------------------------------------


class Register:
    """Who holds what, in the groups whose first member is this process."""

    def __init__(self) -> None:
        # Calls of all members come in threads of torch's RPC, several at a time.
        self._lock = threading.Lock()
        self._holders: dict[tuple[str, Kind], dict[Any, str]] = {}  # guarded by _lock

    def enter(
        self, group_name: str, kind: Kind, key: Any, name: str, lost: Container[str] = ()
    ) -> str | None:
        """Note a holder; return the one that there is already, if there is and it is not lost."""
        with self._lock:
            holders = self._holders.setdefault((group_name, kind), {})
            if key in holders and holders[key] not in lost:
                return holders[key]
            holders[key] = name
            return None

    def strike(self, group_name: str, kind: Kind, key: Any, name: str) -> None:
        """Forget a holder."""
        with self._lock:
            holders = self._holders.get((group_name, kind), {})
            if holders.get(key) == name:
                del holders[key]

    def look_up(self, group_name: str, kind: Kind, key: Any) -> tuple[str | None, list[Any]]:
        """Return the holder, and all keys when there is none."""
        with self._lock:
            holders = self._holders.get((group_name, kind), {})
            holder = holders.get(key)
            return holder, [] if holder else list(holders)

    def drop(self, group_name: str) -> None:
        """Forget a group."""
        with self._lock:
            self._holders.pop((group_name, "service"), None)
            self._holders.pop((group_name, "value"), None)


def _enter(group_name: str, kind: Kind, key: Any, name: str) -> str | None:
    world = the_world()
    register: Register = world.register
    return register.enter(group_name, kind, key, name, world.peers.lost())


def _strike(group_name: str, kind: Kind, key: Any, name: str) -> None:
    the_world().register.strike(group_name, kind, key, name)


def _look_up(group_name: str, kind: Kind, key: Any) -> tuple[str | None, list[Any]]:
    register: Register = the_world().register
    return register.look_up(group_name, kind, key)
