"""Joining a world, leaving it, and the errors of both."""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.limits import PROGRAM_LIMIT

pytest.importorskip("torch", reason="xpool.distributed needs torch")

import torch
import torch.distributed.rpc as rpc
from support.ranks import Ranks
from support.scripts import popen, write
from support.tiers import also

import xpool.distributed._rendezvous as rendezvous
from xpool import WorkerDied
from xpool.distributed import (
    GroupError,
    GroupKeyError,
    GroupTimeout,
    PeerLost,
    World,
    get_cur_name,
    get_cur_rank,
    get_world,
    is_world_initialized,
)
from xpool.errors import OptionError

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def both_kinds(world: World) -> float:
    total = torch.tensor(float(world.rank))
    world.create_collective_group(world.get_ranks()).all_reduce(total)
    group = world.create_rpc_group("all", world.get_members())
    assert group.rpc_sync("w1", get_cur_rank) == 1
    return total.item()


def connects_late(rank: int, address: str) -> float:
    """Rank 1 connects to the others after more time than a call may take."""
    import xpool.distributed._world as module

    watch = vars(module)["watch"]
    if rank == 1:

        def late(*args: Any) -> None:
            time.sleep(1.5)  # like a rank without processor time
            watch(*args)

        vars(module)["watch"] = late
    with World(f"w{rank}", rank, 2, dist_init_method=address, rpc_timeout=1):
        return rpc.get_rpc_timeout()


@pytest.mark.exhaustive
def test_joining_takes_longer_than_calls_may(ranks: Ranks):
    """Joining is limited by ``dist_timeout``, and not by ``rpc_timeout``."""
    assert ranks.run(2, connects_late, ranks.address()) == [1.0, 1.0]


def loses_the_store(rank: int, address: str) -> str:
    """Rank 0 holds the store, and dies when all ranks have connected."""
    if rank == 0:

        def die(store: torch.distributed.Store, *_: object) -> None:
            store.wait(["names/1", "names/2"])
            os.kill(os.getpid(), signal.SIGKILL)

        rendezvous.exchange_names = die
    with pytest.raises(PeerLost) as error:
        World(f"w{rank}", rank, 3, dist_init_method=address, dist_timeout=600)
    assert isinstance(error.value.__cause__, RuntimeError)  # torch's own error
    return str(error.value)


def test_the_store_dies(ranks: Ranks):
    """Ranks that meet at rank 0's TCP address notice at once that rank 0 died."""
    address = f"tcp://127.0.0.1:{free_port()}"
    dead, *others = ranks.run(3, loses_the_store, address)
    assert isinstance(dead, WorkerDied)
    for text in others:
        assert text.startswith(f"The store at {address} is gone, and with it rank 0"), text


def at_environment(rank: int, port: int) -> float:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="3"
    )
    with World(f"w{rank}") as world:
        return both_kinds(world)


def test_torchrun(ranks: Ranks):
    """The environment variables of torchrun are enough: a TCP address that both kinds of group
    share."""
    assert ranks.run(3, at_environment, free_port()) == [3, 3, 3]


AGENT = """
import time
import torch.distributed

store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(3600)  # until the test kills it
"""


def in_attempt(rank: int, port: int, attempt: int) -> float:
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(attempt))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    with World(f"w{rank}", dist_timeout=60) as world:
        world.create_rpc_group("joined", world.get_members()).barrier()
        if attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return both_kinds(world)


def test_torchrun_starts_the_ranks_again(ranks: Ranks):
    """The store of torchrun outlives the ranks: those of the next attempt do not meet the names of
    the first one there."""
    with popen(["-c", AGENT]) as agent:
        assert agent.stdout is not None
        port = int(agent.stdout.readline())
        assert all(isinstance(one, WorkerDied) for one in ranks.run(2, in_attempt, port, 0))
        assert ranks.run(2, in_attempt, port, 1) == [1, 1]
        agent.kill()


