"""Settings of the process that travel with tasks: what a worker has after a message."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from receiver import ROOT
from support import scripts
from support.tiers import also
from template import Template

pytestmark = pytest.mark.torch  # the program of most tests has torch and numpy

SERVE = f"""
import pickle, struct, sys
sys.path.insert(0, {str(ROOT)!r})
from xpool._pickling.by_value import settings

def serve(descriptor):
    names = {{"settings": settings, "sys": sys}}
    source, sink = (open(descriptor, mode, closefd=False) for mode in ("rb", "wb"))
    while head := source.read(8):
        kind, text, given = pickle.loads(source.read(struct.unpack("<Q", head)[0]))
        names["given"] = given
        try:
            reply = True, exec(text, names) if kind == "run" else eval(text, names)
        except BaseException as error:
            reply = False, repr(error)
        data = pickle.dumps(reply)
        sink.write(struct.pack("<Q", len(data)) + data)
        sink.flush()
"""


class Side:
    """A process that has imported nothing but `settings`, and runs code: the program, or a
    worker."""

    def __init__(self, template: Template) -> None:
        self._socket = template.fork()
        self._file = self._socket.makefile("rwb")

    def _ask(self, kind: str, text: str, given: Any) -> Any:
        data = pickle.dumps((kind, text, given))
        self._file.write(len(data).to_bytes(8, "little") + data)
        self._file.flush()
        size = int.from_bytes(self._file.read(8), "little")
        done, value = pickle.loads(self._file.read(size))
        assert done, value
        return value

    def run(self, code: str, given: Any = None) -> None:
        self._ask("run", code, given)

    def get(self, code: str, given: Any = None) -> Any:
        return self._ask("get", code, given)

    def rows(self) -> dict[str, Any]:
        return {name: value for name, _, value in self.get("settings.snapshot().rows")}

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        self._file.read()  # until the process has ended
        self._file.close()
        self._socket.close()


class Pair(NamedTuple):
    program: Side
    worker: Side

    def begin(self) -> None:
        """Let the worker begin as if it was started with the program's values of now."""
        self.worker.run("settings.begin_worker(given)", self.program.get("settings.at_start()"))

    def deliver(self, keep: tuple[str, ...] = ()) -> None:
        """Send a message: the settings of now."""
        self.give(self.take(), keep)

    def take(self) -> Any:
        """Return the rows of a message that arrives later."""
        return self.program.get("settings.snapshot().rows")

    def give(self, rows: Any, keep: tuple[str, ...] = ()) -> None:
        self.worker.run("settings.receive(*given)", (rows, keep))

    def both(self, code: str) -> None:
        self.program.run(code)
        self.worker.run(code)


Sides = Callable[..., contextlib.AbstractContextManager[Pair]]

LIBRARIES = "import csv, decimal, locale, logging, os, socket, time, warnings; import numpy, torch"


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """Start pairs; the program, or both sides, may have imported the libraries."""
    environ = {name: "" for name in ("TZ", "LC_ALL") if name in os.environ}
    said = tmp_path_factory.mktemp("sides") / "stderr"
    with contextlib.ExitStack() as stack:
        options = {"stderr": stack.enter_context(said.open("w")), "env": {**os.environ, **environ}}

        def template(code: str) -> Template:
            return stack.enter_context(contextlib.closing(Template(code, **options)))

        # The call imports for a second, once instead of in each fork.
        heavy = f"{SERVE}\n{LIBRARIES}\ntorch.use_deterministic_algorithms(False)"
        templates = template(SERVE), template(heavy)

        @contextlib.contextmanager
        def start(program: bool = False, worker: bool = False) -> Iterator[Pair]:
            one = Pair(Side(templates[program]), Side(templates[worker]))
            try:
                yield one
            finally:
                for side in one:
                    side.close()
            assert said.read_text() == "", "nothing is printed"

        yield start


@pytest.fixture
def pair(sides: Sides) -> Iterator[Pair]:
    with sides() as one:
        one.begin()
        yield one


@pytest.fixture(scope="module")
def shared(sides: Sides) -> Iterator[Pair]:
    """Two processes that have imported the libraries, for tests that undo their changes."""
    with sides(program=True, worker=True) as one:
        one.begin()
        one.both(LIBRARIES)
        yield one


class Case(NamedTuple):
    """Code that the program runs, that undoes it, and that a worker runs; and what to look at."""

    change: str
    back: str
    own: str
    look: str


def of(setter: str, change: str, back: str, own: str, look: str) -> Case:
    """Return a case whose codes differ in the value that they set."""
    return Case(setter.format(change), setter.format(back), setter.format(own), look)


FLAGS = "(torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode())"

