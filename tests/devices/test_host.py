"""Finding devices: in directories that look like sysfs, and on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xpool.devices import Gpu, Host, devices
from xpool.devices._host import Spare, find_chips, find_gpus, find_nodes, find_spare, parse_cpulist

from .hosts import DEVICE_IDS, XLA, add_node, add_pci, add_vfio

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("generation", DEVICE_IDS)
def test_every_generation_is_known(tmp_path: Path, generation: str):
    """Chips are found by Google's vendor id and their generation's device id."""
    add_pci(tmp_path, "0000:00:04.0", DEVICE_IDS[generation], group=7)
    add_pci(tmp_path, "0000:00:05.0", DEVICE_IDS[generation], group=8)
    add_vfio(tmp_path, 7, 8)
    chips = find_chips(tmp_path)
    assert [chip.generation for chip in chips] == [generation] * 2
    assert [chip.file for chip in chips] == ["dev/vfio/7", "dev/vfio/8"]


def test_other_devices_do_not_count(tmp_path: Path):
    """Google's network cards and other vendors' devices with a TPU's id are no chips."""
    add_pci(tmp_path, "0000:00:04.0", "0x0042", group=1)
    add_pci(tmp_path, "0000:00:05.0", "0x0063", vendor="0x10de", group=2)
    add_vfio(tmp_path, 1, 2)
    assert find_chips(tmp_path) == ()


def test_container_sees_its_own_chips_only(tmp_path: Path):
    """A container may use those of the host's chips whose groups are in /dev/vfio."""
    for i in range(8):
        add_pci(tmp_path, f"0000:00:{i + 4:02x}.0", "0x0063", group=i, node=i // 4)
    add_vfio(tmp_path)
    assert find_chips(tmp_path) == ()
    add_vfio(tmp_path, 2, 5)
    chips = find_chips(tmp_path)
    assert [(chip.file, chip.node) for chip in chips] == [("dev/vfio/2", 0), ("dev/vfio/5", 1)]


def test_chips_of_older_drivers(tmp_path: Path):
    """If chips are /dev/accel*, their groups need not be in /dev/vfio."""
    for i in range(4):
        add_pci(tmp_path, f"0000:00:{i + 4:02x}.0", "0x005e", group=i)
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/accel{i}").touch()
    add_vfio(tmp_path)
    assert [chip.file for chip in find_chips(tmp_path)] == [f"dev/accel{i}" for i in range(4)]


@pytest.mark.starts
def test_chip_held_by_a_process(tmp_path: Path):
    """If a process has a chip's file open, `devices` names the process and the remedy."""
    for i in range(2):
        add_pci(tmp_path, f"0000:00:{i + 4:02x}.0", "0x0063", group=i)
    add_vfio(tmp_path, 0, 1)
    code = "import sys; f = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "dev/vfio/1")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        free, used = find_chips(tmp_path)
        holder.communicate()
    assert free.user == ""
    assert used.user.startswith(f"pid {holder.pid} (")
    host = Host(chips=(free, used), packages=XLA)
    with pytest.raises(RuntimeError, match=rf"chip 1 .* in use by pid {holder.pid}.*end that"):
        devices("tpu", host=host)
    assert len(devices("tpu", 1, host=host)) == 1


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3", (0, 1, 2, 3)), ("0-1,4,6-7", (0, 1, 4, 6, 7)), ("", ()), ("5", (5,)), ("?", ())],
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]):
    """The kernel's CPU lists are parsed."""
    assert parse_cpulist(text) == cpus


