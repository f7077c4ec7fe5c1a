"""Facts about the code of a program's top level, however it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import scripts

from xpool._pickling.by_value.origin import home_of, is_installed
from xpool._pickling.by_value.script_top import assigned_in

PROBE = """
import json
import sys

from xpool._pickling.by_value.script_top import nones_of, top_of_main

import engine


def facts():
    return top_of_main()


def show():
    top = facts()
    assert facts().calls == top.calls
    engine.ran.clear()
    for one in top.calls:
        assert one.package == "" and one.args == ()
        one.function()
    facts_of_calls = engine.ran if top.calls else None
    print(json.dumps([top.imports, facts_of_calls, sorted(top.nones), top.assigned]))
"""

ENGINE = """
ran = []
LIMIT = 1

class Field:
    @classmethod
    def register(cls, *args):
        ran.append(["Field", *args])

def setup(*args, **options):
    ran.append([*args, *options.items()])

import engine.backends

def print_all(*args):
    ran.append(args)
"""

PREAMBLE = """
import sys
sys.path[:0] = [{folder!r}, {folder!r} + "/site-packages"]
import probe
"""

WHOLE = """
import engine, effects
import json as unused_of_python
engine.setup("first", rate=2)
from engine import Field, setup as start
import effects.late
_conn = None
class Config:
    pool: object = None
def use():
    engine.backends.fast = True
Field.register("x")
if __name__ == "__main__":
    start("not at the top")
    probe.show()
"""
FOUND = [
    ["effects", "effects.late"],
    [["first", ["rate", 2]], ["Field", "x"]],
    ["Config.pool", "_conn"],
    [["engine.backends", "fast"]],
]

Show = Callable[..., Any]


@pytest.fixture
def preamble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make installed packages and the probe in the current folder; return how to find them."""
    monkeypatch.chdir(tmp_path)
    packages = tmp_path / "site-packages"
    for folder in ("engine", "effects"):
        (packages / folder).mkdir(parents=True)
    (tmp_path / "probe.py").write_text(PROBE)
    (packages / "engine/__init__.py").write_text(ENGINE)
    (packages / "engine/backends.py").write_text("fast = False\n")
    (packages / "effects/__init__.py").touch()
    (packages / "effects/late.py").touch()
    (packages / "wandb.py").write_text("from engine import setup as init\n")
    return PREAMBLE.format(folder=str(tmp_path))


@pytest.fixture
def show(preamble: str, tmp_path: Path) -> Show:
    """Run a script after the preamble; return what the probe has shown."""

    def run(text: str, *arguments: str) -> Any:
        path = scripts.write(tmp_path / "script.py", preamble + text)
        return json.loads(scripts.run_ok([*arguments, path]))

    return run


RUNNERS = {
    "runpy": """
        import runpy, sys
        runpy.run_path(sys.argv[1], run_name="__main__")
    """,
    "module": """
        import sys, types
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        module.__file__ = sys.argv[1]
        exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), vars(module))
    """,
    "traced": """
        import runpy, sys
        sys.settrace(lambda *args: None)
        runpy.run_path(sys.argv[1], run_name="__main__")
    """,
    "thread": """
        import runpy, sys, threading
        thread = threading.Thread(
            target=runpy.run_path, args=[sys.argv[1]], kwargs={"run_name": "__main__"}
        )
        thread.start()
        thread.join()
    """,
}


def test_a_file(show: Show) -> None:
    """All facts are found in a script with a guard."""
    assert show(WHOLE) == FOUND


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_runner(show: Show, tmp_path: Path, runner: str) -> None:
    """A program that runs a script as its main module does not hide the script's facts."""
    assert show(WHOLE, scripts.write(tmp_path / "runner.py", RUNNERS[runner])) == FOUND


def test_a_debugger(preamble: str, tmp_path: Path) -> None:
    """Under `pdb`, whose own module has the same namespace, the facts are those of the script."""
    path = scripts.write(tmp_path / "script.py", preamble + WHOLE)
    out = scripts.run_ok(["-m", "pdb", "-c", "continue", "-c", "quit", path])
    assert json.loads(out.splitlines()[0]) == FOUND