def one_kind(rank: int, address: str, kind: str) -> str:
    options = {"init_dist": kind == "dist", "init_rpc": kind == "rpc"}
    where = {f"{kind}_init_method": address}
    with World(f"w{rank}", rank, 2, **options, **where) as world:
        if kind == "dist":
            world.create_collective_group([0, 1]).barrier()
            refused, args = world.create_rpc_group, ("group", ["w0", "w1"])
        else:
            world.create_rpc_group("group", ["w0", "w1"]).barrier()
            refused, args = world.create_collective_group, ([0, 1],)
        with pytest.raises(GroupError) as error:
            refused(*args)
    return str(error.value)


@pytest.mark.parametrize(("kind", "option"), [("dist", "init_rpc"), *also(("rpc", "init_dist"))])
def test_one_kind_only(ranks: Ranks, kind: str, option: str):
    """A world may have one kind of group; asking for the other is an error."""
    for text in ranks.run(2, one_kind, ranks.address(), kind):
        assert f"make it with {option}=True" in text


def twice(rank: int, addresses: list[str]) -> list[float]:
    sums = []
    for address in addresses:
        with World(f"w{rank}", rank, 2, dist_init_method=address) as world:
            with pytest.raises(GroupError, match=f"is 'w{rank}' of a world already"):
                World("other", 0, 1)
            total = torch.ones(1)
            world.create_collective_group([0, 1]).all_reduce(total)
            sums.append(total.item())
        assert get_world() is None
        with pytest.raises(OptionError, match=f"was rank {rank} .* torch lets it have no other"):
            World("other", 1 - rank, 2)
        with pytest.raises(GroupError, match="has been stopped"):
            world.stop()
        with pytest.raises(GroupError, match="has been stopped"):
            world.create_rpc_group("group", [world.name])
    return sums


@pytest.mark.parametrize("place", ["one port", *also("two files")])
def test_one_world_after_another(ranks: Ranks, place: str):
    """A process may join another world after leaving one."""
    addresses = [f"tcp://127.0.0.1:{free_port()}"] * 2
    if place == "two files":
        addresses = [ranks.address(), ranks.address()]
    assert ranks.run(2, twice, addresses) == [[2, 2]] * 2


def counts_descriptors(world: World) -> tuple[float, int]:
    total = both_kinds(world)
    world.create_rpc_group("again", world.get_members()).barrier()
    return total, len(os.listdir("/proc/self/fd"))


def test_few_descriptors(ranks: Ranks):
    """A world needs few descriptors."""
    for total, descriptors in ranks.good_world(5, counts_descriptors):
        assert total == 10
        assert descriptors < 100


def names_of_threads(world: World) -> list[str]:
    world.create_rpc_group("all", world.get_members()).barrier()
    return [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
def test_no_memory_is_shared(ranks: Ranks):
    """Messages go through sockets: a rank that is killed while it writes to memory that it shares
    with another one stops all that write there."""
    for names in ranks.good_world(2, names_of_threads):
        assert "TP_UV_loop\n" in names
        assert "TP_SHM_reactor\n" not in names


def test_no_world():
    """Outside of a world the functions raise an error that says what to do."""
    assert get_world() is None
    assert not is_world_initialized()
    for function in (get_cur_name, get_cur_rank):
        with pytest.raises(GroupError, match="not in a world: make one with"):
            function()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a b"}, "name must be 1 to 127 letters"),
        ({"name": ""}, "name must be"),
        ({"rank": 3}, "rank 3 is invalid in a world of 3"),
        ({"rank": -2}, "rank -2 is invalid in a world of 3"),
        ({"world_size": 0}, "in a world of 0"),
        ({"rank": 1.0}, "rank must be a whole number"),
        ({"rank": -1}, "rank is not given, and the environment variable RANK"),
        ({"init_dist": False, "init_rpc": False}, "init_dist or init_rpc"),
        ({"dist_timeout": 0}, "dist_timeout must be a number of seconds above 0"),
        ({"rpc_timeout": -1}, "rpc_timeout must be a number of seconds above 0"),
        *[
            (
                {"dist_timeout": value},
                "dist_timeout must be a number of seconds above 0 and at most",
            )
            for value in (math.inf, math.nan, None, 1e300, "3", True)
        ],
        ({"dist_init_method": Path("/x")}, "dist_init_method must be text, not PosixPath"),
        ({"dist_init_method": "file:///nowhere/x"}, "it is in no folder: there is no /nowhere"),
        ({"dist_init_method": "file:///"}, "it is a folder"),
        ({"dist_init_method": "file://x/y"}, "it is not an absolute path"),
        (
            {"dist_init_method": f"file://{__file__}"},
            "is there already, and is no store of torch's",
        ),
        ({"rpc_init_method": "file:///nowhere/x"}, "it is in no folder: there is no /nowhere"),
        ({"dist_backend": "foo"}, "this torch has no backend 'foo'; it has .*gloo"),
        ({"dist_backend": "cpu:gloo,cuda:foo"}, "this torch has no backend 'foo'"),
        ({"dist_init_method": "http://x"}, "'http://x' is not a valid address"),
        ({"dist_init_method": "tcp://127.0.0.1"}, "is not a valid address"),
        ({"dist_init_method": "env://"}, "MASTER_ADDR is not set"),
    ],
)
def test_bad_options(arguments: dict[str, object], message: str):
    """Invalid options are refused at once, and the process is in no world."""
    good = {"name": "w0", "rank": 0, "world_size": 3, "dist_init_method": "tcp://127.0.0.1:1"}
    with pytest.raises(OptionError, match=message):
        World(**(good | arguments))
    assert get_world() is None


