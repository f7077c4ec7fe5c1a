"""Progress bars that tasks draw on a terminal, below the bar of ``progress=``."""

import os
import re
import signal
import subprocess
import sys

import pytest
from support.limits import PROGRAM_LIMIT
from support.screen import ROOT, OnTerminal
from support.tiers import also
from support.waiting import Gate

BEGIN = """
import importlib.util, multiprocessing, os, signal, sys, time
from support.waiting import pass_gate
from xpool import Pool, ThreadPool

find_spec = importlib.util.find_spec
LEFT_OUT = {"tqdm": (), "rich": ("tqdm",), "line": ("tqdm", "rich")}
gate = sys.argv[1]

def use(display):
    importlib.util.find_spec = lambda name: None if name in LEFT_OUT[display] else find_spec(name)

def draw(text, name="stderr"):
    stream = getattr(sys, name)
    stream.write(text)
    stream.flush()

def task(x):
    for n in range(3):
        draw(f"\\rtask {x}: {n}   ")
    pass_gate(gate)
    print("line", x)
"""


@pytest.fixture
def on_terminal(tmp_path, gate):
    """Return a function that starts a program on a terminal."""
    begun = []

    def begin(code, *args, before="", **size):
        script = tmp_path / "script.py"
        body = "\n".join(f"    {line}" for line in code.strip().split("\n"))
        script.write_text(f"{BEGIN}\n{before}\nif __name__ == '__main__':\n{body}\n")
        begun.append(OnTerminal(script, gate.path, *args, **size).__enter__())
        return begun[-1]

    yield begin
    for one in begun:
        one.__exit__()


def _rows(lines, start="job"):
    """Return the lines below the bar of the job, in order; None: there is no such bar."""
    at = [i for i, line in enumerate(lines) if line.startswith(start)]
    return sorted(lines[at[-1] + 1 :]) if at else None


WAYS = [("line", None), ("tqdm", None)]
MORE_WAYS = [("rich", None), ("line", "fork"), ("line", "spawn"), ("line", "forkserver")]


@pytest.mark.parametrize(("display", "start"), [*WAYS, *also(*MORE_WAYS)])
def test_bars_of_tasks_are_below_the_bar_of_the_job(on_terminal, gate, display, start):
    """Each worker has a line, which is gone when its task ends. Lines of tasks are above."""
    if display != "line":
        pytest.importorskip(display)
    program = on_terminal(
        f"use({display!r})\n"
        f"with Pool(2, context=multiprocessing.get_context({start!r})) as pool:\n"
        "    pool.map(task, range(4), 1, progress='job')\n"
        "print('done')\n"
    )
    program.until(lambda lines: _rows(lines) == ["task 0: 2", "task 1: 2"])
    gate.open()
    lines = program.until(lambda lines: "task 2: 2" in (_rows(lines) or ()))
    assert sum(line.startswith("line ") for line in lines) == 1
    gate.open(3)
    lines = program.end()
    assert sorted(lines[:4]) == [f"line {x}" for x in range(4)]
    assert re.match(r"job.*\b4(/| of )4\b", lines[4])
    assert lines[5:] == ["done"]


ENDS = {
    "killed": ("pool.map(ends, range(2), 1, progress='job', on_error='return')", 0),
    "exits": ("pool.map(ends, range(2), 1, progress='job', on_error='return')", 0),
    "raises": ("pool.map(ends, range(2), 1, progress='job', on_error='return')", 0),
    "timeout": ("pool.map(task, range(2), 1, progress='job', timeout=1, on_error='return')", 0),
    "terminate": ("pool.map_async(task, range(2), 1, progress='job'); pool.terminate()", 0),
    "sys.exit": ("pool.map_async(task, range(2), 1, progress='job'); sys.exit(3)", 3),
    "exception": ("pool.map_async(task, range(2), 1, progress='job'); 1 / 0", 1),
    "interrupt": ("pool.map(task, range(2), 1, progress='job')", -signal.SIGINT),
    "forgotten": ("pool.map_async(task, range(2), 1, progress='job')", 0),
}
HOW = """
def ends(x):
    draw(f"\\rtask {x}: 2")
    pass_gate(gate)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "exits":
        os._exit(1)
    raise ValueError(x)
"""