def test_a_module_of_a_package(preamble: str, tmp_path: Path) -> None:
    """With ``python -m``, relative imports are found by their full names."""
    (tmp_path / "package").mkdir()
    for name in ("__init__", "signals", "models"):
        (tmp_path / f"package/{name}.py").touch()
    text = "from . import signals\nfrom .models import __name__ as _\n"
    scripts.write(tmp_path / "package/module.py", preamble + text + WHOLE)
    imports, *rest = json.loads(scripts.run_ok(["-m", "package.module"]))
    assert imports == ["package.signals", "package.models", *FOUND[0]]
    assert rest == FOUND[1:]


@pytest.mark.parametrize("how", ["-", "-c"])
def test_no_file(preamble: str, how: str) -> None:
    """Without a file, all facts but the calls are found; the calls too where Python has a text."""
    text = preamble + WHOLE
    out = scripts.run_ok(["-c", text]) if how == "-c" else scripts.run_ok(["-"], text)
    imports, calls, nones, assigned = json.loads(out)
    assert [imports, nones, assigned] == [FOUND[0], *FOUND[2:]]
    assert calls in (None, FOUND[1])


@pytest.mark.parametrize(
    "edit",
    [
        "path.write_text(text + 'later = 1')",
        # The last statements have moved.
        "path.write_text(text.replace('Field' + '.reg', chr(10) + 'Field' + '.reg'))",
        "path.unlink()",
    ],
)
def test_an_edited_script(show: Show, edit: str) -> None:
    """The facts are those of the code that runs; calls need the text that made it."""
    text = f"""
import pathlib
path = pathlib.Path(__file__)
text = path.read_text()
{edit}
"""
    assert show(text + WHOLE) == [FOUND[0], None, *FOUND[2:]]


def test_in_another_thread_and_at_exit(show: Show) -> None:
    """The facts are those of the top level in other threads, too, and after it has ended."""
    text = WHOLE.replace(
        "probe.show()", "probe.facts(); import atexit; atexit.register(probe.show)"
    )
    assert show(text) == FOUND
    text = WHOLE.replace(
        "probe.show()",
        "import threading as t; thread = t.Thread(target=probe.show); thread.start();"
        " thread.join()",
    )
    assert show(text) == FOUND


def test_no_guard(show: Show) -> None:
    """A script without a guard has no calls for their effect."""
    text = WHOLE.replace('if __name__ == "__main__":', "if True:")
    assert show(text) == [FOUND[0], None, *FOUND[2:]]


def test_which_imports(show: Show) -> None:
    """Imports for their effect are those that ran and whose names no code uses."""
    text = """
from typing import TYPE_CHECKING
import engine.backends as used_in_a_function
from effects import late
try:
    import effects as named
except ImportError:
    named = None
try:
    import no_such_module
except ImportError:
    no_such_module = None
if TYPE_CHECKING:
    from engine import backends as checked
from engine import *
import engine as deleted
del deleted
def function():
    class Inner:
        def method(self):
            return used_in_a_function, self.late
__all__ = ["named"]
probe.show()
"""
    assert show(text)[0] == ["effects.late", "engine"]


def test_an_import_of_a_submodule_beside_uses_of_its_package(show: Show) -> None:
    """`import a.b` is for its effect if code uses `a`, but not `b`."""
    text = """
import engine.backends, effects.late
import effects.late as unused
def function():
    return engine.Field, effects.late
probe.show()
"""
    assert show(text)[0] == ["engine.backends", "effects.late"]
    assert show(text.replace("import effects.late as unused", ""))[0] == ["engine.backends"]


def test_an_import_for_an_annotation(show: Show) -> None:
    """A name that is used in an annotation is used."""
    text = """
import engine, effects
from engine import Field
class Box:
    field: Field
probe.show()
"""
    assert show(text)[0] == ["engine", "effects"]


