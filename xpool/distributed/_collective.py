"""`CollectiveGroup`: collective operations and messages among some ranks."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xpool._python.starting import PromptThread
from xpool.distributed._current import (
    CurrentWorld,
    GroupError,
    GroupTimeout,
    NotAMember,
    PeerLost,
    connection_lost,
    first_line,
    timed_out,
)
from xpool.errors import OptionError

_ABORT_TAG = 0x7AB0  # the tag of a message that no rank sends
_NEWS_SECONDS = 0.5  # how long a failed operation waits for the name of a process that died
_THREAD_SECONDS = 5.0  # how long `end` waits for a thread that waits for torch
_MESSAGES = ("isend", "irecv")


class Pending:
    """A pending operation: the result of ``async_op=True``, `isend` and `irecv`.

    It has the attributes of torch's ``Work``, too.
    """

    def __init__(self, operations: Operations, what: str, work: Any) -> None:
        self._operations, self._what, self._work = operations, what, work
        self._then: Callable[[], object] | None = None  # runs here after the operation
        self._src: int | None = None
        self._dst: int | None = None

    def wait(self, timeout: timedelta | None = None) -> Any:
        """Wait until the operation ends, at most ``timeout``. None: the group's timeout.

        Returns True, or for `irecv` the rank of the sender.

        Raises:
            PeerLost: a member of the group has died.
            GroupTimeout: it took longer, and the group is now broken.
        """
        with self._operations.watched(self._what):
            self._work.wait(*(() if timeout is None else (timeout,)))
        # Called only after success: `send_out` reports all other messages as lost.
        self._operations.received(self)
        # `_then` runs once, even if `wait` is called again.
        then, self._then = self._then, None
        if then is not None:
            then()
        return True if self._src is None else self._src

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __repr__(self) -> str:
        return f"<Pending {self._what} of {self._operations.label}>"


class ReceivingAny(Pending):
    """A pending `irecv` from any rank.  gloo does not end it when a member dies.  So a thread waits
    for the message, and the caller waits for the thread or for the group's end."""

    def __init__(self, operations: Operations, what: str, work: Any) -> None:
        super().__init__(operations, what, work)
        self.over = self._received = False
        self._error: Exception | None = None
        PromptThread(target=self._receive, name="xpool-irecv", daemon=True).start()

    def _receive(self) -> None:
        try:
            self._work.wait()
            self._received = True
        except RuntimeError as exc:
            self._error = exc
        self._operations.received_any(self)

    def is_completed(self) -> bool:
        """Whether a message has arrived."""
        return self._received

    def wait(self, timeout: timedelta | None = None) -> int:
        seconds = None if timeout is None else timeout.total_seconds()
        in_time = self._operations.await_any(self, seconds)
        # `watched` turns these errors into the group's.  It recognizes a timeout by the text.
        with self._operations.watched("irecv"):
            if not in_time:
                raise RuntimeError("Timed out waiting")
            if self._error is not None:
                raise self._error
            if not self._received:
                raise RuntimeError("the group is broken")
        sender: int = self._operations.ranks[self._work._source_rank()]
        return sender


