"""Statements of a script that a worker skips until a task needs their names."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from support import scripts

from xpool._pickling.by_value.effects import LIBRARY
from xpool._pickling.by_value.source import read
from xpool._pickling.by_value.top_values import sharing
from xpool._pickling.by_value.units import (
    ACTS,
    BINDS,
    COMPUTES,
    WAITS,
    Unit,
    read_units,
)


def units(folder: Path, text: str, **given: object) -> list[Unit]:
    """Run a script and return its units."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    values: dict[str, object] = {"__name__": "script", **given}
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), values)
    found = read_units(str(path), values, read(str(path), None).rebound)
    return [] if found is None else list(found.units)


def names(found: list[Unit], kind: int) -> set[str]:
    return {name for unit in found if unit.kind == kind for name in unit.names}


def left_out(folder: Path, text: str) -> list[str]:
    """Return the names of the statements that a worker may skip."""
    return [name for unit in units(folder, text) if unit.kind != ACTS for name in unit.names]


DEFINES = """
    import math, json as j
    from collections import deque
    import dataclasses
    def f(x: int = 3, *, y=math.pi) -> int: return j.loads(x)
    class Plain:
        rate = 0.5
        def go(self): return deque()
    class Child(Plain):
        pass
"""

COMPUTED = """
    import json, os, random, sys
    def load(): return [3, 1, 2]
    data = load()
    total: int = sum(data)
    total += 1
    first, *second = load()
    rows = [row for row in data if row]
    table = {"rows": 0}
    table["rows"] = len(rows)
    del table["rows"]
    data.sort()
    data[0] = 7
    name = lambda: print(1)
    with open(os.devnull) as file:
        text = file.read()
        for line in text: rows.append(line)
    if total > 3:
        size = 1
    else:
        size = 2
    try:
        found = json.loads("no")
    except ValueError as error:
        found = None
    while size < 5:
        size += 1
        if size == 4: break
    assert size
    for one in data: print(one, file=sys.stderr)
    late: str
    gone = 1
    del gone
"""


@pytest.mark.pure
def test_statements_that_only_bind(tmp_path: Path):
    """Imports of the standard library, and functions and classes without calls, only bind names."""
    found = units(tmp_path, DEFINES)
    wanted = {"math", "j", "deque", "dataclasses", "f", "Plain", "Child"}
    assert names(found, BINDS) == wanted and {unit.kind for unit in found} == {BINDS}


@pytest.mark.pure
@pytest.mark.parametrize(
    "statement",
    [
        "import abc\nclass made(abc.ABC):\n    @abc.abstractmethod\n    def go(self): pass",
        "from enum import Enum, auto\nclass made(str, Enum):\n    A = auto()",
        "import dataclasses as d\n@d.dataclass(frozen=True)\nclass made:\n    x: list = d.field()",
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass made(Generic[T]): pass",
        "from typing import Protocol\nclass made(Protocol): pass",
        "from collections import namedtuple\nclass made(namedtuple('made', 'x')): pass",
        "import functools as ft\n@ft.lru_cache(maxsize=None)\ndef made(): pass",
        "from contextlib import contextmanager as cm\n@cm\ndef made(): yield",
        "class made:\n  @property\n  def x(self): pass\n  @x.setter\n  def x(self, x): pass",
    ],
)
def test_decorators_and_metaclasses_of_the_standard_library(tmp_path: Path, statement: str):
    """Decorators and metaclasses of the standard library have no effect beyond the bound name."""
    assert "made" in names(units(tmp_path, statement), BINDS)


@pytest.mark.pure
def test_assignments(tmp_path: Path):
    """Assignments are skipped, and so are statements that change only the assigned value."""
    found = units(tmp_path, COMPUTED)
    assert {unit.kind for unit in found} == {BINDS, COMPUTES}
    assert names(found, BINDS) == {"json", "os", "random", "sys", "load"}
    assert names(found, COMPUTES) >= {"data", "table", "rows", "size", "found", "file", "second"}