def test_which_calls(show: Show) -> None:
    """Calls for their effect are direct calls of installed packages that have ended."""
    text = """
import engine, logging, os; engine.setup("same line")
from engine import setup, Field
field = Field()
def own(*args):
    return args
logging.getLogger("x")
os.getpid()
own()
field.register("a method of a value")
Field().register("a method of what a call returns")
engine.imwrite = setup
engine.imwrite("a file")
engine.init_process_group = engine.echo = setup
engine.init_process_group("joins other processes")
engine.echo("prints")
from engine import print_all as say
say("prints, by its own name")
engine.distributed = engine
engine.distributed.setup("joins other processes, too")
import wandb
wandb.init("begins a run")
kept = setup("assigned")
setup(walrus := 1)
[setup("in a list")]
for _ in range(1):
    setup("in a loop")
setup(
    own("arguments", key := 2) if False else 1
)
setup([one for one in own("arguments")])
probe.show()
setup("later")
if field and __name__ == "__main__":
    probe.show()
"""
    first, second = show_all(show, text)
    expected = [["same line"], [["arguments"]]]
    assert first == expected
    assert second == [*expected, ["later"]]


def show_all(show: Show, text: str) -> list[Any]:
    """Return the calls that each use of the probe has shown."""
    text = text.replace("probe.show()", "probe.show(); print(',')")
    path = scripts.write(Path("script.py"), PREAMBLE.format(folder=str(Path.cwd())) + text)
    out = scripts.run_ok([path]).strip().rstrip(",")
    return [calls for _, calls, _, _ in json.loads(f"[{out}]")]


def test_calls_keep_their_place(preamble: str, tmp_path: Path) -> None:
    """An error in such a call names the line of the script."""
    text = """
import engine
engine.setup(1)
if __name__ == "__main__":
    code = probe.facts().calls[0].function.__code__
    print(code.co_filename, *{line for *_, line in code.co_lines() if line and line > 1})
"""
    path = scripts.write(tmp_path / "script.py", preamble + text)
    line = (preamble + text).splitlines().index("engine.setup(1)") + 1
    assert scripts.run_ok([path]).split() == [path, str(line)]


def test_warnings_of_the_compiler_are_not_repeated(show: Show) -> None:
    """The text is compiled again without the warnings that Python has shown already."""
    assert show("pattern = '\\d'\n" + WHOLE, "-W", "ignore") == FOUND


def test_which_nones(show: Show) -> None:
    """Every way of binding a name to None is found, in bodies of classes, too."""
    text = """
one: int = None
two = three = four = None
five, six = None, None
seven, eight, nine = None, 1, None
no = [None]
also_no = None or 1
if True:
    ten = None
class Outer:
    a = None
    class Inner:
        b: int = None
    def method(self):
        self.c = local = None
probe.show()
"""
    singles = ["one", "two", "three", "four", "five", "six", "seven", "nine", "ten"]
    assert show(text)[2] == sorted([*singles, "Outer.a", "Outer.Inner.b"])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is of Python 3.12")
def test_nones_of_a_generic_class(show: Show) -> None:
    """A class with type parameters is one of the module."""
    assert show("class Box[T]:\n    a = None\nprobe.show()\n")[2] == ["Box.a"]


def test_nones_of_another_module(preamble: str, tmp_path: Path) -> None:
    """The names that another module binds to None are found, and none where there is no code."""
    scripts.write(tmp_path / "settings.py", "client = None\nclass A:\n    b = None\n")
    text = "import settings\nprint(*sorted(probe.nones_of('settings')), probe.nones_of('nothing'))"
    out = scripts.run_ok([scripts.write(tmp_path / "script.py", preamble + text)])
    assert out == "A.b client frozenset()\n"


