"""`CollectiveGroup`: collective operations and messages among some ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xpool.distributed._current import CurrentWorld
from xpool.distributed._group_errors import GroupError
from xpool.distributed._operations import Operations, Pending, ReceivingAny
from xpool.errors import OptionError

_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class CollectiveGroup:
    """Collective communication among some ranks; made by `World.create_collective_group`.

    The methods and their arguments are those of ``torch.distributed``. Ranks are those of the
    world. ``async_op=True`` returns a `Pending` instead of waiting. Complex tensors are sent as
    pairs of reals, and only SUM and AVG can reduce them.

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
        """As `recv`, but return a `Pending` at once; its ``wait()`` returns the sender's rank."""
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
        pending = self.operations.launch("barrier", lambda: dist.barrier(self.group, async_op=True))
        return pending if async_op else pending.wait() and None

    # -- several tensors in each process, which torch has removed -------------------------------

    def broadcast_multigpu(
        self, tensor_list: list[Tensor], src: int, async_op: bool = False, src_tensor: int = 0
    ) -> Pending | None:
        """Copy ``tensor_list[src_tensor]`` of rank ``src`` into all tensors of all members' lists.

        This is one `broadcast` and local copies, because torch now has one device a process.
        """
        one = _pick(tensor_list, src_tensor, "src_tensor")

        def spread() -> None:
            for other in tensor_list:
                if other is not one:
                    other.copy_(one)

        return _and_then(self.broadcast(one, src, True), async_op, spread)

    def all_reduce_multigpu(
        self, tensor_list: list[Tensor], op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> Pending | None:
        """Reduce all tensors of all members' lists; each of them becomes the result.

        This is one `all_reduce` of the local results, and local copies.
        """
        total = _reduce_here(tensor_list, op)

        def spread() -> None:
            for one in tensor_list:
                one.copy_(total)

        return _and_then(self.all_reduce(total, op, True), async_op, spread)

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
            if self._rank == dst:
                target.copy_(total)

        return _and_then(self.reduce(total, dst, op, True), async_op, keep)

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

        return _and_then(self.all_gather(gathered, packed, True), async_op, spread)

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

    def _run(self, what: str, async_op: bool, op: Callable[..., Any], *args: Any) -> Pending | None:
        pending = self.operations.launch(what, lambda: op(*args, group=self.group, async_op=True))
        return pending if async_op else pending.wait() and None


def _check_rank(what: str, rank: int, ranks: list[int]) -> None:
    if rank not in ranks:
        raise OptionError(f"{what}={rank!r} is not in the group; its ranks: {ranks}.")


def _and_then(
    pending: Pending | None, async_op: bool, then: Callable[[], object]
) -> Pending | None:
    assert pending is not None
    pending._then = then
    return pending if async_op else pending.wait() and None


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
