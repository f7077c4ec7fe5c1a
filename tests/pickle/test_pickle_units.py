"""Which statements of a script a worker leaves out until a name needs them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support import scripts

from xpool.byvalue.units import read_units


def left_out(folder: Path, text: str) -> list[str]:
    """Return the names of the statements that a worker may leave out."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    values: dict[str, object] = {"__name__": "script"}
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), values)
    units = read_units(str(path), values)
    return [] if units is None else [n for u in units.units if not u.always for n in u.names]


BINDS = """
    import math, json as j
    from collections import deque
    import dataclasses
    from dataclasses import dataclass
    DATA = b"x" * 10
    TABLE: dict = {"a": [1, (2, math.pi)], **{"b": len(DATA)}}
    first, second = TABLE, DATA
    def f(x: int = 3, *, y=DATA) -> int: return j.loads(x)
    class Plain:
        rate = 0.5
        def go(self): return deque()
        @property
        def it(self): return 1
        @it.setter
        def it(self, value): pass
    @dataclass(frozen=True)
    class Point:
        x: int = 0
        y: list = dataclasses.field(default_factory=list)
    name = lambda: print(1)
"""


@pytest.mark.pure
def test_what_only_binds_is_left_out(tmp_path: Path):
    """Imports of the standard library, plain functions and classes, literals, arithmetic."""
    names = left_out(tmp_path, BINDS)
    assert names == [
        "math", "j", "deque", "dataclasses", "dataclass", "DATA", "TABLE", "f", "Plain", "Point",
        "name",
    ]  # fmt: skip


@pytest.mark.pure
@pytest.mark.parametrize(
    "statement",
    [
        "made = print()",
        "print('hello')",
        "for made in range(3): pass",
        "made = [one for one in range(3)]",
        "import os; os.environ['MADE'] = '1'",
        "import random; random.seed(3)",
        "import near",
        "from near import thing",
        "made = 1\nmade = 2",
        "made = 1\ndef change():\n    global made\n    made = 2",
        "class Made: pass\ndef change():\n    Made.made = 1\nmade = 1",
        "class Base:\n    def __init_subclass__(cls): pass\nclass made(Base): pass",
        "import abc\nclass made(abc.ABC): pass",
        "class made:\n    print('hello')",
        "def wrap(f): return f\n@wrap\ndef made(): pass",
        "def made(x=print('hello')): pass",
        "try:\n    import json as made\nexcept ImportError:\n    made = None",
        "import sys\nif sys.platform: made = 1",
        "OPEN = iter([1])\nmade = list(OPEN)",
    ],
)
def test_what_may_act_is_not(tmp_path: Path, statement: str, monkeypatch: pytest.MonkeyPatch):
    """A statement that may do more than bind names, or a name that is bound twice."""
    (tmp_path / "near.py").write_text("thing = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = left_out(tmp_path, f"def f(): pass\n{statement}\n")
    assert "f" in names and not {"made", "near", "thing"} & set(names)


@pytest.mark.pure
@pytest.mark.parametrize(
    "line",
    [
        "from math import *",
        "def g(): return globals()['f']",
        "def g(): exec('f()')",
        "import sys\ndef g(): return sys.modules[__name__].f",
        "# coding: latin-1",
    ],
)
def test_a_script_that_looks_at_itself_is_run_as_a_whole(tmp_path: Path, line: str):
    """Nothing is left out where names may be used that the text does not show."""
    assert left_out(tmp_path, f"{line}\ndef f(): pass\n") == []


@pytest.mark.pure
def test_a_module_that_hides_one_of_the_standard_library_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What lies beside the script is the program's own, whatever it is called."""
    (tmp_path / "antenna").mkdir()
    (tmp_path / "this_is_mine.py").write_text("")
    (tmp_path / "colorsys.py").write_text("print('mine')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "colorsys", raising=False)
    assert left_out(tmp_path, "import colorsys\ndef f(): pass\n") == ["f"]
    del __import__("sys").modules["colorsys"]  # for good: `delitem` would bring it back at the end


PROBE = """
    import sys

    def there():
        names = "colorsys", "fractions", "DATA", "plain", "reads", "looks", "Kind"
        return [name for name in names if name in vars(sys.modules["__main__"])]

    def loaded(name):
        return name in sys.modules
"""

SCRIPT = """
    'About it.'
    from __future__ import annotations
    import colorsys
    import fractions
    import probe

    LOG = []
    LOG.append("acted")
    DATA = b"x" * 1000

    def plain(x):
        return LOG, __doc__, probe.loaded("color" + "sys"), probe.there()

    def reads(x):
        return LOG, colorsys.rgb_to_hsv(x, x, x), len(DATA), probe.there()

    def looks(x):
        import __main__
        return LOG, str(__main__.fractions.Fraction(1, 2)), probe.there()

    def fails(x):
        return (
            1 / x
        )

    class Kind(dict):
        size = len(DATA)

    if __name__ == "__main__":
        from xpool import Pool
        with Pool(1) as pool:
            print(pool.map(plain, [1]))
            print(pool.map(reads, [1]))
            print(pool.map(looks, [1]))
            print(pool.map(Kind, [{}])[0].size)
            try:
                pool.map(fails, [0])
            except ZeroDivisionError as exc:
                print("in fails\\n    1 / x\\n" in str(exc.__cause__))
        pool.join()
"""


@pytest.mark.xpool_only
def test_a_worker_runs_what_a_name_needs(tmp_path: Path):
    """What acts is run once, first; the rest when a function needs it; lines keep their numbers."""
    scripts.write(tmp_path / "probe.py", PROBE)
    path = scripts.write(tmp_path / "script.py", SCRIPT)
    assert scripts.run_ok([path]).splitlines() == [
        "[(['acted'], 'About it.', False, ['plain'])]",
        "[(['acted'], (0.0, 0.0, 1), 1000, ['colorsys', 'DATA', 'plain', 'reads'])]",
        "[(['acted'], '1/2', ['colorsys', 'fractions', 'DATA', 'plain', 'reads', 'looks'])]",
        "1000",
        "True",
    ]


CHANGED = """
    import sys
    from pathlib import Path
    from xpool import Pool

    def answer(x):
        return x

    if __name__ == "__main__":
        with Pool(1) as pool:
            own = Path(__file__)
            own.write_text("print('run anew')\\n" + own.read_text())
            print(pool.map(answer, [1]), flush=True)
        pool.join()
"""


@pytest.mark.xpool_only
def test_a_script_that_was_changed_is_run_as_a_whole(tmp_path: Path):
    """What is known of the statements of another text is not used."""
    path = scripts.write(tmp_path / "script.py", CHANGED)
    assert sorted(scripts.run_ok([path]).splitlines()) == ["[1]", "run anew"]


FAILING = """
    import os
    import probe
    from xpool import Pool

    if probe.loaded("xpool.worker.loop") and not os.path.exists("mended"):
        raise LookupError("not yet")

    def answer(x):
        return x

    if __name__ == "__main__":
        with Pool(1) as pool:
            try:
                pool.map(answer, [1])
            except LookupError as exc:
                print(exc)
            open("mended", "w").close()
            print(pool.map(answer, [1]))
        pool.join()
"""


@pytest.mark.xpool_only
def test_a_statement_that_failed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A task that needs a name fails as the script does; the next one tries once more."""
    monkeypatch.chdir(tmp_path)
    scripts.write(tmp_path / "probe.py", PROBE)
    path = scripts.write(tmp_path / "script.py", FAILING)
    assert scripts.run_ok([path]).splitlines() == ["not yet", "[1]"]
