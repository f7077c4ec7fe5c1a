"""Servers of versioned values and of models.

An `OrderedServerSimple` accepts a new version of a value only if it was made from the newest one.
`PushPullModelServer` serves one model in strictly ordered versions.  `PushPullGradServer` reduces
the gradients of many clients and applies them to one model.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from xpool._calls.options import check_choice
from xpool._python.starting import PromptThread
from xpool.distributed._current import GroupError, PeerLost
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
        """Store ``value`` as the newest version of ``key`` if ``prev_version`` is the newest now;
        return whether it was stored.  Raises `VersionError` as `OrderedServerBase.push`.
        """
        service = f"{self.server_name}/_push_service"
        pushed: bool = self.group.registered_sync(service, (key, value, version, prev_version))
        return pushed

    def pull(self, key: Hashable, version: Any = None) -> tuple[Any, Any] | None:
        """Return a copy of the value of ``key`` and its version (``version``, or the newest if
        None), or None if the server has no such version.
        """
        service = f"{self.server_name}/_pull_service"
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
            register(undo, group, f"{server_name}/_push_service", self._push_service)
            register(undo, group, f"{server_name}/_pull_service", self._pull_service)
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


def _ordered(
    undo: ExitStack, server_name: str, group: RpcGroup, here: bool = True
) -> OrderedServerBase:
    """Return the client of a server's own ordered server; ``here``: this process makes that."""
    inner = f"{server_name}_o_server"
    if here:
        undo.push(OrderedServerSimpleImpl(inner, group).undo)
    return OrderedServerSimple(inner, group)


def _check_previous(key: Hashable, prev_version: Any, newest: Any) -> None:
    """Raise `VersionError` if ``prev_version`` is greater than the newest version."""
    try:
        ahead = bool(prev_version > newest)
    except TypeError:
        return  # versions without an order: this may be an old one
    if ahead:
        raise VersionError(
            f"prev_version {prev_version!r} of {key!r} has never existed: the newest is "
            f"{newest!r}. "
            "Pull first, and push a value that was made from that version."
        )


# -- models ----------------------------------------------------------------------------------------