@pytest.mark.pure
@pytest.mark.parametrize(
    "statement",
    [
        "input = len\ninput('hello')",
        "print = len\nprint('hello')",
        "import io\nprint('hello', file=io.StringIO())",
        "import io\nprint('hello', **{'file': io.StringIO()})",
        "import os; os.environ['MADE'] = '1'",
        "import random; random.seed(3)",
        "import near",
        "from near import thing",
        "import os\nmade = os.environ\nmade['MADE'] = '1'",
        "import decimal\nmade = decimal.getcontext()\nmade.prec = 28",
        "import near\nmade = near.thing\nmade.append(2)",
        "made = []\nhash(made.append)",
        "for one in range(3): hash(one)",
        "if True: import json as made",
        "with open(__file__) as file: hash(file.read())",
        "class Made: pass\nMade.rate = 3",
        "class Base:\n    def __init_subclass__(cls): pass\nclass made(Base): pass",
        "def wrap(f): return f\nclass made:\n    @wrap\n    def f(self): pass",
        "import near\nclass made:\n    @near.keep\n    def f(self): pass",
        "import near\nclass made(near.Base): pass",
        "from functools import cache\ndef cache(f): return f\n@cache\ndef made(): pass",
        "from enum import Enum\nclass made(Enum):\n    A = 1\n    def __init__(self, x): print()",
        "from enum import Enum\nclass made(Enum):\n    A = print()",
        "class Meta(type): pass\nclass made(metaclass=Meta): pass",
        "import dataclasses\n@dataclasses.dataclass\nclass made:\n    x: int = hash(1)",
        "class made:\n    print('hello')",
        "def wrap(f): return f\n@wrap\ndef made(): pass",
        "def made(x=print('hello')): pass",
        "try:\n    import json as made\nexcept ImportError:\n    made = None",
        "if not __name__: raise LookupError",
        "(made := 3)",
        "made = print\nmade('hello')",
    ],
)
def test_statements_that_act(tmp_path: Path, statement: str, monkeypatch: pytest.MonkeyPatch):
    """A statement is not skipped if it may change values of other code."""
    (tmp_path / "near.py").write_text(
        "thing = [1]\nclass Base: pass\ndef keep(f): thing.append(f)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "near", raising=False)
    monkeypatch.setenv("MADE", "0")
    found = units(tmp_path, f"def f(): pass\n{statement}\n", __file__=__file__)
    assert "f" in names(found, BINDS) and found[-1].kind == ACTS


@pytest.mark.pure
def test_values_that_share_an_object(tmp_path: Path):
    """The statements of values that share an object are units of all these names."""
    text = """
        class State: pass
        START, STOP = State(), State()
        NEXT = {START: STOP}
        ROWS = [1, 2]
        VIEW = (ROWS,)
        ROWS += [3]
        ALONE = State()
        NONE = OTHER = None
        TEXTS, TUPLES = ["a", ()], [(), "a"]
    """
    found = units(tmp_path, text)
    assert [(unit.kind, unit.names) for unit in found] == [
        (BINDS, ("State",)),
        *[(COMPUTES, ("NEXT", "START", "STOP"))] * 2,
        *[(COMPUTES, ("ROWS", "VIEW"))] * 3,
        (COMPUTES, ("ALONE",)),
        (COMPUTES, ("NONE", "OTHER")),
        (COMPUTES, ("TEXTS", "TUPLES")),
    ]
    values = {"ROWS": (rows := []), "VIEW": (rows,)}
    analysed = read_units(str(tmp_path / "script.py"), values, frozenset())
    assert analysed is not None and analysed.shared == ("ROWS", "VIEW")


@pytest.mark.pure
def test_groups_of_values_that_share_an_object():
    """Values belong to one group if each shares an object with another one of the group."""
    one, two, three = [1], [2], [3]
    found = sharing({"a": one, "b": [two], "c": three, "d": (one, two), "e": 5, "f": {0: three}})
    first, second = {"a", "b", "d"}, {"c", "f"}
    assert found == {"a": first, "b": first, "d": first, "c": second, "f": second}


@pytest.mark.pure
def test_needs_of_a_unit(tmp_path: Path):
    """A unit needs the units of all names that it uses.

    A unit that acts needs everything that it may call.
    """
    text = """
        import math
        LIMIT = 3
        data = math.pow(2, 3)
        other = math.pow(2, 4)
        def reads(data2): return data, LIMIT, "other"
        def calls(): return reads(1)
        def default(x=data): return x
        hash(str(calls()))
    """
    found = units(tmp_path, text)
    needs = {unit.first: (unit.wants, unit.reads) for unit in found}
    assert needs[6] == (("LIMIT",), ("data",))
    assert needs[7] == ((), ()) and needs[8] == (("data",), ())
    assert needs[9] == (("LIMIT", "data"), ())
    acts = found[-1]
    assert acts.kind == ACTS and [found[n].first for n in acts.needs] == [2, 6, 7]


@pytest.mark.torch
@pytest.mark.pure
def test_settings_of_torch_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Settings of torch and its libraries wait until the worker imports torch."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "seeing.py").write_text("import torch\ndef register(name): pass\n")
    (tmp_path / "near_torch.py").write_text("import torch\n")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(tmp_path))
    text = """
        import torch
        from torch import nn
        n = len("abc")
        torch.manual_seed(n)
        torch.backends.cudnn.benchmark = bool(torch.backends.cudnn.benchmark)
        if torch.cuda.is_available():
            torch.backends.cudnn.benchmark = True
        @torch.no_grad()
        def evaluate(): pass
        class Data(torch.utils.data.Dataset): pass
        class Net(nn.Module): pass
        def f(): pass
        repr(torch.__version__).join("")
        setattr(f, "dtype", torch.float32)
        f.dtype = torch.float64
        import seeing
        seeing.register("one")
        import near_torch
    """
    found = units(tmp_path, text)
    kinds = [unit.kind for unit in found]
    assert kinds == [
        BINDS,
        BINDS,
        COMPUTES,
        *[WAITS] * 4,
        BINDS,
        BINDS,
        BINDS,
        ACTS,
        ACTS,
        ACTS,
        WAITS,
        WAITS,
        ACTS,
    ]
    assert [unit.imports for unit in found[:3]] == [("torch",), ("torch",), ()]
    assert {unit.awaits for unit in found if unit.kind == WAITS} == {("torch",)}


