"""Variables of workers with GPUs, and the errors when a worker cannot have one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from xpool.devices import DeviceContext, Gpu, Host, devices
from xpool.errors import DeviceError, OptionError

from .hosts import gpu_host

MASK, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def masks(contexts: list[DeviceContext]) -> list[str | None]:
    return [context.env[MASK] for context in contexts]


def test_a_gpu_for_each_worker():
    """Without a mask, workers get GPUs by their numbers on the PCI bus."""
    contexts = devices("cuda", host=gpu_host(4))
    assert masks(contexts) == ["0", "1", "2", "3"]
    assert {c.env[ORDER] for c in contexts} == {"PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("mask", "order", "expected", "sets_order"),
    [
        ("3,1", None, ["3", "1"], False),
        ("3,1", "PCI_BUS_ID", ["3", "1"], False),
        (" 2 ", "FASTEST_FIRST", ["2"], False),
        ("GPU-222", None, ["GPU-22222222"], True),
        ("GPU-11111111,GPU-0", None, ["GPU-11111111", "GPU-00000000"], True),
        ("0,-1,2", None, ["0"], False),
    ],
)
def test_the_parents_mask(mask: str, order: str | None, expected: list[str], sets_order: bool):
    """Worker i gets the i-th device of its parent's mask, by a name with the same meaning."""
    environ = {MASK: mask} | ({ORDER: order} if order else {})
    contexts = devices("cuda", host=gpu_host(4, environ=environ))
    assert masks(contexts) == expected
    assert all((ORDER in c.env) is sets_order for c in contexts)


def test_mig_instances():
    """Workers get the instances of a GPU in MIG mode; other GPUs are then named by UUID."""
    host = gpu_host(2, mig={0: ("MIG-a", "MIG-b")})
    assert masks(devices("cuda", host=host)) == ["MIG-a", "MIG-b", "GPU-11111111"]
    chosen = replace(host, environ={MASK: "MIG-b"})
    assert masks(devices("cuda", host=chosen)) == ["MIG-b"]
    with pytest.raises(OptionError, match="one MIG instance"):
        devices("cuda", per_worker=2, host=host)


def test_several_gpus_for_a_worker():
    """A worker with two GPUs has both in its mask."""
    contexts = devices("cuda", per_worker=2, host=gpu_host(4))
    assert masks(contexts) == ["0,1", "2,3"]
    assert contexts[1].name == "2,3"


def test_numa_nodes():
    """A worker is bound near its GPU only if the GPU is known for certain."""
    gpus = (Gpu("GPU-a", node=0), Gpu("GPU-b", node=1))
    host = replace(gpu_host(2), gpus=gpus, cpus=(0, 1, 2, 3), nodes={0: (0, 1), 1: (2, 3)})
    assert [c.cpus for c in devices("cuda", host=host)] == [(0, 1), (2, 3)]
    by_number = replace(host, environ={MASK: "1,0"})
    assert [c.node for c in devices("cuda", host=by_number)] == [None, None]
    by_bus = replace(host, environ={MASK: "1,0", ORDER: "PCI_BUS_ID"})
    assert [c.node for c in devices("cuda", host=by_bus)] == [1, 0]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("4", r"names '4', which this machine does not have; it has 0: GPU-0"),
        ("GPU-9", "names 'GPU-9'"),
        ("MIG-9", "names 'MIG-9'"),
        ("", "hides every GPU; unset it"),
        ("-1", "hides every GPU"),
        ("1,1", "names a device twice"),
        ("1,01", "names a device twice"),
        ("GPU-1,GPU-11", "names a device twice"),
        ("0,GPU-1", "by number and by UUID: name all in one way"),
        (
            "GPU-",
            "several UUIDs begin .GPU-00000000, GPU-11111111, GPU-22222222, GPU-33333333.: give",
        ),
        ("\u00b2", "which this machine does not have"),
    ],
)
def test_a_mask_that_names_no_device(mask: str, message: str):
    """A mask with an unknown device is refused, and the error lists the known ones."""
    with pytest.raises(DeviceError, match=message):
        devices("cuda", host=gpu_host(4, environ={MASK: mask}))


def test_missing_driver_gpu_or_build():
    """A missing driver, GPU, CUDA build or torch each has its own error."""
    with pytest.raises(DeviceError, match="no NVIDIA driver answers here"):
        devices("cuda", host=replace(gpu_host(0), gpus=None))
    with pytest.raises(DeviceError, match="no GPU that can be used"):
        devices("cuda", host=gpu_host(0))
    with pytest.raises(DeviceError, match=r"torch 2\.13\.0 is built without CUDA"):
        devices("cuda", host=replace(gpu_host(1), build=""))
    with pytest.raises(DeviceError, match="torch is not installed"):
        devices("cuda", host=Host())


def test_a_mask_without_nvml():
    """Without NVML a mask is accepted, unless a name is there twice or some are numbers."""
    host = replace(gpu_host(0, environ={MASK: "GPU-x,GPU-y"}), gpus=None)
    assert masks(devices("cuda", host=host)) == ["GPU-x", "GPU-y"]
    for mask in "0,GPU-x", "GPU-x,GPU-x":
        with pytest.raises(DeviceError, match="by number and by UUID|names a device twice"):
            devices("cuda", host=replace(host, environ={MASK: mask}))


def test_no_group_of_gpus():
    """GPU workers use groups of torch.distributed instead."""
    with pytest.raises(OptionError, match=r"torch\.distributed"):
        devices("cuda", independent=False, host=gpu_host(2))


# -- which GPUs a process sees -----------------------------------------------------------------