def on_cpu(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, because other processes may lack their devices."""
    return {name: one.detach().to("cpu", copy=True) for name, one in tensors.items()}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def load(model: nn.Module, state: dict[str, Tensor], name: str) -> None:
    """Copy a pulled state into a model, on the model's own devices."""
    own = {key: tuple(one.shape) for key, one in model.state_dict().items()}
    pulled = {key: tuple(one.shape) for key, one in state.items()}
    if own != pulled:  # checked first: torch would load the parts that fit, and then raise
        raise GroupError(
            f"The server's {name!r} is not the given model: they differ in "
            f"{', '.join(_differing(own, pulled))}. The server's has {', '.join(pulled)}."
        )
    model.load_state_dict(state)


class PushPullModelServer:
    """The client of a model server.

    Members of the group get it by ``group.get_paired(server_name).to_here()``.  A model's version
    is its attribute ``pp_version``, which `push` and `pull` set.  Without it, the version is 0.
    Calls raise the errors of `OrderedServerSimple`, too.
    """

    def __init__(self, model_name: str, o_server: OrderedServerBase) -> None:
        self.model_name, self.o_server = model_name, o_server

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool:
        """Push the model's state, as its version + 1.  Return whether the server stored it.

        The server does not store it if another process has pushed since this model was pulled.
        Then, with ``pull_on_fail``, the newest state is loaded into ``model``, but no gradients.

        Raises:
            VersionError: the model's version is higher than any that the server has had.
            GroupError: the server's model has other names or shapes.
        """
        version: int = getattr(model, "pp_version", 0)
        state = on_cpu(model.state_dict())
        pushed = self.o_server.push(self.model_name, state, version + 1, version)
        if pushed:
            model.pp_version = version + 1
        elif pull_on_fail:
            self.pull(model)
        return pushed

    def pull(self, model: nn.Module) -> bool:
        """Load the newest state into ``model`` if it is newer.  Return whether the server has one.

        Raises:
            GroupError: the server's model has other names or shapes.
        """
        pulled = self.o_server.pull(self.model_name)
        if pulled is None:
            return False
        state, version = pulled
        # A model without a version loads any version, including 0.
        if getattr(model, "pp_version", -1) < version:
            load(model, state, self.model_name)
            model.pp_version = version
        return True


class PushPullModelServerImpl:
    """A server of one model, in this process.

    Args:
        server_name: a name that is unique in the group.  The client is paired under it.
        group: an `RpcGroup` that contains this process.
        model_name: the model's key in the ordered server.
        o_server: the client of another ordered server.  None: this process makes a server.

    Raises:
        GroupKeyError: the name is taken.
        NotAMember: this process is not in the group.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str = "model",
        o_server: OrderedServerBase | None = None,
    ) -> None:
        self.server_name, self.group, self.model_name = server_name, group, model_name
        with ExitStack() as undo:
            if o_server is None:
                o_server = _ordered(undo, server_name, group)
            self.o_server = o_server
            group.pair(server_name, PushPullModelServer(model_name, o_server))
            undo.pop_all()  # all succeeded, so undo nothing

    def __repr__(self) -> str:
        return f"<PushPullModelServerImpl {self.server_name!r} in {self.group!r}>"


Gradients = dict[str, Tensor]

Facts = dict[str, str]
"""A text with shape, dtype and layout of each gradient, by the name of its parameter."""


class ModelNotManaged(GroupError):
    """The server manages another model, or none."""

    __module__ = "xpool.server"  # the public name, in pickles and tracebacks


class ReduceType(Enum):
    """The level of the reduction tree to which a push goes."""

    REDUCE_PRIMARY = 0
    REDUCE_SECONDARY = 1


class PushPullGradServer:
    """The client of a gradient server.

    Members of the group get it by ``group.get_paired(server_name).to_here()``.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str,
        secondary_reducers: Sequence[str],
        o_server: OrderedServerBase,
    ) -> None:
        self.server_name, self.group, self.model_name = server_name, group, model_name
        self.o_server = o_server
        self.secondary_reducers = list(secondary_reducers)
        self._managed: Facts | None = None  # fetched from the server at the first push

    def push(self, model: nn.Module) -> bool:
        """Push the model's gradients, then call `pull` and return its result.

        The gradients go to a living secondary reducer, chosen at random.  Parameters that require
        no gradient are left out.

        Raises:
            ModelNotManaged: the managed model has parameters of other names, shapes or dtypes, or
                gradients are sparse.  The text names them.
            GroupError: a parameter has no gradient, or the reducer has stopped with an error.
            PeerLost: no secondary reducer is left, or the primary has died.
        """
        gradients: dict[str, Any] = {
            name: one.grad for name, one in model.named_parameters() if one.requires_grad
        }
        bare = [name for name, one in gradients.items() if one is None]
        if bare:
            raise GroupError(f"No gradient to push for {', '.join(bare)}: call backward() first.")
        if self._managed is None:
            # The server returns None if it manages no model yet.  Then the gradients wait there.
            self._managed = self.group.registered_sync(f"{self.server_name}/_facts_service")
        if self._managed is not None:
            check_facts(self.server_name, self._managed, facts_of(gradients))
        sent = on_cpu(gradients)
        # In random order, try one reducer after the other until one is alive.
        reducers = random.sample(self.secondary_reducers, len(self.secondary_reducers))
        for reducer in reducers:
            service = f"{self.server_name}/{reducer}/_push_service"
            try:
                self.group.registered_sync(service, (sent, ReduceType.REDUCE_SECONDARY))
                break
            except PeerLost:
                # Gradients that the dead reducer has taken are lost, so none counts twice.
                if reducer == reducers[-1]:
                    raise
        return self.pull(model)

    def pull(self, model: nn.Module) -> bool:
        """Load the newest state and clear the gradients.  Return whether the server has a state.

        Raises:
            GroupError: the server's model has other names or shapes.
        """
        model.zero_grad()
        pulled = self.o_server.pull(self.model_name)
        if pulled is None:
            return False  # no gradients have been applied yet
        load(model, pulled[0], self.model_name)
        return True