@pytest.mark.parametrize("way", [*list(ENDS)[::3], *also(*list(ENDS)[1::3], *list(ENDS)[2::3])])
def test_no_bar_of_a_task_remains(on_terminal, gate, way):
    """However tasks or the program end, no bar of a task stays on the terminal."""
    call, code = ENDS[way]
    call = call.replace("; ", "\npass_gate(gate + 'main')\n")
    before = "" if way == "forgotten" else "with pool:\n"
    body = call if way == "forgotten" else "\n".join(f"    {one}" for one in call.split("\n"))
    if way == "forgotten":
        body += "\npass_gate(gate + 'main')"
    held = Gate(gate.path + "main")
    program = on_terminal(f"pool = Pool(2)\n{before}{body}", way, before=HOW, height=40)
    program.until(lambda lines: _rows(lines) == ["task 0: 2", "task 1: 2"])
    if way == "interrupt":
        os.killpg(program.process.pid, signal.SIGINT)
    elif way in ("killed", "exits", "raises"):
        gate.open(2)
    held.open()
    lines = program.end()
    held.close()
    assert program.process.returncode == code
    assert lines[0].startswith("job"), lines
    assert not any("task 0:" in line or "task 1:" in line for line in lines)


def test_a_task_that_hangs_keeps_its_bar_alone(on_terminal, gate):
    """When one of two tasks has ended, only the line of the other remains."""
    program = on_terminal(
        "with Pool(2) as pool:\n    pool.map(f, range(2), 1, progress='job')",
        before="def f(x):\n    draw(f'\\rtask {x}: 2')\n    pass_gate(gate + str(x))\n",
    )
    gates = [Gate(f"{gate.path}{x}") for x in range(2)]
    program.until(lambda lines: _rows(lines) == ["task 0: 2", "task 1: 2"])
    gates[0].open()
    program.until(lambda lines: _rows(lines) == ["task 1: 2"])
    gates[1].open()
    assert len(program.end()) == 1
    for one in gates:
        one.close()


def test_a_wide_bar_is_cut(on_terminal, gate):
    """A bar has one line of the terminal, also one of wide characters."""
    program = on_terminal(
        "with Pool(2) as pool:\n    pool.map(f, ['x', '\u5bbd'], 1, progress='job')\nprint('done')",
        before="def f(x):\n    draw('\\r' + x * 100)\n    pass_gate(gate)\n",
        columns=40,
    )
    program.until(lambda lines: _rows(lines) == ["x" * 39, "\u5bbd\u200b" * 19])
    gate.open(2)
    assert program.end()[1:] == ["done"]


def test_more_bars_than_lines(on_terminal, gate):
    """The bars that have no room on the terminal are not shown, and nothing else is lost."""
    program = on_terminal(
        "print('first')\n"
        "with Pool(6) as pool:\n    pool.map(task, range(6), 1, progress='job')\nprint('done')",
        height=5,
    )
    program.until(lambda lines: len(_rows(lines) or ()) == 3)
    gate.open(6)
    lines = program.end()
    assert lines[0] == "first"
    assert sorted(lines[1:7]) == [f"line {x}" for x in range(6)]
    assert lines[8:] == ["done"]