CASES = {
    "working folder": Case("os.chdir('/usr')", "os.chdir(start)", "os.chdir('/')", "os.getcwd()"),
    "umask": Case("os.umask(0o027)", "os.umask(start)", "os.umask(0o007)", "[os.umask(0o77)][0]"),
    "time zone": Case(
        "os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()",
        "del os.environ['TZ']; time.tzset()",
        "os.environ['TZ'] = 'EST5EDT'; time.tzset()",
        "time.localtime(0)[3]",
    ),
    "locale": Case(
        "locale.setlocale(locale.LC_ALL, 'C')",
        "locale.setlocale(locale.LC_CTYPE, 'C.UTF-8')",
        "locale.setlocale(locale.LC_CTYPE, 'C.UTF-8')",
        "(locale.setlocale(locale.LC_CTYPE), locale.setlocale(locale.LC_NUMERIC))",
    ),
    "recursion limit": of(
        "sys.setrecursionlimit({})", "1234", "1000", "777", "sys.getrecursionlimit()"
    ),
    "socket timeout": of(
        "socket.setdefaulttimeout({})", "2.5", "None", "1", "socket.getdefaulttimeout()"
    ),
    "csv field size": of(
        "csv.field_size_limit({})", "10**9", "131072", "7", "csv.field_size_limit()"
    ),
    "warning filters": Case(
        "warnings.filterwarnings('error', 'mine', UserWarning, 'some[.]module', 7)",
        "del warnings.filters[0]",
        "warnings.simplefilter('always')",
        "[(f[0], f[1] and f[1].pattern, f[2], f[4]) for f in warnings.filters]",
    ),
    "logging.disable": of("logging.disable({})", "40", "0", "10", "logging.root.manager.disable"),
    "level of a logger": of(
        "logging.getLogger('one').setLevel({})", "10", "0", "50", "logging.getLogger('one').level"
    ),
    "level of the root logger": of(
        "logging.getLogger().setLevel({})", "10", "30", "50", "logging.root.level"
    ),
    "propagate of a logger": Case(
        "logging.getLogger('two.three').propagate = False",
        "logging.getLogger('two.three').propagate = True",
        "logging.getLogger('two.three').propagate = True",
        "logging.getLogger('two.three').propagate",
    ),
    "decimal context": Case(
        "c = decimal.getcontext(); c.prec = 5; c.rounding = 'ROUND_UP'; c.Emax = 99; c.Emin = -9;"
        "c.capitals = 0; c.clamp = 1; c.traps[decimal.Inexact] = True",
        "decimal.setcontext(decimal.Context())",
        "decimal.getcontext().prec = 7",
        "(decimal.getcontext().__reduce__()[1][:6], str(decimal.getcontext().traps))",
    ),
    "a trap of decimal": Case(
        "decimal.getcontext().traps[decimal.FloatOperation] = True",
        "decimal.getcontext().traps[decimal.FloatOperation] = False",
        "decimal.getcontext().traps[decimal.Rounded] = True",
        "str(decimal.getcontext().traps)",
    ),
    "numpy error state": of(
        "numpy.seterr(all={})", "'raise'", "'warn', under='ignore'", "'print'", "numpy.geterr()"
    ),
    "numpy print options": Case(
        "numpy.set_printoptions(precision=3, suppress=True)",
        "numpy.set_printoptions(precision=8, suppress=False)",
        "numpy.set_printoptions(precision=5)",
        "{**numpy.get_printoptions()}",
    ),
    "torch default dtype": Case(
        "torch.set_default_dtype(torch.float64)",
        "torch.set_default_dtype(torch.float32)",
        "torch.set_default_dtype(torch.float16)",
        "str(torch.get_default_dtype())",
    ),
    "torch default device": of(
        "torch.set_default_device({})", "'meta'", "None", "'cpu'", "str(torch.empty(1).device)"
    ),
    "torch grad mode": of(
        "torch.set_grad_enabled({})", "False", "True", "True", "torch.is_grad_enabled()"
    ),
    "torch autocast": Case(
        "torch.set_autocast_enabled('cpu', True); torch.set_autocast_dtype('cpu', torch.float16)",
        "torch.set_autocast_enabled('cpu', False); torch.set_autocast_dtype('cpu', torch.bfloat16)",
        "torch.set_autocast_enabled('cpu', False)",
        "(torch.is_autocast_enabled('cpu'), str(torch.get_autocast_dtype('cpu')))",
    ),
    "torch anomaly detection": Case(
        "warnings.simplefilter('ignore'); torch.autograd.set_detect_anomaly(True, False)",
        "torch.autograd.set_detect_anomaly(False, True); del warnings.filters[0]",
        "torch.autograd.set_detect_anomaly(False)",
        "(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())",
    ),
    "torch deterministic algorithms": Case(
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "torch.use_deterministic_algorithms(False)",
        "torch.use_deterministic_algorithms(True)",
        FLAGS,
    ),
    "torch float32 matmul precision": Case(
        "torch.set_float32_matmul_precision('high')",
        "torch.set_float32_matmul_precision('highest')",
        "torch.set_float32_matmul_precision('medium')",
        "torch.get_float32_matmul_precision()",
    ),
    "cudnn.benchmark": Case(
        "torch.backends.cudnn.benchmark = True",
        "torch.backends.cudnn.benchmark = False",
        "torch.backends.cudnn.benchmark = False",
        "torch.backends.cudnn.benchmark",
    ),
    "cudnn.deterministic": Case(
        "torch.backends.cudnn.deterministic = True",
        "torch.backends.cudnn.deterministic = False",
        "torch.backends.cudnn.deterministic = False",
        "torch.backends.cudnn.deterministic",
    ),
    "torch print options": Case(
        "torch.set_printoptions(precision=2, sci_mode=True)",
        "torch.set_printoptions(profile='default', sci_mode=None)",
        "torch.set_printoptions(linewidth=40)",
        "repr(torch.tensor([1.23456] * 9))",
    ),
    "names of levels": of(
        "logging.addLevelName(20, {})", "'NOTE'", "'INFO'", "'MINE'", "logging.getLevelName(20)"
    ),
    "a variable": Case(
        "os.environ['XPOOL_TEST'] = 'a\\udcff'",
        "del os.environ['XPOOL_TEST']",
        "os.environ['XPOOL_TEST'] = 'mine'",
        "os.environ.get('XPOOL_TEST')",
    ),
    "sys.path": Case(
        "sys.path.insert(0, '/a/folder')",
        "sys.path.remove('/a/folder')",
        "sys.path[:] = sys.path[1:]",
        "sys.path[:3]",
    ),
}
if find_spec("pandas"):
    SET = "import pandas; pandas.set_option"
    CASES["pandas options"] = Case(
        f"{SET}('display.precision', 3); pandas.options.display.max_rows = 7",
        f"{SET}('display.precision', 6); pandas.options.display.max_rows = 60",
        f"{SET}('display.precision', 5)",
        "[__import__('pandas').get_option(f'display.{n}') for n in ('precision', 'max_rows')]",
    )
