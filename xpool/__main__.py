"""``python -m xpool`` prints a report on this machine for pools, after a self-test of two seconds.

``python -m xpool stacks PID`` prints the stacks of the workers of a running program.

``--json`` prints the report as one JSON object.  The exit status is 1 if the self-test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xpool._engine.stacks import outside
from xpool._memory.system import default_processes, scopes
from xpool._pools.observing import Stacks
from xpool._pools.process import Pool
from xpool.devices._host import Host, installed, read, usable_cpus
from xpool.errors import WorkerDied

__all__ = ["main"]

_PACKAGES = ("torch", "dill", "numpy", "torch_xla", "torch_tpu", "joblib", "hypothesis")

_LIMITS = {
    "open files": "RLIMIT_NOFILE",
    "processes": "RLIMIT_NPROC",
    "addresses": "RLIMIT_AS",
    "file size": "RLIMIT_FSIZE",
    "core size": "RLIMIT_CORE",
}

LEAST_FILES = 1024
"""If fewer open files are allowed, the report recommends more.  A worker takes about six."""

SELF_TEST_LIMIT = 30.0
"""Seconds that each task of the self-test may take, even on a very busy machine."""


def look(root: Path = Path("/")) -> dict[str, Any]:
    """Return the report on this machine.  ``root`` replaces ``/`` as the parent of sys and proc."""
    return {
        "versions": _versions(),
        "workers": _workers(),
        "processors": _processors(),
        "memory": _memory(root),
        "limits": _limits(),
        "devices": _devices(root),
    }


def _versions() -> dict[str, str]:
    return {
        "xpool": sys.modules["xpool"].__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **installed(_PACKAGES),
    }


def _workers() -> dict[str, Any]:
    linux = sys.platform == "linux"
    return {
        "start method": "xpool's fork server" if linux else "spawn",
        "large values": "shared memory" if linux else "copies through pipes",
    }


def _processors() -> dict[str, Any]:
    found: dict[str, Any] = {"usable": len(usable_cpus()), "of": os.cpu_count()}
    found["workers of a pool"] = default_processes()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name in os.environ:
            found[name] = os.environ[name]
    return found


def _memory(root: Path) -> dict[str, Any]:
    """Return sizes of memory in bytes, and the kernel's settings for pages."""
    found: dict[str, Any] = {}
    names = {"MemTotal": "total", "MemAvailable": "available", "SwapTotal": "swap"}
    for line in read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[names[name]] = int(value.split()[0]) * 1024
    cgroups = [*scopes()][1:] if sys.platform == "linux" else []
    if cgroups:
        found["cgroup allows"], found["cgroup has"] = min(cgroups)
    for name, file in (("huge pages", "enabled"), ("huge pages, shared", "shmem_enabled")):
        choices = read(root / "sys/kernel/mm/transparent_hugepage" / file)
        if "[" in choices:
            found[name] = choices.partition("[")[2].partition("]")[0]
    mappings = read(root / "proc/sys/vm/max_map_count")
    if mappings.isdigit():
        found["mappings of a process"] = int(mappings)
    return found


def _limits() -> dict[str, int | None]:
    """Return the soft limits of this process.  None means unlimited."""
    soft = {name: resource.getrlimit(getattr(resource, key))[0] for name, key in _LIMITS.items()}
    return {name: None if n == resource.RLIM_INFINITY else n for name, n in soft.items()}


def _devices(root: Path) -> dict[str, Any]:
    host = Host.here(root)
    gpus = "NVML does not answer" if host.gpus is None else [str(gpu) for gpu in host.gpus]
    found = {"gpus": gpus, "tpu chips": [chip.generation for chip in host.chips]}
    return found | {kind: list(map(str, some)) for kind, some in host.accelerators.items() if some}