def same_place(rank: int, address: str, name: str, claimed: int) -> None:
    with World(name, claimed, 2, dist_init_method=address, dist_timeout=2):
        pass


def beside_a_group(rank: int, address: str, later: str) -> tuple[str, bool]:
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        World("w0", 0, 1, init_rpc=False, dist_init_method=later)
    except OptionError as exc:
        return str(exc), torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
    return "", False


def test_a_group_of_the_program(ranks: Ranks):
    """If torch has a default group, a world is refused and the group stays."""
    [(text, stays)] = ranks.run(1, beside_a_group, ranks.address(), ranks.address())
    assert stays and "has a default group of torch.distributed" in text


def test_name_taken_twice(ranks: Ranks):
    """If two ranks have the same name, all ranks get an error."""
    results = ranks.start(2, same_name, ranks.address())
    for result in results:
        with pytest.raises(OptionError, match=r"Ranks 0 and 1 are both named 'me'.*me, me"):
            result.get()


def same_name(rank: int, address: str) -> None:
    same_place(rank, address, "me", rank)


def same_rank(rank: int, address: str) -> None:
    same_place(rank, address, f"w{rank}", 1)


@pytest.mark.exhaustive
def test_rank_taken_twice(ranks: Ranks):
    """The second to claim a rank gets an error; the first times out."""
    errors = ranks.run(2, same_rank, ranks.address())
    assert {type(error) for error in errors} == {OptionError, GroupTimeout}
    text = "\n".join(map(str, errors))
    assert "Rank 1 at file:///" in text
    assert "is taken already: give each process a rank of its own" in text
    assert "rank 0 did not join" in text


@pytest.mark.exhaustive
def test_nobody_at_the_address():
    """If nobody listens at the address, the error says that rank 0 must open it."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(GroupTimeout, match="Rank 0 opens it"):
        World("w1", 1, 2, dist_init_method=address, dist_timeout=1)
    assert get_world() is None


def at_a_port(rank: int, address: str, *seconds: float) -> None:
    World(f"w{rank}", rank, 2, dist_init_method=address, dist_timeout=seconds[rank])


def test_a_port_in_use(ranks: Ranks):
    """Rank 0 gets an error if another process has its port; the others wait until their timeout."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        first, second = ranks.run(2, at_a_port, address, 600, 1)
    assert isinstance(first, OptionError) and "another process has that port" in str(first)
    assert isinstance(second, GroupTimeout) and "no store at" in str(second)
    assert "within 1 s" in str(second) and "Rank 0 opens it" in str(second)


@pytest.mark.parametrize("option", ["dist_init_method", *also("rpc_init_method")])
def test_a_host_without_an_address(ranks: Ranks, option: str):
    """The error names the unknown host, and torch is not called, because it may wait longer."""
    [text] = ranks.run(1, at_no_address, option, f"tcp://no-such-host.invalid:{free_port()}")
    assert "'no-such-host.invalid' has no address" in text, text
    assert float(text.split("within ")[1].split(" s")[0]) <= 1  # the rest of dist_timeout


