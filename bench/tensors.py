"""Check what the documentation promises about large tensors: memory, descriptors, deaths.

`bench.peers` compares tensors with peers.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import xpool
from bench.floor import warm_memcpy
from bench.procs import descendants
from xpool._memory.arena import Arena

MIB = 1 << 20
WORKERS = 2


def pss(pid: int) -> int:
    """Proportional set size of a process in bytes: shared pages are divided among their users."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    line = next(line for line in text.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def program() -> int:
    """Proportional set size of this process and its descendants in bytes."""
    total = 0
    for pid in [os.getpid(), *descendants(os.getpid())]:
        try:
            total += pss(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
    return total


def descriptors() -> list[int]:
    """Number of open descriptors of this process and of each descendant."""
    pids = [os.getpid(), *descendants(os.getpid())]
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]


def make(number: int) -> torch.Tensor:
    """Make a tensor of 1 MiB."""
    return torch.full((MIB // 4,), float(number))


def make_small(number: int) -> torch.Tensor:
    """Make a tensor of 64 KiB."""
    return torch.full((16 * 1024,), float(number))


def copies(count: int = 15) -> str:
    """64 MiB one way, against a warm memcpy in the same run"""
    from bench import tensor_tasks

    floor = warm_memcpy() / 1e3
    out = []
    with xpool.Pool(WORKERS) as pool:
        for way in ("to the parent", "to a worker"):
            times = []
            for i in range(count + 3):
                if way == "to the parent":
                    begin = time.perf_counter()
                    tensor, making = pool.apply(tensor_tasks.make, (16 * MIB,))
                    taken = time.perf_counter() - begin - making
                else:
                    tensor, _ = tensor_tasks.make(16 * MIB)
                    begin = time.perf_counter()
                    pool.apply(tensor_tasks.count, (tensor,))
                    taken = time.perf_counter() - begin
                del tensor
                if i >= 3:
                    times.append(taken)
            median = statistics.median(times)
            out.append(f"{way} {median * 1e3:.1f} ms, {median / floor:.2f} memcpys")
    return f"memcpy {floor * 1e3:.1f} ms; " + "; ".join(out)


def stream(count: int = 1000) -> str:
    """1,000 tensors of 1 MiB through `imap` with `buffersize=8`"""
    with xpool.Pool(WORKERS) as pool:
        list(pool.imap(make, range(20)))
        gc.collect()
        before = program()
        most = 0
        for i, tensor in enumerate(pool.imap(make, range(count), buffersize=8)):
            if float(tensor[-1]) != i:
                raise AssertionError(f"tensor {i} has wrong values")
            if i % 20 == 0:
                most = max(most, program() - before)
        del tensor
    return f"at most {most / MIB:.1f} MiB above the start, with up to 9 MiB alive"


def live(count: int = 100_000) -> str:
    """100,000 live results of 64 KiB"""
    with xpool.Pool(WORKERS) as pool:
        pool.map(make_small, range(100))
        before = descriptors()
        begin = time.perf_counter()
        results = list(pool.imap(make_small, range(count)))
        seconds = time.perf_counter() - begin
        after = descriptors()
        wrong = sum(float(tensor[0]) != i for i, tensor in enumerate(results))
        if wrong:
            raise AssertionError(f"{wrong} results have wrong values")
        arena = Arena.own()
        used = arena.statistics()["bytes"] if arena is not None else 0
        del results
        gc.collect()
    return (
        f"{count / seconds:,.0f}/s, {used / MIB:,.0f} MiB shared, descriptors of parent and "
        f"workers {before} before, {after} with all alive"
    )


_DOOMED = """
import os, sys, xpool
from bench.tensors import make
if __name__ == "__main__":
    pool = xpool.Pool(2)
    print(os.getpid(), *[p for p in pool.statistics()["pids"]], flush=True)
    for i, tensor in enumerate(pool.imap(make, iter(int, 1))):
        if i == 50:
            print("busy", flush=True)
"""


def killed(times: int = 10) -> str:
    """SIGKILL of the parent during a stream: processes and files that are left"""
    names = set(os.listdir("/dev/shm"))
    for _ in range(times):
        child = subprocess.Popen([sys.executable, "-c", _DOOMED], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        first, busy = child.stdout.readline(), child.stdout.readline()
        if busy != "busy\n":
            raise AssertionError(f"the program printed {first!r}, {busy!r}")
        below = descendants(child.pid)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        deadline = time.monotonic() + 5
        while any(Path(f"/proc/{pid}").exists() for pid in below):
            if time.monotonic() > deadline:
                raise AssertionError(f"some of {below} have not ended")
            time.sleep(0.01)
    left = set(os.listdir("/dev/shm")) - names
    if any(name.startswith("torch_") or "xpool" in name for name in left):
        raise AssertionError(f"left in /dev/shm: {left}")
    return f"{times} times: no process, no file in /dev/shm"


def small_shm() -> str:
    """The first row again, with a /dev/shm of 64 MB, as in a container"""
    script = (
        "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "
        f"{sys.executable} -m bench.tensors copies"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"not measured: {done.stderr.strip().splitlines()[-1]}"
    return done.stdout.strip().splitlines()[-1]


ALL: dict[str, Callable[[], str]] = {
    "copies": copies,
    "stream": stream,
    "live": live,
    "killed": killed,
    "small_shm": small_shm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", choices=[*ALL, []], help="default: all")
    for name in parser.parse_args().which or ALL:
        summary = (ALL[name].__doc__ or "").strip()
        print(f"| {summary} | {ALL[name]()} |", flush=True)


if __name__ == "__main__":
    main()
