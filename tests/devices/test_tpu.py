"""Variables of workers with TPU chips, for every kind of TPU host."""

from __future__ import annotations

import os
from typing import Any

import pytest
from support import scripts

from xpool._worker.entry import set_environment
from xpool.devices import Chip, Host, devices
from xpool.devices._masks import TPU_SCRUB, TpuSlice, accelerator_type
from xpool.errors import DeviceError, OptionError

from .hosts import TPU, XLA, tpu_host

HOSTS = {
    # generation and chips of a host: the name in Google's metadata
    ("v4", 4): "v4-8",
    ("v5e", 1): "v5litepod-1",
    ("v5e", 4): "v5litepod-4",
    ("v5e", 8): "v5litepod-8",
    ("v5p", 4): "v5p-8",
    ("v6e", 1): "v6e-1",
    ("v6e", 8): "v6e-8",
    ("7x", 4): "tpu7x-8",
}

KAGGLE = {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"}
GKE = {
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_PORT": "8476",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "true",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "WORLD_SIZE": "8",
    "RANK": "3",
}


@pytest.mark.parametrize(("generation", "chips"), HOSTS)
def test_one_chip_for_each_independent_worker(generation: str, chips: int):
    """Worker i owns chip i alone, and torch_xla needs no metadata to know its host."""
    contexts = devices("tpu", host=tpu_host(generation, chips))
    assert [c.name for c in contexts] == [str(i) for i in range(chips)]
    for i, context in enumerate(contexts):
        wanted = {
            "TPU_VISIBLE_CHIPS": str(i),
            "TPU_VISIBLE_DEVICES": str(i),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_HOST_BOUNDS": "1,1,1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "PJRT_DEVICE": "TPU",
            "PJRT_LOCAL_PROCESS_COUNT": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": HOSTS[generation, chips],
            "TPU_WORKER_ID": "0",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        assert {k: v for k, v in context.env.items() if v is not None} == wanted
        assert {k for k, v in context.env.items() if v is None} == set(TPU_SCRUB) - set(wanted)
        assert (context.framework, context.group) == ("torch_xla", 0)


@pytest.mark.parametrize("n", [None, 3])
def test_one_core_for_each_worker_of_v3(n: int | None):
    """Workers of a v3 chip are threads of one process, and each owns a core."""
    contexts = devices("tpu", n, host=tpu_host("v3", 4))
    assert [(c.name, c.core) for c in contexts] == [
        (str(chip), core) for chip in range(4) for core in range(2)
    ][: n or 8]
    for i, context in enumerate(contexts):
        chip = str(i // 2)
        assert (context.count, context.framework, context.group) == (1, "torch_xla", 0)
        assert context.env["TPU_VISIBLE_CHIPS"] == context.env["TPU_VISIBLE_DEVICES"] == chip
        assert context.env["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
        assert context.env["TPU_ACCELERATOR_TYPE"] == "v3-8"
        assert context.env["PJRT_LOCAL_PROCESS_COUNT"] == "1"
    rooms = [c.env["XPOOL_PROCESS"] for c in contexts]
    assert rooms == (["0/2", "0/2", "1/1"] if n else [f"{i}/2" for i in range(4) for _ in "ab"])
    assert "core 1" in repr(contexts[1])


@pytest.mark.parametrize(
    ("generation", "packages", "options", "counts"),
    [
        ("v3", XLA, {"per_process": 1}, [2] * 4),
        ("v3", XLA, {"per_worker": 2}, [4] * 2),
        ("v3", XLA, {"independent": False}, [2] * 4),
        ("v3", TPU, {}, [2] * 4),
        ("7x", XLA, {}, [2] * 4),
        ("7x", XLA, {"per_process": 2}, [1] * 8),
        ("v4", XLA, {"per_process": 1}, [1] * 4),
    ],
)
def test_cores_or_chips_for_a_worker(
    generation: str, packages: dict[str, str], options: dict[str, Any], counts: list[int]
):
    """On other chips a worker owns whole chips, unless the caller asks for cores."""
    contexts = devices("tpu", host=tpu_host(generation, 4, packages), **options)
    assert [c.count for c in contexts] == counts
    assert {c.core is None for c in contexts} == {len(counts) != 8}
    assert {"XPOOL_PROCESS" in c.env for c in contexts} == {len(counts) == 8}


@pytest.mark.parametrize(
    ("generation", "packages", "options", "message"),
    [
        ("v5e", XLA, {"per_process": 2}, "a TPU v5e chip can have 1 workers here"),
        ("v3", XLA, {"per_process": 3}, "a TPU v3 chip can have 1 or 2 workers here"),
        ("v3", TPU, {"per_process": 2}, "more than one needs torch_xla"),
        ("v3", XLA, {"per_process": 2, "independent": False}, "and independent=True"),
        ("v3", XLA, {"per_process": 2, "per_worker": 2}, "leave out one of the two"),
        ("v3", XLA, {"n": 9}, "9 workers are too many: there are 8 cores of TPU chips"),
        ("v4", XLA, {"n": 5}, "5 workers are too many: there are 4 TPU chips"),
        ("v4", XLA, {"n": 2, "per_worker": 4}, "2 workers of 4 each are too many"),
        ("v5e", XLA, {"per_worker": 3}, "3 TPU chips form no mesh.*1, 2, 4 or 8"),
        ("v4", XLA, {"per_worker": 2, "independent": False}, "one worker for each chip"),
    ],
)
def test_impossible_options(
    generation: str, packages: dict[str, str], options: dict[str, Any], message: str
):
    """Impossible options are refused, and the error names the possible ones."""
    with pytest.raises(OptionError, match=message):
        devices("tpu", host=tpu_host(generation, 4, packages), **options)


@pytest.mark.parametrize(
    ("generation", "each", "bounds", "visible"),
    [
        ("v5e", 2, "1,2,1", ["0,1", "2,3", "4,5", "6,7"]),
        ("v6e", 4, "2,2,1", ["0,1,2,3", "4,5,6,7"]),
        ("v6e", 8, "2,4,1", ["0,1,2,3,4,5,6,7"]),
        ("v4", 8, "2,2,2", ["0,1,2,3,4,5,6,7"]),
    ],
)
def test_several_chips_for_a_worker(generation: str, each: int, bounds: str, visible: list[str]):
    """A worker of k chips gets neighbouring chips and their shape."""
    contexts = devices("tpu", per_worker=each, host=tpu_host(generation, 8))
    assert [c.env["TPU_VISIBLE_CHIPS"] for c in contexts] == visible
    assert {c.env["TPU_CHIPS_PER_PROCESS_BOUNDS"] for c in contexts} == {bounds}
    assert {c.env["TPU_PROCESS_BOUNDS"] for c in contexts} == {"1,1,1"}


@pytest.mark.parametrize("stale", [KAGGLE, GKE], ids=["Kaggle", "GKE"])
@pytest.mark.parametrize("packages", [XLA, TPU], ids=["torch_xla", "torch_tpu"])
def test_stale_variables_are_gone(
    monkeypatch: pytest.MonkeyPatch, stale: dict[str, str], packages: dict[str, str]
):
    """Variables of a notebook service or an orchestrator do not reach a worker's libtpu."""
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    context = devices("tpu", host=tpu_host("v5e", 8, packages, environ=dict(os.environ)))[5]
    for name in {**stale, **context.env}:
        # Let monkeypatch restore the environment after the test.
        if not name.endswith("*"):
            monkeypatch.setenv(name, os.environ.get(name, ""))
    set_environment(context.env)
    left = {k: v for k, v in os.environ.items() if k in stale or k.startswith("TPU_")}
    assert left.pop("TPU_VISIBLE_CHIPS") == left.pop("TPU_VISIBLE_DEVICES") == "5"
    assert not set(left) & {
        "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID",
        "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID",
    }  # fmt: skip
    assert {v for k, v in left.items() if k.endswith("BOUNDS")} == {"1,1,1"}
    if packages is TPU:
        assert not set(left) & {"WORLD_SIZE", "RANK"}


def test_torch_tpu_alone():
    """An independent worker of torch_tpu has a chip and a backend, but no launcher's variables."""
    context = devices("tpu", host=tpu_host("v6e", 4, TPU))[2]
    assert context.framework == "torch_tpu"
    assert context.env["TPU_VISIBLE_CHIPS"] == "2"
    assert context.env["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert context.env[name] is None
    assert "PJRT_DEVICE" not in context.env


@pytest.mark.parametrize(
    ("generation", "chips", "bounds"),
    [
        ("v3", 4, "2,2,1"),
        ("v4", 4, "2,2,1"),
        ("v5e", 4, "2,2,1"),
        ("v5e", 8, "2,4,1"),
        ("v6e", 8, "2,4,1"),
        ("v5p", 4, "2,2,1"),
        ("7x", 4, "2,2,1"),
    ],
)
def test_one_group_of_torch_xla(generation: str, chips: int, bounds: str):
    """Each member of a replica group gets the group's shape, its rank and all addresses."""
    contexts = devices("tpu", independent=False, host=tpu_host(generation, chips))
    envs = [c.env for c in contexts]
    assert {c.group for c in contexts} == {chips}
    assert {e["TPU_PROCESS_BOUNDS"] for e in envs} == {bounds}
    assert {e["TPU_CHIPS_PER_PROCESS_BOUNDS"] for e in envs} == {"1,1,1"}
    ranks = [str(i) for i in range(chips)]
    for name in ("CLOUD_TPU_TASK_ID", "TPU_VISIBLE_CHIPS", "PJRT_LOCAL_PROCESS_RANK"):
        assert [e[name] for e in envs] == ranks
    assert {e["PJRT_LOCAL_PROCESS_COUNT"] for e in envs} == {str(chips)}
    ports = [e["TPU_PROCESS_PORT"] for e in envs]
    assert len(set(ports)) == chips
    assert {e["TPU_PROCESS_ADDRESSES"] for e in envs} == {
        ",".join(f"localhost:{port}" for port in ports)
    }


def test_two_groups_use_different_ports():
    """Two groups on one host use different ports."""
    host = tpu_host("v5e", 8)
    first, second = (devices("tpu", 4, independent=False, host=host) for _ in range(2))
    assert not {c.env["TPU_PROCESS_PORT"] for c in first} & {
        c.env["TPU_PROCESS_PORT"] for c in second
    }


def test_a_group_across_hosts():
    """The second of four v5e hosts (4 x 4 chips) gets task ids, addresses and bounds of all
    hosts."""
    host = tpu_host(
        "v5e",
        4,
        environ={
            "TPU_WORKER_HOSTNAMES": "a,b,c,d",
            "TPU_WORKER_ID": "1",
            "TPU_HOST_BOUNDS": "2,2,1",
        },
    )
    env = devices("tpu", independent=False, host=host)[2].env
    assert env["TPU_PROCESS_BOUNDS"] == "4,4,1"
    assert env["CLOUD_TPU_TASK_ID"] == "6"
    assert env["TPU_PROCESS_ADDRESSES"] == ",".join(
        f"{name}:{port}" for name in "abcd" for port in range(8476, 8480)
    )
    assert (env["TPU_PROCESS_PORT"], env["TPU_WORKER_ID"]) == ("8478", "1")
    assert env["TPU_ACCELERATOR_TYPE"] == "v5litepod-16"
    alone = devices("tpu", host=host)[2].env
    assert (alone["TPU_WORKER_ID"], alone["TPU_WORKER_HOSTNAMES"]) == ("0", "localhost")


@pytest.mark.parametrize(
    "wrong", [{"TPU_WORKER_ID": "2"}, {"TPU_WORKER_ID": ""}, {"TPU_HOST_BOUNDS": "2x1"}]
)
def test_hosts_that_do_not_fit(wrong: dict[str, str]):
    """Contradicting variables of a slice are refused, and the error says what they must be."""
    environ = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0", "TPU_HOST_BOUNDS": "1,2,1"}
    with pytest.raises(DeviceError, match="TPU_WORKER_ID must then be 0 to 1"):
        devices("tpu", host=tpu_host("v5e", 8, environ={**environ, **wrong}))


@pytest.mark.parametrize(
    ("generation", "chips", "topology"),
    [
        ("v4", 4, "2,2,1"),
        ("v4", 8, "2,2,2"),
        ("v5p", 4, "2,2,1"),
        ("v5e", 1, "1,1,1"),
        ("v5e", 8, "2,4,1"),
        ("v6e", 8, "2,4,1"),
        ("7x", 8, "2,2,1,2"),
    ],
)
def test_one_group_of_torch_tpu(generation: str, chips: int, topology: str):
    """torch_tpu's group is described by a launcher's variables and two of its own."""
    contexts = devices("tpu", independent=False, host=tpu_host(generation, chips, TPU))
    for i, context in enumerate(contexts):
        env = context.env
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(i), str(i), str(chips))
        assert (env["MASTER_ADDR"], env["TORCH_TPU_TOPOLOGY"]) == ("localhost", topology)
        addresses = (env["TORCH_TPU_SLICEBUILDER_ADDRESSES"] or "").split(",")
        assert len(set(addresses)) == chips
        assert f"localhost:{env['MASTER_PORT']}" not in addresses
        assert env["TPU_VISIBLE_CHIPS"] is None


def test_a_given_accelerator_type_is_kept():
    """An already set accelerator type is kept."""
    assert accelerator_type(TpuSlice("v3", 4, accelerator="v2-8")) == "v2-8"


@pytest.mark.parametrize("name", ["TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"])
def test_the_parents_mask(name: str):
    """Worker i gets the i-th chip of its parent's mask."""
    host = tpu_host("v5e", 8, environ={name: "6,1"})
    assert [c.env["TPU_VISIBLE_CHIPS"] for c in devices("tpu", host=host)] == ["6", "1"]


@pytest.mark.parametrize("mask", ["8", "0,0", "zero", "-1"])
def test_a_mask_that_names_no_chip(mask: str):
    """A mask with an unknown chip is refused, and the error lists the known ones."""
    host = tpu_host("v5e", 8, environ={"TPU_VISIBLE_CHIPS": mask})
    with pytest.raises(DeviceError, match=r"TPU_VISIBLE_CHIPS=.*this host, 0 to 7"):
        devices("tpu", host=host)


def test_no_chip():
    """Without a chip the error says where xpool looked and what to use instead."""
    with pytest.raises(DeviceError, match=r"no TPU chip.*/dev/vfio.*devices\('xla'\)"):
        devices("tpu", host=Host(packages=XLA))


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({"torch": "2.9.0"}, "torch_tpu is not installed.*; torch_xla is not installed"),
        ({"torch": "2.8.1", "torch_xla": "2.9.0"}, r"does not fit torch 2\.8\.1: pip install"),
        ({"torch": "2.1.0", "torch_xla": "2.1.0"}, r"torch_xla 2\.1\.0 is too old.*--upgrade"),
        ({"torch": "2.9.0", "torch_tpu": "0.2.0"}, r"for torch 2\.11 to 2\.15"),
        ({"torch_tpu": "0.2.0"}, "but torch is not: pip install torch"),
    ],
)
def test_frameworks_that_do_not_fit(packages: dict[str, str], message: str):
    """A framework that is missing, too old or for another torch is one error in the parent."""
    with pytest.raises(DeviceError, match=message):
        devices("tpu", host=Host(chips=(Chip("v5e"),), packages=packages))


def test_the_framework_that_fits_is_taken():
    """Of two installed frameworks the one that fits torch is used, unless the caller names one."""
    both = {"torch": "2.9.1+cpu", "torch_xla": "2.9.0", "torch_tpu": "0.2.0"}
    host = tpu_host("v5e", 1, both)
    assert devices("tpu", host=host)[0].framework == "torch_xla"
    with pytest.raises(DeviceError, match="torch_tpu 0.2.0 does not fit"):
        devices("tpu", framework="torch_tpu", host=host)


def test_torch_tpu_is_kept_out_of_the_parent():
    """Importing torch after `devices("tpu")` does not load the backend in the parent."""
    code = (
        "import os\n"
        "from xpool.devices import Chip, Host, devices\n"
        "host = Host(chips=(Chip('v6e'),), packages={'torch': '2.13.0', 'torch_tpu': '0.2.0'})\n"
        "devices('tpu', host=host); print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    )
    assert scripts.run_ok(["-c", code]) == "0\n"
