"""Loaders at the same works, two workers each, interleaved: `python -m bench.loaders`.

Peers, where they are installed (`pip install torchdata spdl grain`): torch's loader, torchdata's
loader and its nodes in threads, SPDL's pipeline in threads, grain in threads and in processes.
Each loader has a process of its own, in which workers stay from epoch to epoch where the loader can
have that; the processes take turns, an epoch each.  Printed for each work and loader:

    rate        samples a second: the median over the epochs, without the first one
    CPU         seconds of processor time for 1,000 samples, of the program and all its processes
    PSS         MiB of memory in the middle of the first epoch, of all these processes
    first       seconds from ``iter(loader)`` to the first batch, right after the loader was made

and for each work the ratio of xpool's better way to the best peer.  All of it takes five minutes on
two cores that do nothing else.  ``--soak SECONDS`` kills
workers instead.
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
    """Items that are made by a function of their places."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.length:
            raise IndexError(i)
        return self.make(i)


def _photo() -> bytes:
    """Return a JPEG file of 500x375, about as compressed as photos are."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3)).astype("uint8")
    file = io.BytesIO()
    Image.fromarray(noise).resize((500, 375)).save(file, "jpeg")
    return file.getvalue()


PHOTO = _photo()


def decode(i: int) -> Any:
    """Decode a JPEG file, cut 224x224 of it, and scale that to floats."""
    with Image.open(io.BytesIO(PHOTO)) as picture:
        array = np.asarray(picture.crop((0, 0, 224, 224)), dtype="float32")
    return torch.from_numpy(array.transpose(2, 0, 1) / 255), i


def floats(i: int) -> Any:
    """Make 3x224x224 floats."""
    return torch.full((3, 224, 224), float(i))


def integer(i: int) -> int:
    """Return the place itself."""
    return i


def record(i: int) -> Any:
    """Return a dict of a text and an array."""
    return {"text": f"sample {i}", "values": np.arange(16) + i, "label": i % 10}


class Work(NamedTuple):
    """A dataset, and how it is made into batches."""

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
"""Returns one epoch's batches; is called for each epoch."""


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
"""The package that each needs, and how it is made."""

# -- one of them, in its process -------------------------------------------------------------------


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
    # Without what libraries do at the end of a program.
    os._exit(0)


def family() -> list[int]:
    """Return this process and all that descend from it."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_seconds() -> float:
    """Return the processor time of the family, and of those in it that have ended."""
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


# -- all of them, in turns -------------------------------------------------------------------------


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
        """Have it run one epoch; return the figures."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        figures: dict[str, float] = json.loads(self._process.stdout.readline())
        return figures

    def median(self, figure: str) -> float:
        """Return the median of a figure over the epochs."""
        return statistics.median(epoch[figure] for epoch in self.epochs)

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(name: str, kinds: Iterable[str], epochs: int) -> None:
    """Measure one work, and print."""
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


# -- workers that are killed -----------------------------------------------------------------------


def with_pid(i: int) -> Any:
    """Return the place, 4 kB, and which process made them."""
    time.sleep(0.0005)
    return i, torch.full((1024,), float(i)), os.getpid()


def soak(seconds: float) -> None:
    """Kill a worker every ten seconds; each sample must come once an epoch.  Prints what is held.

    Descriptors, threads and memory are counted after the second epoch and at the end.
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
                    continue  # it was killed before its batch was taken: try the next one
                kill_at = time.monotonic() + 10
        assert sorted(seen) == list(range(8192)), "a sample is missing, or came twice"
        epochs += 1
        if epochs == 2:
            print("after 2 epochs:", held(), flush=True)
    print(f"after {epochs} epochs, {killed} workers killed:", held(), flush=True)


def held() -> str:
    """Say what this process holds."""
    counts = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")}
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return f"{counts['fd']} descriptors, {counts['task']} threads, {resident:.0f} MiB resident"


def main() -> None:
    """Measure each work, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("works", nargs="*", default=list(WORKS), help=", ".join(WORKS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="only kill workers, so long")
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
