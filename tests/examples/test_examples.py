"""The examples are correct on real data, with one worker and with eight."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import pytest
from support import scripts
from support.screen import OnTerminal
from support.scripts import ROOT

pytest.importorskip("torch", reason="the examples use torch")
pytest.importorskip("tqdm", reason="the tour shows a progress bar")
pytest.importorskip("PIL", reason="the examples use pillow")

from PIL import Image

pytestmark = [
    pytest.mark.torch,
    pytest.mark.exhaustive,  # `make run` runs the main ones
    pytest.mark.skipif(
        # Importing it takes a second of each process that collects the tests.
        importlib.util.find_spec("sklearn") is None,
        reason="the examples use scikit-learn's images",
    ),
]


def run(name: str, *arguments: str, code: int = 0) -> CompletedProcess[str]:
    """Run the example as a user would, with warnings as errors."""
    path = str(ROOT / "examples" / name)
    done = scripts.run(["-W", "error::ResourceWarning", path, *arguments])
    assert done.returncode == code, done.stdout + done.stderr
    return done


def run_example(name: str, *arguments: str) -> str:
    """Run the example; return its output."""
    done = run(name, *arguments)
    assert done.stderr == ""
    return done.stdout


def accuracy(out: str, text: str = "accuracy") -> float:
    """Return the accuracy in a line of the output that begins with this text."""
    (found,) = re.findall(rf"^{text} (0\.\d{{4}})$", out, re.M)
    return float(found)


def test_tour(folder: Path):
    """Despite a killed worker the results equal a plain loop's, and the page shows pictures."""
    page = folder / "tour" / "page.html"
    done = run("tour.py", f"--out={page}")
    killed = re.search(r"^2 workers: 480 .* process (\d+) was killed half-way$", done.stdout, re.M)
    assert killed
    assert "checked: both have the same bytes" in done.stdout
    assert re.search(r"^accuracy of version 30: 0\.9[5-9]", done.stdout, re.M)
    assert "480/480" in done.stderr  # the progress bar
    text = page.read_text(encoding="utf-8")
    assert text.count("<figcaption>") == 4
    for picture in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(picture)
    assert f"process {killed[1]} was killed" in text
    (ideal,) = re.findall(r"^the (?:ideal|machine is busy), .* cores?.*$", done.stdout, re.M)
    assert f"times as fast ({ideal})." in text
    assert text.count('stroke="#c22"') == 1  # the death in the timeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.mark.parametrize("workers", [1, 8])
def test_evaluate(workers: int):
    """Each pass evaluates every image once, and the output has a line for each worker."""
    out = run_example("evaluate.py", f"--workers={workers}")
    assert len(re.findall(r"pass.*: 898 images in [\d.]+ s, [\d,]+ items/s\n", out)) == 2
    assert accuracy(out) > 0.95
    assert "checked: one process finds the same in each of the 57 batches\n" in out
    assert re.findall(r"^worker (\d+):", out, re.M) == [str(i) for i in range(workers)]
    counts = re.findall(r": cpu, (\d+) batches, (\d+) items, pid \d+$", out, re.M)
    assert sum(int(batches) for batches, _ in counts) == 57
    assert sum(int(items) for _, items in counts) == 898


@pytest.mark.parametrize("workers", [1, 8])
def test_preprocess(folder: Path, workers: int):
    """All tiles come back in order; the picture has the input and both outputs."""
    picture = folder / "new" / f"{workers}.png"
    out = run_example("preprocess.py", f"--workers={workers}", f"--out={picture}")
    assert len(re.findall(r"pass.*: 108 tiles in [\d.]+ s, [\d,]+ tiles/s\n", out)) == 2
    assert "checked: a plain loop finds the same" in out
    with Image.open(picture) as image:
        assert image.size == (3 * 9 * 72 + 2 * 20, 12 * 72)
        assert len(image.getcolors(maxcolors=2**24) or []) > 1000


@pytest.mark.parametrize("workers", [1, 4])
def test_versions(folder: Path, workers: int):
    """Versions are evaluated during training and at its end, and all are plotted."""
    plot = folder / "plots" / f"{workers}.svg"
    out = run_example("versions.py", f"--workers={workers}", f"--out={plot}")
    versions = re.findall(
        r"^version +(\d+): accuracy (0\.\d{4}), by worker ([\d and]+)$", out, re.M
    )
    numbers = [int(number) for number, _, _ in versions]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 30
    assert float(versions[-1][1]) > 0.95
    assert f"checked: one process finds the same in each of the {len(numbers)} versions" in out
    picture = ElementTree.parse(plot).getroot()
    dots = picture.findall(".//{http://www.w3.org/2000/svg}circle")
    assert [dot[0].text.split(":")[0] for dot in dots] == [f"version {n}" for n in numbers]