def facts_of(gradients: Gradients) -> Facts:
    return {name: _describe(one.shape, one.dtype, one.layout) for name, one in gradients.items()}


def _describe(shape: Any, dtype: Any, layout: Any = torch.strided) -> str:
    kind = "" if layout is torch.strided else f" {layout}".replace("torch.", "")
    return f"{list(shape)} {dtype}{kind}".replace("torch.", "")


def check_facts(server_name: str, managed: Facts, given: Facts) -> None:
    if given != managed:
        differ = _differing(given, managed)
        what = ", ".join(f"{name} (pushed: {given.get(name, 'nothing')})" for name in differ)
        raise ModelNotManaged(
            f"{server_name!r} does not manage this model: the gradients differ in {what}. It takes "
            f"{', '.join(f'{name} {facts}' for name, facts in managed.items())}."
        )


class PushPullGradServerImpl:
    """The part of a gradient server in one process.

    The primary reducer and each secondary reducer make one.  Clients push gradients to a secondary
    reducer.  A secondary reducer reduces each ``reduce_batch_size`` gradients to one, which it
    sends to the primary.  The primary reduces each ``reduce_batch_size`` of those, applies the
    result to the managed model with the model's optimizer, and pushes the model's state to the
    ordered server, from which clients pull it.  No order is guaranteed.  An incomplete batch is
    dropped when the server stops.

    Args:
        server_name: a name that is unique in the group.  The primary pairs the client under it.
        group: an `RpcGroup` that contains this process.
        model_name: the model's key in the ordered server.
        primary_reducer: the name of a member.  None: the group's first member.
        secondary_reducers: names of members.  None: all members.
        o_server: the client of another ordered server.  None: the primary makes a server.
        reduce_method: how a batch is reduced, ``"sum"`` or ``"mean"``.
        reduce_device: the device on which batches are reduced.
        reduce_batch_size: number of gradients of a batch, at least 1.
        max_queue_size: how many gradients may wait in a process, more than ``reduce_batch_size``.
            If there are more, the oldest is dropped, and `dropped` counts it.

    If gradients do not fit the managed model (another name, shape or dtype, or sparse), the
    client's `push` raises.  Gradients that were pushed before a model was managed may be refused
    later, without an error for the client.  `refused` counts these.

    Raises:
        OptionError: an argument has a wrong value, or a reducer is not in the group.
        GroupKeyError: the name is taken.
        NotAMember: this process is not in the group.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str = "model",
        primary_reducer: str | None = None,
        secondary_reducers: Sequence[str] | None = None,
        o_server: OrderedServerBase | None = None,
        reduce_method: str = "sum",
        reduce_device: torch.device | str = "cpu",
        reduce_batch_size: int = 4,
        max_queue_size: int = 64,
    ) -> None:
        members = group.get_group_members()
        self.primary_reducer = members[0] if primary_reducer is None else primary_reducer
        self.secondary_reducers = list(
            members if secondary_reducers is None else secondary_reducers
        )
        for name in (self.primary_reducer, *self.secondary_reducers):
            if name not in members:
                raise OptionError(f"reducer {name!r} is not in the group: {', '.join(members)}")
        if not self.secondary_reducers:
            raise OptionError("secondary_reducers must name at least one member")
        check_choice("reduce_method", reduce_method, "sum", "mean")
        if not 1 <= reduce_batch_size < max_queue_size:
            raise OptionError(
                "reduce_batch_size must be 1 or more and less than max_queue_size, not "
                f"{reduce_batch_size} and {max_queue_size}"
            )
        self.server_name, self.group, self.model_name = server_name, group, model_name
        self.reduce_method, self.reduce_device = reduce_method, torch.device(reduce_device)
        self.reduce_batch_size, self.max_queue_size = reduce_batch_size, max_queue_size
        self.is_primary = group.get_cur_name() == self.primary_reducer
        self.model: nn.Module | None = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.dropped = self.refused = 0

        # Threads of torch's RPC run the pushes.  The lock is not held during a reduction or a call.
        self._changed = threading.Condition()
        # Guarded by _changed: the gradients that wait, and the state of the reducing thread.
        self._queues: dict[ReduceType, deque[Gradients]] = {kind: deque() for kind in ReduceType}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: BaseException | None = None
        with ExitStack() as undo:
            self._offer(undo, o_server)
            undo.pop_all()  # all succeeded, so undo nothing

    def _offer(self, undo: ExitStack, o_server: OrderedServerBase | None) -> None:
        if o_server is None:
            o_server = _ordered(undo, self.server_name, self.group, self.is_primary)
        self.o_server = o_server
        own = f"{self.server_name}/{self.group.get_cur_name()}/_push_service"
        register(undo, self.group, own, self._push_service)
        if self.is_primary:
            facts = f"{self.server_name}/_facts_service"
            register(undo, self.group, facts, self._facts_service)
            # Paired last, because a member that gets the client may push at once.
            accessor = PushPullGradServer(
                self.server_name,
                self.group,
                self.model_name,
                self.secondary_reducers,
                self.o_server,
            )
            self.group.pair(self.server_name, accessor)

    def manage_model(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> None:
        """Apply the reduced gradients to ``model``.  The primary reducer calls this before `start`.

        Until `stop`, the program must not use the model otherwise.

        Args:
            model: the model that gets the gradients.  Its state is pushed after each step.
            optimizer: an optimizer of the model's parameters.
            lr_scheduler: a scheduler of the optimizer.  It makes a step after each optimizer step.

        Raises:
            ModelNotManaged: this process is not the primary reducer.
        """
        if not self.is_primary:
            raise ModelNotManaged(
                f"{self.group.get_cur_name()!r} cannot manage a model for {self.server_name!r}: "
                f"its primary reducer, {self.primary_reducer!r}, does."
            )
        # The ordered server may have states already, of a model that was managed before.
        newest = self.o_server.pull(self.model_name)
        model.pp_version = 0 if newest is None else newest[1]
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        # Set last: threads of torch's RPC read it to know whether a model is managed.
        self.model = model

    def start(self) -> None:
        """Start the thread that reduces gradients, including those that were pushed before.

        Raises:
            ModelNotManaged: this is the primary reducer, and it manages no model.
        """
        if self.is_primary and self.model is None:
            raise ModelNotManaged(
                f"The primary reducer of {self.server_name!r} manages no model: call "
                "manage_model(model, optimizer) before start()."
            )
        with self._changed:
            if self._thread is None:
                self._stopping, self._error = False, None
                name = f"xpool-reduce-{self.server_name}"
                self._thread = PromptThread(target=self._reduce, name=name, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step.  `start` may be called again."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()  # not under the lock, which the thread needs
            with self._changed:
                self._thread = None

    def watch(self) -> None:
        """Raise the error that has ended the thread, if an error has."""
        with self._changed:
            if self._error is not None:
                raise self._error

    # -- services -----------------------------------------------------------------------------

    def _push_service(self, gradients: Gradients, level: ReduceType) -> None:
        given = facts_of(gradients)
        if self.model is not None:
            check_facts(self.server_name, self._facts(self.model), given)
        queue = self._queues[level]
        with self._changed:
            differs = bool(queue) and facts_of(queue[-1]) != given
        if differs:
            self._drop_misfits(queue)
        with self._changed:
            if self._error is not None:
                raise GroupError(
                    f"The reducer of {self.server_name!r} in {self.group.get_cur_name()!r} has "
                    f"stopped: {self._error!r}. watch() raises that error there; stop() and "
                    "start() begin again."
                )
            if queue:  # the gradients of a batch must be alike, even if no model is managed here
                check_facts(self.server_name, facts_of(queue[-1]), given)
            queue.append(gradients)
            if len(queue) > self.max_queue_size:
                queue.popleft()
                self.dropped += 1
            self._changed.notify_all()

    def _drop_misfits(self, queue: deque[Gradients]) -> None:
        """Drop gradients that do not fit the managed model: clients pushed them before it was."""
        if self.is_primary:
            managed = self._facts_service()
        else:
            managed = self.group.registered_sync(f"{self.server_name}/_facts_service")
        if managed is None:
            return
        with self._changed:
            fit = list(filter(lambda one: facts_of(one) == managed, queue))
            self.refused += len(queue) - len(fit)
            queue.clear()
            queue.extend(fit)

    def _facts_service(self) -> Facts | None:
        return None if self.model is None else self._facts(self.model)

    @staticmethod
    def _facts(model: nn.Module) -> Facts:
        return {
            # In newer versions of torch a gradient can have another dtype than its parameter.
            name: _describe(one.shape, getattr(one, "grad_dtype", None) or one.dtype)
            for name, one in model.named_parameters()
            if one.requires_grad
        }

    # -- the thread -----------------------------------------------------------------------------

    def _reduce(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                try:
                    self._reduce_batch(*batch)
                except ModelNotManaged:
                    # The clients pushed before a model was managed, so `push` could not check.
                    self.refused += len(batch[1])
        except BaseException as exc:
            # `watch` and later pushes raise it, because no caller waits for this thread.
            with self._changed:
                self._error = exc

    def _reduce_batch(self, level: ReduceType, gradients: list[Gradients]) -> None:
        reduced = self._reduced(gradients)
        if level is ReduceType.REDUCE_PRIMARY:
            self._apply(reduced)
        elif self.is_primary:
            self._push_service(reduced, ReduceType.REDUCE_PRIMARY)
        else:
            service = f"{self.server_name}/{self.primary_reducer}/_push_service"
            self.group.registered_sync(service, (reduced, ReduceType.REDUCE_PRIMARY))

    def _next_batch(self) -> tuple[ReduceType, list[Gradients]] | None:
        """Wait for a full batch and return it, the primary's first.  Return None after `stop`."""
        size = self.reduce_batch_size
        with self._changed:
            while not self._stopping:
                for level in ReduceType:
                    queue = self._queues[level]
                    if len(queue) >= size:
                        return level, [queue.popleft() for _ in range(size)]
                self._changed.wait()
        return None

    def _reduced(self, batch: list[Gradients]) -> Gradients:
        reduced = {}
        for name in batch[0]:
            stacked = torch.stack([one[name].to(self.reduce_device) for one in batch])
            total = stacked.sum(0) if self.reduce_method == "sum" else stacked.mean(0)
            reduced[name] = total.cpu()
        return reduced

    def _apply(self, gradients: Gradients) -> None:
        model = self.model
        assert model is not None
        check_facts(self.server_name, self._facts(model), facts_of(gradients))
        self.optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device)
        self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        version: Any = model.pp_version
        # `on_cpu` copies the state, because the next step changes the model in place.
        state = on_cpu(model.state_dict())
        if not self.o_server.push(self.model_name, state, version + 1, version):
            raise GroupError(
                f"The state of {self.model_name!r} after a step was refused, because another "
                f"process has pushed one since version {version}: only the primary reducer of "
                f"{self.server_name!r} may push it."
            )
        model.pp_version = version + 1

    def __repr__(self) -> str:
        part = "primary" if self.is_primary else "secondary"
        return f"<PushPullGradServerImpl {self.server_name!r}, {part}, in {self.group!r}>"