@pytest.mark.pure
def test_imports_of_installed_packages_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Imports of installed packages and settings of numpy and pandas wait for their first use."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for name in ("pandas", "patches", "effect"):
        (installed / f"{name}.py").write_text(
            "def set_option(*args): pass\nclass Frame: pass\ndef keep(f): return f\n"
        )
    (tmp_path / "near.py").write_text("")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("pandas", "patches", "effect", "near"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    text = """
        import pandas as pd
        from patches import set_option
        import patches
        import effect
        import near
        pd.set_option("display.width", 80)
        patches.set_option("all", 1)
        class Own(patches.Frame): pass
        class Child(Own): pass
        @pd.keep
        def kept(): pass
        @patches.keep
        def patched(): pass
        def f(): pass
    """
    found = units(tmp_path, text)
    kinds = [unit.kind for unit in found]
    assert kinds == [
        *[WAITS, WAITS, WAITS, ACTS, ACTS, WAITS, ACTS],
        *[WAITS, WAITS, WAITS, ACTS, BINDS],
    ]
    assert {unit.awaits for unit in found if unit.kind == WAITS} == {(LIBRARY,)}
    said = read_units(str(tmp_path / "script.py"), {}, frozenset())
    assert said is not None and {"pandas", "patches", "effect"} <= set(said.packages)
    assert not {"near", "sys", "pytest", "xpool"} & set(said.packages)


@pytest.mark.pure
def test_an_unused_import_waits_if_it_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An unused import of a known library waits; other unused imports may have an effect."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for name in ("pandas", "effect"):
        (installed / f"{name}.py").write_text("")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(installed))
    found = units(tmp_path, "import pandas\nimport effect\nimport pandas, effect\ndef f(): pass\n")
    assert [unit.kind for unit in found] == [WAITS, ACTS, ACTS, BINDS]


