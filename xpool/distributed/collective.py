"""`CollectiveGroup`: collective communication that ends, one way or the other."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from xpool.distributed.errors import GroupError, GroupTimeout, NotAMember, PeerLost
from xpool.distributed.faults import connection_lost, first_line, timed_out
from xpool.distributed.pending import Pending, ReceivingAny, Watch
from xpool.errors import OptionError

if TYPE_CHECKING:
    from xpool.distributed.world import World

__all__ = ["CollectiveGroup", "explain"]

_ABORT_TAG = 0x7AB0  # of a message that nobody sends
_HEARSAY = 0.5  # seconds for the news of a death to come, so that the error can name who died
_PATIENCE = 5.0  # seconds for threads that wait for torch, when the group has ended
_MESSAGES = ("isend", "irecv")
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class CollectiveGroup:
    """Collective communication among some ranks; made by `World.create_collective_group`.

    The methods are those of ``torch.distributed``, with its arguments; ranks are those of the
    world. ``async_op=True`` returns a `Pending` instead of waiting. Complex tensors are sent as
    pairs of reals; only sums and means reduce them. All members must call the same operations in
    the same order, with contiguous tensors of one shape and dtype. That is not checked. With gloo,
    a tensor that is larger than the sender's is filled in part without an error (`broadcast`,
    `recv`, `scatter`, `gather`), and a smaller one ends its process (SIGABRT). Set
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` in all processes to have torch refuse such collectives.

    All raise:
        NotAMember: this process is not in the group.
        PeerLost: a member has died; so for all operations of the group, from then on.
        GroupTimeout: not all members called the operation within the group's timeout. After this
            the group is broken too.
        OptionError: a rank is not in the group, or the reduction is not one for complex tensors.
    """

    def __init__(
        self, world: World, ranks: list[int], group: Any, timeout: float, number: int = 0
    ) -> None:
        self.group = group
        # The same in all members: the ranks, and which group of these ranks it is.
        self.key = tuple(ranks), number
        self.current_rank = ranks.index(world.rank) if world.rank in ranks else None
        self.destroyed = False
        self._world, self._ranks, self._timeout = world, ranks, timeout
        # Held for moments only.  Nobody waits for torch under it, or closes connections: threads of
        # torch's RPC take it to break the group, and must get through while others wait.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # of _begun and _aborted
        # Guarded by _lock: why the group is of no use any more, and who waits for any message.
        self._broken: GroupError | None = None
        self._events: set[threading.Event] = set()
        # Guarded by _lock: collectives with a lower number go on in a broken group, for whoever
        # is lost had done their part of them; and whether the connections have been closed.
        self._unharmed = 0
        self._aborted = False
        # Guarded by _lock: how many collectives were begun, and how many of the first of them have
        # succeeded.  All members begin the same ones in the same order, and they end in it.
        self._begun = self._succeeded = 0
        # Guarded by _lock: what may be going on.  torch works at collectives of which nobody
        # holds the `Pending` any more; messages end with it.
        self._works: deque[Any] = deque()
        self._pending: weakref.WeakSet[Pending] = weakref.WeakSet()
        # Guarded by _lock, a set in order: messages that were sent, and not waited for.  torch
        # drops a message of which nobody holds the work, and the next one then goes astray.
        self._sent: dict[Pending, None] = {}
        # Guarded by _lock: threads of ours that wait for torch, and end when the group does.
        self._threads: list[threading.Thread] = []

    # -- two ranks --------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send to rank ``dst``; returns when the tensor may be written to again."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into ``tensor`` from rank ``src``, or from any; returns the sender's rank."""
        sender: int = self.irecv(tensor, src, tag).wait()
        return sender

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Pending:
        """Begin to send to rank ``dst``; leave the tensor alone until ``wait()`` has returned.

        A message that nobody waits for is kept until it is received, at the latest by `destroy`
        or `World.stop`: these wait for it.
        """
        self._check_rank("dst", dst)
        pending = self._launch("isend", lambda: dist.isend(_input(tensor), dst, self.group, tag))
        pending._dst = dst
        with self._lock:
            self._sent[pending] = None
        return pending

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Pending:
        """Begin to receive from rank ``src``, or from any; ``wait()`` returns the sender's rank."""
        into = _output(tensor)
        if src is not None:
            self._check_rank("src", src)
            pending = self._launch("irecv", lambda: dist.irecv(into, src, self.group, tag))
            pending._src = src
            return pending
        return self._launch("irecv", lambda: self.group.recv_anysource([into], tag), ReceivingAny)

    # -- all ranks --------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Pending | None:
        """Make ``tensor`` in all members what it is in rank ``src``."""
        self._check_rank("src", src)
        return self._run("broadcast", async_op, dist.broadcast, _output(tensor), src)

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Pending | None:
        """Reduce the tensors of all members, in place, in all."""
        return self._run("all_reduce", async_op, dist.all_reduce, _summand(tensor, op), op)

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Pending | None:
        """Reduce the tensors of all members, in place, in rank ``dst``; others' are scratch."""
        self._check_rank("dst", dst)
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
        """Fill ``gather_list`` in rank ``dst``, where alone it is given."""
        self._check_rank("dst", dst)
        outputs = None if gather_list is None else [_output(one) for one in gather_list]
        return self._run("gather", async_op, dist.gather, _input(tensor), outputs, dst)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Pending | None:
        """Fill ``tensor`` from the ``scatter_list`` that rank ``src`` alone gives."""
        self._check_rank("src", src)
        inputs = None if scatter_list is None else [_input(one) for one in scatter_list]
        return self._run("scatter", async_op, dist.scatter, _output(tensor), inputs, src)

    def barrier(self, async_op: bool = False) -> Pending | None:
        """Wait until all members have called this."""
        pending = self._launch("barrier", lambda: dist.barrier(self.group, async_op=True))
        return pending if async_op else pending.wait() and None

    # -- several tensors in each process, which torch has taken out -----------------------------

    def broadcast_multigpu(
        self, tensor_list: list[Tensor], src: int, async_op: bool = False, src_tensor: int = 0
    ) -> Pending | None:
        """Make every tensor of every member's list what ``src``'s ``tensor_list[src_tensor]`` is.

        torch has one device for each process today: this is one `broadcast` and local copies.
        """
        one = _pick(tensor_list, src_tensor, "src_tensor")

        def spread() -> None:
            for other in tensor_list:
                if other is not one:
                    other.copy_(one)

        return self._and_then(self.broadcast(one, src, True), async_op, spread)

    def all_reduce_multigpu(
        self, tensor_list: list[Tensor], op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Pending | None:
        """Reduce all tensors of all members' lists, in place, in all.

        One `all_reduce` of what was reduced locally, and local copies.
        """
        total = _reduce_here(tensor_list, op)

        def spread() -> None:
            for one in tensor_list:
                one.copy_(total)

        return self._and_then(self.all_reduce(total, op, True), async_op, spread)

    def reduce_multigpu(
        self,
        tensor_list: list[Tensor],
        dst: int,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
        dst_tensor: int = 0,
    ) -> Pending | None:
        """Reduce all tensors of all lists into rank ``dst``'s ``tensor_list[dst_tensor]``."""
        target = _pick(tensor_list, dst_tensor, "dst_tensor")
        total = _reduce_here(tensor_list, op)

        def keep() -> None:
            if self._world.rank == dst:
                target.copy_(total)

        return self._and_then(self.reduce(total, dst, op, True), async_op, keep)

    def all_gather_multigpu(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        async_op: bool = False,
    ) -> Pending | None:
        """Fill each output list with all tensors of all members: member by member, in order.

        Each of the ``len(input_tensor_list)`` output lists takes ``size()`` times as many tensors.
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
        gathered = [torch.empty_like(packed) for _ in self._ranks]

        def spread() -> None:
            for outputs in output_tensor_lists:
                for output, value in zip(outputs, (row for member in gathered for row in member)):
                    output.copy_(value)

        return self._and_then(self.all_gather(gathered, packed, True), async_op, spread)

    # -- life -------------------------------------------------------------------------------

    def size(self) -> int:
        """Number of members."""
        return len(self._ranks)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around what all members do: an error of torch's in it becomes the group's, and any error
        breaks the group, so that the others do not wait for this one."""
        try:
            with self._watched(what, launching=True):
                yield
        except BaseException as exc:
            self._break(GroupError(f"{type(exc).__name__} in {self._world.name!r}"))
            raise

    def destroy(self) -> None:
        """Let go of the group's connections; the group is of no use afterwards.

        First it waits, for the group's timeout at most, until the others have received what was
        sent; a `ResourceWarning` says what they have not.
        """
        try:
            self._send_out(self._timeout)
        finally:
            # Also after a warning that is an error, or a signal handler that raises.
            self._end()

    def _end(self) -> None:
        """Destroy the group as it is: what was sent and not received is lost."""
        busy = self._is_busy()
        self._break(GroupError(f"{self!r} was destroyed; make a new one."), abort=False)
        # Without anything pending, torch's own destruction closes the connections.
        self._close(abort=busy)
        if not self.destroyed:
            self.destroyed = True
            # The end of torch's default group, that of `World.group`, takes all others along.
            if self.current_rank is not None and dist.is_initialized():
                dist.destroy_process_group(self.group)
            self.group = None
        with self._lock:
            # Not while it is connected: torch drops messages of which nobody holds the work.
            self._sent.clear()
            threads, self._threads = self._threads, []
        # One that is in torch's code when Python ends aborts the process: Python has such threads
        # end by pthread_exit(3), which C++ takes for an exception where there may be none.
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_PATIENCE)
        self._world._forget_group(self)

    def __reduce__(self) -> Any:
        raise TypeError("A group belongs to its process and cannot be sent; make one in each.")

    def __repr__(self) -> str:
        return f"<CollectiveGroup of ranks {', '.join(map(str, self._ranks))}>"

    # -- the group's end ----------------------------------------------------------------------

    def _lost(self, rank: int, error: GroupError, completed: int = 0) -> None:
        """A rank of the world is gone, after it had ``completed`` that many collectives."""
        if rank in self._ranks:
            self._break(error, completed=completed)

    def completed(self) -> int:
        """How many collectives have succeeded here, of those that were begun first."""
        with self._lock:
            self._retire()
            return self._succeeded

    def _break(self, error: GroupError, abort: bool = True, completed: int = 0) -> None:
        """End everything that is pending here, for this reason.

        But for the first ``completed`` collectives: whoever is lost has completed these, so they
        can end well here.  The news of a loss may come before what that rank sent for them.
        """
        with self._changed:
            first = self._broken is None
            if first:
                self._broken, self._unharmed = error, completed
            elif completed < self._unharmed:  # somebody else is lost, who had done less
                self._unharmed = completed
                self._changed.notify_all()
            else:
                return
            events, self._events = self._events, set()
            self._retire()
            over = self._succeeded >= self._unharmed
        # From here on without the lock: `_close` takes it, and waits for torch.
        for event in events:
            event.set()
        if abort and over:
            self._close()
        elif abort and first:
            # Some collectives are to end first.  A thread waits for these: this one may be torch's,
            # which brings the news of a loss and has other calls to answer.
            self._start("xpool-group-end", self._close_later)

    def _start(self, name: str, target: Callable[[], None]) -> None:
        """Run something in a thread, for whose end that of the group waits."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _close(self, abort: bool = True) -> None:
        """Close the group's connections, once, so that whatever waits on them ends."""
        with self._changed:
            # Of several threads that come here, one closes them.
            abort, self._aborted = abort and not self._aborted, True
            self._changed.notify_all()
        if abort and self.current_rank is not None:
            _abort(self.group)

    def _close_later(self) -> None:
        """Close them when the collectives that the loss does not harm have ended."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._aborted or self._begun >= self._unharmed)
                self._retire()
                # The rest of them, if there are any, ends when the connections are closed.
                if self._aborted or self._begun - len(self._works) >= self._unharmed:
                    break
                # There is one: of those begun, fewer than `_unharmed` have ended.
                work = self._works[0]
            try:
                work.wait()
            except RuntimeError:
                break  # whoever waits for it is told so
        self._close()

    def _taken(self, pending: Pending) -> None:
        """Its message has been received, if it was one."""
        if pending._dst is not None:
            with self._lock:
                self._sent.pop(pending, None)

    def _send_out(self, seconds: float) -> None:
        """Wait until what was sent is received, before the connections end; say what is not."""
        end = time.monotonic() + seconds
        with self._lock:
            # A broken group closes its connections: there is nothing to wait for.
            sent = list(self._sent) if self._broken is None else []
        try:
            for pending in sent:
                # torch cannot be asked: what was not waited for never counts as completed.
                pending.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except GroupError:
            with self._lock:
                lost = [str(one._dst) for one in self._sent]
            warnings.warn(
                f"{self!r} ends in {self._world.name!r}, and what was sent there and not received "
                f"is lost: {len(lost)} messages, to rank {', '.join(sorted(set(lost)))}.",
                ResourceWarning,
                stacklevel=3,
            )

    def _retire(self) -> None:
        """Take out the works that have ended; under the lock."""
        # To wait for a completed work takes no time, and raises if it has failed.
        while self._works and self._works[0].is_completed():
            before = self._begun - len(self._works)
            try:
                self._works.popleft().wait()
            except RuntimeError:
                continue  # it failed, and none after it counts as a success
            if self._succeeded == before:
                self._succeeded += 1

    def _explain(self, what: str, exc: RuntimeError) -> GroupError:
        """Break the group for what torch says; return the error to raise."""
        names = tuple(self._world.names[rank] for rank in self._ranks)
        # While `explain` waits for news, a loss may break the group with the name of who died.  The
        # first reason stays.
        self._break(explain(self._world, names, exc, self._timeout))
        return self._error(what)

    def _error(self, what: str) -> GroupError:
        """The reason of the group's end, for one caller."""
        # Without the lock, which `_launch` holds: the reason is set once, and stays.
        reason = self._broken
        if self.destroyed:
            return GroupError(str(reason))
        # An error of its own for each caller, so that tracebacks do not grow into each other.
        return type(reason or GroupError())(
            f"{what} in {self!r} failed: {reason}. The group is broken: destroy() it in all who "
            "are left, and make a new one of them."
        )

    def _watched(self, what: str, launching: bool = False) -> Watch:
        return Watch(self, what, launching)

    def _over_event(self) -> threading.Event:
        event = threading.Event()
        with self._lock:
            if self._broken is None:
                self._events.add(event)
            else:
                event.set()
        return event

    def _forget(self, event: threading.Event) -> None:
        with self._lock:
            self._events.discard(event)

    # -- running ----------------------------------------------------------------------------

    def _check_rank(self, what: str, rank: int) -> None:
        if rank not in self._ranks:
            raise OptionError(f"{what}={rank!r} is not in the group; its ranks: {self._ranks}.")

    def _launch(
        self, what: str, start: Callable[[], Any], kind: type[Pending] = Pending
    ) -> Pending:
        if self.current_rank is None:
            raise NotAMember(
                f"Rank {self._world.rank} is not in the group, whose ranks are {self._ranks}."
            )
        with self._lock:
            # A collective that whoever is lost has done its part of may still begin.
            if self._broken is not None and (what in _MESSAGES or self._begun >= self._unharmed):
                raise self._error(what)
        # Without the lock: an error of torch's breaks the group, which takes it.
        with self._watched(what, launching=True):
            pending = kind(self, what, start())
        with self._changed:
            if what in _MESSAGES:
                self._pending.add(pending)
            else:
                self._retire()
                self._works.append(pending._work)
                self._begun += 1
                self._changed.notify_all()
        return pending

    def _is_busy(self) -> bool:
        """Whether something is pending, which would keep the connections open."""
        with self._lock:
            works = [*self._works, *(one._work for one in self._pending)]
            return any(not work.is_completed() for work in works)

    def _run(self, what: str, async_op: bool, op: Callable[..., Any], *args: Any) -> Pending | None:
        pending = self._launch(what, lambda: op(*args, group=self.group, async_op=True))
        return pending if async_op else pending.wait() and None

    def _and_then(
        self, pending: Pending | None, async_op: bool, then: Callable[[], object]
    ) -> Pending | None:
        assert pending is not None
        pending._then = then
        return pending if async_op else pending.wait() and None


def explain(world: World, names: tuple[str, ...], exc: RuntimeError, timeout: float) -> GroupError:
    """Say in our words why torch gave up something among these members."""
    # After a timeout, or without RPC, no news of a death is on its way.
    late = timed_out(exc)
    lost = world.peers.wait_lost(list(names), 0 if late or not world.has_rpc else _HEARSAY)
    if lost:
        return PeerLost("; ".join(world.peers.describe(name) for name in lost))
    members = ", ".join(names)
    if late:
        return GroupTimeout(
            f"not all of {members} took part within {timeout:g} s, or the timeout that was given"
        )
    story = first_line(exc)
    if connection_lost(exc):
        return PeerLost(f"a member (of {members}) has died, or left the group ({story[:200]})")
    return GroupError(story)


def _abort(group: Any) -> None:
    """Close the connections of a process group, so that whatever waits on them ends."""
    try:
        if dist.get_backend(group) == "gloo":
            # gloo has no call for it, but closes them after a receive that timed out.
            nothing = torch.empty(1)
            group.recv_anysource([nothing], _ABORT_TAG).wait(timedelta(milliseconds=1))
        else:
            group.abort()
    except RuntimeError:
        pass  # it timed out, as was meant, or they are closed already
    except ValueError:
        pass  # torch has destroyed the group


def _input(tensor: Tensor) -> Tensor:
    # `view_as_real` refuses conjugate views.  Only what is sent may be a copy of the tensor.
    return _output(tensor.resolve_conj() if isinstance(tensor, Tensor) else tensor)


def _output(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a tensor is needed, not {tensor!r}")
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _summand(tensor: Tensor, op: Any) -> Tensor:
    real = _output(tensor)
    # Of pairs of reals, only a sum or a mean is that of the complex numbers.
    if real is not tensor and op not in _SUMS:
        raise OptionError(f"{op} is not for complex tensors: only SUM and AVG are.")
    return real


def _pick(tensors: list[Tensor], index: int, what: str) -> Tensor:
    if not 0 <= index < len(tensors):
        raise OptionError(f"{what}={index} is none of the {len(tensors)} tensors of the list.")
    return tensors[index]


_IN_PLACE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def _reduce_here(tensors: list[Tensor], op: Any) -> Tensor:
    """Reduce a list of one process into a new tensor, on the device of the first."""
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
