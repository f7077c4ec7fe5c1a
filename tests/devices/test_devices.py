"""Variables and threads of workers that are bound to devices."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import scripts

from xpool.devices import DeviceContext, Host, devices
from xpool.errors import DeviceError, OptionError

from .hosts import XLA, gpu_host, tpu_host

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def no_threads_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpool.devices._host.usable_cpus", lambda: tuple(range(8)))


@pytest.mark.parametrize(("n", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1), (None, 1)])
def test_cores_are_shared_out(eight_cores: None, n: int | None, threads: int):
    """Each of n workers on 8 cores gets 8 // n threads, but at least one. Without ``n`` each usable
    core has a context."""
    contexts = devices("cpu", n=n)
    assert [context.ordinal for context in contexts] == list(range(n or 8))
    assert {context.threads for context in contexts} == {threads}
    assert {context.env["OMP_NUM_THREADS"] for context in contexts} == {str(threads)}


@pytest.mark.starts
@pytest.mark.skipif(sys.platform != "linux", reason="affinity masks are Linux's")
def test_usable_cores_are_those_of_the_mask():
    """A process that may use one core shares out one core."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from xpool.devices import devices; print(devices())"
    )
    assert scripts.run_ok(["-c", code]) == "[DeviceContext(cpu:0, threads=1)]\n"


@pytest.mark.parametrize(
    ("value", "threads"),
    [("3", 3), (" 6 ", 6), ("5,2", 5), *((invalid, 1) for invalid in ("", "0", "many"))],
)
def test_the_users_number_wins(monkeypatch: pytest.MonkeyPatch, value: str, threads: int):
    """The user's ``OMP_NUM_THREADS`` is kept, unless it is invalid."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    context = devices("cpu", n=10_000)[1]
    assert context.threads == threads
    assert threads == 1 or context.env == {}


def test_a_number_in_place_of_a_kind():
    """The error says how to ask for a number of devices."""
    with pytest.raises(TypeError, match=r'not 2; did you mean devices\("cpu", 2\)'):
        devices(2)  # type: ignore[arg-type]


EIGHT = Host(cpus=tuple(range(8)))
MAC = Host(cpus=tuple(range(8)), metal=True, packages={"torch": "2.13.0"})


def test_auto_takes_the_best_device():
    """ "auto" prefers TPUs to GPUs to the CPU, if an installed framework can use them."""
    cuda, tpu = gpu_host(2), tpu_host("v5e", 4)
    assert {c.kind for c in devices(host=EIGHT)} == {"cpu"}
    assert {c.kind for c in devices(host=cuda)} == {"cuda"}
    assert {c.kind for c in devices(host=replace(cuda, build=""))} == {"cpu"}
    hidden = replace(cuda, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert {c.kind for c in devices(host=hidden)} == {"cpu"}
    assert {c.kind for c in devices(host=replace(cuda, chips=tpu.chips))} == {"cuda"}
    assert {c.kind for c in devices(host=tpu)} == {"tpu"}
    assert {c.kind for c in devices(host=MAC)} == {"mps"}
    assert {c.kind for c in devices(host=replace(MAC, packages={}))} == {"cpu"}


@pytest.mark.torch
def test_workers_of_a_mac_share_its_gpu():
    """By default one worker has a Mac's GPU; with n= several share it."""
    (one,) = devices("mps", host=MAC)
    assert (one.kind, one.threads, repr(one)) == ("mps", 8, "DeviceContext(mps:0, threads=8)")
    two = devices("mps", n=2, host=MAC)
    assert [str(context.device) for context in two] == ["mps:0", "mps:0"]
    assert two[1].threads == 4


@pytest.mark.parametrize("options", [{"per_worker": 2}, {"independent": False}])
@pytest.mark.parametrize(
    ("kind", "message"), [("mps", "a Mac has one GPU"), ("cpu", "takes no per_worker=")]
)
def test_unused_arguments(kind: str, message: str, options: dict[str, Any]):
    """Arguments that a kind cannot use are refused."""
    with pytest.raises(OptionError, match=message):
        devices(kind, host=MAC, **options)


@pytest.mark.torch
def test_mps_is_for_macs():
    """mps is refused on other machines and without torch; if torch cannot use it, the worker
    fails."""
    with pytest.raises(DeviceError, match="not a Mac with an Apple GPU"):
        devices("mps", host=EIGHT)
    with pytest.raises(DeviceError, match="torch is not installed"):
        devices("mps", host=replace(MAC, packages={}))
    (context,) = devices("mps", host=MAC)
    with pytest.raises(DeviceError, match="worker 0 cannot open mps device 0 .*is_available"):
        context.enter()


