"""Collective groups: each operation does what torch documents, also for complex tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="xpool.distributed needs torch")

import torch
from support.ranks import Ranks
from support.tiers import also

from xpool.distributed import CollectiveGroup, GroupError, NotAMember, World
from xpool.errors import OptionError

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]


def full(value: complex, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.full((3,), value * (1 + 2j) if kind.is_complex else value, dtype=kind)


def same(tensor: torch.Tensor, value: complex, dtype: str) -> None:
    assert torch.equal(tensor, full(value, dtype)), tensor


def every_operation(world: World, dtype: str) -> None:
    """Every operation gives each rank the right result, with any order of ranks."""
    rank, group = world.rank, world.create_collective_group([2, 0, 1])

    def mine() -> torch.Tensor:
        return full(rank + 1, dtype)

    tensor = mine()
    assert group.broadcast(tensor, 1) is None
    same(tensor, 2, dtype)
    tensor = mine()
    group.all_reduce(tensor)
    same(tensor, 6, dtype)
    tensor = mine()
    group.reduce(tensor, 2)
    if rank == 2:
        same(tensor, 6, dtype)
    gathered = [full(0, dtype) for _ in range(3)]
    group.all_gather(gathered, mine())
    for index, tensor in enumerate(gathered):
        same(tensor, index + 1, dtype)
    gathered = [full(0, dtype) for _ in range(3)]
    group.gather(mine(), gathered if rank == 1 else None, dst=1)
    for index, tensor in enumerate(gathered):
        same(tensor, index + 1 if rank == 1 else 0, dtype)
    tensor = full(0, dtype)
    group.scatter(tensor, [full(index + 5, dtype) for index in range(3)] if rank == 2 else None, 2)
    same(tensor, rank + 5, dtype)
    group.barrier()
    assert group.size() == 3


def asynchronous(world: World, dtype: str) -> None:
    """With ``async_op`` an operation returns an object to wait for."""
    rank, group = world.rank, world.create_collective_group(range(3))
    tensor = full(rank, dtype)
    pending = group.all_reduce(tensor, async_op=True)
    assert pending.wait() is True
    assert pending.is_completed()
    same(tensor, 3, dtype)
    gathered = [full(0, dtype) for _ in range(3)]
    pending = group.gather(full(rank, dtype), gathered if rank == 0 else None, async_op=True)
    barrier = group.barrier(async_op=True)
    pending.wait()
    barrier.wait()
    if rank == 0:
        same(gathered[2], 2, dtype)


def point_to_point(world: World, dtype: str) -> None:
    """Ranks send to each other; a receive from any rank returns the sender's rank."""
    rank, group = world.rank, world.create_collective_group([0, 1, 2])
    if rank:
        group.recv(tensor := full(0, dtype), 0)
        same(tensor, rank, dtype)
        group.isend(full(10 * rank, dtype), 0, tag=7).wait()
        group.recv(full(0, dtype), 0)
        group.send(full(20 * rank, dtype), 0)
        return
    for other in (1, 2):
        group.send(full(other, dtype), other)
    senders = []
    for _ in range(2):
        source = group.irecv(tensor := full(0, dtype), tag=7).wait()
        same(tensor, 10 * source, dtype)
        senders.append(source)
    pending = {other: group.irecv(full(0, dtype), other) for other in (1, 2)}
    for other in (1, 2):
        group.send(full(0, dtype), other)
    assert {pending[other].wait() for other in (1, 2)} == {1, 2}
    assert sorted(senders) == [1, 2]


def all_types(world: World) -> None:
    """Each kind of element arrives whole."""
    for dtype in ("float32", "int64", "complex64", "complex128"):
        for body in (every_operation, asynchronous, point_to_point):
            body(world, dtype)


def test_operations(ranks: Ranks):
    """Each operation does what torch documents, waited for and not, for each kind of element."""
    ranks.good_world(3, all_types)


def multigpu(world: World) -> None:
    """Functions for several GPUs, which torch removed, use one operation and local reductions or
    copies."""
    rank, group = world.rank, world.create_collective_group([0, 1])
    two = [torch.full((2,), 10.0 * rank + 1), torch.full((2,), 10.0 * rank + 2)]

    def fresh() -> list[torch.Tensor]:
        return [one.clone() for one in two]

    tensors = fresh()
    group.broadcast_multigpu(tensors, 1, src_tensor=1)
    assert [one.tolist() for one in tensors] == [[12, 12], [12, 12]]
    tensors = fresh()
    group.all_reduce_multigpu(tensors, async_op=True).wait()
    assert [one.tolist() for one in tensors] == [[26, 26], [26, 26]]
    tensors = fresh()
    group.all_reduce_multigpu(tensors, torch.distributed.ReduceOp.MAX)
    assert [one.tolist() for one in tensors] == [[12, 12], [12, 12]]
    tensors = fresh()
    group.reduce_multigpu(tensors, 0, dst_tensor=1)
    assert tensors[0].tolist() == two[0].tolist()
    assert tensors[1].tolist() == ([26, 26] if rank == 0 else two[1].tolist())
    outputs = [[torch.zeros(2) for _ in range(4)] for _ in range(2)]
    group.all_gather_multigpu(outputs, fresh())
    for output in outputs:
        assert [one.tolist() for one in output] == [[1, 1], [2, 2], [11, 11], [12, 12]]
    with pytest.raises(OptionError, match="need 2 output lists of 4 tensors"):
        group.all_gather_multigpu(outputs[:1], fresh())
    with pytest.raises(OptionError, match="src_tensor=5 is not an index of the 2"):
        group.broadcast_multigpu(tensors, 1, src_tensor=5)
    with pytest.raises(OptionError, match="0 tensors: give at least one"):
        group.all_reduce_multigpu([])


