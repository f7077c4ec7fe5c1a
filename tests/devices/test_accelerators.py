"""Workers with accelerators other than CUDA's and TPUs: how they are found, masked and opened.

The machines are described by hand or by files, so no test needs such a device.
"""

from __future__ import annotations

import os
import re
import textwrap
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import scripts

import xpool.ray
from xpool import CtxPool, Pool
from xpool.__main__ import look
from xpool.devices import Accelerator, Chip, DeviceContext, Gpu, Host, _device_context, devices
from xpool.devices._host import build_of
from xpool.errors import DeviceError, OptionError

from .hosts import add_pci

pytestmark = pytest.mark.pure

HIP, ROCR, CUDA = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
ZE, SELECTOR = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"
HIERARCHY, ORDER = "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
ASCEND, NEURON = "ASCEND_RT_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES"
MASKS = {"rocm": HIP, "xpu": ZE, "npu": ASCEND, "neuron": NEURON}

AMD = tuple(Accelerator(f"renderD{128 + i}") for i in range(4))
INTEL = tuple(Accelerator(f"renderD{128 + i}") for i in range(4))
TILES = tuple(Accelerator(f"renderD{128 + i}", parts=2) for i in range(2))
BOTH = (Accelerator("renderD128", model="integrated"), Accelerator("renderD129"))
NPUS = tuple(Accelerator(f"davinci{i}") for i in range(4))
TRN1 = tuple(Accelerator(f"neuron{i}", parts=2, model="Trainium1") for i in range(2))
TRN2 = (Accelerator("neuron0", parts=8, model="Trainium2"),)

BUILDS = {"rocm": "ROCm", "xpu": "XPU"}
PACKAGES = {
    "npu": {"torch": "2.13.0", "torch_npu": "2.13.0"},
    "neuron": {"torch": "2.13.0", "torch_neuronx": "2.13.0"},
}


def machine(kind: str, found: tuple[Accelerator, ...], **environ: str) -> Host:
    """A machine with these devices, and all packages for them."""
    return Host(
        environ=environ,
        cpus=tuple(range(8)),
        accelerators={kind: found},
        packages=PACKAGES.get(kind, {"torch": "2.13.0"}),
        build=BUILDS.get(kind, ""),
    )


def masks(contexts: list[DeviceContext]) -> list[str | None]:
    return [context.env[MASKS[context.kind]] for context in contexts]


# -- what the machine has ----------------------------------------------------------------------