def at_no_address(rank: int, option: str, address: str) -> str:
    asked: list[str] = []

    def listening(original: Any) -> Any:
        def ask(place: str, *args: Any, **options: Any) -> Any:
            asked.append(place)
            if "no-such-host" in place:
                raise AssertionError("torch is called")
            return original(place, *args, **options)

        return ask

    # The process is this test's own.
    for name in ("TCPStore", "rendezvous"):
        setattr(torch.distributed, name, listening(getattr(torch.distributed, name)))
    places = {"dist_init_method": f"tcp://127.0.0.1:{free_port()}", option: address}
    with pytest.raises(GroupTimeout) as error:
        World("w0", 0, 1, dist_timeout=1, **places)
    for thread in threading.enumerate():
        if thread.name == "xpool-open-store":
            thread.join()
    assert not any("no-such-host" in place for place in asked)
    return str(error.value)


def test_world_in_a_fork(ranks: Ranks):
    """A forked child is in no world, and does not wait for its parent's."""
    assert ranks.good_world(1, forks) == [0]


def forks(world: World) -> int:
    groups = world.create_collective_group([0]), world.create_rpc_group("group", world.names)
    pid = os.fork()
    if pid == 0:
        uses = [*(group.barrier for group in groups), world.stop, lambda: world.group]
        refused = 0
        for use in uses:
            try:
                use()
            except GroupError:
                refused += 1
        os._exit(0 if get_world() is None and refused == len(uses) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_signal_ends_a_wait_for_a_call(ranks: Ranks):
    """The handler of Ctrl-C runs while a process waits for the answer of another."""
    assert ranks.good_world(1, interrupted) == ["interrupted"]


def interrupted(world: World) -> str:
    group, over = world.create_rpc_group("group", world.get_members()), threading.Event()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        over.wait()

    group.register("interrupt", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        group.registered_sync("interrupt", timeout=0)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
    return "answered"


ENDS = """
import sys
from xpool.distributed import World, get_world
rank, address = int(sys.argv[1]), sys.argv[2]
world = World(f"w{rank}", rank, 2, dist_init_method=address)
group = world.create_collective_group([0, 1])
world.create_rpc_group("group", ["w0", "w1"])
group.barrier()
print("ready", flush=True)
if sys.argv[3] == "pending" and rank == 1:
    sys.stdin.read()  # until the other has ended: it begins nothing with one who has left
elif sys.argv[3] == "pending":
    import torch
    works = [group.all_reduce(torch.ones(1), async_op=True), group.irecv(torch.ones(1))]
elif sys.argv[3] == "raises":
    raise SystemExit(3)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("how", "code"), [("pending", 0), ("raises", 3)])
def test_a_world_that_is_not_left(ranks: Ranks, tmp_path: Path, how: str, code: int):
    """A program that does not leave its world still ends, with its own exit code."""
    script = write(tmp_path / "ends.py", ENDS)
    address = ranks.address()
    # Show the stacks if a thread of torch aborts the exit, as happened once.
    options = ["-X", "faulthandler", "-W", "error"]
    processes = [popen([*options, script, str(rank), address, how]) for rank in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=PROGRAM_LIMIT)
        assert out == "ready\n", err
        assert process.returncode == code, err
        assert "Traceback" not in err


@pytest.mark.parametrize("kind", [GroupError, GroupTimeout, PeerLost, GroupKeyError])
def test_errors_can_be_pickled(kind: type[Exception]):
    """Errors keep their type and text when they are pickled."""
    error = pickle.loads(pickle.dumps(kind("what 'it' says")))
    assert type(error) is kind
    assert str(error) == "what 'it' says"


def test_a_store_that_is_garbage_after_its_first_key(tmp_path: Path):
    """The store file is refused; torch would read past its end for ever, holding the GIL."""
    path = tmp_path / "store"
    path.write_bytes((5).to_bytes(4, sys.byteorder) + b"/init" + b"\xff" * 20)
    with pytest.raises(OptionError, match="no store of torch's"):
        World("w0", 0, 1, dist_init_method=f"file://{path}", dist_timeout=3)