if find_spec("sklearn"):
    SET = "import sklearn; sklearn.set_config"
    CASES["sklearn options"] = Case(
        f"{SET}(transform_output='pandas', working_memory=9)",
        f"{SET}(transform_output='default', working_memory=1024)",
        f"{SET}(working_memory=5)",
        "__import__('sklearn').get_config()",
    )
if find_spec("matplotlib"):
    SET = "import matplotlib; matplotlib.rcParams"
    LOOKED_AT = ("font.size", "font.family", "axes.prop_cycle", "savefig.bbox")
    CASES["matplotlib options"] = Case(
        f"{SET}.update({{'font.size': 7, 'savefig.bbox': 'tight'}}); cycle = matplotlib.cycler\n"
        "matplotlib.rcParams['axes.prop_cycle'] = cycle(color=['r', 'b'])\n"
        "matplotlib.rcParams['font.family'].insert(0, 'serif')",
        f"{SET}['font.family'].pop(0); matplotlib.rcParams.update(matplotlib.rcParamsDefault)",
        f"{SET}['font.size'] = 9",
        f"[str(__import__('matplotlib').rcParams[name]) for name in {LOOKED_AT}]",
    )
if find_spec("mpmath"):
    LOOK = "(__import__('mpmath').mp.dps, str(__import__('mpmath').mpf(2).sqrt()))"
    CASES["mpmath precision"] = Case(
        "import mpmath; mpmath.mp.dps = 30",
        "mpmath.mp.dps = 15",
        "import mpmath; mpmath.mp.prec = 80",
        LOOK,
    )
if find_spec("loguru"):
    SET = "from loguru._logger import context; context.set"
    CASES["context of loguru"] = Case(
        f"{SET}(dict(run=1))",
        f"{SET}({{}})",
        f"{SET}(dict(own=2))",
        "__import__('loguru')._logger.context.get()",
    )
if find_spec("structlog"):
    SET = "import structlog; structlog.contextvars"
    CASES["context of structlog"] = Case(
        f"{SET}.bind_contextvars(run=1, fold='a')",
        f"{SET}.unbind_contextvars('run', 'fold')",
        f"{SET}.bind_contextvars(own=2)",
        "__import__('structlog').contextvars.get_contextvars()",
    )
if hasattr(sys, "set_int_max_str_digits"):
    CASES["digits of int"] = Case(
        "sys.set_int_max_str_digits(5000)",
        "sys.set_int_max_str_digits(4300)",
        "sys.set_int_max_str_digits(6000)",
        "sys.get_int_max_str_digits()",
    )


