"""Loaders at the same works, two workers each, interleaved: `python -m bench.loaders`.

Peers are torch's loader and, where it is installed, torchdata's loader and its nodes in threads.
Workers stay from epoch to epoch (the nodes' threads do not), and the first epoch of each loader is
not counted.  Prints a line for each work: samples a second, medians over the epochs, and the ratio
of xpool's better way to the best peer.  ``--soak SECONDS`` kills workers instead.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader as Theirs
from torch.utils.data import Dataset, default_collate

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


def loaders(work: Work) -> dict[str, Iterable[Any]]:
    """Return a loader of each kind that is installed; their names tell them apart."""
    dataset = Made(work.make, work.samples)
    options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True, "shuffle": True}
    found: dict[str, Iterable[Any]] = {
        "xpool": Ours(dataset, work.batch, **options),
        "xpool threads": Ours(dataset, work.batch, workers="thread", **options),
        "torch": Theirs(dataset, work.batch, **options),
    }
    if importlib.util.find_spec("torchdata"):
        nodes: Any = importlib.import_module("torchdata.nodes")
        stateful: Any = importlib.import_module("torchdata.stateful_dataloader")
        found["torchdata"] = stateful.StatefulDataLoader(dataset, work.batch, **options)
        places = nodes.SamplerWrapper(torch.utils.data.RandomSampler(dataset))
        batches = nodes.Batcher(places, work.batch, drop_last=False)
        found["torchdata threads"] = nodes.Loader(
            nodes.ParallelMapper(
                batches,
                lambda indices: default_collate([dataset[i] for i in indices]),
                num_workers=WORKERS,
                method="thread",
            )
        )
    return found


def epoch(loader: Iterable[Any], batches: int) -> float:
    """Walk through the loader once; return the seconds that took."""
    begin = time.perf_counter()
    seen = sum(1 for _ in loader)
    seconds = time.perf_counter() - begin
    assert seen == batches, (seen, batches)
    return seconds


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
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="only kill workers, so long")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.soak:
        soak(args.soak)
        return
    for name in args.works:
        work = WORKS[name]
        batches = -(-work.samples // work.batch)
        kinds = loaders(work)
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(args.epochs + 1):
            for kind, loader in kinds.items():
                seconds = epoch(loader, batches)
                if turn:
                    taken[kind].append(seconds)
        rates = {kind: work.samples / statistics.median(times) for kind, times in taken.items()}
        ours = max(rate for kind, rate in rates.items() if kind.startswith("xpool"))
        best = max(rate for kind, rate in rates.items() if not kind.startswith("xpool"))
        told = ", ".join(f"{kind} {rate:,.0f}" for kind, rate in rates.items())
        print(f"{name}: {told}; ratio {ours / best:.2f}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