def test_what_modules_assign(show: Show, tmp_path: Path) -> None:
    """Assignments in modules of the program are found: at their top, in functions and methods."""
    scripts.write(
        tmp_path / "settings.py",
        """
        import engine, os, sys
        import engine.backends as backends
        import probe
        engine.top = True
        probe.own = 1
        sys.mine = os.mine = 1
        """,
    )
    scripts.write(
        tmp_path / "more.py",
        """
        import engine, engine.backends as backends
        class Box:
            def method(self):
                self.engine = 1
                engine.backends.method = 1
            @staticmethod
            def static():
                setattr(engine, "static", 1)
        def function(engine):
            engine.no = 1
            def inner():
                backends.inner += 1
        """,
    )
    assert show("import settings, more\nprobe.show()")[3] == [
        ["engine", "static"],
        ["engine", "top"],
        ["engine.backends", "inner"],
        ["engine.backends", "method"],
        ["os", "mine"],
    ]


def test_an_edited_module(show: Show, tmp_path: Path) -> None:
    """Functions that a module has are looked at, and not those that its file has now."""
    scripts.write(tmp_path / "more.py", "import engine\ndef function():\n    engine.old = 1\n")
    text = "import more, os\nos.remove(more.__file__)\nprobe.show()"
    assert show(text)[3] == [["engine", "old"]]


ASSIGNS = """
import json, json.decoder, os, warnings, sys
json.decoder.plain = 1
json.decoder.FLAGS |= 2
json.first, json.second = 1, 2
json.encoder.c_make_encoder: object = None
setattr(json, "set", 1)
setattr(json, name, 1)
json.JSONDecoder.of_a_class = 1
json.missing.attribute = 1
value = json.decoder.plain
value.attribute = json.decoder
x = json.decoder == 1
sys.mine = os.mine = 1
for json.loop in (): pass
class Body:
    warnings.body = 1
    def method(self, warnings):
        warnings.argument = 1
        json.decoder.method = self
"""


@pytest.mark.pure
def test_what_code_assigns() -> None:
    """Attributes of modules and classes are found by their bytecode; those of others are not."""
    import json.decoder
    import json.encoder
    import warnings

    namespace = {"json": json, "sys": sys, "warnings": warnings, "value": 1}
    code = compile(ASSIGNS, "script.py", "exec")
    assert assigned_in([code], namespace) == {
        *[("json.decoder", name) for name in ("plain", "FLAGS", "method")],
        *[("json", name) for name in ("first", "second", "set", "loop")],
        ("json.encoder", "c_make_encoder"),
        ("json.decoder", "JSONDecoder.of_a_class"),
        ("warnings", "body"),
    }


def test_a_console(preamble: str) -> None:
    """In an interactive session, there is no whole program: only what the current cell shows."""
    text = f"""
import code, sys, types
sys.ps1 = ">>> "
main = sys.modules["__main__"] = types.ModuleType("__main__")
{preamble}
console = code.InteractiveInterpreter(vars(main))
console.runsource("import probe", "<stdin>", "exec")
console.runsource("import engine, effects", "<stdin>", "exec")
console.runsource("def use(): engine.backends.fast = True\\n", "<stdin>", "exec")
console.runsource("_conn = None; probe.show()", "<stdin>", "exec")
"""
    out = scripts.run_ok(["-"], text)
    assert json.loads(out) == [[], None, ["_conn"], FOUND[3]]


def test_a_strange_main_module(preamble: str, tmp_path: Path) -> None:
    """A program without a main module, or with a broken one, has no facts, and no error."""
    text = """
import types
class Broken(types.ModuleType):
    __dict__ = property(lambda self: 1 / 0)
for module in (None, Broken("__main__")):
    sys.modules["__main__"] = module
    print(*probe.facts())
"""
    out = scripts.run_ok([scripts.write(tmp_path / "script.py", preamble + text)])
    assert out == "() () frozenset() ()\n" * 2


def test_an_object_in_place_of_a_function_of_a_package(tmp_path: Path) -> None:
    """An object, and not a function, that the script assigns to an installed module arrives."""
    text = """
        import functools
        import json
        import textwrap
        import xpool

        class Marked:
            def __init__(self, inner):
                self.inner = inner

            def __call__(self, *args):
                return "marked " + self.inner(*args)

        textwrap.fill = functools.partial(textwrap.fill, width=10)
        json.dumps = Marked(json.dumps)

        def task(x):
            return textwrap.fill("aaaa bbbb cccc"), json.dumps([x])

        if __name__ == "__main__":
            with xpool.Pool(1) as pool:
                assert pool.apply(task, (1,)) == ("aaaa bbbb\\ncccc", "marked [1]")
                textwrap.fill, json.dumps = Marked(textwrap.dedent), functools.partial(str)
                assert pool.apply(task, (1,)) == ("marked aaaa bbbb cccc", "[1]")
        """
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", text)]) == ""