SEQUENCES = {
    "tqdm closes": (["\rbar 1", "\n"], [], []),
    "tqdm, nested": (["\router", "\n", "\rinner 5", "\x1b[A"], ["inner 5"], []),
    "tqdm clears": (["\router", "\n", "\rinner", "\x1b[A", "\r     ", "\r"], [], []),
    "returns at the end": (["bar 5\r"], ["bar 5"], []),
    "in pieces": (["\rbar", " 5", " of 9"], ["bar 5 of 9"], []),
    "click": (["\r\x1b[?25l" + " " * 20 + "\r\x1b[?25lbar 5"], ["bar 5"], []),
    "click ends": (["\r\x1b[?25lbar 9", "\x1b[?25h\n"], [], []),
    "rich": (["\x1b[?25l", "\u2501 1", "\r\x1b[2K\u2501 5"], ["\u2501 5"], []),
    "rich ends": (["\x1b[?25l", "\u2501 1", "\r\x1b[2K\u2501 9\n\x1b[?25h"], [], []),
    "rich prints": (["\x1b[?25l", "\r\x1b[2Kabove\n\u2501 5"], ["\u2501 5"], ["above"]),
    "rich, two bars": (
        ["\x1b[?25l", "\u2501 1\n\u2501 2", "\r\x1b[2K\x1b[1A\x1b[2Kabove\n\u2501 3\n\u2501 4"],
        ["\u2501 4"], ["above"],
    ),
    "colours": (["\r\x1b[31mbar\x1b[0m 5"], ["bar 5"], []),
    "evil": (["\rbar\x1b[2J\x1b[5A 5\x07\x00\x9b"], ["bar 5"], []),
    "a line with returns": (["old\rnew\n"], [], ["new"]),
    "ends of lines of Windows": (["a line\r\n"], [], ["a line"]),
    "a coloured line": (["\x1b[31mred\x1b[0m\n"], [], ["red"]),
    "a line after a bar": (["\rbar 5", "above\n"], ["bar 5"], ["above"]),
}  # fmt: skip


@pytest.mark.parametrize("stream", ["stderr", *also("stdout")])
def test_what_libraries_write(on_terminal, gate, stream):
    """What tqdm, rich and click write is shown as one line; lines are above the bar."""
    program = on_terminal(
        f"use('line')\nwith Pool(1) as pool:\n    for name in {list(SEQUENCES)!r}:\n"
        "        pool.map(f, [name], 1, progress='job')",
        before=(
            f"ALL = { {name: pieces for name, (pieces, *_) in SEQUENCES.items()}!r}\n"
            f"def f(name):\n    for one in ALL[name]:\n        draw(one, {stream!r})\n"
            "    print('drawn', name)\n    pass_gate(gate)\n"
        ),
    )
    expected = []
    for name, (_, rows, above) in SEQUENCES.items():
        drawn = f"drawn {name}"
        program.until(lambda lines: drawn in lines and _rows(lines) == rows)  # noqa: B023
        gate.open()
        expected = [*expected, *above, drawn, "job: 1 of 1"]
        program.until(lambda lines: lines[: len(expected)] == expected)  # noqa: B023
    assert program.end() == expected


def test_prefix_and_bars(on_terminal, gate):
    """With ``output="prefix"``, lines have the prefix, and bars have none."""
    program = on_terminal(
        "use('line')\nwith Pool(1, output='prefix') as pool:\n"
        "    pool.map(task, [0], 1, progress='job')"
    )
    program.until(lambda lines: _rows(lines) == ["task 0: 2"])
    gate.open()
    assert program.end() == ["[worker 0] line 0", "job: 1 of 1"]


def test_files_get_the_bars(on_terminal, gate, tmp_path):
    """With ``output="files"``, the file of a task gets its bar, and the terminal does not."""
    program = on_terminal(
        "use('line')\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "with Pool(1, output='files') as pool:\n"
        "    pool.map(task, [0], 1, progress='job')"
    )
    gate.open()
    assert program.end() == ["job: 1 of 1"]
    (file,) = tmp_path.rglob("*.txt")
    assert "\rtask 0: 2" in file.read_bytes().decode()