def add_file(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def found(root: Path, kind: str) -> tuple[Accelerator, ...]:
    return Host.here(root, gpus=False).accelerators[kind]


def test_amd_gpus_of_the_topology(tmp_path: Path):
    """Nodes with SIMD units are GPUs, in the order of their numbers; others are processors."""
    for node, (simd, minor) in {0: (0, -1), 2: (304, 128), 10: (304, 129)}.items():
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        facts = f"cpu_cores_count 0\nsimd_count {simd}\ndrm_render_minor {minor}\n"
        add_file(folder / "properties", facts)
    for minor in 128, 129:
        add_file(tmp_path / f"dev/dri/renderD{minor}")
        add_file(tmp_path / f"sys/class/drm/renderD{minor}/device/numa_node", f"{minor - 128}\n")
    assert found(tmp_path, "rocm") == (), "without /dev/kfd no process can open a GPU"
    add_file(tmp_path / "dev/kfd")
    assert found(tmp_path, "rocm") == (Accelerator("renderD128", 0), Accelerator("renderD129", 1))
    (tmp_path / "dev/dri/renderD128").unlink()
    assert found(tmp_path, "rocm") == (Accelerator("renderD129", 1),), "a container has its own"


def test_intel_gpus_and_their_tiles(tmp_path: Path):
    """Cards are found in PCI order, with tiles as either driver shows them."""
    for address, minor, node in (
        ("0000:00:02.0", 130, -1),
        ("0000:18:00.0", 128, 0),
        ("0000:c0:00.0", 129, 1),
    ):
        add_pci(tmp_path, address, "0x0bd5", vendor="0x8086", node=node)
        pci = tmp_path / "sys/bus/pci/devices" / address
        (pci / f"drm/renderD{minor}").mkdir(parents=True)
        add_file(tmp_path / f"dev/dri/renderD{minor}")
    pci = tmp_path / "sys/bus/pci/devices"
    for tile in 0, 1:
        (pci / f"0000:18:00.0/tile{tile}").mkdir()
        (pci / f"0000:00:02.0/drm/card0/gt/gt{tile}").mkdir(parents=True)
        (pci / f"0000:c0:00.0/drm/card2/gt/gt{tile}").mkdir(parents=True)
    add_pci(tmp_path, "0000:19:00.0", "0x1563", vendor="0x8086")  # a network card
    assert found(tmp_path, "xpu") == (
        Accelerator("renderD130", None, 1, "integrated"),
        Accelerator("renderD128", 0, 2),
        Accelerator("renderD129", 1, 2),
    )
    (tmp_path / "dev/dri/renderD129").unlink()
    assert len(found(tmp_path, "xpu")) == 2, "a container has only its own"


def test_ascend_npus(tmp_path: Path):
    """Each numbered file of the driver is an NPU, in the order of the numbers."""
    for name in ("davinci0", "davinci10", "davinci9", "davinci_manager", "davinci1x"):
        add_file(tmp_path / "dev" / name)
    names = ["davinci0", "davinci9", "davinci10"]
    assert [one.name for one in found(tmp_path, "npu")] == names
    report = look(tmp_path)["devices"]
    assert [name in text for name, text in zip(names, report["npu"])] == [True] * 3
    assert "rocm" not in report


def test_neuron_devices_and_their_cores(tmp_path: Path):
    """Cores are counted by the driver's number or by its folders, for the container's devices."""
    about = tmp_path / "sys/devices/virtual/neuron_device"
    add_file(about / "neuron0/core_count", "8\n")
    add_file(about / "neuron0/info/architecture/device_name", "Trainium2\n")
    for core in range(2):
        (about / f"neuron1/neuron_core{core}").mkdir(parents=True)
    add_file(about / "neuron3/core_count", "8\n")
    for number in 0, 1, 2:
        add_file(tmp_path / f"dev/neuron{number}")
    assert found(tmp_path, "neuron") == (
        Accelerator("neuron0", None, 8, "Trainium2"),
        Accelerator("neuron1", None, 2),
        Accelerator("neuron2", None, 0),
    )


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "CUDA"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n", "ROCm"),
        ("cuda = None\nhip = None\nxpu = '20250301'\n", "XPU"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = None\n", ""),
        ("", ""),
    ],
)
def test_what_torch_was_built_with(text: str, build: str):
    """A build is known from a file of torch, so torch is not imported."""
    assert build_of(text) == build