def test_workers_are_bound_near_their_chips(tmp_path: Path):
    """On a host with two NUMA nodes a worker gets its chip's cores and a share of the threads."""
    add_node(tmp_path, 0, "0-3")
    add_node(tmp_path, 1, "4-7")
    for i in range(4):
        add_pci(tmp_path, f"0000:00:{i + 4:02x}.0", "0x0063", group=i, node=i // 2)
    add_vfio(tmp_path, 0, 1, 2, 3)
    host = Host(
        cpus=(0, 1, 2, 3, 4, 5, 7),
        nodes=find_nodes(tmp_path),
        chips=find_chips(tmp_path),
        packages=XLA,
    )
    contexts = devices("tpu", host=host)
    assert [c.cpus for c in contexts] == [(0, 1, 2, 3)] * 2 + [(4, 5, 7)] * 2
    assert [c.threads for c in contexts] == [2, 2, 1, 1]
    both = devices("tpu", per_worker=4, host=host)[0]
    assert both.cpus == (), "a worker with chips on two nodes is not bound"


def test_repr_hides_variables():
    """A host's repr hides the environment, which may hold secrets."""
    assert "hunter2" not in repr(Host(environ={"PASSWORD": "hunter2"}))


NVML = r"""
#include <string.h>
#include <stdio.h>
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } pci_t;
static int up;
static long number(void *device) { return (long)device - 100; }
int nvmlInit_v2(void) { up++; return 0; }
int nvmlShutdown(void) { up--; return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return up == 1 ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(100L + i); return 0; }
int nvmlDeviceGetUUID(void *d, char *text, unsigned size) {
  if (number(d) >= 100) snprintf(text, size, "MIG-%ld", number(d));
  else snprintf(text, size, "GPU-%ld", number(d));
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void *d, pci_t *info) {
  memset(info, 0, sizeof *info);
  info->bus = 0x65 + number(d);
  return 0;
}
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *later) {
  *now = *later = number(d) == 1;
  return number(d) == 2 ? 3 : 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *d, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *d, unsigned i, void **m) {
  *m = (void *)(200L + i);
  return i < 2 ? 0 : 6;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **d) {
  int i;
  if (sscanf(uuid, "GPU-%d", &i) != 1 && sscanf(uuid, "MIG-%d", &i) != 1) return 6;
  *d = (void *)(100L + i);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *total_free_used) {
  total_free_used[1] = (10ULL << 30) + number(d);
  return number(d) == 3 ? 3 : 0;
}
int nvmlDeviceGetUtilizationRates(void *d, unsigned *gpu_memory) {
  gpu_memory[0] = 25;
  return number(d) >= 100 ? 3 : 0;
}
"""


def build_nvml(folder: Path) -> str:
    """Build a library with NVML's interface; return its path."""
    (folder / "nvml.c").write_text(NVML)
    library = str(folder / "libnvidia-ml.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "nvml.c"], check=True)
    return library


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a library with")
@pytest.mark.starts
def test_nvml(tmp_path: Path):
    """Identities, MIG instances and nodes are read through NVML's interface."""
    library = build_nvml(tmp_path)
    add_pci(tmp_path, "0000:66:00.0", "0x2330", vendor="0x10de", node=1)
    gpus = find_gpus(tmp_path, library)
    assert gpus == (
        Gpu("GPU-0"),
        Gpu("GPU-1", mig=("MIG-100", "MIG-101"), node=1),
        Gpu("GPU-2"),
    )


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a library with")
@pytest.mark.starts
def test_spare_memory_and_time(tmp_path: Path):
    """Memory and idle time of numbered and named devices are read, or None if one is unknown."""
    library = build_nvml(tmp_path)
    assert find_spare(["2", "GPU-1", "MIG-101"], library) == [
        Spare((10 << 30) + 2, 0.75),
        Spare((10 << 30) + 1, 0.75),
        Spare((10 << 30) + 101, 1.0),
    ]
    assert find_spare(["0", "3"], library) is None
    assert find_spare(["0", "what"], library) is None
    assert find_gpus(tmp_path, library) is not None  # NVML is shut down after each use


def test_without_nvml(tmp_path: Path):
    """Without the driver's library no GPU is found."""
    assert find_gpus(tmp_path, str(tmp_path / "libnvidia-ml.so.1")) is None
    assert find_spare(["0"], str(tmp_path / "libnvidia-ml.so.1")) is None
