"""What a worker bound to a device is told to set."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from xpool.devices import DeviceContext, devices
from xpool.errors import OptionError


@pytest.fixture(autouse=True)
def no_threads_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpool.devices._usable_cores", lambda: 8)


@pytest.mark.parametrize(("n", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_cores_are_shared_out(eight_cores: None, n: int, threads: int):
    """Each of n workers on 8 cores gets 8 // n threads, and never none."""
    contexts = devices("cpu", n=n)
    assert [context.ordinal for context in contexts] == list(range(n))
    assert {context.threads for context in contexts} == {threads}
    assert {context.env["OMP_NUM_THREADS"] for context in contexts} == {str(threads)}


def test_one_worker_for_each_core_by_default(eight_cores: None):
    """Without ``n`` there is a context for each usable core."""
    assert len(devices()) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="affinity masks are Linux's")
def test_usable_cores_are_those_of_the_mask():
    """A process that may run on one core only has one core to share out."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from xpool.devices import devices; print(devices())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[DeviceContext(cpu:0, threads=1)]\n"


@pytest.mark.parametrize(("value", "threads"), [("3", 3), (" 6 ", 6), ("5,2", 5)])
def test_the_users_number_wins(monkeypatch: pytest.MonkeyPatch, value: str, threads: int):
    """``OMP_NUM_THREADS`` as the user set it is kept, and nothing is set over it."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    context = devices("cpu", n=2)[1]
    assert context.threads == threads
    assert context.env == {}


@pytest.mark.parametrize("value", ["", "0", "many"])
def test_a_senseless_number_is_ignored(monkeypatch: pytest.MonkeyPatch, value: str):
    """An ``OMP_NUM_THREADS`` that OpenMP would not understand counts as unset."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert devices("cpu", n=10_000)[0].threads == 1


@pytest.mark.parametrize("kind", ["cuda", "tpu", "xla"])
def test_later_kinds_say_so(kind: str):
    """A kind that is planned is refused with what to do meanwhile."""
    with pytest.raises(OptionError, match=r"not in this version yet.*kind='cpu'"):
        devices(kind)


def test_unknown_kind():
    """A kind that nobody knows is refused with those that are known."""
    with pytest.raises(ValueError, match=r"'gpu'.*use 'cpu' or 'auto'"):
        devices("gpu")


@pytest.mark.parametrize("n", [0, -1])
def test_no_workers(n: int):
    """Contexts for no workers make no sense."""
    with pytest.raises(OptionError, match="at least 1"):
        devices(n=n)


@pytest.mark.parametrize("n", [1.0, "2", True])
def test_number_of_workers_is_an_int(n: object):
    """``n`` of a wrong type is a TypeError that names it."""
    with pytest.raises(TypeError, match="n is the number of workers"):
        devices(n=n)  # type: ignore[arg-type]


def test_contexts_travel(eight_cores: None):
    """A context is equal to its copy, hashable, and one telling line."""
    context = devices("auto", n=2)[1]
    copy = pickle.loads(pickle.dumps(context))
    assert copy == context
    assert hash(copy) == hash(context)
    assert repr(copy) == "DeviceContext(cpu:1, threads=4)"


def test_enter_imports_nothing():
    """Binding a worker that does not use torch does not make it import torch."""
    code = (
        "import sys; from xpool.devices import devices; devices(n=2)[0].enter();"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


@pytest.mark.torch
def test_enter_sets_torchs_threads():
    """A worker whose torch is imported already gets the number all the same."""
    pytest.importorskip("torch")
    code = (
        "import torch; from xpool.devices import DeviceContext\n"
        "c = DeviceContext('cpu', 0, 3, {'OMP_NUM_THREADS': '3'}); c.enter()\n"
        "print(torch.get_num_threads(), c.device)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert out.stdout == "3 cpu\n"


def test_contexts_do_not_share_their_environment():
    """What someone adds to one worker's environment is not seen by the next."""
    first, second = devices(n=2)
    assert isinstance(first, DeviceContext)
    assert first.env is not second.env