# -- the masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "has", "environ", "expected"),
    [
        # AMD
        ("rocm", AMD, {}, ["0", "1", "2", "3"]),
        ("rocm", AMD, {HIP: "2,3"}, ["2", "3"]),
        ("rocm", AMD, {HIP: "3, 02"}, ["3", "2"]),
        ("rocm", AMD, {HIP: "1,-1,2"}, ["1"]),
        ("rocm", AMD, {CUDA: "2,3"}, ["2", "3"]),
        ("rocm", AMD, {CUDA: "0", HIP: "2"}, ["2"]),
        ("rocm", AMD, {ROCR: "2,3"}, ["0", "1"]),
        ("rocm", AMD, {ROCR: "1,2,3", HIP: "2,0"}, ["2", "0"]),
        ("rocm", AMD, {ROCR: "0,GPU-4b2c1a9f8d3e6f7a"}, ["0", "1"]),
        ("rocm", AMD, {HIP: "GPU-4b2c1a9f8d3e6f7a"}, ["GPU-4b2c1a9f8d3e6f7a"]),
        ("rocm", (), {HIP: "5,6"}, ["5", "6"]),
        # Intel: the order of a mask has no effect
        ("xpu", INTEL, {}, ["0", "1", "2", "3"]),
        ("xpu", INTEL, {ZE: ""}, ["0", "1", "2", "3"]),
        ("xpu", INTEL, {ZE: "3, 2"}, ["2", "3"]),
        ("xpu", TILES, {}, ["0", "1", "2", "3"]),
        ("xpu", TILES, {HIERARCHY: "COMBINED", ZE: "2,3"}, ["2", "3"]),
        ("xpu", TILES, {HIERARCHY: "COMPOSITE"}, ["0", "1"]),
        ("xpu", TILES, {HIERARCHY: "COMPOSITE", ZE: "1"}, ["1"]),
        ("xpu", TILES, {HIERARCHY: "COMPOSITE", ZE: "1.1,0.1,1.0"}, ["0.1", "1.0,1.1"]),
        ("xpu", TILES, {ZE: "0.1"}, ["0.1"]),
        ("xpu", (), {ZE: "10,9"}, ["9", "10"]),
        ("xpu", BOTH, {}, ["1"]),
        ("xpu", BOTH[:1], {}, ["0"]),
        ("xpu", BOTH, {ZE: "0,1"}, ["0", "1"]),
        ("xpu", BOTH, {SELECTOR: "level_zero:1"}, ["1"]),
        ("xpu", INTEL, {SELECTOR: "level_zero:gpu"}, ["0", "1", "2", "3"]),
        ("xpu", INTEL, {SELECTOR: "*:gpu"}, ["0", "1", "2", "3"]),
        ("xpu", INTEL, {SELECTOR: "level_zero:2,3"}, ["2", "3"]),
        ("xpu", INTEL, {ZE: "1,3", SELECTOR: "level_zero:1"}, ["3"]),
        # Ascend
        ("npu", NPUS, {}, ["0", "1", "2", "3"]),
        ("npu", NPUS, {ASCEND: "2,3"}, ["2", "3"]),
        ("npu", NPUS[2:3], {ASCEND: "2"}, ["2"]),
        ("npu", NPUS[2:3], {ASCEND: "0"}, ["0"]),
        ("npu", (), {ASCEND: "7"}, ["7"]),
        # Neuron
        ("neuron", TRN1, {}, ["0", "1", "2", "3"]),
        ("neuron", TRN1, {NEURON: "2-3"}, ["2", "3"]),
        ("neuron", TRN1, {NEURON: "0, 2-3"}, ["0", "2", "3"]),
        ("neuron", TRN1, {"NEURON_RT_NUM_CORES": "0"}, ["0", "1", "2", "3"]),
        ("neuron", TRN1, {NEURON: "1", "NEURON_RT_NUM_CORES": "1"}, ["1"]),
        ("neuron", TRN2, {}, ["0", "1", "2", "3"]),
        ("neuron", TRN2, {"NEURON_LOGICAL_NC_CONFIG": "1"}, [str(i) for i in range(8)]),
        ("neuron", TRN1, {"NEURON_RT_VIRTUAL_CORE_SIZE": "2"}, ["0", "1"]),
        ("neuron", (), {NEURON: "8-9"}, ["8", "9"]),
    ],
)  # fmt: skip
def test_worker_i_gets_the_ith_visible_device(
    kind: str, has: tuple[Accelerator, ...], environ: dict[str, str], expected: list[str]
):
    """With a mask 2,3 the program's device 0 is 2, and so is that of worker 0."""
    contexts = devices(kind, host=machine(kind, has, **environ))
    assert masks(contexts) == expected
    assert [context.name for context in contexts] == expected
    assert {context.kind for context in contexts} == {kind}