def test_train(folder: Path):
    """After a kill, training continues with the same losses as torch's; both are plotted."""
    plot = folder / "plots" / "training.svg"
    out = run_example("train.py", f"--out={plot}")
    assert "xpool: kill -9 after batch 80\nxpool: goes on after batch" in out
    assert "checked: both give the same 224 losses" in out
    epochs = dict(re.findall(r"^(\w+: epoch \d), loss (\d\.\d+)$", out, re.M))
    assert len(epochs) == 8 and all(
        float(epochs[f"{kind}: epoch 4"]) < 0.3 for kind in ("torch", "xpool")
    )
    lines = ElementTree.parse(plot).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points", "").split()) for line in lines] == [224, 224]


@pytest.mark.parametrize(
    ("workers", "method"),
    [(2, "exact"), (8, "gradient")],
)
def test_placement(workers: int, method: str):
    """Every model runs on its assigned worker, and the ensemble is accurate."""
    out = run_example("placement.py", f"--workers={workers}")
    held = re.search(rf"^<ModelAssigner (cpu: .*); {method}, cost [\d.]+>$", out, re.M)
    assert held
    numbers = [re.findall(r"\d", models) for models in re.findall(r"\[(.*?)\]", held[1])]
    assert len(numbers) == workers
    assert sorted(number for models in numbers for number in models) == list("012345")
    table = re.findall(r" +([\d.]+) MiB +([\d.]+) MFLOP  worker (\d) \(cpu\)$", out, re.M)
    assert [str(i) in numbers[int(worker)] for i, (_, _, worker) in enumerate(table)] == [True] * 6
    assert re.search(r"^\d+ of 256 KiB a batch go from one worker to another$", out, re.M)
    assert accuracy(out, "ensemble: accuracy") > 0.95
    assert "checked: one process finds the same for all 898 images\n" in out


@pytest.mark.parametrize("workers", [3, 6])
def test_pipeline(workers: int):
    """Every batch passes all stages of one pipeline, and the results are right."""
    out = run_example("pipeline.py", f"--workers={workers}")
    lines = re.findall(r"^worker (\d+): pipeline (\d+), stage (\d+), (\d+) batches", out, re.M)
    stages = [(int(pipeline), int(stage)) for _, pipeline, stage, _ in lines]
    assert stages == [divmod(i, 3) for i in range(workers)]
    assert sum(int(batches) for _, _, _, batches in lines) == 3 * 29
    assert accuracy(out) > 0.95
    assert re.search(r"^checked: one process finds the same \d+ of 898$", out, re.M)


@pytest.mark.parametrize("workers", [1, 8])
def test_share_handle(workers: int):
    """Ten tasks use each batch's activations, and find the same as one process."""
    out = run_example("share_handle.py", f"--workers={workers}")
    assert re.search(r"^7\.0 MiB of activations, used 10 times in [\d.]+ s$", out, re.M)
    lines = re.findall(
        r"^worker \d+: .*, (\d+) batches through the trunk, (\d+) judged$", out, re.M
    )
    assert len(lines) == workers
    assert sum(int(batches) for batches, _ in lines) == 15
    assert sum(int(judged) for _, judged in lines) == 150
    assert "the activations are in shared memory" in out
    assert re.search(r"^150 tasks used them in place, \d+ of them in another worker$", out, re.M)
    assert accuracy(out, "accuracy of the heads") > 0.97
    assert "checked: one process finds the same for 898 images and 10 heads\n" in out


@pytest.mark.parametrize("workers", [1, 4])
def test_tpu_sweep(workers: int):
    """Every trial runs once, the best setting is accurate, and one process finds the same."""
    out = run_example("tpu_sweep.py", f"--workers={workers}")
    trials = re.findall(r"^ +\d+ of 18: rate (\S+), width (\d+), without fold (\d):", out, re.M)
    assert len(trials) == len(set(trials)) == 18
    accuracies = re.findall(r"^rate \S+ +width \d+ +accuracy (0\.\d{4})$", out, re.M)
    assert len(accuracies) == 6
    assert accuracies == sorted(accuracies, reverse=True)
    assert float(accuracies[0]) > 0.95
    done = re.findall(r"^worker \d+: .*, (\d+) trials$", out, re.M)
    assert len(done) == workers
    assert sum(map(int, done)) == 18
    assert "checked: one process finds the same in each of the 3 folds\n" in out