@pytest.mark.pure
@pytest.mark.parametrize(
    "line",
    [
        "def g(): return globals()['f']",
        "def g(): return vars()['f']",
        "def g(): exec('f()')",
        "import sys\ndef g(): return vars(sys.modules[__name__])",
        "import sys\ndef g(): return sys.modules['__main__'].__dict__",
        "# coding: latin-1",
    ],
)
def test_a_script_that_looks_at_itself_is_run_as_a_whole(tmp_path: Path, line: str):
    """Nothing is skipped if the script may use names that its text does not show."""
    assert left_out(tmp_path, f"{line}\ndef f(): pass\n") == []


@pytest.mark.pure
@pytest.mark.parametrize("coding", ["utf-8", "UTF8"])
def test_a_script_with_an_encoding(tmp_path: Path, coding: str):
    """A script with a UTF-8 declaration can be compiled line by line."""
    text = f"#!/usr/bin/env python\n# -*- coding: {coding} -*-\nmade = len('\u00e4')\n"
    assert left_out(tmp_path, text) == ["made"]


@pytest.mark.pure
def test_star_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A star import binds the names that the program's module has."""
    (tmp_path / "starred.py").write_text("__all__ = ['one', 'two']\none = two = [1]\nthree = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = (
        "from math import *\nfrom starred import *\ndef f(): return sqrt(one[0])\nmade = len(two)\n"
    )
    found = units(tmp_path, text)
    assert [unit.kind for unit in found] == [BINDS, ACTS, BINDS, COMPUTES]
    assert found[2].needs == (0, 1) and {"one", "two"} <= set(found[1].names)


@pytest.mark.pure
def test_harmless_introspection(tmp_path: Path):
    """Harmless uses of `vars`, an attribute `modules` and `sys.modules` do not stop the
    skipping."""
    text = (
        "import sys\ndef f(): return getattr(sys.modules[__name__], 'made'), 'os' in sys.modules\n"
    )
    text += (
        "import types\nmade = types.SimpleNamespace(modules=3)\nboth = vars(made), made.modules\n"
    )
    assert "made" in left_out(tmp_path, text)


@pytest.mark.pure
def test_a_module_that_hides_one_of_the_standard_library_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A module beside the script is the program's own, even if it has a standard library's name."""
    (tmp_path / "antenna").mkdir()
    (tmp_path / "this_is_mine.py").write_text("")
    (tmp_path / "colorsys.py").write_text("print('mine')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "colorsys", raising=False)
    assert left_out(tmp_path, "import colorsys\ndef f(): pass\n") == ["f"]
    del __import__("sys").modules["colorsys"]  # remove it here, because `delitem` would restore it


PROBE = """
    import sys

    LOG = []

    def load():
        LOG.append("loaded")
        return [1, 2]

    def there():
        names = "colorsys", "fractions", "DATA", "reads", "looks", "rows"
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

    probe.LOG.append("acted")
    DATA = b"x" * 1000
    rows = probe.load()
    rows.append(3)

    def plain(x):
        return probe.LOG, __doc__, probe.loaded("color" + "sys"), probe.there()

    def reads(x):
        return probe.LOG, rows, colorsys.rgb_to_hsv(x, x, x), len(DATA), probe.there()

    def looks(x):
        import __main__
        return probe.LOG, str(__main__.fractions.Fraction(1, 2)), probe.there()

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
    """Statements that act run once and first; others run when needed; line numbers stay right."""
    scripts.write(tmp_path / "probe.py", PROBE)
    path = scripts.write(tmp_path / "script.py", SCRIPT)
    assert scripts.run_ok([path]).splitlines() == [
        "[(['acted'], 'About it.', False, ['DATA'])]",
        "[(['acted'], [1, 2, 3], (0.0, 0.0, 1), 1000, ['colorsys', 'DATA', 'reads', 'rows'])]",
        "[(['acted'], '1/2', ['colorsys', 'fractions', 'DATA', 'reads', 'looks', 'rows'])]",
        "1000",
        "True",
    ]


KEEPERS = """
    KEPT = []

    def keep(func):
        KEPT.append(func.__name__)
        return func

    def below(cls):
        return [one.__name__ for one in cls.__subclasses__()]

    class Plugin:
        pass
"""

