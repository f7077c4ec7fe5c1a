"""The main job: preprocess photographs on workers, and evaluate a model while it is trained.

1. A plain loop makes 480 variants of two photographs: decoded, rotated, cropped and blurred. Then
   the workers of a `Pool` do the same. One worker is killed half-way. The results must be equal.
2. A classifier of handwritten digits is trained while workers evaluate its newest version
   (`versions.py`).

The program writes all pictures to one HTML page.

    python examples/tour.py --workers 2 --out examples/out/tour.html
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import versions
from PIL import Image, ImageFilter
from torch import Tensor

import xpool

ITEMS = 480
SIDE = 224
SEED = 7


def load_photographs() -> list[bytes]:
    """Return scikit-learn's two sample photographs as JPEG files."""
    folder = resources.files("sklearn.datasets.images")
    return [(folder / name).read_bytes() for name in ("china.jpg", "flower.jpg")]


def make_augment(photographs: list[bytes]) -> Callable[[int], Tensor]:
    """Return the function to map: a closure over the photographs."""

    def augment(number: int) -> Tensor:
        """Return one variant of a photograph (uint8, SIDE x SIDE x 3)."""
        draw = random.Random(SEED + number)
        with Image.open(io.BytesIO(photographs[number % len(photographs)])) as image:
            turned = image.rotate(draw.uniform(-20, 20), Image.Resampling.BICUBIC)
        size = draw.randrange(200, 320)
        left = draw.randrange(60, turned.width - size - 60)
        top = draw.randrange(40, turned.height - size - 40)
        crop = turned.crop((left, top, left + size, top + size))
        crop = crop.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        if draw.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        soft = crop.filter(ImageFilter.GaussianBlur(draw.uniform(0, 2)))
        return torch.frombuffer(bytearray(soft.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3)

    return augment


def cores_in_use(seconds: float = 0.5) -> float:
    """Return how many cores other programs use now, on average over ``seconds``."""

    def idle() -> float:
        numbers = Path("/proc/stat").read_text().split("\n")[0].split()[4:6]  # idle, iowait
        return sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK")

    before, begin = idle(), time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - begin
    return max(0.0, (os.cpu_count() or 1) - (idle() - before) / passed)


def by_a_plain_loop(augment: Callable[[int], Tensor]) -> tuple[list[Tensor], float]:
    """Return the results and the seconds."""
    begin = time.perf_counter()
    results = [augment(number) for number in range(ITEMS)]
    return results, time.perf_counter() - begin


def by_a_pool(
    augment: Callable[[int], Tensor], workers: int, trace: Path
) -> tuple[list[Tensor], float, int]:
    """Return the results, the seconds including the workers' start, and the killed worker's pid."""
    begin = time.perf_counter()
    results: list[Tensor] = []
    killed = 0
    with xpool.Pool(workers) as pool, pool.trace(trace):
        for result in pool.imap(augment, range(ITEMS), retries=1, progress="photographs"):
            results.append(result)
            if len(results) == ITEMS // 2:
                killed = pool.report().workers[0].pid or 0
                os.kill(killed, signal.SIGKILL)
        return results, time.perf_counter() - begin, killed


def digest(results: list[Tensor]) -> str:
    """Return a short SHA-256 of all results."""
    return hashlib.sha256(b"".join(r.numpy().tobytes() for r in results)).hexdigest()[:16]


def embedded(images: list[Image.Image], height: int) -> str:
    """Return the images side by side, as one ``<img>`` element with embedded data."""
    resized = [image.resize((image.width * height // image.height, height)) for image in images]
    sheet = Image.new("RGB", (sum(i.width for i in resized), height))
    left = 0
    for image in resized:
        sheet.paste(image, (left, 0))
        left += image.width
    file = io.BytesIO()
    sheet.save(file, "JPEG", quality=88)
    return f'<img src="data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}">'


def timeline(events: list[dict[str, Any]], workers: int) -> str:
    """Return a timeline of the workers (SVG), made from the events of `Pool.trace`."""
    spans = [event for event in events if event["ph"] == "X"]
    deaths = [event for event in events if event["ph"] == "i" and event["s"] == "t"]
    end = max(span["ts"] + span["dur"] for span in spans)
    seconds = end / 1e6
    left, width, row = 100, 640, 34

    def x(microseconds: float) -> float:
        return left + (width - left - 10) * microseconds / end

    parts = [
        f'<text x="{left - 8}" y="{row * i + 22}" text-anchor="end">worker {i}</text>'
        for i in range(workers)
    ]
    parts += [
        f'<rect x="{x(s["ts"]):.1f}" y="{row * s["tid"] + 6}" height="24" fill="#28a" '
        f'width="{max(x(s["ts"] + s["dur"]) - x(s["ts"]) - 0.5, 0.5):.1f}"/>'
        for s in spans
    ]
    parts += [
        f'<path d="M{x(m["ts"]):.1f} {row * m["tid"] + 2}v32" stroke="#c22" stroke-width="3">'
        f"<title>{m['name']}</title></path>"
        for m in deaths
    ]
    step = max(1, round(seconds / 6))
    bottom = row * workers + 18
    parts += [
        f'<text x="{x(t * 1e6):.1f}" y="{bottom}" text-anchor="middle">{t} s</text>'
        for t in range(0, int(seconds) + 1, step)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 8}"'
        f">{versions.STYLE}{''.join(parts)}</svg>"
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>What xpool did</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 720px; margin: 2em auto; padding: 0 1em; }}
figure {{ margin: 1.5em 0; }} img, svg {{ max-width: 100%; height: auto; }}
figcaption {{ color: #555; }} :root {{ color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #181818; color: #ddd; }}
  figcaption {{ color: #aaa; }} }}
</style></head><body>
<h1>What xpool did</h1>
{figures}
</body></html>
"""


def page(figures: list[tuple[str, str]]) -> str:
    """Return the page; a figure is a pair of picture and caption."""
    parts = [f"<figure>{p}<figcaption>{caption}</figcaption></figure>" for p, caption in figures]
    return PAGE.format(figures="\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Preprocess and evaluate on workers.")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    default = Path(__file__).parent / "out" / "tour.html"
    parser.add_argument("--out", type=Path, default=default, help="write the page to this file")
    options = parser.parse_args()

    busy, cores = cores_in_use(), os.cpu_count() or 1
    xpool.preload("torch", "PIL.ImageFilter")  # the fork server imports these during the plain loop
    photographs = load_photographs()
    augment = make_augment(photographs)
    print(f"plain loop: {ITEMS} photographs", end="", flush=True)  # it takes a while
    alone, plain_seconds = by_a_plain_loop(augment)
    print(f" in {plain_seconds:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        results, pool_seconds, killed = by_a_pool(augment, options.workers, trace)
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    speed_up = plain_seconds / pool_seconds
    print(
        f"{options.workers} workers: {ITEMS} photographs in {pool_seconds:.2f} s, "
        f"{speed_up:.2f} times as fast, though process {killed} was killed half-way"
    )
    if busy > 0.3:
        ideal = f"the machine is busy, so that says little: others use {busy:.1f} of {cores} cores"
    else:
        ideal = f"the ideal, for {cores} cores: {min(options.workers, cores)} times as fast"
    print(ideal)
    assert digest(results) == digest(alone), "the results differ from the plain loop's"
    print(f"checked: both have the same bytes, sha256 {digest(results)}")

    reports = versions.run(options.workers)
    accuracies = {report.version: report.accuracy for report in reports}
    last = max(accuracies)
    print(f"{len(accuracies)} versions of a model evaluated while it was trained")
    print(f"accuracy of version {last}: {accuracies[last]:.4f}")

    went_in = [Image.open(io.BytesIO(photograph)) for photograph in photographs]
    came_out = [Image.fromarray(result.numpy()) for result in results[:8]]
    what_workers_did = (
        f"The tasks of each of {options.workers} workers. The red mark shows when process {killed} "
        f"was killed; its task ran again. The plain loop took {plain_seconds:.1f} s, and the pool "
        f"took {pool_seconds:.1f} s including its start: {speed_up:.2f} times as fast ({ideal})."
    )
    evaluated = (
        f"Accuracy of {len(accuracies)} versions of a model on 898 digits: {options.workers} "
        "workers evaluated the newest version while the model was trained."
    )
    figures = [
        (embedded(went_in, 240), "Input: two photographs."),
        (embedded(came_out, 112), f"Output: the first 8 of {ITEMS} variants."),
        (timeline(events, options.workers), what_workers_did),
        (versions.plot(accuracies), evaluated),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(figures), encoding="utf-8")
    print(f"page: {options.out}")


if __name__ == "__main__":
    main()
