"""Compare data loaders at the same works, with two workers each: `python -m bench.loaders`.

The peers, if installed (`pip install torchdata spdl grain`), are torch's loader, torchdata's loader
and its nodes in threads, SPDL's pipeline in threads, and grain in threads and in processes.  Each
loader runs in its own process.  Workers stay for all epochs if the loader supports that.  The
processes take turns of one epoch.  Printed for each work and loader:

    rate        samples a second: the median of the epochs after the first
    CPU         processor seconds for 1,000 samples, of the program and all its processes
    PSS         MiB of memory of all these processes, in the middle of the first epoch
    first       seconds from ``iter(loader)`` to the first batch of the first epoch

For each work, the last line has the ratio of xpool's faster way to the best peer.  All works take
five minutes on two idle cores.  ``--soak SECONDS`` only kills workers, and checks the samples.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

if "xpool preloaded" in sys.argv:
    import xpool

    xpool.preload("torch")

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader as Theirs
from torch.utils.data import Dataset, RandomSampler, default_collate

from xpool.data import DataLoader as Ours

WORKERS = 2


class Made(Dataset):  # type: ignore[misc]
    """A dataset whose items are ``make(index)``."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.length:
            raise IndexError(i)
        return self.make(i)


def _photo() -> bytes:
    """Return a JPEG file of 500x375 pixels that compresses about as well as a photo."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3)).astype("uint8")
    file = io.BytesIO()
    Image.fromarray(noise).resize((500, 375)).save(file, "jpeg")
    return file.getvalue()


PHOTO = _photo()


def decode(i: int) -> Any:
    """Decode a JPEG file, crop it to 224x224, and scale the values to floats."""
    with Image.open(io.BytesIO(PHOTO)) as picture:
        array = np.asarray(picture.crop((0, 0, 224, 224)), dtype="float32")
    return torch.from_numpy(array.transpose(2, 0, 1) / 255), i


def floats(i: int) -> Any:
    return torch.full((3, 224, 224), float(i))


def integer(i: int) -> int:
    return i


def record(i: int) -> Any:
    return {"text": f"sample {i}", "values": np.arange(16) + i, "label": i % 10}


class Work(NamedTuple):
    """A dataset and its batch size."""

    make: Callable[[int], Any]
    samples: int
    batch: int


WORKS = {
    "jpeg": Work(decode, 1024, 32),
    "floats": Work(floats, 4096, 32),
    "integers": Work(integer, 200_000, 256),
    "dicts": Work(record, 16_384, 64),
}

OPTIONS: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True, "shuffle": True}

# -- the loaders -----------------------------------------------------------------------------------

Loader = Callable[[], Iterable[Any]]
"""Returns the batches of one epoch."""


def _ours(work: Work, **options: Any) -> Loader:
    loader: Any = Ours(Made(work.make, work.samples), work.batch, **OPTIONS, **options)
    return lambda: loader


def _torch(work: Work) -> Loader:
    loader = Theirs(Made(work.make, work.samples), work.batch, **OPTIONS)
    return lambda: loader


def _torchdata(work: Work) -> Loader:
    stateful: Any = importlib.import_module("torchdata.stateful_dataloader")
    dataset = Made(work.make, work.samples)
    loader = stateful.StatefulDataLoader(dataset, work.batch, **OPTIONS)
    return lambda: loader


def _fetch(work: Work) -> Callable[[list[int]], Any]:
    dataset = Made(work.make, work.samples)
    return lambda indices: default_collate([dataset[i] for i in indices])


def _nodes(work: Work) -> Loader:
    nodes: Any = importlib.import_module("torchdata.nodes")
    places = nodes.SamplerWrapper(RandomSampler(range(work.samples)))
    batches = nodes.Batcher(places, work.batch, drop_last=False)
    mapped = nodes.ParallelMapper(batches, _fetch(work), num_workers=WORKERS, method="thread")
    loader = nodes.Loader(mapped)
    return lambda: loader


def _spdl(work: Work) -> Loader:
    pipeline: Any = importlib.import_module("spdl.pipeline")
    batches = torch.utils.data.BatchSampler(RandomSampler(range(work.samples)), work.batch, False)
    fetch = _fetch(work)

    def epoch() -> Iterable[Any]:
        builder = pipeline.PipelineBuilder().add_source(batches)
        builder = builder.pipe(fetch, concurrency=WORKERS, output_order="input").add_sink(4)
        built = builder.build(num_threads=WORKERS)
        with built.auto_stop():
            yield from built

    return epoch


def _grain(work: Work, processes: bool) -> Loader:
    grain: Any = importlib.import_module("grain.python")
    dataset: Any = grain.MapDataset.source(Made(work.make, work.samples)).shuffle(seed=0)
    dataset = dataset.batch(work.batch, batch_fn=default_collate)
    if processes:
        options = grain.MultiprocessingOptions(num_workers=WORKERS)
        loader = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)).mp_prefetch(options)
    else:
        loader = dataset.to_iter_dataset(
            grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * WORKERS)
        )
    return lambda: loader


KINDS: dict[str, tuple[str, Callable[[Work], Loader]]] = {
    "xpool": ("xpool", _ours),
    "xpool threads": ("xpool", lambda work: _ours(work, workers="thread")),
    "xpool preloaded": ("xpool", _ours),
    "torch": ("torch", _torch),
    "torchdata": ("torchdata", _torchdata),
    "torchdata threads": ("torchdata", _nodes),
    "SPDL threads": ("spdl", _spdl),
    "grain": ("grain", lambda work: _grain(work, True)),
    "grain threads": ("grain", lambda work: _grain(work, False)),
}
"""By name: the package that a loader needs, and the function that makes it."""

# -- one loader, in its own process ----------------------------------------------------------------


def serve(kind: str, work: Work) -> None:
    """Run an epoch for each line on stdin, and print its figures."""
    torch.set_num_threads(1)
    loader = KINDS[kind][1](work)
    batches = -(-work.samples // work.batch)
    for line in sys.stdin:
        cpu, first, pss = cpu_seconds(), 0.0, 0.0
        begin = time.perf_counter()
        seen = 0
        for _ in loader():
            first = first or time.perf_counter() - begin
            seen += 1
            if seen == batches // 2 and line.strip() == "memory":
                pss = memory()
        seconds = time.perf_counter() - begin
        assert seen == batches, (seen, batches)
        cpu = cpu_seconds() - cpu
        print(json.dumps({"seconds": seconds, "cpu": cpu, "first": first, "pss": pss}), flush=True)
    # Skip the exit handlers of the libraries.
    os._exit(0)


def family() -> list[int]:
    """Return the pids of this process and its descendants."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue  # the process has ended
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_seconds() -> float:
    """Return the processor time of the family, including children that have ended."""
    ticks = 0
    for pid in family():
        try:
            with open(f"/proc/{pid}/stat") as file:
                ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def memory() -> float:
    """Return the proportional set size of the family, in MiB."""
    kilobytes = 0
    for pid in family():
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                kilobytes += sum(int(row.split()[1]) for row in file if row.startswith("Pss:"))
        except OSError:
            continue
    return kilobytes / 1024