def test_without_progress_nothing_changes(on_terminal, gate):
    """Without ``progress=``, a task writes to the terminal itself."""
    program = on_terminal("with Pool(1) as pool:\n    pool.map(task, [0], 1)")
    gate.open()
    program.end()
    assert program.seen.startswith(b"\rtask 0: 0   \rtask 0: 1   \rtask 0: 2   ")


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool"])
def test_without_a_terminal_nothing_changes(tmp_path, gate, kind):
    """Without a terminal, a bar is the text that the task writes."""
    script = tmp_path / "script.py"
    script.write_text(
        f"{BEGIN}\nif __name__ == '__main__':\n    use('line')\n    with {kind}(1) as pool:\n"
        "        pool.map(task, [0], 1, progress='job')\n"
    )
    gate.open()
    done = subprocess.run(
        [sys.executable, str(script), gate.path], check=True, capture_output=True,
        timeout=PROGRAM_LIMIT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    assert done.stderr == b"\rtask 0: 0   \rtask 0: 1   \rtask 0: 2   job: 1 of 1\n"
    assert done.stdout == b"line 0\n"


def test_two_jobs_at_once(on_terminal, gate):
    """Two bars of jobs with tqdm have their lines, and the bars of tasks are below both."""
    pytest.importorskip("tqdm")
    program = on_terminal(
        "with Pool(2) as pool:\n"
        "    one = pool.imap(task, [0], progress='job one')\n"
        "    two = pool.starmap_async(task, [(1,)], 3, progress='job two')\n"
        "    list(one)\n    two.get()\nprint('done')"
    )
    both = re.compile("job (one|two).*\njob (one|two).*\ntask .: 2\ntask .: 2")
    program.until(lambda lines: both.fullmatch("\n".join(lines)))
    gate.open(2)
    lines = program.end()
    assert lines[-1].startswith("done")  # tqdm leaves the rest of the line of its second bar
    assert not any(line.startswith("task") for line in lines)
    assert {"line 0", "line 1"} <= {*lines}  # the bar of a job that has ended may be above


def test_a_bar_of_the_program_around_it(on_terminal, gate):
    """A bar of tqdm in the program stays above the bar of the job."""
    pytest.importorskip("tqdm")
    program = on_terminal(
        "from tqdm import tqdm\nwith Pool(2) as pool:\n"
        "    for _ in tqdm(range(1), desc='outer'):\n"
        "        pool.map(task, range(2), 1, progress='job')"
    )
    program.until(lambda lines: _rows(lines) == ["task 0: 2", "task 1: 2"])
    assert program.screen.lines[-4].startswith("outer")
    gate.open(2)
    assert not any(line.startswith("task") for line in program.end())


REAL = {
    "tqdm": "from tqdm import tqdm\nbar = tqdm(total=9, desc='mine', mininterval=0)\n"
    "bar.update(5)\nbar.refresh()\npass_gate(gate)\nbar.close()",
    "nested": "from tqdm import tqdm\nouter = tqdm(total=9, desc='outer', mininterval=0)\n"
    "bar = tqdm(total=9, desc='mine', mininterval=0)\nbar.update(5)\n"
    "tqdm.write('above')\nbar.refresh()\npass_gate(gate)\nbar.close()\nouter.close()",
    "rich": "from rich.progress import Progress\nwith Progress(auto_refresh=False) as bars:\n"
    "    bar = bars.add_task('mine', total=9)\n    bars.update(bar, completed=5, refresh=True)\n"
    "    pass_gate(gate)",
    "two of rich": "from rich.progress import Progress\n"
    "with Progress(auto_refresh=False) as bars:\n"
    "    bars.add_task('other', total=9)\n    bar = bars.add_task('mine', total=9)\n"
    "    bars.update(bar, completed=5, refresh=True)\n    print('above')\n    pass_gate(gate)",
}


def _is_half(line):
    return line.startswith("mine") and "56%" in line


@pytest.mark.parametrize("library", REAL)
def test_bars_of_libraries(on_terminal, gate, library):
    """The bars of tqdm and rich are lines of the terminal, and are gone at the end."""
    pytest.importorskip("rich" if "rich" in library else "tqdm")
    body = "\n".join(f"    {line}" for line in REAL[library].split("\n"))
    program = on_terminal(
        "use('line')\nwith Pool(2) as pool:\n    pool.map(f, range(2), 1, progress='job')\n"
        # Since Python 3.14, a killed worker leaves a named semaphore: tqdm's lock.
        "    pool.close()\n    pool.join()",
        before=f"def f(x):\n{body}\n    print('line', x)\n",
    )
    program.until(lambda lines: list(map(_is_half, _rows(lines) or ())) == [True] * 2)
    gate.open(2)
    lines = program.end()
    above = ["above"] * 2 if "above" in REAL[library] else []
    assert sorted(lines[:-1]) == [*above, "line 0", "line 1"]
    assert lines[-1] == "job: 2 of 2"