@pytest.mark.parametrize("name", CASES)
def test_a_setting_follows_the_program_and_the_workers_own_stays(shared: Pair, name: str) -> None:
    """A change arrives; a worker's own value stays until the program changes its own again."""
    case, (program, worker) = CASES[name], shared
    look = case.look
    if name == "umask":  # it is read by setting it
        look = "[was := os.umask(0o77), os.umask(was)][0]"
    shared.deliver()
    start = program.get(look)
    assert worker.get(look) == start
    program.run(case.change.replace("start", repr(start)))
    shared.deliver()
    changed = program.get(look)
    assert worker.get(look) == changed != start
    worker.run(case.own)
    mine = worker.get(look)
    shared.deliver()
    assert worker.get(look) == mine
    program.run(case.back.replace("start", repr(start)))
    shared.deliver()
    assert worker.get(look) == start == program.get(look)


def test_a_snapshot_is_the_same_object_until_something_changes(shared: Pair) -> None:
    """Equal settings are one snapshot; a change makes another serial, also in a single row."""
    program = shared.program
    program.run("one = settings.snapshot()")
    assert program.get("settings.snapshot() is one")
    program.run("os.environ['XPOOL_TEST'] = '1'; two = settings.snapshot()")
    assert program.get("two.serial != one.serial")
    changed = "[row for row in two.rows if row not in one.rows]"
    assert [row[0] for row in program.get(changed)] == ["os.environ"]
    program.run("del os.environ['XPOOL_TEST']")


def test_threads_with_values_of_their_own_take_turns_with_two_snapshots(shared: Pair) -> None:
    """A grad mode of a thread is no change for another thread."""
    shared.program.run(
        "import threading\n"
        "found = []\n"
        "def other():\n"
        "    torch.set_grad_enabled(False)\n"
        "    found.append(settings.snapshot())\n"
        "for _ in range(3):\n"
        "    found.append(settings.snapshot())\n"
        "    thread = threading.Thread(target=other)\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    # The first snapshot may be from before the row has ever changed.
    assert shared.program.get("len({one.serial for one in found[1:]})") == 2
    assert shared.program.get("found[2] is found[4] and found[3] is found[5]")


def test_a_row_of_a_thread_is_set_in_each_thread_that_runs_tasks(shared: Pair) -> None:
    """A second thread of a worker gets the grad mode although the first one has it."""
    shared.program.run("torch.set_grad_enabled(False); decimal.getcontext().prec = 3")
    shared.deliver()
    shared.worker.run(
        "import threading\n"
        "def task():\n"
        "    settings.receive(*given)\n"
        "    seen = torch.is_grad_enabled(), decimal.getcontext().prec\n"
        "    globals().update(seen=seen)\n"
        "thread = threading.Thread(target=task)\n"
        "thread.start()\n"
        "thread.join()\n",
        (shared.take(), ()),
    )
    assert shared.worker.get("seen") == (False, 3)
    shared.program.run("torch.set_grad_enabled(True); decimal.getcontext().prec = 28")
    shared.deliver()
    assert shared.worker.get("torch.is_grad_enabled(), decimal.getcontext().prec") == (True, 28)


def test_nothing_is_sent_before_anything_changes(pair: Pair) -> None:
    """A program that has changed nothing sends no rows, and a changed row is sent from then on."""
    assert pair.program.rows() == {}
    pair.program.run("import sys; sys.setrecursionlimit(1500)")
    assert pair.program.rows() == {"recursion limit": 1500}
    pair.program.run("sys.setrecursionlimit(1000)")
    assert pair.program.rows() == {"recursion limit": 1000}


def test_filters_from_before_the_first_import_of_xpool_arrive(sides: Sides) -> None:
    """Filters set before the first snapshot are sent with it."""
    with sides() as (program, worker):
        program.run("import warnings; warnings.simplefilter('error', UserWarning)")
        rows = program.get("settings.snapshot().rows")
        worker.run("settings.receive(given)", rows)
        assert worker.get("sys.modules['warnings'].filters[0][:3]") == ("error", None, UserWarning)


def test_a_locale_from_before_the_first_import_of_xpool_arrives(sides: Sides) -> None:
    """`setlocale(LC_ALL, "C")` also changes LC_CTYPE, from which `open` takes its encoding."""
    with sides(program=True, worker=True) as (program, worker):
        program.run("import locale; locale.setlocale(locale.LC_ALL, 'C')")
        worker.run("settings.receive(given)", program.get("settings.snapshot().rows"))
        look = "open('/dev/null').encoding"
        assert worker.get(look) == program.get(look)


def test_rows_are_built_in_values_that_import_nothing(shared: Pair) -> None:
    """A worker can read all rows of a program before it imports any library."""
    shared.program.run(
        "import numpy, torch; numpy.seterr(all='raise'); torch.set_default_dtype(torch.float64)"
    )
    rows = shared.take()
    assert {name for name, _, _ in rows} >= {"torch default dtype", "numpy error state"}
    code = "import sys, pickle; before = set(sys.modules); pickle.loads(sys.stdin.buffer.read());"
    code += "assert set(sys.modules) == before"
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(rows), check=True)