# -- all loaders, in turns -------------------------------------------------------------------------


class Child:
    """A loader in its own process."""

    def __init__(self, kind: str, work: str) -> None:
        self.name = kind
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "bench.loaders", work, "--serve", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        begun = self.epoch("memory")
        self.first, self.pss = begun["first"], begun["pss"]
        self.epochs: list[dict[str, float]] = []

    def epoch(self, order: str = "go") -> dict[str, float]:
        """Let the child run one epoch; return its figures."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        figures: dict[str, float] = json.loads(self._process.stdout.readline())
        return figures

    def median(self, figure: str) -> float:
        return statistics.median(epoch[figure] for epoch in self.epochs)

    def end(self) -> None:
        self._process.communicate()


def compare(name: str, kinds: Iterable[str], epochs: int) -> None:
    """Measure one work with all loaders, and print the figures."""
    work = WORKS[name]
    children = [Child(kind, name) for kind in kinds]
    for turn in range(epochs):
        for child in children[turn % len(children) :] + children[: turn % len(children)]:
            child.epochs.append(child.epoch())
    rates = {child.name: work.samples / child.median("seconds") for child in children}
    for child in children:
        cpu = child.median("cpu") / work.samples * 1000
        print(
            f"{name:9} {child.name:18} {rates[child.name]:11,.0f}/s  CPU {cpu:7.3f}  "
            f"PSS {child.pss:6,.0f}  first {child.first:.3f}"
        )
        child.end()
    ours = max(rate for kind, rate in rates.items() if kind.startswith("xpool"))
    best = max((rate, kind) for kind, rate in rates.items() if not kind.startswith("xpool"))
    load = os.getloadavg()[0]
    print(f"{name}: ratio {ours / best[0]:.2f} to {best[1]}; load {load:.1f}\n", flush=True)


# -- soak ------------------------------------------------------------------------------------------


def with_pid(i: int) -> Any:
    """Return the index, 4 KiB, and the worker's pid."""
    time.sleep(0.0005)
    return i, torch.full((1024,), float(i)), os.getpid()


def soak(seconds: float) -> None:
    """Kill a worker every ten seconds; check that each sample comes once an epoch.

    Prints the program's descriptors, threads and memory after the second epoch and at the end.
    """
    loader = Ours(Made(with_pid, 8192), 32, True, num_workers=WORKERS, persistent_workers=True)
    end, kill_at = time.monotonic() + seconds, time.monotonic() + 10
    epochs = killed = 0
    while epochs < 2 or time.monotonic() < end:
        seen: list[int] = []
        for places, rows, pids in loader:
            assert torch.equal(rows[:, -1], places.float())
            seen += places.tolist()
            if time.monotonic() >= kill_at:
                try:
                    os.kill(int(pids[0]), signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    continue  # this batch is from a worker that is dead already
                kill_at = time.monotonic() + 10
        assert sorted(seen) == list(range(8192)), "a sample is missing or came twice"
        epochs += 1
        if epochs == 2:
            print("after 2 epochs:", held(), flush=True)
    print(f"after {epochs} epochs, {killed} workers killed:", held(), flush=True)


def held() -> str:
    """Describe the descriptors, threads and memory of this process."""
    counts = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")}
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return f"{counts['fd']} descriptors, {counts['task']} threads, {resident:.0f} MiB resident"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("works", nargs="*", default=list(WORKS), help=", ".join(WORKS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(KINDS), help="loaders, separated by commas")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="only kill workers")
    parser.add_argument("--serve", metavar="KIND", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, WORKS[args.works[0]])
        return
    torch.set_num_threads(1)
    if args.soak:
        soak(args.soak)
        return
    kinds = [kind for kind in args.kinds.split(",") if importlib.util.find_spec(KINDS[kind][0])]
    for name in args.works:
        compare(name, kinds, args.epochs)


if __name__ == "__main__":
    main()