@pytest.mark.parametrize(
    ("kind", "has", "environ", "message"),
    [
        ("rocm", AMD, {HIP: "4"}, "HIP_VISIBLE_DEVICES='4' names '4', .* it has 0, 1, 2, 3"),
        ("rocm", AMD, {ROCR: "2,3", HIP: "2"}, "names '2', which .* it has 0, 1$"),
        ("rocm", AMD, {ROCR: "9"}, "ROCR_VISIBLE_DEVICES='9' names '9'"),
        ("rocm", AMD, {CUDA: "1,1"}, "CUDA_VISIBLE_DEVICES='1,1' names a device twice"),
        ("rocm", AMD, {HIP: "-1"}, "HIP_VISIBLE_DEVICES='-1' hides every AMD GPU; unset it"),
        ("rocm", AMD, {ROCR: "", HIP: "0"}, "ROCR_VISIBLE_DEVICES='' hides every AMD GPU"),
        ("rocm", (), {}, r"no AMD GPUs were found here \(/dev/kfd .* name them in HIP_VISIBLE_DEV"),
        ("xpu", INTEL, {ZE: "4"}, "names '4'"),
        ("xpu", TILES, {ZE: "2.0"}, "names '2.0'"),
        ("xpu", INTEL, {ZE: "0,0"}, "names a device twice"),
        ("xpu", INTEL, {ZE: "0,x"}, "must be numbers of devices, such as 0,1, or of tiles: 0.1"),
        ("xpu", TILES, {ZE: "0.1", HIERARCHY: "FLAT"}, "needs ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE"),
        ("xpu", INTEL, {SELECTOR: "opencl:gpu"}, "must be level_zero:gpu, or numbers as in"),
        ("xpu", INTEL, {SELECTOR: "level_zero:4"}, "names level_zero:4, but .* may see 4 devices"),
        ("xpu", (), {}, "no Intel GPUs were found here"),
        ("xpu", (), {SELECTOR: "level_zero:gpu"}, "no Intel GPUs were found here"),
        ("npu", NPUS, {ASCEND: "4"}, "names '4'"),
        ("npu", NPUS, {ASCEND: "1, 2"}, "numbers with commas between them, without spaces"),
        ("npu", NPUS, {ASCEND: ""}, "ASCEND_RT_VISIBLE_DEVICES='' hides every Ascend NPU"),
        ("npu", (), {}, r"no Ascend NPUs were found here \(/dev/davinci\*\)"),
        ("neuron", TRN1, {NEURON: "2-4"}, "names '4'"),
        ("neuron", TRN1, {NEURON: "3-2"}, "must be numbers and ranges of cores: 0-3 or 0,2-3"),
        ("neuron", TRN1, {NEURON: "0-1,1"}, "names a device twice"),
        ("neuron", TRN1, {NEURON: ""}, "hides every NeuronCore"),
        ("neuron", TRN1, {"NEURON_RT_NUM_CORES": "2"}, "does not say which cores .*name them, as"),
        ("neuron", (), {}, "no NeuronCores were found here"),
    ],
)
def test_masks_that_are_wrong(
    kind: str, has: tuple[Accelerator, ...], environ: dict[str, str], message: str
):
    """A mask that names no device, or one twice, is refused, and the error says what to do."""
    with pytest.raises(DeviceError, match=message):
        devices(kind, host=machine(kind, has, **environ))