LATER = {
    "decimal": ("decimal.getcontext().prec = 9", "decimal.getcontext().prec"),
    "numpy": ("numpy.seterr(all='raise')", "numpy.geterr()['over']"),
    "torch": (
        "torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False)",
        "(str(torch.get_default_dtype()), torch.is_grad_enabled())",
    ),
    "socket": ("socket.setdefaulttimeout(3)", "socket.getdefaulttimeout()"),
    "logging": ("logging.getLogger('some').setLevel(5)", "logging.getLogger('some').level"),
    "locale": (
        "locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')",
        "locale.setlocale(locale.LC_NUMERIC)",
    ),
}


@pytest.mark.parametrize("name", [name for name in LATER if name != "torch"] + also("torch"))
def test_a_row_of_a_library_is_set_when_a_worker_imports_the_library(
    sides: Sides, name: str
) -> None:
    """`receive` imports no library, and the row is there right after the import."""
    change, look = LATER[name]
    with sides(program=True) as pair:
        pair.begin()
        pair.program.run(f"import {name}\n{change}")
        pair.worker.run(f"had = {name!r} in sys.modules")
        pair.deliver()
        assert pair.worker.get(f"({name!r} in sys.modules) == had")
        pair.worker.run(f"import {name}")
        assert pair.worker.get(look) == pair.program.get(look)


def test_a_row_that_goes_before_its_library_is_imported_is_not_set(pair: Pair) -> None:
    """A message without the row arrives before the import: the worker has the default."""
    early = pair.take()
    pair.program.run("import decimal; decimal.getcontext().prec = 9")
    pair.deliver()
    pair.give(early)
    pair.worker.run("import decimal")
    assert pair.worker.get("decimal.getcontext().prec") == 28


def test_a_filter_whose_category_is_not_imported_is_added_in_its_place(pair: Pair) -> None:
    """The filter comes between those that the program has before and after it."""
    pair.program.run(
        "import warnings\nfrom numpy.exceptions import AxisError, VisibleDeprecationWarning as V\n"
        "warnings.resetwarnings()\n"
        "for one in (BytesWarning, V, UserWarning): warnings.simplefilter('error', one)"
    )
    pair.deliver()
    names = "[one[2].__name__ for one in __import__('warnings').filters]"
    assert pair.worker.get(names) == ["UserWarning", "BytesWarning"]
    pair.worker.run("import numpy.exceptions")
    order = ["UserWarning", "VisibleDeprecationWarning", "BytesWarning"]
    found = pair.worker.get(names)  # numpy adds some of its own
    assert [one for one in found if one in order] == order
    assert "ResourceWarning" not in found


def test_a_filter_whose_category_comes_with_a_task_is_added_with_the_next_one(pair: Pair) -> None:
    """A class of `__main__` exists in a worker when a task has brought it."""
    make = "class Own(UserWarning): pass\nOwn.__module__ = '__main__'\n"
    make += "sys = __import__('sys'); sys.modules['__main__'].Own = Own"
    pair.program.run(f"{make}\nimport warnings; warnings.simplefilter('error', Own)")
    pair.deliver()
    names = "[one[2].__name__ for one in __import__('warnings').filters]"
    assert "Own" not in pair.worker.get(names)
    pair.worker.run(make)
    pair.deliver()
    assert pair.worker.get(names)[0] == "Own"


def test_only_the_variables_that_changed_are_changed(pair: Pair) -> None:
    """Variables that a worker has set itself stay when the program changes others."""
    pair.both("import os")
    pair.program.run("os.environ['ONE'] = '1'; os.environ['TWO'] = '1'")
    pair.deliver()
    pair.worker.run("os.environ['ONE'] = 'mine'; os.environ['OTHER'] = 'mine'")
    pair.program.run("os.environ['TWO'] = '2'; os.environ['HOME'] = '/new'")
    pair.deliver()
    here = "[os.environ.get(name) for name in ('ONE', 'OTHER', 'TWO', 'HOME')]"
    assert pair.worker.get(here) == ["mine", "mine", "2", "/new"]
    pair.program.run("del os.environ['ONE'], os.environ['TWO'], os.environ['HOME']")
    pair.deliver()
    assert pair.worker.get(here) == [None, "mine", None, None]