class Operations:
    """The pending operations of one group, and the group's state.

    A group breaks as a whole, once.  Then its connections are closed, which ends all pending
    operations.  Later operations raise an error with the same reason.
    """

    def __init__(self, world: CurrentWorld, ranks: list[int], group: Any, timeout: float) -> None:
        self.group = group  # torch's group; None if this process is no member, and after the end
        self.ranks, self.timeout = ranks, timeout
        self.label = f"<CollectiveGroup of ranks {', '.join(map(str, ranks))}>"
        self.destroyed = False
        self._world, self._pid = world, os.getpid()
        # Threads of torch's RPC take this lock to break the group while other threads wait for
        # torch.  So no thread waits for torch, or closes connections, while it holds the lock.
        self._lock = threading.Lock()  # guards the fields below, except _closing
        # Notified when _begun, _broken or _aborted changes, and by `ReceivingAny`.
        self._changed = threading.Condition(self._lock)
        self._broken: GroupError | None = None  # why the group is broken
        # Collectives that a lost rank has completed may still succeed here: their number.
        self._unharmed = 0
        self._aborted = False  # whether the connections have been closed
        # How many collectives were begun, and how many of them have succeeded.  All members begin
        # the same collectives in the same order, and collectives end in this order.
        self._begun = self._succeeded = 0
        # torch completes a collective even if its `Pending` was dropped, but not a message.
        self._works: deque[Any] = deque()
        self._messages: weakref.WeakSet[Pending] = weakref.WeakSet()
        # An ordered set of the messages that were sent and not waited for.  If their work were
        # collected, torch would drop the message, and the receiver would take a wrong one.
        self._sent: dict[Pending, None] = {}
        self._closing: threading.Thread | None = None  # runs `_close_later`

    def launch(self, what: str, start: Callable[[], Any], kind: type[Pending] = Pending) -> Pending:
        """Begin an operation: ``start`` begins it in torch and returns torch's ``Work``."""
        if self.group is None and not self.destroyed:
            raise NotAMember(
                f"Rank {self._world.rank} is not in the group, whose ranks are {self.ranks}."
            )
        with self._lock:
            # A collective that the lost rank has completed may still begin.
            if self._broken is not None and (what in _MESSAGES or self._begun >= self._unharmed):
                raise self._error(what)
        # Not under the lock, which `break_for` takes after an error.
        with self.watched(what, launching=True):
            pending = kind(self, what, start())
        with self._changed:
            if what in _MESSAGES:
                self._messages.add(pending)
                if what == "isend":
                    self._sent[pending] = None
            else:
                self._retire()
                self._works.append(pending._work)
                self._begun += 1
                self._changed.notify_all()
        return pending

    @contextmanager
    def watched(self, what: str, launching: bool = False) -> Iterator[None]:
        """If torch raises an error in the block, break the group and raise the group's error.

        In a forked child, which has none of torch's threads, torch would wait for ever.
        """
        if os.getpid() != self._pid:
            raise GroupError(
                f"{self.label} belongs to process {self._pid}, from which this one was forked."
            )
        try:
            yield
        except GroupError:
            raise  # an inner `watched` has raised it
        except RuntimeError as exc:
            if launching and not (connection_lost(exc) or isinstance(exc, dist.DistError)):
                raise  # an error in the caller's arguments: nothing was sent
            names = tuple(self._world.names[rank] for rank in self.ranks)
            # While `explain` waits, `Peers` may break the group with a more precise error.
            self.break_for(explain(self._world, names, exc, self.timeout))
            raise self._error(what) from exc

    def completed(self) -> int:
        """Return how many collectives, from the first on, have succeeded here."""
        with self._lock:
            self._retire()
            return self._succeeded

    # -- messages ---------------------------------------------------------------------------

    def received(self, pending: Pending) -> None:
        """Record that an operation has ended: if it was `isend`, the message was received."""
        if pending._dst is not None:
            with self._lock:
                self._sent.pop(pending, None)

    def send_out(self, seconds: float) -> None:
        """Wait, at most ``seconds``, until all sent messages are received; warn of the others."""
        end = time.monotonic() + seconds
        with self._lock:
            sent = list(self._sent) if self._broken is None else []
        try:
            for pending in sent:
                # `is_completed` would not help: it is False until a thread waits for the message.
                pending.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except GroupError:
            with self._lock:
                lost = [str(one._dst) for one in self._sent]
            warnings.warn(
                f"{self.label} ends in {self._world.name!r} before {len(lost)} messages to rank "
                f"{', '.join(sorted(set(lost)))} were received; they are lost.",
                ResourceWarning,
                stacklevel=3,
            )

    def received_any(self, pending: ReceivingAny) -> None:
        """Record that the thread of a receive from any rank has ended."""
        with self._changed:
            pending.over = True
            self._changed.notify_all()

    def await_any(self, pending: ReceivingAny, seconds: float | None) -> bool:
        """Wait until that thread has ended or the group breaks; return whether this was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: pending.over or self._broken is not None, seconds)

    # -- the end ----------------------------------------------------------------------------

    def break_for(self, error: GroupError, abort: bool = True, completed: int = 0) -> None:
        """Break the group and end its pending operations; ``error`` is the reason.

        The first ``completed`` collectives are not ended, because the lost rank has completed them:
        its farewell may arrive before the data that it has sent for them.
        """
        with self._changed:
            first = self._broken is None
            if first:
                self._broken, self._unharmed = error, completed
            elif completed < self._unharmed:  # another rank was lost, and had completed fewer
                self._unharmed = completed
            else:
                return
            self._changed.notify_all()
            self._retire()
            over = self._succeeded >= self._unharmed
        # Not under the lock: `_close` takes it, and waits for torch.
        if abort and over:
            self._close()
        elif abort and first:
            # Some collectives may still succeed.  A new thread waits for them, because this one may
            # be a thread of torch's RPC, which must answer other calls.
            closing = PromptThread(target=self._close_later, name="xpool-group-end", daemon=True)
            closing.start()
            self._closing = closing

    def end(self) -> None:
        """Destroy the group.  Messages that were not received are lost."""
        with self._lock:
            works = [*self._works, *(one._work for one in self._messages)]
            busy = any(not work.is_completed() for work in works)
        self.break_for(GroupError(f"{self.label} was destroyed; make a new one."), abort=False)
        # If no operation is pending, torch itself closes the connections.
        self._close(abort=busy)
        if not self.destroyed:
            self.destroyed = True
            # The end of torch's default group (see `World.group`) ends all other groups.
            if self.group is not None and dist.is_initialized():
                dist.destroy_process_group(self.group)
            self.group = None
        with self._lock:
            self._sent.clear()
        # A thread that is in torch's code when Python ends would abort the process: Python ends the
        # thread by pthread_exit(3), which unwinds its stack, and some C++ functions are `noexcept`.
        if self._closing not in (None, threading.current_thread()):
            self._closing.join(_THREAD_SECONDS)

    def _close(self, abort: bool = True) -> None:
        """Close the group's connections, once, which ends all waits for them."""
        with self._changed:
            abort, self._aborted = abort and not self._aborted, True
            self._changed.notify_all()
        if abort and self.group is not None:
            _abort(self.group)

    def _close_later(self) -> None:
        """Wait until the collectives that may still succeed have ended; close the connections."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._aborted or self._begun >= self._unharmed)
                self._retire()
                if self._aborted or self._begun - len(self._works) >= self._unharmed:
                    break
                # `_works` is not empty: fewer than `_unharmed` of the begun ones have ended.
                work = self._works[0]
            try:
                work.wait()
            except RuntimeError:
                break  # the caller of that operation gets the error
        self._close()

    def _retire(self) -> None:
        """Remove the works that have ended.  The caller holds the lock."""
        # `wait` of an ended work returns at once, and raises if the work has failed.
        while self._works and self._works[0].is_completed():
            before = self._begun - len(self._works)
            try:
                self._works.popleft().wait()
            except RuntimeError:
                continue  # failed, and no later operation counts as a success
            if self._succeeded == before:
                self._succeeded += 1

    def _error(self, what: str) -> GroupError:
        """Return a new error for a caller, with the reason why the group is broken."""
        # Takes no lock, because `launch` holds it.  The reason is set only once.
        reason = self._broken
        if self.destroyed:
            return GroupError(str(reason))
        return type(reason or GroupError())(
            f"{what} in {self.label} failed: {reason}. The group is broken: destroy() it in all "
            "remaining members and make a new one of them."
        )


def explain(
    world: CurrentWorld, names: tuple[str, ...], exc: RuntimeError, timeout: float
) -> GroupError:
    """Return the error for an operation of ``names`` for which torch has raised ``exc``."""
    # After a timeout, or without RPC, no message about a death can be on its way.
    late = timed_out(exc)
    lost = world.peers.wait_lost(list(names), 0 if late or not world.has_rpc else _NEWS_SECONDS)
    if lost:
        return PeerLost("; ".join(world.peers.describe(name) for name in lost))
    members = ", ".join(names)
    if late:
        return GroupTimeout(
            f"not all of {members} took part within {timeout:g} s, or the timeout of the call"
        )
    story = first_line(exc)
    if connection_lost(exc):
        return PeerLost(f"a member (of {members}) has died, or left the group ({story[:200]})")
    return GroupError(story)


def _abort(group: Any) -> None:
    try:
        if dist.get_backend(group) == "gloo":
            # gloo has no call for this, but it closes connections after a receive has timed out.
            nothing = torch.empty(1)
            group.recv_anysource([nothing], _ABORT_TAG).wait(timedelta(milliseconds=1))
        else:
            group.abort()
    except (RuntimeError, ValueError):
        pass  # timed out, as intended; or the connections or the group were closed already


_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class CollectiveGroup:
    """Collective communication among some ranks; made by `World.create_collective_group`.

    The methods and their arguments are those of ``torch.distributed``. Ranks are those of the
    world. ``op`` is a `torch.distributed.ReduceOp`. A message is received with the ``tag`` with
    which it was sent. With ``async_op=True``, an operation returns a `Pending` at once instead of
    waiting. Complex tensors are sent as pairs of reals, and only SUM and AVG can reduce them.

    All members must call the same operations in the same order, with contiguous tensors of one
    shape and dtype. This is not checked. With gloo, a tensor that is larger than the sender's is
    filled only in part, without an error (`broadcast`, `recv`, `scatter`, `gather`), and a smaller
    one ends its process with SIGABRT. To have torch refuse such collectives, set
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` in all processes.

    All operations raise:
        NotAMember: this process is not in the group.
        PeerLost: a member has died. All later operations of the group raise it, too.
        GroupTimeout: not all members called the operation within the group's timeout. All later
            operations of the group raise it, too.
        OptionError: a rank is not in the group, or ``op`` cannot reduce complex tensors.
    """

    def __init__(
        self,
        world: CurrentWorld,
        ranks: list[int],
        group: Any,
        timeout: float,
        number: int,
        on_end: Callable[[CollectiveGroup], None],
    ) -> None:
        # The key is the same in all members.  ``number`` counts the groups of the same ranks.
        self.key = tuple(ranks), number
        self.ranks = ranks
        self.current_rank = ranks.index(world.rank) if world.rank in ranks else None
        self.operations = Operations(world, ranks, group, timeout)
        self._rank, self._on_end = world.rank, on_end

    @property
    def group(self) -> Any:
        """torch's process group; None if this process is not a member, and after `destroy`."""
        return self.operations.group

    @property
    def destroyed(self) -> bool:
        """Whether the group has been destroyed here."""
        return self.operations.destroyed

    # -- two ranks --------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send ``tensor`` to rank ``dst``. On return, the caller may write to it again."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into ``tensor`` from rank ``src``, or any if None. Returns the sender's rank."""
        sender: int = self.irecv(tensor, src, tag).wait()
        return sender

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Pending:
        """Begin to send to rank ``dst``. Do not write to ``tensor`` before ``wait()`` returns.

        A message is kept until it is received, even if the caller drops the `Pending`. `destroy`
        and `World.stop` wait until it is received.
        """
        _check_rank("dst", dst, self.ranks)
        pending = self.operations.launch(
            "isend", lambda: dist.isend(_input(tensor), dst, self.group, tag)
        )
        pending._dst = dst
        return pending

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Pending:
        """Begin to receive into ``tensor`` from rank ``src``, or any if None. Return a `Pending`
        at once; its ``wait()`` returns the sender's rank.
        """
        into = _output(tensor)
        if src is not None:
            _check_rank("src", src, self.ranks)
            pending = self.operations.launch(
                "irecv", lambda: dist.irecv(into, src, self.group, tag)
            )
            pending._src = src
            return pending
        return self.operations.launch(
            "irecv", lambda: self.group.recv_anysource([into], tag), ReceivingAny
        )

    # -- all ranks --------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Pending | None:
        """Copy the tensor of rank ``src`` into ``tensor`` in all members."""
        _check_rank("src", src, self.ranks)
        return self._run("broadcast", async_op, dist.broadcast, _output(tensor), src)

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Pending | None:
        """Reduce the tensors of all members; each member's ``tensor`` becomes the result."""
        return self._run("all_reduce", async_op, dist.all_reduce, _summand(tensor, op), op)

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Pending | None:
        """Reduce all members' tensors into that of rank ``dst``; torch may change the others."""
        _check_rank("dst", dst, self.ranks)
        return self._run("reduce", async_op, dist.reduce, _summand(tensor, op), dst, op)

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool = False
    ) -> Pending | None:
        """Fill ``tensor_list`` with the tensors of all members, in the order of the group."""
        outputs = [_output(one) for one in tensor_list]
        return self._run("all_gather", async_op, dist.all_gather, outputs, _input(tensor))

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Pending | None:
        """Fill ``gather_list`` of rank ``dst`` with all members' tensors, in the group's order.

        Other ranks give no ``gather_list``.
        """
        _check_rank("dst", dst, self.ranks)
        outputs = None if gather_list is None else [_output(one) for one in gather_list]
        return self._run("gather", async_op, dist.gather, _input(tensor), outputs, dst)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Pending | None:
        """Fill each member's ``tensor`` with one tensor of rank ``src``'s ``scatter_list``.

        The list is in the order of the group. Other ranks give no ``scatter_list``.
        """
        _check_rank("src", src, self.ranks)
        inputs = None if scatter_list is None else [_input(one) for one in scatter_list]
        return self._run("scatter", async_op, dist.scatter, _output(tensor), inputs, src)

    def barrier(self, async_op: bool = False) -> Pending | None:
        """Wait until all members have called this."""
        return self._run("barrier", async_op, dist.barrier)

    # -- several tensors in each process, which torch has removed -------------------------------

    def broadcast_multigpu(
        self, tensor_list: list[Tensor], src: int, async_op: bool = False, src_tensor: int = 0
    ) -> Pending | None:
        """Copy ``tensor_list[src_tensor]`` of rank ``src`` into all tensors of all members' lists.

        This is one `broadcast` and local copies, because torch now has one device a process.
        """
        _check_rank("src", src, self.ranks)
        one = _pick(tensor_list, src_tensor, "src_tensor")
        then = partial(_fill, tensor_list, one)
        return self._run("broadcast", async_op, dist.broadcast, _output(one), src, then=then)

    def all_reduce_multigpu(
        self, tensor_list: list[Tensor], op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Pending | None:
        """Reduce all tensors of all members' lists; each of them becomes the result.

        This is one `all_reduce` of the local results, and local copies.
        """
        total = _reduce_here(tensor_list, op)
        then = partial(_fill, tensor_list, total)
        summand = _summand(total, op)
        return self._run("all_reduce", async_op, dist.all_reduce, summand, op, then=then)

    def reduce_multigpu(
        self,
        tensor_list: list[Tensor],
        dst: int,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
        dst_tensor: int = 0,
    ) -> Pending | None:
        """Reduce all tensors of all lists into rank ``dst``'s ``tensor_list[dst_tensor]``."""
        _check_rank("dst", dst, self.ranks)
        target = _pick(tensor_list, dst_tensor, "dst_tensor")
        total = _reduce_here(tensor_list, op)
        then = partial(_fill, [target] if self._rank == dst else [], total)
        return self._run("reduce", async_op, dist.reduce, _summand(total, op), dst, op, then=then)

    def all_gather_multigpu(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        async_op: bool = False,
    ) -> Pending | None:
        """Fill each output list with all tensors of all members, in the order of the group.

        With ``n`` input tensors in each member, there are ``n`` output lists of ``n * size()``
        tensors. Raises `OptionError` for other lengths.
        """
        n = len(input_tensor_list)
        if len(output_tensor_lists) != n or any(
            len(one) != n * self.size() for one in output_tensor_lists
        ):
            raise OptionError(
                f"{n} tensors in each of {self.size()} members need {n} output lists of "
                f"{n * self.size()} tensors; there are {[len(one) for one in output_tensor_lists]}."
            )
        packed = torch.stack([one.to(input_tensor_list[0].device) for one in input_tensor_list])
        gathered = [torch.empty_like(packed) for _ in self.ranks]

        def spread() -> None:
            for outputs in output_tensor_lists:
                for output, value in zip(outputs, (row for member in gathered for row in member)):
                    output.copy_(value)

        outputs = [_output(one) for one in gathered]
        run = dist.all_gather
        return self._run("all_gather", async_op, run, outputs, _input(packed), then=spread)

    # -- life -------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Break the group on any error in the block, so that others do not wait for this member.

        An error of torch becomes a `GroupError`.  ``what`` names the block in error texts.
        """
        try:
            with self.operations.watched(what, launching=True):
                yield
        except BaseException as exc:
            error = GroupError(f"rank {self._rank} raised {type(exc).__name__}")
            self.operations.break_for(error)
            raise

    def destroy(self) -> None:
        """Close the group's connections; the group cannot be used afterwards.

        Waits, for the group's timeout at most, until the others have received all messages. Emits a
        `ResourceWarning` for messages that were not received.
        """
        try:
            self.operations.send_out(self.operations.timeout)
        finally:
            self.end()

    def end(self) -> None:
        """Destroy the group without waiting. Messages that were not received are lost."""
        self.operations.end()
        self._on_end(self)

    def __reduce__(self) -> Any:
        raise TypeError("A group belongs to its process and cannot be sent; make one in each.")

    def __repr__(self) -> str:
        return self.operations.label

    # -- running ----------------------------------------------------------------------------

    def _run(
        self,
        what: str,
        async_op: bool,
        op: Callable[..., Any],
        *args: Any,
        then: Callable[[], object] | None = None,
    ) -> Pending | None:
        pending = self.operations.launch(what, lambda: op(*args, group=self.group, async_op=True))
        pending._then = then
        return pending if async_op else pending.wait() and None


def _check_rank(what: str, rank: int, ranks: list[int]) -> None:
    if rank not in ranks:
        raise OptionError(f"{what}={rank!r} is not in the group; its ranks: {ranks}.")


def _input(tensor: Tensor) -> Tensor:
    # `view_as_real` refuses conjugate views.  An input may be copied; an output may not.
    return _output(tensor.resolve_conj() if isinstance(tensor, Tensor) else tensor)


def _output(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a tensor is needed, not {tensor!r}")
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _summand(tensor: Tensor, op: Any) -> Tensor:
    real = _output(tensor)
    # Other reductions give another result for pairs of reals than for complex numbers.
    if real is not tensor and op not in _SUMS:
        raise OptionError(f"{op} is not for complex tensors: only SUM and AVG are.")
    return real


def _pick(tensors: list[Tensor], index: int, what: str) -> Tensor:
    if not 0 <= index < len(tensors):
        raise OptionError(
            f"{what}={index} is not an index of the {len(tensors)} tensors of the list."
        )
    return tensors[index]


def _fill(tensors: list[Tensor], value: Tensor) -> None:
    for one in tensors:
        one.copy_(value)


_IN_PLACE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def _reduce_here(tensors: list[Tensor], op: Any) -> Tensor:
    """Reduce the tensors of this process into a new tensor, on the device of the first."""
    combine = next((found for one, found in _IN_PLACE.items() if one == op), None)
    if not tensors or combine is None:
        raise OptionError(
            f"{op} of {len(tensors)} tensors: give at least one tensor, and SUM, PRODUCT, MAX or "
            "MIN."
        )
    total = tensors[0].clone()
    for one in tensors[1:]:
        total = combine(total, one.to(total.device))
    return total