@pytest.mark.parametrize(
    ("kind", "has", "environ", "expected"),
    [
        ("rocm", AMD, {}, {HIP: "0,1", CUDA: None}),
        ("rocm", AMD, {ROCR: "2,3"}, {HIP: "0,1", CUDA: None, ROCR: "2,3"}),
        ("xpu", INTEL, {}, {ZE: "0,1", SELECTOR: None, HIERARCHY: "FLAT", ORDER: "1"}),
        ("xpu", INTEL, {ZE: "3,1"}, {ZE: "1,3", SELECTOR: None}),
        ("xpu", INTEL, {SELECTOR: "level_zero:0,2"}, {ZE: "0,2", SELECTOR: None}),
        ("xpu", TILES, {ZE: "0.0,1.1"}, {ZE: "0.0,1.1", SELECTOR: None, HIERARCHY: "COMPOSITE"}),
        ("npu", NPUS, {ASCEND: "3,1"}, {ASCEND: "1,3", "ASCEND_DEVICE_ID": None}),
        ("neuron", TRN1, {}, {NEURON: "0-1", "NEURON_RT_NUM_CORES": None}),
        ("neuron", TRN1, {NEURON: "1,3"}, {NEURON: "1,3", "NEURON_RT_NUM_CORES": None}),
    ],
)
def test_variables_of_a_worker_with_two_devices(
    kind: str, has: tuple[Accelerator, ...], environ: dict[str, str], expected: dict[str, Any]
):
    """A worker gets its devices' names, and loses variables that would say something else."""
    context = devices(kind, 1, per_worker=2, host=machine(kind, has, **environ))[0]
    threads = {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "8"}
    assert context.env == expected | threads
    assert context.count == 2


def test_numa_nodes():
    """Workers run near their devices, also if a mask reorders these."""
    near = (Accelerator("a", 0), Accelerator("b", 1))
    for kind, mask in (("rocm", HIP), ("npu", ASCEND)):
        host = machine(kind, near, **{mask: "1,0"})
        host = replace(host, cpus=(0, 1, 2, 3), nodes={0: (0, 1), 1: (2, 3)})
        assert [context.cpus for context in devices(kind, host=host)] == [(2, 3), (0, 1)]
    below = replace(machine("rocm", near, **{ROCR: "1"}), cpus=(0, 1), nodes={1: (1,)})
    assert [context.node for context in devices("rocm", host=below)] == [1]
    core = (Accelerator("neuron0", 1, parts=2),)
    assert [context.node for context in devices("neuron", host=machine("neuron", core))] == [1, 1]
    # Intel's driver gives the GPU of a processor the last number, unless it is told otherwise.
    cards = (Accelerator("a", 0, model="integrated"), Accelerator("b", 1))
    driver = devices("xpu", host=machine("xpu", cards, **{ZE: "0,1"}))
    assert [context.node for context in driver] == [1, 0]
    by_bus = devices("xpu", host=machine("xpu", cards, **{ZE: "0,1", ORDER: "1"}))
    assert [context.node for context in by_bus] == [0, 1]


def test_too_many_workers():
    """No device is shared by two workers."""
    with pytest.raises(OptionError, match="5 workers .*4 Ascend NPUs that this process may see"):
        devices("npu", 5, host=machine("npu", NPUS))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "options", [{"per_process": 2}, {"independent": False}, {"framework": "torch_tpu"}]
)
def test_unused_arguments(kind: str, options: dict[str, Any]):
    """Arguments for TPUs are refused."""
    with pytest.raises(OptionError, match=f"{kind}.*takes no per_process=, independent= or frame"):
        devices(kind, host=machine(kind, AMD), **options)


@pytest.mark.parametrize(("kind", "has", "build"), [("rocm", AMD, "ROCm"), ("xpu", INTEL, "XPU")])
def test_other_build_of_torch(kind: str, has: tuple[Accelerator, ...], build: str):
    """torch must be built for the device."""
    host = replace(machine(kind, has), build="CUDA")
    with pytest.raises(DeviceError, match=rf"torch 2\.13\.0 is built without {build}; install a"):
        devices(kind, host=host)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("rocm", "torch"), ("npu", "torch"), ("npu", "torch_npu"), ("neuron", "torch_neuronx")],
)
def test_missing_packages(kind: str, missing: str):
    """A missing package is named."""
    host = machine(kind, AMD)
    packages = {name: version for name, version in host.packages.items() if name != missing}
    with pytest.raises(DeviceError, match=rf"{missing} is not installed .*pip install {missing}"):
        devices(kind, host=replace(host, packages=packages))