def test_calls_of_an_object_of_a_package(preamble: str, tmp_path: Path) -> None:
    """They are repeated (`settings.configure()`), except those that act outside.  A file for log
    lines, which the program has emptied, is opened again to append to it."""
    engine = tmp_path / "site-packages" / "engine" / "__init__.py"
    with open(engine, "a") as file:
        file.write("\nclass Log:\n    def __getattr__(self, name):\n")
        file.write("        return lambda *args, **kwds: ran.append([name, *args, *kwds.values()]")
        file.write(")\nlog = Log()\n")
    text = """
from engine import log
own = log.bind("is assigned")
log.remove()
log.remove(0)
log.configure(level=3)
log.info("starting")
log.add("file.log", mode="w")
log.add("file.log")
log.remove("file")
own2 = log
own2.configure("another name")
if __name__ == "__main__":
    probe.show()
"""
    out = scripts.run_ok([scripts.write(tmp_path / "script.py", preamble + text)])
    calls = [["remove"], ["remove", 0], ["configure", 3], ["add", "file.log", "a"]]
    assert json.loads(out)[1] == [*calls, ["add", "file.log"]]


def test_a_name_without_a_global_has_no_home() -> None:
    """A builtin is no global of the script, so modules that lack its name do not have it either."""
    assert home_of(("__main__", "no_module_has_this_name"), None) is None


def test_calls_come_before_what_needs_their_effect(tmp_path: Path) -> None:
    """A module whose import needs a call of the script is imported after it, as in the program."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "frame.py").write_text(
        "ready = False\ndef setup():\n    global ready\n    ready = True\n"
    )
    (tmp_path / "models.py").write_text(
        "import frame\nassert frame.ready, 'not set up'\nRATE = 1\n"
        "class Model:\n    pass\ndef rated(x):\n    return x * RATE\n"
    )
    text = """
        import os, sys
        sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
        import xpool
        import frame
        frame.setup()
        import models

        class Own(models.Model):
            rate = 2

        def task(x):
            return models.rated(x) + Own.rate, frame.ready

        if __name__ == "__main__":
            models.RATE = 10
            for options in {}, {"context": "spawn"}:
                with xpool.Pool(1, **options) as pool:
                    assert pool.apply(models.rated, (1,)) == 10
                    assert pool.apply(task, (1,)) == (12, True)
                    assert type(pool.map(lambda x: Own(), [1])[0]) is Own
        """
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", text)]) == ""


def test_calls_of_a_script_that_ran_before(tmp_path: Path) -> None:
    """A runner executes several scripts: workers make the calls of the one that runs."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "frame.py").write_text("ran = []\ndef setup(name):\n    ran.append(name)\n")
    for name in ("first", "second"):
        text = f"""
            import sys
            sys.path.append({str(packages)!r})
            import frame, xpool
            NAME = {name!r}
            frame.setup(NAME)
            def task(x):
                return frame.ran, NAME
            if __name__ == "__main__":
                with xpool.Pool(1) as pool:
                    assert pool.apply(task, (1,)) == ([NAME], NAME)
            """
        scripts.write(tmp_path / f"{name}.py", text)
    runner = f"""
        import runpy
        for name in "first", "second", "first":
            runpy.run_path({str(tmp_path)!r} + f"/{{name}}.py", run_name="__main__")
        """
    assert scripts.run_ok([scripts.write(tmp_path / "runner.py", runner)]) == ""


