"""Programs from scripts, standard input, ``-c`` and notebooks."""

import json
import py_compile

import pytest
from support import scripts
from support.limits import WAIT
from support.tiers import also

pytestmark = pytest.mark.xpool_only

BODY = """
def initialise(value):
    global setting
    setting = value

def scaled(x):
    return x * setting

class Point:
    def __init__(self, x):
        self.x = x
    def __eq__(self, other):
        return isinstance(other, Point) and self.x == other.x
    def doubled(self):
        return Point(self.x * 2)

def doubled(point):
    assert isinstance(point, Point)
    return point.doubled()

def main():
    with xpool.Pool(2, initialise, (10,)) as pool:
        print(pool.map(scaled, range(4)))
        print(pool.map(lambda x: x + len(BIAS), range(4)))
        points = pool.map(doubled, [Point(1), Point(2)])
        print(all(type(p) is Point for p in points), points == [Point(2), Point(4)])
        class Local(Point):
            pass
        print(type(pool.apply(Local(3).doubled)) is Point)
        print(type(pool.apply(lambda p: p, (Local(3),))) is Local)
        try:
            pool.apply(scaled, ())
        except TypeError as error:
            print("scaled" in str(error))
    pool.join()

BIAS = "ab"
"""
EXPECTED = [
    "[0, 10, 20, 30]",
    "[2, 3, 4, 5]",
    "True True",
    "True",
    "True",
    "True",
]
PROGRAM = "import xpool\n" + BODY
GUARD = '\nif __name__ == "__main__":\n    main()\n'
UNGUARDED = PROGRAM + "\nmain()\n"


@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__":'])
@pytest.mark.parametrize("method", ["forkserver", *also("spawn", "fork")])
def test_a_script(tmp_path, guard, method):
    """Functions, lambdas, classes and globals of a script work with every start method, with the
    guard and without."""
    text = PROGRAM.replace("(10,))", f"(10,), context={method!r})")
    out = scripts.program(tmp_path, f"{text}\n{guard or 'if True:'}\n    main()\n")
    assert out.splitlines() == EXPECTED


@pytest.mark.parametrize(("arguments", "given"), [(["-c", UNGUARDED], ""), (["-"], UNGUARDED)])
def test_a_program_without_a_file(arguments, given):
    """``python -c`` and ``python -`` work."""
    assert scripts.run_ok(arguments, given).splitlines() == EXPECTED


@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("folder", "spawn"), ("compiled", "forkserver"),
        *also(("folder", "forkserver"), ("compiled", "spawn")),
    ],
)  # fmt: skip
def test_what_multiprocessing_does_not_run_again(tmp_path, how, method):
    """An unguarded ``__main__.py`` of a folder and a guarded compiled script work."""
    text = PROGRAM.replace("(10,))", f"(10,), context={method!r})")
    if how == "folder":
        path = tmp_path
        scripts.write(tmp_path / "__main__.py", text + "\nmain()\n")
    else:
        source = scripts.write(tmp_path / "guarded.py", text + GUARD)
        path = py_compile.compile(source, cfile=str(tmp_path / "guarded.pyc"), doraise=True)
    assert scripts.run_ok([str(path)]).splitlines() == EXPECTED


def test_a_module_without_the_guard(tmp_path):
    """Workers do not run an unguarded module. Its functions are sent by value and may import
    relatively."""
    package = tmp_path / "runpackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("def triple(x):\n    return 3 * x\n")
    (package / "__main__.py").write_text(
        "import sys, xpool\nfrom .helper import triple\n"
        "sys.stdout.write('top\\n')\nsys.stdout.flush()\n"
        "def task(x):\n    from . import helper\n    return helper.triple(x) + triple(1)\n"
        "with xpool.Pool(1) as pool:\n"
        "    print(pool.map(task, [1, 2]))\n"
        "pool.join()\n"
    )
    done = scripts.popen(["-m", "runpackage"], cwd=str(tmp_path))
    out, err = done.communicate(timeout=WAIT)
    assert (out, err) == ("top\n[6, 9]\n", "")


def test_interactive():
    """An interactive session works."""
    text = "import xpool\n" + BODY.replace("\n\ndef", "\n\n\ndef") + "\nmain()\n"
    # The console expects an empty line after a block, and none inside it.
    lines = []
    for line in text.splitlines():
        if line and not line.startswith(" ") and lines and lines[-1].startswith(" "):
            lines.append("")
        if line:
            lines.append(line)
    code = (
        "import code, sys\n"
        "sys.ps1 = sys.ps2 = ''\n"
        "console = code.InteractiveConsole(vars(sys.modules['__main__']))\n"
        "source = iter(sys.stdin.read().split('\\n'))\n"
        "for line in source:\n"
        "    console.push(line)\n"
    )
    done = scripts.run(["-c", code], "\n".join([*lines, ""]))
    assert done.stdout.splitlines() == EXPECTED, done.stderr


def test_notebook(tmp_path):
    """Functions, lambdas, classes and globals of a notebook's cells work."""
    pytest.importorskip("jupyter_client", reason="jupyter_client is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    (tmp_path / "cells.json").write_text(json.dumps([PROGRAM, "main()"]))
    (tmp_path / "notebook.py").write_text(scripts.NOTEBOOK)
    done = scripts.popen(["notebook.py"], cwd=str(tmp_path))
    out, err = done.communicate(timeout=WAIT)
    assert out.splitlines() == EXPECTED, err