GALLERY = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^\$ python examples/(\w+\.py)\n(.*?)^```$", GALLERY, re.M | re.S)


def test_gallery_has_every_example():
    """The gallery has the text and output of each example."""
    names = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert sorted(name for name, _ in SHOWN) == names
    assert sorted(re.findall(r"literalinclude} \.\./examples/(\S+)$", GALLERY, re.M)) == names


@pytest.mark.parametrize(
    ("name", "shown"),
    # `test_on_ray` runs the first two; the others have tests of their own.  The gallery shows the
    # terminal of the last one at a moment.
    [
        one
        for one in SHOWN
        if one[0]
        not in ("pool_on_ray.py", "cluster.py", "tour.py", "interpreters.py", "bars_in_tasks.py")
    ],
    ids=lambda text: text if text.endswith(".py") else "",
)
def test_gallery_shows_what_is_printed(folder: Path, name: str, shown: str):
    """Each line in the gallery is printed by its program, numbers aside."""
    out = (
        [f"--out={folder / 'shown'}.png"]
        if name in ("preprocess.py", "versions.py", "train.py")
        else []
    )
    printed = {without_numbers(line) for line in run_example(name, *out).splitlines()}
    assert {without_numbers(line) for line in shown.splitlines()} - {"..."} <= printed


def without_numbers(line: str) -> str:
    """Replace parts that differ between runs."""
    line = re.sub(r"^(picture|plot): .*|(sha256) \w+", r"\1\2", line)
    return " ".join(re.sub(r"[\d,.]*\d( and \d)?", " 0 ", line).split())


@pytest.mark.skipif(
    sys.version_info >= (3, 14),
    reason="tqdm leaves semaphores in killed workers: guides/progress.md",
)
def test_bars_in_tasks():
    """The lines of all tasks stay above the bar of the pool, and no bar of a task stays."""
    with OnTerminal(ROOT / "examples" / "bars_in_tasks.py", "--steps=2") as program:
        *lines, bar, mean = program.end()
    assert sorted(lines) == [f"fold {fold}: loss 0.960" for fold in range(6)]
    assert bar.startswith("all folds: 100%")
    assert mean == "mean loss 0.960"


def test_shared_names():
    """A worker has less memory for itself with a `SharedList` than with a list."""
    out = run_example("shared_names.py", "--names=600000")
    lists, shared = map(int, re.findall(r": (\d+) MB for each", out))
    assert shared < lists / 2, out


@pytest.mark.parametrize("workers", [1, 3])
def test_licences(workers: int):
    """The licences of workers that died are free for those that replace them."""
    out = run_example("licences.py", f"--workers={workers}")
    assert out.splitlines()[0] == "item 7: WorkerDied" and out.endswith("are free\n"), out


def test_records():
    """A plain loop finds the same records, and the first error is that of the first file."""
    out = run_example("records.py", "--files=5", "--lines=3000")
    assert "checked" in out and "first error: at 2.75 s, request 897115" in out


def test_other_workers():
    """Any number of workers makes the remaining batches of an epoch, with the same values."""
    lines = run_example("other_workers.py").splitlines()
    assert [int(line.split()[0]) for line in lines] == [3, 1, 2]
    assert len({line.partition(":")[2] for line in lines}) == 1, lines


def test_how_many_workers():
    """The loader has no more workers than it may, for steps of any length."""
    lines = run_example("how_many_workers.py", "--slow=0.005").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["slow steps", "fast steps"]
    for line in lines:
        found, most = map(int, re.findall(r"(\d+) (?:of|workers)", line))
        assert 1 <= found <= most, line


@pytest.mark.skipif(sys.platform != "linux", reason="worker_memory takes /proc")
@pytest.mark.parametrize(("largest", "ends"), [(500, "loaded"), (1000, "WorkerDied")])
def test_out_of_memory(largest: int, ends: str):
    """The task that is too large for a worker is done alone, if it is not too large for two."""
    out = run_example("out_of_memory.py", f"--largest={largest}")
    assert f"{largest} MB: {ends}" in out and "30 MB: loaded" in out, out


def test_priorities():
    """A request with a priority does not wait for the batch."""
    out = run_example("priorities.py", "--items=100")
    without, with_priority = map(float, re.findall(r"took ([\d.]+) s", out))
    assert with_priority < without / 2, out


def test_no_workers():
    """An invalid number of workers ends with xpool's error message."""
    done = run("evaluate.py", "--workers", "0", code=1)
    assert "at least 1" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="sub-interpreters need Python 3.14")
def test_interpreters():
    """Threads, sub-interpreters and processes count the same primes as a plain loop."""
    out = run_example("interpreters.py", "--limit=2000")
    kinds = re.findall(r"^(\w+) of 2: [\d.]+ s$", out, re.M)
    assert kinds == ["ThreadPool", "InterpreterPool", "Pool"]