def subsets(world: World) -> object:
    group = world.create_collective_group([0, 2])
    if world.rank == 1:
        assert group.current_rank is None
        for refused in (group.barrier, lambda: group.send(torch.ones(1), 0)):
            with pytest.raises(NotAMember, match=r"Rank 1 is not in the group, .* \[0, 2\]"):
                refused()
        return None
    with pytest.raises(OptionError, match=r"dst=1 is not in the group; its ranks: \[0, 2\]"):
        group.reduce(torch.ones(1), 1)
    again = world.create_collective_group([2, 0])  # the same ranks again
    one, two = torch.ones(1), torch.ones(1) * 10
    group.all_reduce(one)
    again.all_reduce(two)
    group.destroy()
    with pytest.raises(GroupError, match="was destroyed; make a new one"):
        group.all_reduce(one)
    group.destroy()
    again.all_reduce(two)
    return one.item(), two.item(), again.current_rank


def test_groups_of_some(ranks: Ranks):
    """Groups may have some of the ranks, and two groups the same ranks; one can be destroyed."""
    assert ranks.good_world(3, subsets) == [(2, 40, 0), None, (2, 40, 1)]


def without_others(world: World) -> None:
    """Unknown and repeated ranks are refused, and the error lists the existing ones."""
    if world.rank == 0:
        group: CollectiveGroup = world.create_collective_group([0])
        group.all_reduce(torch.ones(1))
        with pytest.raises(TypeError, match="cannot be sent"):
            world.__reduce__()
        with pytest.raises(TypeError, match="cannot be sent"):
            group.__reduce__()
    with pytest.raises(OptionError, match="rank 7 is not in the world; its ranks: 0 to 1"):
        world.create_collective_group([0, 7])
    with pytest.raises(OptionError, match="give each rank once"):
        world.create_collective_group([1, 1])
    with pytest.raises(OptionError, match="timeout must be a number of seconds above 0"):
        world.create_collective_group([0, 1], timeout=0)


def bad_tensors(world: World) -> None:
    """An operation that is refused before it sends leaves the group usable."""
    group = world.create_collective_group([0, 1])
    with pytest.raises(OptionError, match="only SUM and AVG"):
        group.all_reduce(torch.ones(1) * 1j, torch.distributed.ReduceOp.PRODUCT)
    with pytest.raises(TypeError, match=r"a tensor is needed, not \[1, 2\]"):
        group.all_reduce([1, 2])
    with pytest.raises(ValueError, match="gather_list"):
        group.gather(torch.ones(1), None, dst=world.rank)
    conjugate = (torch.ones(2) * 1j).conj()
    gathered = [torch.zeros(2, dtype=torch.complex64) for _ in range(2)]
    group.all_gather(gathered, conjugate)
    assert gathered[1].tolist() == [-1j, -1j]
    tensor = torch.ones(1)
    group.all_reduce(tensor)
    assert tensor.item() == 2


def test_two_ranks(ranks: Ranks):
    """Several GPUs in a rank, and what is refused, as each function says."""
    ranks.good_bodies(2, multigpu, bad_tensors, without_others)


def different_sizes(rank: int, address: str, operation: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        torch.distributed.set_debug_level_from_env()
        world = World(f"w{rank}", rank, 2, dist_init_method=address)
        tensor = torch.zeros(2 + rank)
        with pytest.raises(RuntimeError) as error:
            if operation == "broadcast":
                world.group.broadcast(tensor, 0)
            elif operation == "all_reduce":
                world.group.all_reduce(tensor)
            elif operation == "scatter":
                world.group.scatter(tensor, None if rank else [tensor.clone()] * 2, 0)
            else:
                world.group.gather(tensor, None if rank else [tensor.clone()] * 2, 0)
        world.stop()
    return str(error.value)


@pytest.mark.skipif(
    torch.distributed.is_nccl_available(),
    reason="torch's init_rpc fails with TORCH_DISTRIBUTED_DEBUG=DETAIL where NCCL is available",
)
@pytest.mark.parametrize("operation", ["broadcast", *also("all_reduce", "scatter", "gather")])
def test_torch_names_different_sizes(ranks: Ranks, operation: str):
    """torch's own size check, which docs/distributed.md recommends, works in our groups."""
    for text in ranks.run(2, different_sizes, ranks.address(), operation):
        assert isinstance(text, str), text
        assert "Detected mismatch between collectives" in text
        assert "TensorShape=[2]" in text and "TensorShape=[3]" in text