def test_the_target_of_a_link_decides_whether_a_file_is_installed(tmp_path: Path):
    """A link into site-packages leads to an installed file, and one out of it to the program's."""
    own, installed = tmp_path / "own", tmp_path / "site-packages" / "package"
    own.mkdir()
    installed.mkdir(parents=True)
    for folder in own, installed:
        (folder / "module.py").touch()
    assert is_installed(str(installed / "module.py"))
    assert not is_installed(str(own / "module.py"))
    (tmp_path / "link").symlink_to(installed)
    (own / "linked.py").symlink_to(installed / "module.py")
    assert is_installed(str(tmp_path / "link" / "module.py"))
    assert is_installed(str(own / "linked.py"))
    (installed.parent / "editable").symlink_to(own)
    (installed / "linked.py").symlink_to(own / "module.py")
    assert not is_installed(str(installed.parent / "editable" / "module.py"))
    assert not is_installed(str(installed / "linked.py"))


def test_an_assigned_object_that_cannot_be_sent(tmp_path: Path) -> None:
    """A warning names an attribute of an installed module that workers do not see."""
    text = """
        import colorsys
        import warnings
        import xpool

        class Streams:
            def __init__(self):
                self.lines = (line for line in ())

        def name():
            return getattr(colorsys, "ONE_THIRD", None)

        if __name__ == "__main__":
            colorsys.ONE_THIRD = Streams()
            with xpool.Pool(1) as pool, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert [pool.apply(name) for _ in range(2)] == [1 / 3] * 2
            [text] = [str(one.message) for one in caught if one.category is RuntimeWarning]
            assert "'ONE_THIRD' of colorsys" in text and "generator" in text, text
        """
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", text)]) == ""


PATCHES = """
    import builtins, datetime, io, math, os, socket, subprocess, sys, threading, time, warnings
    import multiprocessing
    import xpool

    # Functions and classes of Python's modules, before the program gives their names to others.
    _print, _sqrt, _sleep, _info, _import = (
        print, math.sqrt, time.sleep, socket.getaddrinfo, builtins.__import__
    )
    IMPORTED = []

    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2020, 1, 1)

    class Popen(subprocess.Popen):
        marked = True

    class Thread(threading.Thread):
        marked = True

    def stamped(*args, **keywords):
        _print("stamped", *args, **keywords)

    def noting(name, *args, **keywords):
        IMPORTED.append(name)
        return _import(name, *args, **keywords)

    def patch():
        builtins.print, builtins.__import__ = stamped, noting
        math.sqrt = lambda x: _sqrt(abs(x))
        time.sleep = lambda seconds: "slept"
        socket.getaddrinfo = lambda host, *args: _info("127.0.0.1", *args)
        os.cpu_count = multiprocessing.cpu_count = lambda: 77
        warnings.formatwarning = lambda message, *args: "short"
        datetime.datetime, subprocess.Popen, threading.Thread = Frozen, Popen, Thread

    def seen():
        import colorsys
        out = io.StringIO()
        print("text", file=out)
        return (
            out.getvalue(), math.sqrt(-4), time.sleep(0), os.cpu_count(),
            multiprocessing.cpu_count(), socket.getaddrinfo("no.invalid", 80)[0][4],
            warnings.formatwarning("text", UserWarning, "", 1), datetime.datetime.now().year,
            issubclass(Frozen, datetime.date), subprocess.Popen(["true"]).marked,
            threading.Thread().marked, "colorsys" in IMPORTED,
        )

    def restored():
        out = io.StringIO()
        print("text", file=out)
        return out.getvalue(), print is _print, math.sqrt is _sqrt

    if __name__ == "__main__":
        patch()
        with xpool.Pool(1, context=sys.argv[1]) as pool:
            assert seen() == pool.apply(seen), pool.apply(seen)
            builtins.print, math.sqrt = _print, _sqrt
            assert restored() == pool.apply(restored) == ("text\\n", True, True)
    """


@pytest.mark.parametrize("context", ["forkserver", "spawn", "fork"])
def test_what_the_program_assigns_to_modules_of_python(context: str, tmp_path: Path) -> None:
    """Workers see it, also in modules that they use themselves, and what a patch calls."""
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", PATCHES), context]) == ""