def test_cuda_of_a_rocm_build():
    """torch calls AMD's GPUs cuda, so "cuda" means them if torch is built for ROCm."""
    contexts = devices("cuda", host=machine("rocm", AMD, **{CUDA: "2,3"}))
    assert masks(contexts) == ["2", "3"]
    assert {context.kind for context in contexts} == {"rocm"}


def test_auto():
    """ "auto" takes a kind whose package or build is installed and of which a device is visible."""
    for kind, has in (("rocm", AMD), ("xpu", INTEL), ("npu", NPUS), ("neuron", TRN1)):
        host = machine(kind, has)
        assert {context.kind for context in devices(host=host)} == {kind}
        without = replace(host, packages={"torch": "2.13.0"}, build="")
        assert {context.kind for context in devices(host=without)} == {"cpu"}
    hidden = machine("npu", NPUS, **{ASCEND: ""})
    assert {context.kind for context in devices(host=hidden)} == {"cpu"}
    nvidia = replace(machine("npu", NPUS), gpus=(Gpu("GPU-a"),), build="CUDA")
    assert {context.kind for context in devices(host=nvidia)} == {"cuda"}
    tpu = replace(nvidia, chips=(Chip("v5e"),), packages={"torch": "2.9.0", "torch_xla": "2.9.0"})
    assert {context.kind for context in devices(host=tpu)} == {"tpu"}