@pytest.mark.parametrize(
    ("environ", "n", "each", "expected"),
    [({}, None, 1, 8), ({"CPU_NUM_DEVICES": "4"}, None, 1, 4), ({"CPU_NUM_DEVICES": "4"}, 2, 1, 2),
     ({"CPU_NUM_DEVICES": "4"}, None, 2, 2)],
)  # fmt: skip
def test_torch_xla_on_the_cpu(environ: dict[str, str], n: int | None, each: int, expected: int):
    """Each worker has its own CPU client with the number of devices in torch_xla's variable."""
    host = replace(EIGHT, packages=XLA, environ=environ)
    contexts = devices("xla", n, per_worker=each, host=host)
    assert len(contexts) == expected
    env = contexts[0].env
    assert (env["PJRT_DEVICE"], env["CPU_NUM_DEVICES"]) == ("CPU", str(each))
    assert (env["TPU_PROCESS_ADDRESSES"], env["PJRT_LOCAL_PROCESS_COUNT"]) == (None, "1")


def test_torch_xla_takes_the_client_that_is_set():
    """`PJRT_DEVICE` decides; without it a present TPU is used."""
    host = tpu_host("v5e", 4)
    assert {c.kind for c in devices("xla", host=host)} == {"tpu"}
    on_cpu = replace(host, environ={"PJRT_DEVICE": "CPU"})
    assert {c.kind for c in devices("xla", host=on_cpu)} == {"xla"}
    with pytest.raises(DeviceError, match="PJRT_DEVICE=NEURON"):
        devices("xla", host=replace(host, environ={"PJRT_DEVICE": "NEURON"}))
    with pytest.raises(OptionError, match=r"no group of several processes; xpool\.xla\.spawn"):
        devices("xla", independent=False, host=on_cpu)
    with pytest.raises(OptionError, match=r"devices\('tpu'\)"):
        devices("xla", framework="torch_tpu", host=host)


def test_a_compilation_cache_for_each_worker(tmp_path: Path):
    """`cache=` gives each worker and its replacements their own cache."""
    contexts = devices("xla", 2, cache=tmp_path, host=replace(EIGHT, packages=XLA))
    paths = [c.env["XLA_PERSISTENT_CACHE_PATH"] for c in contexts]
    assert paths == [f"{tmp_path}/worker-0", f"{tmp_path}/worker-1"]
    with pytest.raises(OptionError, match="cache= is for torch_xla"):
        devices("cpu", cache=tmp_path)


def test_unknown_names():
    """An unknown kind or framework is refused, and the error lists the known ones."""
    with pytest.raises(OptionError, match="must be 'torch_xla' or 'torch_tpu', not 'jax'"):
        devices("tpu", framework="jax")
    known = r"'auto' or \['accelerator', 'cpu', 'cuda', .*, 'tpu', 'xla', 'xpu'\]\.$"
    with pytest.raises(OptionError, match=f"'vulkan'.*{known}"):
        devices("vulkan")
    for kind in ("gpu", "cuda:0"):
        with pytest.raises(OptionError, match=f"'{kind}'.*For NVIDIA GPUs use 'cuda'"):
            devices(kind)


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        *((n, OptionError, "at least 1") for n in (0, -1)),
        *((n, TypeError, "n must be a whole number") for n in (1.0, "2", True)),
    ],
)
def test_wrong_numbers_of_workers(n: Any, error: type[Exception], message: str):
    """The error names ``n``, and what it must be."""
    with pytest.raises(error, match=message):
        devices(n=n)


def test_contexts_can_be_pickled(eight_cores: None):
    """A context equals its pickled copy, is hashable, and has a short repr."""
    context = devices("auto", n=2)[1]
    copy = pickle.loads(pickle.dumps(context))
    assert copy == context
    assert hash(copy) == hash(context)
    assert repr(copy) == "DeviceContext(cpu:1, threads=4)"


@pytest.mark.starts
def test_enter_imports_nothing():
    """Entering a context does not import torch."""
    code = (
        "import sys; from xpool.devices import devices; devices(n=2)[0].enter();"
        "print('torch' in sys.modules)"
    )
    assert scripts.run_ok(["-c", code]) == "False\n"


@pytest.mark.exhaustive
@pytest.mark.starts
@pytest.mark.torch
def test_enter_sets_torchs_threads():
    """Entering a context sets the threads of an already imported torch."""
    pytest.importorskip("torch")
    code = (
        "import torch; from xpool.devices import DeviceContext\n"
        "c = DeviceContext('cpu', 0, 3, {'OMP_NUM_THREADS': '3'}); c.enter()\n"
        "print(torch.get_num_threads(), c.device)"
    )
    assert scripts.run_ok(["-c", code], OMP_NUM_THREADS="1") == "3 cpu\n"


def test_contexts_do_not_share_their_environment():
    """Changing one worker's environment does not change another's."""
    first, second = devices(n=2)
    assert isinstance(first, DeviceContext)
    assert first.env is not second.env