def advice(found: dict[str, Any]) -> list[str]:
    """Return a sentence for each recommended change."""
    said = []
    limits = found["limits"]
    if found["workers"]["start method"] == "spawn":
        said.append("Not Linux: workers start slowly and values are copied through pipes.")
    if limits.get("addresses") is not None:
        said.append("Addresses are limited (ulimit -v), so large values travel through pipes.")
    files = limits.get("open files")
    if files is not None and files < LEAST_FILES:
        said.append(f"Only {files} files may be open: raise that by ulimit -n 4096.")
    if limits.get("file size") is not None:
        said.append("The size of files is limited (ulimit -f), and so is shared memory.")
    wants = "torch" in found["versions"] and not os.environ.get("THP_MEM_ALLOC_ENABLE")
    if wants and found["memory"].get("huge pages") in ("madvise", "always"):
        said.append(
            "THP_MEM_ALLOC_ENABLE=1 lets torch allocate large tensors in huge pages: workers "
            "return tensors of 64 MiB up to twice as fast."
        )
    return said


# -- the self-test ---------------------------------------------------------------------------------


def self_test() -> dict[str, Any]:
    """Use the main features with two workers.  Return times and rates, and the first failure."""
    found: dict[str, Any] = {}
    begin = time.perf_counter()
    try:
        with Pool(2, task_timeout=SELF_TEST_LIMIT) as pool:
            _expect(pool.apply(pow, (2, 5)), 32, "apply")
            found["first result, ms"] = _milliseconds(begin)
            calls = [_timed(lambda: pool.apply(abs, (-1,))) for _ in range(50)]
            found["apply, us"] = round(statistics.median(calls) * 1e6)
            begin = time.perf_counter()
            _expect(sum(pool.imap(abs, range(5000))), sum(range(5000)), "imap")
            found["imap, tasks/s"] = round(5000 / (time.perf_counter() - begin))
            # This block is large enough for shared memory.
            block = bytearray(os.urandom(1 << 20)) * 16
            _expect(pool.apply(lambda data: data, (block,)), block, "16 MiB there and back")
            begin = time.perf_counter()
            pool.apply(len, (block,))
            found["16 MiB to a worker, ms"] = _milliseconds(begin)
            try:
                pool.apply(os._exit, (3,))
            except WorkerDied as died:
                _expect(died.exitcode, 3, "the exit code of a worker that ends")
            else:
                raise AssertionError("a worker that ends is not reported")
            _expect(pool.map(abs, range(-9, 0)), list(range(9, 0, -1)), "map after a death")
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    return found


def _expect(got: Any, wanted: Any, what: str) -> None:
    if got != wanted:
        raise AssertionError(f"{what}: wrong result")


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _milliseconds(begin: float) -> float:
    return round((time.perf_counter() - begin) * 1e3, 1)


# -- printing --------------------------------------------------------------------------------------


def _text(found: dict[str, Any]) -> str:
    lines = []
    for title, facts in found.items():
        lines.append(f"{title}:")
        if isinstance(facts, list):
            lines += [f"  {sentence}" for sentence in facts] or ["  nothing"]
        else:
            lines += [f"  {name:<24}{_value(value)}" for name, value in facts.items()]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if value is None:
        return "unlimited"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int) and value >= 1 << 30:
        return f"{value / (1 << 30):.1f} GiB"
    return str(value)


def show_stacks(pid: int) -> int:
    """Print the stacks of the workers of another process.  Return the exit status."""
    if sys.platform != "linux":
        print("stacks needs Linux: it finds the workers through /proc", file=sys.stderr)
        return 1
    try:
        found = outside(pid)
    except (ProcessLookupError, FileNotFoundError):
        print(f"There is no process {pid}.", file=sys.stderr)
        return 1
    except PermissionError:
        print(f"Process {pid} belongs to another user: run this as that user.", file=sys.stderr)
        return 1
    print(Stacks(found) if found else f"Process {pid} has no workers of xpool.")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Print the report.  Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m xpool",
        description="A report on this machine for pools, with a self-test. Paste it into an issue.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-test", action="store_true", help="start no workers")
    parser.add_argument(
        "command", nargs="?", choices=["stacks"], help="stacks PID: where the workers of PID are"
    )
    parser.add_argument("pid", nargs="?", type=int)
    asked = parser.parse_args(arguments)
    if asked.command:
        if asked.pid is None:
            parser.error("stacks needs the process id of the program that has made the pool")
        return show_stacks(asked.pid)
    found = look()
    found["to do"] = advice(found)
    if not asked.no_test:
        found["self-test"] = self_test()
    print(json.dumps(found, indent=2) if asked.json else _text(found))
    return 1 if "failed" in found.get("self-test", ()) else 0


if __name__ == "__main__":
    sys.exit(main())