@pytest.mark.torch
def test_neuron_with_torch_xla():
    """If torch_xla is installed, it opens the cores, and each worker is a world of its own."""
    pytest.importorskip("torch")
    packages = {"torch": "2.9.0", "torch_xla": "2.9.0", "torch_neuronx": "2.9.0"}
    host = replace(machine("neuron", TRN1, NEURON_PJRT_WORLD_SIZE="4"), packages=packages)
    first, second = devices("neuron", per_worker=2, host=host)
    assert (first.framework, first.env[NEURON], second.env[NEURON]) == ("torch_xla", "0-1", "2-3")
    env = second.env
    assert (env["PJRT_DEVICE"], env["NEURON_PJRT_*"]) == ("NEURON", None)
    assert env["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == "2"
    assert str(second.device) == "xla:0"
    with pytest.raises(OptionError, match="cache= is for torch_xla"):
        devices("neuron", host=host, cache="/tmp/x")
    old = replace(host, packages=packages | {"torch": "2.8.0"})
    with pytest.raises(DeviceError, match="torch_xla 2.9.0 does not fit torch 2.8.0"):
        devices("neuron", host=old)
    with pytest.raises(DeviceError, match=r"use devices\('neuron'\) for NEURON"):
        devices("xla", host=replace(host, environ={"PJRT_DEVICE": "NEURON"}))


# -- what torch.accelerator reports ------------------------------------------------------------


@pytest.mark.torch
def test_accelerators_that_torch_reports():
    """A known type gets its row of the table; of another type, each worker uses one by index."""
    pytest.importorskip("torch")
    xpu = replace(machine("xpu", INTEL, **{ZE: "2,3"}), reported=("xpu", 2))
    assert masks(devices("accelerator", host=xpu)) == ["2", "3"]
    amd = replace(machine("rocm", AMD), reported=("cuda", 4))
    assert {context.kind for context in devices("accelerator", host=amd)} == {"rocm"}
    mac = Host(metal=True, packages={"torch": "2.13.0"}, reported=("mps", 1))
    assert [context.kind for context in devices("accelerator", 2, host=mac)] == ["mps", "mps"]
    other = Host(cpus=(0, 1), packages={"torch": "2.13.0"}, reported=("hpu", 2))
    contexts = devices("accelerator", host=other)
    assert [str(context.device) for context in contexts] == ["hpu:0", "hpu:1"]
    assert [context.name for context in contexts] == ["0", "1"]
    with pytest.raises(OptionError, match="takes no per_worker=.*no mask for hpu devices"):
        devices("accelerator", per_worker=2, host=other)
    with pytest.raises(OptionError, match="3 workers are too many: there are 2 hpu devices"):
        devices("accelerator", 3, host=other)


def test_accelerator_without_torch():
    """Without torch there is nobody to ask."""
    with pytest.raises(DeviceError, match=r"devices\('accelerator'\): torch is not installed here"):
        devices("accelerator", host=Host())


@pytest.mark.starts
@pytest.mark.torch
def test_torch_is_asked_only_for_accelerator(monkeypatch: pytest.MonkeyPatch):
    """ "accelerator" asks `torch.accelerator`; without a device, the error says so."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "accelerator") or torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator, or torch is older than 2.6")
    with pytest.raises(DeviceError, match=r"torch\.accelerator reports no device here"):
        devices("accelerator")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("hpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert [str(one.device) for one in devices("accelerator")] == ["hpu:0", "hpu:1", "hpu:2"]


# -- workers -----------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "has", "device", "message"),
    [
        ("rocm", AMD, "cuda:0", r"cannot open rocm device 0 with torch: .*rocm-smi shows"),
        ("xpu", INTEL, "xpu:0", r"cannot open xpu device 0 with torch: .*sycl-ls shows"),
        ("npu", NPUS, None, r"cannot open npu device 0 .*No module named 'torch_npu'.*npu-smi"),
        ("neuron", TRN1, None, r"cannot open neuron device 0 .*torch_neuronx.*neuron-ls shows"),
    ],
)
def test_devices_that_are_not_there(
    kind: str, has: tuple[Accelerator, ...], device: str | None, message: str
):
    """A context has the type that torch knows; opening a missing device says what to check."""
    torch = pytest.importorskip("torch")
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    context = devices(kind, host=machine(kind, has))[0]
    assert device is None or str(context.device) == device
    with pytest.raises(DeviceError, match=message):
        context.enter()


@pytest.mark.torch
def test_a_device_without_a_mask_is_opened_by_its_index(monkeypatch: pytest.MonkeyPatch):
    """A worker that sees all devices selects its own; torch without such devices is refused."""
    torch = pytest.importorskip("torch")
    host = Host(packages={"torch": "2"}, reported=("hpu", 2))
    context = devices("accelerator", host=host)[1]
    message = (
        "worker 1 cannot open hpu device 1 with torch: RuntimeError: torch has no module "
        "torch.hpu. torch.accelerator must report hpu devices in the worker, too"
    )
    with pytest.raises(Exception, match=re.escape(message)):
        context.enter()
    got: list[int] = []
    module = types.SimpleNamespace(set_device=got.append)
    monkeypatch.setattr(torch, "hpu", module, raising=False)
    monkeypatch.setattr(_device_context, "_opened", type(_device_context._opened)())
    threads = torch.get_num_threads()
    try:
        context.enter()
        assert (got, context.devices) == ([1], [torch.device("hpu", 1)])
    finally:
        torch.set_num_threads(threads)


BACKEND = '''
"""A backend like torch_npu, whose devices need no driver."""
import os, sys
import torch

visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")   # read once, as real runtimes do
opened = []

def set_device(index):
    opened.append(index)

def is_initialized():
    return bool(opened)

state = [0]

def manual_seed_all(seed):
    state[0] = seed

def get_rng_state_all():
    return list(state)

def set_rng_state_all(states):
    state[:] = states

def _is_in_bad_fork():
    return False

def rand():
    state[0] += 1
    return state[0]

def _autoload():
    """The entry point, which torch calls at the end of its import."""

torch.accelerator.current_accelerator = lambda *args: torch.device("npu")
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", sys.modules[__name__])
'''


def opened(context: DeviceContext) -> tuple[Any, ...]:
    """Return what the backend saw."""
    import torch_npu  # type: ignore[import-not-found]

    other = os.environ.get("ASCEND_DEVICE_ID")
    return torch_npu.visible, torch_npu.opened, str(context.device), other


def die(context: DeviceContext) -> None:
    os._exit(3)


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "torch_npu.py").write_text(textwrap.dedent(BACKEND))
    about = tmp_path / "torch_npu-1.0.dist-info"
    add_file(about / "METADATA", "Metadata-Version: 2.1\nName: torch_npu\nVersion: 1.0\n")
    add_file(about / "entry_points.txt", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.starts
@pytest.mark.torch
def test_workers_of_a_pool_own_one_device_each(
    make_pool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, backend: None
):
    """Each worker sees one device of the program's mask before the backend is imported, and so
    does its replacement."""
    monkeypatch.setenv(ASCEND, "2,3")
    monkeypatch.setenv("ASCEND_DEVICE_ID", "1")
    host = machine("npu", NPUS, **{ASCEND: "2,3"})
    pool = make_pool(CtxPool, worker_contexts=devices("npu", host=host))

    whole = [("2", [0], "npu:0", None), ("3", [0], "npu:0", None)]
    assert pool.run_all(opened) == whole
    with pytest.raises(xpool.WorkerDied):
        pool.apply(die)
    assert pool.run_all(opened) == whole
    assert os.environ[ASCEND] == "2,3"


def draw(context: DeviceContext, item: int = 0) -> tuple[int, int]:
    import torch_npu

    return item, torch_npu.rand()


@pytest.mark.starts
@pytest.mark.torch
@pytest.mark.exhaustive
def test_seeds(make_pool: Callable[..., Any], backend: None):
    """`seed=` seeds the device's generator as well, for a worker and for each item."""
    contexts = devices("npu", 1, host=machine("npu", NPUS))
    # A fresh process imports torch, which loads the backend.
    one = make_pool(CtxPool, worker_contexts=contexts, seed=5, context="spawn")
    first, second = one.apply(draw), one.apply(draw)
    assert first[1] > 1, "the backend begins at 0"
    items = one.map(draw, range(3), seed=1)
    assert len({number for _, number in items}) == 3
    third = one.apply(draw)
    assert [second[1] - first[1], third[1] - second[1]] == [1, 1], "items left it alone"
    other = make_pool(CtxPool, worker_contexts=contexts, seed=5, context="spawn")
    assert other.apply(draw) == first
    assert other.map(draw, range(3), seed=1, chunksize=1) == items


@pytest.mark.starts
@pytest.mark.torch
def test_no_fork_of_a_program_that_uses_a_device(monkeypatch: pytest.MonkeyPatch):
    """A program that has started an Intel GPU is not forked."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    with pytest.raises(OptionError, match="has started the XPU runtime"):
        Pool(1, context="fork")


@pytest.mark.starts
def test_describing_a_machine_imports_no_framework():
    """`devices` of these kinds imports neither torch nor a backend."""
    code = (
        "import sys; from xpool.devices import Accelerator, Host, devices\n"
        "host = Host(accelerators={'npu': (Accelerator('davinci0'),)},\n"
        "            packages={'torch': '2', 'torch_npu': '2'})\n"
        "print(devices('npu', host=host), sorted({'torch', 'torch_npu'} & set(sys.modules)))"
    )
    assert scripts.run_ok(["-c", code]) == "[DeviceContext(npu:0, threads=1)] []\n"


def test_kinds_over_hosts():
    """A pool over Ray's hosts has the kinds that Ray counts; others are refused."""
    for kind in ("mps", "xla", "accelerator", "auto", None):
        with pytest.raises(
            OptionError, match=r"Ray has no resource for it; use one of \['cpu', 'cu"
        ):
            xpool.ray.devices(kind)  # type: ignore[arg-type]