PARTS = {
    "numpy.seterr": ("numpy.seterr(over={!r})", "numpy.seterr(under={!r})", "numpy.geterr()"),
    "numpy.set_printoptions": (
        "numpy.set_printoptions(nanstr={!r})",
        "numpy.set_printoptions(infstr={!r})",
        "numpy.get_printoptions()",
    ),
    "locale": (
        "locale.setlocale(locale.LC_TIME, {!r})",
        "locale.setlocale(locale.LC_NUMERIC, {!r})",
        "[locale.setlocale(one) for one in (locale.LC_TIME, locale.LC_NUMERIC)]",
    ),
    "pandas": (
        "import pandas; pandas.set_option('display.precision', len({!r}))",
        "import pandas; pandas.set_option('display.max_rows', len({!r}))",
        "pandas.get_option('display.precision'), pandas.get_option('display.max_rows')",
    ),
    "matplotlib": (
        "import matplotlib; matplotlib.rcParams['font.size'] = len({!r})",
        "import matplotlib; matplotlib.rcParams['savefig.pad_inches'] = len({!r})",
        "matplotlib.rcParams['font.size'], matplotlib.rcParams['savefig.pad_inches']",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_only_the_parts_of_a_setting_that_changed_are_changed(sides: Sides, name: str) -> None:
    """What a worker has set stays when the program changes another option of the same kind."""
    if name in ("pandas", "matplotlib"):
        pytest.importorskip(name)
    one, other, look = PARTS[name]
    values = ("C.UTF-8", "C") if name == "locale" else ("print", "ignore")
    with sides(program=True, worker=True) as pair:
        pair.begin()
        pair.both(LIBRARIES)
        pair.program.run(one.format(values[0]))
        pair.deliver()
        pair.worker.run(one.format(values[1]))
        pair.program.run(other.format(values[0]))
        pair.deliver()
        pair.program.run(one.format(values[1]))
        assert pair.worker.get(look) == pair.program.get(look)


@pytest.mark.parametrize("keep", ["DEVICES", "DEV*"])
def test_variables_of_the_worker_never_change(pair: Pair, keep: str) -> None:
    """A variable of the device's binding stays, also when the program deletes its own."""
    pair.worker.run("import os; os.environ['DEVICES'] = '3'")
    for change in ("import os; os.environ['DEVICES'] = '0'", "del os.environ['DEVICES']"):
        pair.program.run(change)
        pair.deliver(keep=("OTHER", keep))
        assert pair.worker.get("os.environ['DEVICES']") == "3"


def test_a_message_from_before_a_workers_start_has_the_older_values(
    sides: Sides,
) -> None:
    """A worker that was started after a change goes back for a message made before it."""
    with sides() as pair:
        pair.both("import os, sys")
        folder = pair.program.get("os.getcwd()")
        first = pair.take()
        change = "os.environ['LATE'] = '1'; os.chdir('/usr'); sys.path.append('/late')"
        pair.both(f"{change}; os.umask(0o022)")
        pair.program.run("os.umask(0o077)")
        pair.worker.run("os.umask(0o077)")
        pair.begin()
        look = "(os.environ.get('LATE'), os.getcwd(), '/late' in sys.path)"
        pair.give(first)
        assert pair.worker.get(look) == (None, folder, False)
        pair.deliver()
        assert pair.worker.get(look) == ("1", "/usr", True)
        pair.worker.run("os.environ['LATE'] = 'mine'")
        pair.deliver()
        assert pair.worker.get(look) == ("mine", "/usr", True)


def test_an_older_message_has_the_older_values(pair: Pair) -> None:
    """Messages that overtake each other: each task sees the values of its own call."""
    pair.both("import os, decimal, sys")
    early = pair.take()
    pair.program.run("os.environ['ONE'] = '1'; decimal.getcontext().prec = 4")
    pair.program.run("sys.setrecursionlimit(1100)")
    late = pair.take()
    look = "(os.environ.get('ONE'), decimal.getcontext().prec, sys.getrecursionlimit())"
    for rows, seen in ((late, ("1", 4, 1100)), (early, (None, 28, 1000)), (late, ("1", 4, 1100))):
        pair.give(rows)
        assert pair.worker.get(look) == seen


def test_a_fork_of_a_changed_program_has_the_defaults_for_an_older_message(pair: Pair) -> None:
    """A forked worker inherits the change, and an older message still sees the default."""
    pair.both("import decimal, socket")
    early = pair.take()
    pair.both("decimal.getcontext().prec = 4; socket.setdefaulttimeout(3)")
    pair.deliver()
    pair.give(early)
    look = "(decimal.getcontext().prec, socket.getdefaulttimeout())"
    assert pair.worker.get(look) == (28, None)


RESET = """
    import logging, xpool

    log = logging.getLogger("one")

    def levels(_):
        return log.level, log.getEffectiveLevel(), logging.getLogger("two").level

    if __name__ == "__main__":
        log.setLevel(10)
        logging.root.setLevel(20)
        with xpool.Pool(1, context="fork") as pool:
            log.setLevel(0)
            logging.getLogger("two").setLevel(40)
            assert pool.map(levels, [0]) == [(0, 20, 40)]
"""


def test_what_a_fork_inherits_is_reset_with_the_program(tmp_path: Path) -> None:
    """The program sets a level, forks a worker, and takes the level back before the first task."""
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", RESET)]) == ""


def test_entries_that_a_worker_has_added_to_the_path_stay(pair: Pair) -> None:
    """The program's entries change around those of the worker."""
    pair.both("import sys")
    pair.worker.run("sys.path.insert(0, '/front'); sys.path.append('/back')")
    pair.program.run("sys.path[:] = ['/one', '/two']")
    pair.deliver()
    assert pair.worker.get("sys.path") == ["/front", "/one", "/two", "/back"]


def test_only_the_loggers_that_changed_are_changed(pair: Pair) -> None:
    """A logger's level that a worker has set stays when the program changes another logger."""
    pair.both("import logging")
    pair.program.run("logging.getLogger('one').setLevel(10)")
    pair.deliver()
    pair.worker.run("logging.getLogger('one').setLevel(40); logging.getLogger('w').setLevel(40)")
    pair.program.run("logging.getLogger('two').setLevel(20); logging.getLogger('a.b').disabled = 1")
    pair.deliver()
    look = "[logging.getLogger(one).level for one in ('one', 'w', 'two')]"
    assert pair.worker.get(look) == [40, 40, 20]
    assert pair.worker.get("logging.getLogger('a.b').disabled")


def test_a_logger_above_one_that_the_worker_has_is_made(pair: Pair) -> None:
    """Its level is that of the logger below."""
    pair.both("import logging; below = logging.getLogger('up.below')")
    pair.deliver()
    pair.program.run("logging.getLogger('up').setLevel(40)")
    pair.deliver()
    assert pair.worker.get("below.getEffectiveLevel()") == 40


def test_attributes_of_loggers_are_looked_at(pair: Pair) -> None:
    """A new attribute of the root or of a logger with others arrives, and so does a new value."""
    pair.both("import logging")
    for text in ("one.run = 3", "one.other = 4", "one.run = 5", "root.run = 6"):
        pair.program.run(f"one, root = logging.getLogger('one'), logging.getLogger(); {text}")
        pair.deliver()
    look = "vars(logging.getLogger('one')).get"
    assert pair.worker.get(f"[{look}('run'), {look}('other'), logging.root.run]") == [5, 4, 6]


def test_a_package_makes_its_logger_with_a_class_of_its_own(pair: Pair) -> None:
    """A level waits for its logger, so `receive` does not make a logger that its package makes."""
    pair.program.run("import logging; logging.getLogger('top').setLevel(11)")
    pair.worker.run("import logging")
    pair.deliver()
    assert pair.worker.get("'top' not in logging.root.manager.loggerDict")
    pair.worker.run(
        "class Own(logging.Logger): pass\n"
        "logging.setLoggerClass(Own)\n"
        "child = logging.getLogger('top.child')"
    )
    assert pair.worker.get("child.getEffectiveLevel(), type(child.parent).__name__") == (11, "Own")


PACKAGE = """
import logging, warnings
warnings.filterwarnings("always", "about", DeprecationWarning)
warnings.filterwarnings("once", "other", DeprecationWarning)
logging.getLogger("package").setLevel(30)
"""


def test_imports_of_a_task_do_not_overrule_the_program(pair: Pair) -> None:
    """A worker imports a package later than the program did, whose own settings come after that."""
    pair.program.run(f"{PACKAGE}\nlogging.getLogger('package').setLevel(10)")
    pair.program.run("warnings.resetwarnings(); warnings.filterwarnings('always', 'about', "
                     "DeprecationWarning); warnings.simplefilter('ignore')")  # fmt: skip
    pair.deliver()
    pair.worker.run("import warnings; warnings.simplefilter('error', BytesWarning)")
    pair.deliver()
    pair.worker.run(f"settings.filters.ignore_all()\n{PACKAGE}\nsettings.imports_done()")
    look = "[(one[0], one[2].__name__) for one in warnings.filters]"
    assert pair.worker.get(look) == [
        ("once", "DeprecationWarning"),  # the program's own list no longer has it
        ("error", "BytesWarning"),
        ("ignore", "Warning"),
        ("always", "DeprecationWarning"),
    ]
    assert pair.worker.get("logging.getLogger('package').level") == 10
    pair.worker.run("logging.getLogger('package').setLevel(50); settings.imports_done()")
    assert pair.worker.get("logging.getLogger('package').level") == 50


def test_propagate_of_a_logger_made_in_place_of_a_placeholder_is_seen(pair: Pair) -> None:
    """The number of loggers stays the same then, and no level changes."""
    pair.program.run("import logging; logging.getLogger('top.child'); settings.snapshot()")
    pair.program.run("logging.getLogger('top').propagate = False")
    assert pair.program.rows() == {"levels of loggers": (0, (("top", 0, False, False, (), ()),))}


@pytest.mark.parametrize("filters", ["default", "error"])
def test_a_row_that_cannot_be_set_is_warned_of_once(pair: Pair, filters: str) -> None:
    """The task runs in the worker's folder, and the warning names the setting and the reason."""
    pair.both("import os, warnings")
    pair.worker.run(
        f"warnings.simplefilter({filters!r})\n"
        "shown = []\n"
        "warnings.showwarning = lambda text, kind, *_, **__: shown.append((kind, str(text)))"
    )
    folder = "/tmp/xpool-no-such-folder"
    for _ in range(2):
        pair.program.run("os.environ['ONE'] = os.environ.get('ONE', '') + '1'")
        rows = [*pair.take(), ("working folder", 7 + _, folder)]
        pair.give([row for row in rows if row[0] != "warning filters"])
    ((kind, text),) = pair.worker.get("shown")
    assert kind is RuntimeWarning
    assert "working folder" in text and folder in text and "FileNotFoundError" in text
    assert pair.worker.get("os.environ['ONE']") == "11"


def test_the_umask_is_untouched_while_it_does_not_change(pair: Pair) -> None:
    """A snapshot sets the mask that it knows, so files of other threads never get another one."""
    pair.program.run(
        "import os; settings.snapshot(); calls = []; real = os.umask\n"
        "known = real(0o022); real(known); settings._sources.clear(); settings._last = None\n"
        "os.umask = lambda mask: calls.append(mask) or real(mask)\n"
        "settings.snapshot(); settings.snapshot()"
    )
    assert pair.program.get("set(calls) == {known}")


def test_a_library_that_the_program_imports_later_is_seen(pair: Pair) -> None:
    """The rows of a library are read from its import on."""
    pair.program.run("one = settings.snapshot()\nimport decimal")
    assert pair.program.rows() == {}
    pair.program.run("decimal.getcontext().rounding = 'ROUND_UP'")
    assert pair.program.rows()["decimal context"][1] == "ROUND_UP"


def test_a_device_of_a_with_block_is_a_default_device(shared: Pair) -> None:
    """`with torch.device(...)` counts as torch counts it, and ends with the block."""
    program = shared.program
    program.run("with torch.device('meta'): inner = dict((r[0], r[2]) for r in "
                "settings.snapshot().rows)")  # fmt: skip
    assert program.get("inner['torch default device']") == "meta"
    assert program.rows()["torch default device"] is None


def test_the_serials_of_a_fork_are_its_own(pair: Pair) -> None:
    """A child of the program never uses a number of its parent for another value."""
    pair.program.run(
        "import os, sys\n"
        "settings.snapshot(); read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    sys.setrecursionlimit(1200)\n"
        "    os.write(write, repr(settings.snapshot().rows[0][1]).encode()); os._exit(0)\n"
        "os.wait(); theirs = int(os.read(read, 100)); sys.setrecursionlimit(1300)"
    )
    assert pair.program.get("theirs != settings.snapshot().rows[0][1]")


def test_a_value_that_raises_when_compared_ends_no_call(pair: Pair) -> None:
    """An object in `sys.path` whose comparison fails leaves the other rows as they are."""
    pair.program.run(
        "import sys\n"
        "class Odd:\n"
        "    def __eq__(self, other): raise ValueError\n"
        "settings.snapshot(); sys.path[0] = Odd(); sys.setrecursionlimit(1200)"
    )
    assert pair.program.rows()["recursion limit"] == 1200


INSTALLED = """
    import colorsys, functools, json, os
    import xpool

    json.JSONEncoder.default = lambda encoder, obj: "unknown"

    if __name__ == "__main__":
        os.chdir(os.path.dirname(__file__))
        with xpool.Pool(2) as pool:
            assert pool.map(os.path.exists, ["file.txt"] * 4) == [False] * 4
            os.environ["LATER"] = "1"
            os.mkdir("folder")
            os.chdir("folder")
            open("file.txt", "w").close()
            assert pool.map(os.path.exists, ["file.txt"] * 4, chunksize=1) == [True] * 4
            assert pool.apply(os.getenv, ("LATER",)) == "1"
            assert pool.submit(os.getenv, "LATER").result() == "1"
            assert list(pool.imap(os.getenv, ["LATER"] * 9)) == ["1"] * 9
            assert pool.run_all(os.getcwd) == [os.getcwd()] * 2
            listed = functools.partial(os.listdir)
            assert pool.map(listed, ["."]) == [["file.txt"]]
            assert pool.apply(json.dumps, (range(2),)) == '"unknown"'
            json.JSONEncoder.default = lambda encoder, obj: "other"
            assert pool.map(json.dumps, [range(2)] * 3) == ['"other"'] * 3
"""


@pytest.mark.parametrize("method", ["None", *also("'spawn'", "'fork'")])
def test_tasks_of_installed_functions_have_the_settings(tmp_path: Path, method: str) -> None:
    """The function of a task need not be the program's own."""
    text = INSTALLED.replace("Pool(2)", f"Pool(2, context={method})")
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", text)]) == ""