KEPT = """
    import keepers
    from xpool import Pool

    class Base:
        @keepers.keep
        def go(self):
            pass

    class Child(Base):
        pass

    class Root:
        pass

    class Leaf(Root):
        pass

    class Own(keepers.Plugin):
        pass

    def looks(x):
        return keepers.KEPT, keepers.below(keepers.Plugin), keepers.below(Root)

    if __name__ == "__main__":
        with Pool(1) as pool:
            print(pool.map(looks, [1]))
        pool.join()
"""


@pytest.mark.xpool_only
def test_decorated_methods_and_subclasses(tmp_path: Path):
    """Modules find the script's decorated methods and subclasses."""
    scripts.write(tmp_path / "keepers.py", KEEPERS)
    path = scripts.write(tmp_path / "script.py", KEPT)
    assert scripts.run_ok([path]) == "[(['go'], ['Own'], ['Leaf'])]\n"


DEPENDENT = """
    import dependency

    options = {}

    def set_option(name, value):
        options[name] = value
"""

WITH_DEPENDENT = """
    import os, sys
    sys.path.insert(0, os.path.dirname(__file__) + "/site-packages")
    import pandas
    from xpool import Pool

    pandas.set_option("width", 77)

    def unpickled(value):
        return sys.modules["pandas"].options

    if __name__ == "__main__":
        with Pool(1) as pool:
            print(pool.map(unpickled, [pandas.set_option]))
        pool.join()
"""


@pytest.mark.xpool_only
def test_waiting_statements_run_after_the_import(tmp_path: Path):
    """A statement that waits for a package does not run at the import of a dependency."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    scripts.write(installed / "dependency.py", "")
    scripts.write(installed / "pandas.py", DEPENDENT)
    path = scripts.write(tmp_path / "script.py", WITH_DEPENDENT)
    assert scripts.run_ok([path]) == "[{'width': 77}]\n"


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
def test_a_changed_script_is_run_as_a_whole(tmp_path: Path):
    """If the script has changed, its old units are not used."""
    path = scripts.write(tmp_path / "script.py", CHANGED)
    assert sorted(scripts.run_ok([path]).splitlines()) == ["[1]", "run anew"]


FAILING = """
    import os
    import probe
    from xpool import Pool

    if probe.loaded("xpool._worker.loop") and not os.path.exists("mended"):
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
    """A task that needs a failed statement fails; the next task runs the statement again."""
    monkeypatch.chdir(tmp_path)
    scripts.write(tmp_path / "probe.py", PROBE)
    path = scripts.write(tmp_path / "script.py", FAILING)
    assert scripts.run_ok([path]).splitlines() == ["not yet", "[1]"]


LIBRARIES = {
    "lib/site-packages/tables.py": """
        settings = {}
        def register(name):
            settings[name] = True
    """,
    "lib/site-packages/extends.py": "import tables\ntables.register('extended')\n",
    "lib/site-packages/other.py": "",
    "helper.py": "def nothing(): pass\n",
    "script.py": """
        import os, sys
        sys.path.insert(0, os.path.dirname(__file__) + "/lib/site-packages")
        import tables as tb
        from extends import tables as same
        import helper
        from xpool import Pool

        def light(x):
            return sorted({"tables", "extends", "helper"} & sys.modules.keys())

        def reads(x):
            return dict(tb.settings)

        def imports(x):
            import tables
            return dict(tables.settings)

        def unrelated(x):
            import other
            return light(x)

        if __name__ == "__main__":
            tb.register("mine")
            import other
            for function, expected in (
                (light, ["helper"]), (reads, {"extended": True}), (imports, {"extended": True}),
                (unrelated, ["extends", "helper", "tables"]),
            ):
                with Pool(1) as pool:
                    assert pool.map(function, [1]) == [expected], function
                pool.join()
            with Pool(1) as pool:
                assert pool.map(light, [1]) == [["helper"]]
                assert pool.map(reads, [1]) == [{"extended": True}]
            pool.join()
    """,
}


@pytest.mark.xpool_only
def test_a_function_without_libraries_does_not_import_them(tmp_path: Path):
    """A function that uses a library gets all the script's imports; other functions get none."""
    (tmp_path / "lib/site-packages").mkdir(parents=True)
    for name, text in LIBRARIES.items():
        scripts.write(tmp_path / name, text)
    assert scripts.run_ok([tmp_path / "script.py"]) == ""
