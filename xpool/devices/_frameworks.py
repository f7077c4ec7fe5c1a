"""Checks whether frameworks are installed, fit each other, or run in this process."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from xpool.errors import DeviceError

TORCH_XLA_LEAST = (2, 3)
"""The first version with `torch_xla.device()`.  A version needs the torch of the same number."""

TORCH_TPU_FOR = (2, 11), (2, 15)
"""The first and the last torch for which torch_tpu 0.2 has binaries."""


def pick_tpu_framework(packages: Mapping[str, str], wanted: str | None = None) -> str:
    """Return ``"torch_xla"`` or ``"torch_tpu"``: the wanted one, or the one that fits torch.

    Raises:
        DeviceError: it is not installed, or does not fit the installed torch.
    """
    names = [wanted] if wanted else [n for n in ("torch_tpu", "torch_xla") if n in packages]
    if not names:
        raise DeviceError(
            "TPUs need torch_xla or torch_tpu, and neither is installed here: "
            "pip install torch_xla (with the torch of the same number), or pip install torch_tpu"
        )
    problems = []
    for name in names:
        try:
            (check_torch_tpu if name == "torch_tpu" else check_torch_xla)(packages)
        except DeviceError as exc:
            problems.append(str(exc))
        else:
            return name
    raise DeviceError("; ".join(problems))


def check_torch_xla(packages: Mapping[str, str]) -> None:
    """Raise `DeviceError` unless torch_xla is installed and fits the installed torch."""
    ours, torch = _versions(packages, "torch_xla")
    if ours < TORCH_XLA_LEAST:
        raise DeviceError(
            f"torch_xla {packages['torch_xla']} is too old; xpool needs 2.3 or later: "
            "pip install --upgrade torch torch_xla"
        )
    if ours != torch:
        raise DeviceError(
            f"torch_xla {packages['torch_xla']} does not fit torch {packages['torch']}: "
            f"pip install torch=={ours[0]}.{ours[1]}.* torch_xla=={ours[0]}.{ours[1]}.*"
        )


def check_torch_tpu(packages: Mapping[str, str]) -> None:
    """Raise `DeviceError` unless torch_tpu is installed and has binaries for this torch."""
    _, torch = _versions(packages, "torch_tpu")
    first, last = TORCH_TPU_FOR
    if not first <= torch <= last:
        raise DeviceError(
            f"torch_tpu {packages['torch_tpu']} does not fit torch {packages['torch']}; it is for "
            f"torch {first[0]}.{first[1]} to {last[0]}.{last[1]}: pip install --upgrade torch"
        )


def _versions(packages: Mapping[str, str], name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if name not in packages:
        fit = ", with the torch of the same number" if name == "torch_xla" else ""
        raise DeviceError(f"{name} is not installed here: pip install {name}{fit}")
    if "torch" not in packages:
        raise DeviceError(f"{name} is installed, but torch is not: pip install torch")
    return _minor(packages[name]), _minor(packages["torch"])


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def running_runtime() -> str | None:
    """Return the name of a device runtime that this process has started, or None.

    Such a runtime would not work in a fork of this process.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_initialized():
        return "CUDA" if torch.version.hip is None else "HIP"
    for name in ("xpu", "npu", "neuron"):
        started = getattr(getattr(torch, name, None), "is_initialized", None)
        if started is not None and started():
            return name.upper()
    xla = sys.modules.get("torch_xla")
    if xla is not None and xla._XLAC._xla_runtime_is_initialized():
        return "XLA"
    tpu = getattr(torch, "tpu", None) if "torch_tpu" in sys.modules else None
    if tpu is not None and tpu.is_initialized():
        return "TPU"
    return None
