"""A generator of random scripts, and the referee that compares what their workers see.

A script is made of statements of programs as people write them: they load data, fill registries,
configure modules, open connections.  Some are changed later: under the guard, in `main()`, between
two maps, in a thread.  Workers evaluate *probes*: expressions of what the statements made.  The
referee compares each answer of xpool with that of a pool which `multiprocessing` forks right
before, in the same run of the script: so random values, addresses and folders are the same::

    cd tests
    python -m differential.scripts_generator show 17        # print the script of a seed
    python -m differential.scripts_generator run 0-299      # run seeds, and shorten what fails
    python -m differential.scripts_generator each           # run every statement by itself
    python -m differential.scripts_generator each torch     # those whose name begins with a text
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = ["STATEMENTS", "Script", "Statement", "Verdict", "judged", "script", "shortened"]

MODES = ("script", "module", "stdin", "bare", "runpy")
"""Ways to run a script.  `bare` is one without a guard."""

NAMED = re.compile(r"was not sent to this worker|could not be sent")
"""In an error of a task that reads what cannot be sent."""

LIMIT = 60
"""Seconds after which a script hangs."""


@dataclass(frozen=True)
class Statement:
    """Lines of a script, and what workers are asked about them.  ``~`` is the statement's number.

    ``top``: lines of the script; leading imports go to its beginning.  ``inside``: lines of its
    main part.  ``probes``: expressions of the item ``x``.  ``changes``: lines that may follow at
    ``places``.  ``names``: the globals that they bind.  ``gives``: an object that a link may use.
    ``after``: an expression that is true in the program at the end.  ``unsent``: why a worker may
    refuse it by name.  ``differs``: why a worker may differ, which the documentation says.
    """

    name: str
    top: str = ""
    probes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    names: str = ""
    gives: str = ""
    inside: str = ""
    after: str = ""
    files: dict[str, str] = field(default_factory=dict)
    once: bool = False
    places: tuple[str, ...] = ("top", "guard", "between")
    modes: tuple[str, ...] = MODES
    unsent: str = ""
    differs: str = ""

    @property
    def kind(self) -> str:
        """The kind of statement."""
        return self.name.partition(":")[0]


STATEMENTS: dict[str, Statement] = {}


def add(name: str, top: str, *probes: str, change: str | tuple[str, ...] = (), **more: Any) -> None:
    """Add a statement to the table."""
    changes = (change,) if isinstance(change, str) else change
    more["files"] = {k: textwrap.dedent(v) for k, v in more.get("files", {}).items()}
    texts = (textwrap.dedent(one).strip("\n") for one in changes)
    top = textwrap.dedent(top).strip("\n")
    assert name not in STATEMENTS
    STATEMENTS[name] = Statement(name, top, probes, tuple(texts), **more)


# Data --------------------------------------------------------------------------------------------

add(
    "data: rows of a load",
    """
    def read_rows~():
        note_load()
        return [{"id": n, "cost": n * 1.5} for n in range(4)]
    rows~ = read_rows~()
    """,
    "[row['cost'] for row in rows~]",
    change=(
        "rows~.append({'id': len(rows~), 'cost': 0.5})",
        "rows~ = [row for row in rows~ if row['id'] % 2] + rows~[:1]",
        "rows~[0]['cost'] += 10",
        "rows~.sort(key=lambda row: -row['id'])",
        "rows~[1:2] = []",
    ),
    names="rows~",
    gives="rows~",
)
add(
    "data: csv",
    """
    import csv
    with open("sales~.csv", newline="") as source:
        sales~ = list(csv.DictReader(source))
    by_town~ = {}
    for sale in sales~:
        by_town~.setdefault(sale["town"], []).append(sale)
    """,
    "{town: len(found) for town, found in by_town~.items()}",
    "by_town~['Ulm'][0] is sales~[0]",
    change=("sales~[0]['town'] = 'Bonn'", "by_town~['Kiel'] = sales~[:1]"),
    gives="by_town~",
    files={"sales~.csv": "town,sum\nUlm,3\nJena,4\nUlm,5\n"},
)
add(
    "data: text read by a path",
    """
    from pathlib import Path
    stop_words~ = frozenset(Path("stop~.txt").read_text().split())
    """,
    "sorted(stop_words~), 'the' in stop_words~",
    change="stop_words~ |= {'late~'}",
    names="stop_words~",
    gives="stop_words~",
    files={"stop~.txt": "the\na\nof\n"},
)
add(
    "data: shuffled and split",
    """
    import random
    def load_ids~():
        note_load()
        return list(range(12))
    ids~ = load_ids~()
    random.shuffle(ids~)
    fit~, held~ = ids~[:9], ids~[9:]
    def is_held~(n, among=held~):
        return n in among
    """,
    "fit~, held~",
    "[n for n in range(12) if is_held~(n)]",
    "is_held~.__defaults__[0] is held~",
    change=("random.shuffle(fit~)", "held~.append(-1)"),
    gives="held~",
)
add(
    "data: count of words",
    """
    from collections import Counter
    def read_text~():
        note_load()
        return "to be or not to be"
    words~ = Counter(read_text~().split())
    most~ = words~.most_common(1)[0][0] if len(words~) else None
    """,
    "words~['to'], most~, sum(words~.values())",
    change=("words~.update(['to', 'so'])", "del words~['not']"),
    gives="words~",
)
add(
    "data: large list",
    """
    def load_large~():
        note_load()
        return list(range(30_000))
    large~ = load_large~()
    """,
    "len(large~), large~[7], large~[-1]",
    change=("large~[7] = -1", "large~.append('end')", "large~.reverse()"),
    gives="large~",
)
add(
    "data: array and its view",
    """
    import numpy as np
    def load_grid~():
        note_load()
        return np.arange(24.0).reshape(4, 6)
    grid~ = load_grid~()
    edge~ = grid~[:, 0]
    edge~ += 0.5
    """,
    "grid~.sum(), edge~",
    "np.shares_memory(grid~, edge~)",
    change=("grid~[2] = 9", "edge~ *= 3", "grid~ = grid~ + 1"),
    names="grid~ edge~",
    gives="grid~",
)
add(
    "data: large array",
    """
    import numpy as np
    wave~ = np.linspace(0, 1, 40_000)
    mask~ = wave~ > 0.5
    logging.info("wave has %d points", len(wave~))
    """,
    "wave~[:3], mask~.sum(), float(wave~[mask~][0])",
    change=("wave~[1] = 70", "mask~[:] = False\nmask~[5] = True", "wave~ /= 2"),
    names="wave~",
    gives="wave~",
)
add(
    "data: structured array",
    """
    import numpy as np
    stars~ = np.zeros(3, dtype=[("name", "U8"), ("size", "f4")])
    stars~["name"] = ["a", "b", "c"]
    best~ = stars~[1]
    """,
    "stars~['name'], stars~['size']",
    change="stars~['size'][2] = 4",
)
add(
    "data: database file",
    """
    import sqlite3
    with sqlite3.connect(":memory:") as memory~:
        memory~.executescript("create table t (n int); insert into t values (4), (6);")
        found~ = [n for n, in memory~.execute("select n from t order by n")]
    memory~.close()
    """,
    "found~, sum(found~)",
    change="found~ += [100]",
    names="found~",
    gives="found~",
)
add(
    "data: folder of its own",
    """
    import atexit
    import shutil
    import tempfile
    folder~ = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder~, True)
    """,
    "folder~",
    "os.path.isdir(folder~)",
    change='open(os.path.join(folder~, "more"), "w").close()',
    after="os.path.isdir(folder~)",
)
add(
    "data: heap and queue",
    """
    import heapq
    from collections import deque
    jobs~ = [7, 2, 9, 4]
    heapq.heapify(jobs~)
    recent~ = deque(maxlen=2)
    while len(jobs~) > 2:
        recent~.append(heapq.heappop(jobs~))
    """,
    "jobs~, list(recent~), recent~.maxlen",
    change=("heapq.heappush(jobs~, 1)", "recent~.appendleft(5)"),
    gives="recent~",
)
add(
    "data: bytes in place",
    """
    import array
    buffer~ = bytearray(b"head")
    samples~ = array.array("h", [1, 2, 3])
    """,
    "bytes(buffer~), samples~.tolist()",
    change=("buffer~ += b'tail'", "buffer~[0] = 72", "samples~.extend([4, 5])"),
    names="buffer~",
    gives="buffer~",
)
add(
    "data: tree with parents",
    """
    class Branch~:
        def __init__(self, label, parent=None):
            self.label, self.parent, self.children = label, parent, []
            if parent is not None:
                parent.children.append(self)
    root~ = Branch~("root")
    leaf~ = Branch~("leaf", Branch~("middle", root~))
    """,
    "leaf~.parent.parent is root~, leaf~ is root~.children[0].children[0]",
    "root~.children[0].label, type(leaf~) is Branch~",
    change=("Branch~('new', root~)", "leaf~.parent.label = 'bough'", "leaf~.parent = root~"),
    gives="root~",
)
add(
    "data: nested defaults",
    """
    from collections import defaultdict
    tally~ = defaultdict(lambda: defaultdict(int))
    for place, n in [("in", 2), ("out", 3), ("in", 4)]:
        tally~[place][n % 2] += n
    """,
    "{k: dict(v) for k, v in tally~.items()}, tally~.default_factory()['none']",
    change=("tally~['up'][0] += 1", "tally~.pop('out', None)"),
    gives="tally~",
)
add(
    "data: walrus and match",
    """
    def header~():
        note_load()
        return ("v", 3, "rest")
    if (head~ := header~()) and len(head~) == 3:
        match head~:
            case (str(letter~), int(version~), _):
                known~ = True
    """,
    "head~, letter~, version~, known~",
    change="version~ += 1",
    names="version~",
    modes=MODES if sys.version_info >= (3, 10) else (),
)

# Modules of the program --------------------------------------------------------------------------

add(
    "config: number in a module",
    "import own_rates~",
    "own_rates~.RATE, own_rates~.doubled()",
    change=("own_rates~.RATE = 5", "setattr(own_rates~, 'RATE', own_rates~.RATE + 1)"),
    files={"own_rates~.py": "RATE = 1\ndef doubled():\n    return 2 * RATE\n"},
)
add(
    "config: namespace imported by name",
    "from own_opts~ import opts as opts~, depth_of as depth_of~",
    "opts~.depth, depth_of~(), sorted(vars(opts~))",
    change=("opts~.depth += 3", "opts~.extra = ['x']", "vars(opts~).update(depth=40)"),
    gives="opts~",
    files={
        "own_opts~.py": """
            from types import SimpleNamespace
            opts = SimpleNamespace(depth=2)
            def depth_of():
                return opts.depth
            """
    },
)
add(
    "config: flag of a class in a module",
    "import own_flags~",
    "own_flags~.Flags.loud, own_flags~.Flags().level()",
    change=("own_flags~.Flags.loud = True", "own_flags~.Flags.scale = 7"),
    files={
        "own_flags~.py": """
            class Flags:
                loud = False
                scale = 2
                def level(self):
                    return self.scale * (1 + self.loud)
            """
    },
)
add(
    "config: set by a function of the module",
    "import own_setup~\nown_setup~.configure(level=3)",
    "own_setup~.level(), own_setup~._steps",
    change="own_setup~.configure(level=own_setup~.level() * 2)",
    files={
        "own_setup~.py": """
            _level = 0
            _steps = []
            def configure(level):
                global _level
                _level = level
                _steps.append(level)
            def level():
                return _level
            """
    },
)
add(
    "config: star",
    "from own_names~ import *",
    "alpha~ + x, gamma~(x)",
    change="alpha~ = 50",
    names="alpha~",
    files={"own_names~.py": "alpha~ = 4\ndef gamma~(x):\n    return x - alpha~\n"},
)
add(
    "config: module of a folder",
    "from own_parts~ import core as core~\nfrom own_parts~.shapes import area as area~",
    "core~.scaled(x), area~(2)",
    change=("core~.FACTOR = 7", "core~.TABLE['more'] = 1"),
    files={
        "own_parts~/__init__.py": "",
        "own_parts~/core.py": """
            FACTOR = 2
            TABLE = {}
            def scaled(x):
                return x * FACTOR + len(TABLE)
            """,
        "own_parts~/shapes.py": """
            from .core import scaled
            def area(side):
                return scaled(side) * side
            """,
    },
)
add(
    "config: patched function of a module",
    """
    import own_tools~
    plain~ = own_tools~.work
    def traced~(x):
        return ("traced", plain~(x))
    own_tools~.work = traced~
    """,
    "own_tools~.twice(x)",
    change="own_tools~.work = lambda x: -x",
    files={
        "own_tools~.py": "def work(x):\n    return x\ndef twice(x):\n    return [work(x)] * 2\n"
    },
)
add(
    "config: patched method of a module's class",
    """
    import own_pets~
    def loudly~(self):
        return self.name.upper() + "!"
    own_pets~.Pet.speak = loudly~
    """,
    "own_pets~.pet.speak(), own_pets~.Pet('b').speak()",
    change=("own_pets~.pet.name = 'rex'", "own_pets~.Pet.speak = lambda self: 'none'"),
    gives="own_pets~.pet",
    files={
        "own_pets~.py": """
            class Pet:
                def __init__(self, name):
                    self.name = name
                def speak(self):
                    return self.name
            pet = Pet("tom")
            """
    },
)
add(
    "config: patches that keep the names",
    """
    import functools
    import own_jobs~
    plain_run~, plain_step~ = own_jobs~.run, own_jobs~.Job.step
    @functools.wraps(plain_run~)
    def run~(x):
        return ("wrapped", plain_run~(x))
    @functools.wraps(plain_step~)
    def step~(self):
        return "wrapped " + plain_step~(self)
    own_jobs~.run = run~
    own_jobs~.Job.step = step~
    own_jobs~.Job.__len__ = lambda self: 7
    """,
    "own_jobs~.twice(x), own_jobs~.Long().step(), hasattr(own_jobs~.Job, '__len__')",
    change=(
        "own_jobs~.run = plain_run~",
        "own_jobs~.Job.step = plain_step~",
        "del own_jobs~.Job.__len__",
    ),
    files={
        "own_jobs~.py": """
            def run(x):
                return x
            def twice(x):
                return [run(x)] * 2
            class Job:
                def step(self):
                    return "step"
            class Long(Job):
                pass
            """
    },
)
add(
    "config: module that makes its attributes",
    "import own_lazy~\nown_lazy~._values['rate'] = 0.5",
    "own_lazy~.rate, own_lazy~.size",
    change=("own_lazy~._values['size'] = 64", "own_lazy~._values.update(rate=[1])"),
    files={
        "own_lazy~.py": """
            _values = {"rate": 0.1, "size": 32}
            def __getattr__(name):
                if name not in _values:
                    raise AttributeError(name)
                return _values[name]
            """
    },
)
add(
    "config: attribute that comes later",
    """
    import own_later~
    def later~():
        try:
            return own_later~.found
        except AttributeError:
            return "none"
    """,
    "getattr(own_later~, 'late', None), later~(), own_later~.known()",
    change=("own_later~.late = 3", "own_later~.found = [4]", "own_later~.more = {}"),
    files={"own_later~.py": "def known():\n    return 'more' in globals()\n"},
)
add(
    "config: module that is no module of the path",
    """
    import importlib.util
    where~ = importlib.util.spec_from_file_location("tool~", os.path.abspath("extras/tool~.py"))
    tool~ = importlib.util.module_from_spec(where~)
    where~.loader.exec_module(tool~)
    """,
    "tool~.measure(x), tool~.UNIT",
    change="tool~.UNIT = 'km'",
    files={
        "extras/tool~.py": """
            UNIT = "m"
            def measure(x):
                return f"{x} {UNIT}"
            """
    },
)
add(
    "config: folder appended to the path",
    """
    import sys
    sys.path.append(os.path.join(os.getcwd(), "vendor~"))
    import vendored~ as from_vendor~
    """,
    "from_vendor~.NAME, from_vendor~.Thing(x).twice()",
    change="from_vendor~.NAME = 'changed'",
    files={
        "vendor~/vendored~.py": """
            NAME = "vendored"
            class Thing:
                def __init__(self, n):
                    self.n = n
                def twice(self):
                    return 2 * self.n, NAME
            """
    },
)
add(
    "config: object shared by two modules",
    """
    import own_store~
    import own_user~
    own_store~.items.append("top")
    """,
    "own_user~.held is own_store~.items, own_user~.count()",
    change=("own_store~.items.append('more')", "own_user~.held = own_store~.items = ['new']"),
    gives="own_store~.items",
    files={
        "own_store~.py": "items = []\n",
        "own_user~.py": """
            try:
                from own_store~ import items as held
            except ImportError:
                from .own_store~ import items as held
            def count():
                return len(held)
            """,
    },
)
add(
    "config: file of settings",
    """
    import configparser
    settings~ = configparser.ConfigParser()
    settings~.read("setup~.ini")
    """,
    "settings~['net'].getint('width'), settings~.get('net', 'kind', fallback='none')",
    change=("settings~['net']['kind'] = 'conv'", "settings~.set('net', 'width', '16')"),
    files={"setup~.ini": "[net]\nwidth = 8\n"},
)
add(
    "config: parsed arguments",
    """
    import argparse
    parser~ = argparse.ArgumentParser()
    parser~.add_argument("--width", type=int, default=3)
    args~ = parser~.parse_args([])
    """,
    "args~.width, sorted(vars(args~))",
    change=("args~.width = 11", "args~ = parser~.parse_args(['--width', '6'])"),
    names="args~",
    gives="args~",
)
add(
    "config: arguments that the guard parses",
    "from types import SimpleNamespace\nchosen~ = None",
    "chosen~ and chosen~.seed",
    change=("chosen~ = SimpleNamespace(seed=7)", "chosen~ = SimpleNamespace(seed=[8])"),
    names="chosen~",
)
add(
    "config: frozen record replaced",
    """
    from dataclasses import dataclass, field, replace
    @dataclass(frozen=True)
    class Plan~:
        rate: float = 0.1
        steps: list = field(default_factory=list)
    plan~ = Plan~()
    """,
    "plan~, type(plan~) is Plan~",
    change=("plan~ = replace(plan~, rate=0.7)", "plan~.steps.append('warm')"),
    names="plan~",
    gives="plan~",
)
add(
    "config: layers of mappings",
    """
    from collections import ChainMap
    defaults~ = {"lr": 1, "log": False}
    layered~ = ChainMap({}, defaults~)
    """,
    "layered~['lr'], layered~.maps[1] is defaults~, dict(layered~)",
    change=("layered~['lr'] = 5", "defaults~['log'] = True"),
    gives="defaults~",
)

# Registries --------------------------------------------------------------------------------------

add(
    "registry: decorator",
    """
    OPS~ = {}
    def op~(name):
        def keep(func):
            OPS~[name] = func
            return func
        return keep
    @op~("inc")
    def inc~(x):
        return x + 1
    @op~("neg")
    def neg~(x):
        return -x
    """,
    "{name: func(x) for name, func in OPS~.items()}",
    "OPS~['inc'] is inc~",
    change=("OPS~['late'] = lambda x: x * 100", "op~('abs')(abs)", "OPS~.pop('neg', None)"),
    gives="OPS~",
)
add(
    "registry: decorator of a module",
    """
    import own_plugs~
    @own_plugs~.plug
    def mine~(x):
        return x + 30
    """,
    "sorted(own_plugs~.PLUGS), own_plugs~.call('mine~', x)",
    "own_plugs~.PLUGS['mine~'] is mine~",
    change="own_plugs~.PLUGS['other'] = mine~",
    files={
        "own_plugs~.py": """
            PLUGS = {}
            def plug(func):
                PLUGS[func.__name__] = func
                return func
            @plug
            def builtin(x):
                return x
            def call(name, x):
                return PLUGS[name](x)
            """
    },
)
add(
    "registry: subclasses",
    """
    class Reader~:
        known = {}
        def __init_subclass__(cls, suffix=None, **more):
            super().__init_subclass__(**more)
            Reader~.known[suffix or cls.__name__] = cls
        def read(self):
            return type(self).__name__
    class Text~(Reader~, suffix=".txt"):
        pass
    """,
    "{key: cls().read() for key, cls in Reader~.known.items()}",
    "Reader~.known['.txt'] is Text~",
    change=("type('Late~', (Reader~,), {})", "Reader~.known['.md'] = Text~"),
    gives="Reader~.known",
)
add(
    "registry: metaclass",
    """
    class Listed~(type):
        made = []
        def __init__(cls, name, bases, space):
            super().__init__(name, bases, space)
            Listed~.made.append(cls)
    class First~(metaclass=Listed~):
        size = 1
    class Second~(First~):
        size = 2
    """,
    "[cls.size for cls in Listed~.made], Listed~.made[1] is Second~",
    change=("First~.size = 10", "Listed~.made.reverse()"),
)
add(
    "registry: dispatch on types",
    """
    import functools
    class Metre~:
        pass
    @functools.singledispatch
    def unit~(value):
        return "any"
    @unit~.register(int)
    def _(value):
        return "number"
    @unit~.register
    def _(value: Metre~):
        return "m"
    """,
    "unit~(x), unit~(Metre~()), unit~('s'), unit~(b'')",
    change="unit~.register(bytes, lambda value: 'bytes')",
)
add(
    "registry: dispatch of a module",
    """
    import own_shows~
    class Shown~:
        pass
    @own_shows~.show.register(Shown~)
    def show_mine~(value):
        return "mine"
    """,
    "own_shows~.show(Shown~()), own_shows~.show(x)",
    files={
        "own_shows~.py": """
            import functools
            @functools.singledispatch
            def show(value):
                return "any"
            """
    },
)
add(
    "registry: bound methods",
    """
    class Meter~:
        def __init__(self):
            self.total = 0
        def count(self, n):
            self.total += n
            return self.total
    class Bus~:
        def __init__(self):
            self.listeners = []
    meter~, bus~ = Meter~(), Bus~()
    bus~.listeners.append(meter~.count)
    bus~.listeners[0](4)
    """,
    "meter~.total, [one.__name__ for one in bus~.listeners]",
    "bus~.listeners[0].__self__ is meter~",
    change=("bus~.listeners.append(meter~.count)", "meter~.count(10)"),
    gives="bus~",
)
add(
    "registry: list of hooks",
    """
    hooks~ = [str, lambda x: x * 3]
    def hooked~(x):
        return [hook(x) for hook in hooks~]
    hooks~.append(repr)
    """,
    "hooked~(x)",
    change=("hooks~.insert(0, float)", "hooks~[1:] = []"),
    gives="hooks~",
)
add(
    "registry: abstract class",
    """
    from abc import ABC
    class Sized~(ABC):
        pass
    class Box~:
        pass
    class Bag~:
        pass
    Sized~.register(Box~)
    """,
    "isinstance(Box~(), Sized~), issubclass(Bag~, Sized~)",
)
add(
    "registry: weak values",
    """
    import weakref
    class Node~:
        def __init__(self, name):
            self.name = name
            nodes~[name] = self
    nodes~ = weakref.WeakValueDictionary()
    kept~ = [Node~("a"), Node~("b")]
    """,
    "sorted(nodes~) if kept~ else None",
    "nodes~['a'] is kept~[0]",
    change="kept~.append(Node~('c'))",
)
add(
    "registry: weak keys and references",
    """
    import weakref
    class Owner~:
        def __init__(self, name):
            self.name = name
    owner~, tenant~ = Owner~("o"), Owner~("t")
    tenant~.of = weakref.ref(owner~)
    notes~ = weakref.WeakKeyDictionary({owner~: "first", tenant~: "second"})
    seen~ = weakref.WeakSet([tenant~])
    """,
    "tenant~.of().name",
    "notes~[owner~], notes~.get(tenant~), tenant~ in seen~, tenant~.of() is owner~",
    change=("notes~[owner~] = 'changed'", "owner~.name = 'p'", "seen~.add(owner~)"),
    gives="owner~",
)
add(
    "registry: enum keys",
    """
    import enum
    class Mode~(enum.Enum):
        FAST = "fast"
        SAFE = "safe"
    handlers~ = {Mode~.FAST: len, Mode~.SAFE: lambda text: text + "?"}
    mode~ = Mode~.FAST
    """,
    "handlers~[mode~]('abc'), mode~.name, mode~ is Mode~('fast')",
    change=("mode~ = Mode~.SAFE", "handlers~[Mode~.FAST] = str.upper"),
    names="mode~",
)

# Classes -----------------------------------------------------------------------------------------

add(
    "class: counter of instances",
    """
    class Ticket~:
        sold = 0
        waiting = []
        def __init__(self):
            type(self).sold += 1
            self.number = self.sold
    tickets~ = [Ticket~() for _ in range(3)]
    """,
    "Ticket~.sold, [one.number for one in tickets~], Ticket~.waiting",
    change=(
        "tickets~.append(Ticket~())",
        "Ticket~.waiting.append('me')",
        "Ticket~.sold = 90",
    ),
    gives="Ticket~.waiting",
)
add(
    "class: methods added later",
    """
    class Shape~:
        def __init__(self, side):
            self.side = side
    def area_of~(self):
        return self.side ** 2
    Shape~.area = area_of~
    """,
    "Shape~(x).area(), [hasattr(Shape~, name) for name in ('extra', 'double')]",
    change=(
        "Shape~.extra = property(lambda self: self.side + 1)",
        "Shape~.double = staticmethod(lambda n: n * 2)",
        "Shape~.area = lambda self: -1",
    ),
)
add(
    "class: descriptor",
    """
    class Positive~:
        def __set_name__(self, owner, name):
            self.place = "_" + name
        def __get__(self, one, owner=None):
            return self if one is None else getattr(one, self.place, 0)
        def __set__(self, one, value):
            setattr(one, self.place, max(0, value))
    class Account~:
        money = Positive~()
    account~ = Account~()
    account~.money = 8
    """,
    "account~.money, Account~.money.place, vars(account~)",
    change=("account~.money -= 100", "account~.money = 21"),
    gives="account~",
)
add(
    "class: slots",
    """
    class Point~:
        __slots__ = ("across", "up")
        def __init__(self, across, up):
            self.across, self.up = across, up
    corner~ = Point~(2, 3)
    """,
    "corner~.across, corner~.up, type(corner~) is Point~",
    change=("corner~.up = -3", "corner~ = Point~(corner~.up, 1)"),
    names="corner~",
    gives="corner~",
)
add(
    "class: number with a unit",
    """
    class Length~(float):
        unit = "m"
        def __new__(cls, value, unit=None):
            made = super().__new__(cls, value)
            made.unit = unit or cls.unit
            return made
    lengths~ = [Length~(2.5), Length~(3, "km")]
    """,
    "[(one, one.unit) for one in lengths~], Length~(x).unit",
    change=("Length~.unit = 'cm'", "lengths~.append(Length~(1))"),
    gives="lengths~",
)
add(
    "class: single instance",
    """
    class Only~:
        _one = None
        def __new__(cls):
            if cls._one is None:
                cls._one = super().__new__(cls)
                cls._one.log = []
            return cls._one
    only~ = Only~()
    """,
    "Only~() is only~, only~.log, Only~._one is only~",
    change="Only~().log.append('seen')",
    gives="only~",
)
add(
    "class: sentinel",
    """
    NOTHING~ = object()
    class Absent~:
        pass
    absent~ = Absent~()
    slots~ = {"a": NOTHING~, "b": absent~, "c": 0}
    def given~(name, default=NOTHING~):
        return slots~.get(name, NOTHING~) is not default
    """,
    "[given~(name) for name in 'abcd'], slots~['b'] is absent~",
    change=("slots~['c'] = NOTHING~", "slots~['d'] = absent~"),
    gives="absent~",
)
add(
    "class: exception of its own",
    """
    class Refused~(ValueError):
        codes = {"low": 1}
        def __init__(self, word):
            super().__init__(word)
            self.code = self.codes[word]
    def risky~(word):
        try:
            raise Refused~(word)
        except Refused~ as error:
            return error
    """,
    "risky~('low').code, risky~('low')",
    change="Refused~.codes['low'] = 5",
)
add(
    "class: answer of the task",
    """
    from typing import NamedTuple
    class Hit~(NamedTuple):
        place: int
        score: float = 0.5
        @property
        def worth(self):
            return self.place * self.score
    """,
    "Hit~(x), Hit~(x).worth",
)
add(
    "class: cached property",
    """
    import functools
    class Report~:
        def __init__(self, rows):
            self.rows = rows
        @functools.cached_property
        def total(self):
            note_load()
            return sum(self.rows)
    report~ = Report~([1, 2, 3])
    report~.total
    """,
    "report~.total",
    change="report~.rows.append(4)\nreport~.__dict__['total'] = 10",
    gives="report~.rows",
)
add(
    "class: key by identity",
    """
    class Cell~:
        pass
    cells~ = [Cell~(), Cell~()]
    values~ = {cells~[0]: "first", cells~[1]: "second"}
    """,
    "[values~.get(cell) for cell in cells~]",
    change=("cells~.reverse()", "values~[cells~[0]] = 'changed'"),
    gives="values~",
)
add(
    "class: subclass of a dict",
    """
    class Bag~(dict):
        def __missing__(self, key):
            return f"no {key}"
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return self[name]
    bag~ = Bag~(size=3)
    bag~.label = "mine"
    """,
    "bag~.size, bag~['gone'], vars(bag~), dict(bag~)",
    change=("bag~['size'] = 4", "bag~.label = 'yours'"),
    gives="bag~",
)
add(
    "class: wrapped by a decorator",
    """
    def counted~(cls):
        class Counted(cls):
            base = cls
            def name(self):
                return "counted " + super().name()
        Counted.__name__ = Counted.__qualname__ = cls.__name__
        return Counted
    @counted~
    class Job~:
        def name(self):
            return "job"
    job~ = Job~()
    """,
    "job~.name(), type(job~) is Job~, Job~.base is not Job~",
    change="Job~.name = lambda self: 'other'",
)
add(
    "class: nested and generic",
    """
    from typing import Generic, TypeVar
    T~ = TypeVar("T~")
    class Holder~(Generic[T~]):
        class Part:
            weight = 2
        def __init__(self, item):
            self.item, self.part = item, Holder~.Part()
    holder~ = Holder~[int](5)
    """,
    "holder~.item, holder~.part.weight, type(holder~.part) is Holder~.Part",
    change=("Holder~.Part.weight = 30", "holder~.item = [holder~.part]"),
    gives="holder~",
)

# Functions and decorators ------------------------------------------------------------------------

add(
    "function: counted calls",
    """
    import functools
    def counted~(func):
        @functools.wraps(func)
        def inner(*given):
            inner.calls += 1
            return func(*given)
        inner.calls = 0
        return inner
    @counted~
    def triple~(n):
        return 3 * n
    triple~(1)
    """,
    "triple~.calls, triple~.__wrapped__(x), triple~.__name__",
    change=("triple~(2)", "triple~.calls = 40"),
)
add(
    "function: memo in an attribute",
    """
    def power~(n):
        if n not in power~.memo:
            note_load()
            power~.memo[n] = n ** 2
        return power~.memo[n]
    power~.memo = {}
    for n in range(4):
        power~(n)
    """,
    "power~(x), sorted(power~.memo)",
    change=("power~(9)", "power~.memo[0] = 'zero'"),
)
add(
    "function: counter in a closure",
    """
    def counter~():
        n = 0
        def step(by=1):
            nonlocal n
            n += by
            return n
        return step
    tick~ = counter~()
    tick~()
    """,
    "tick~(0)",
    change=("tick~()", "tick~(by=5)"),
)
add(
    "function: two closures of one cell",
    """
    def account~():
        entries = []
        def put(entry):
            entries.append(entry)
        def seen():
            return entries
        return put, seen
    put~, seen~ = account~()
    put~("first")
    """,
    "seen~(), put~.__closure__[0].cell_contents is seen~()",
    change="put~('next')",
    gives="put~.__closure__[0].cell_contents",
)
add(
    "function: default that was a global",
    """
    scale~ = 3
    limits~ = [0, 10]
    def clipped~(n, scale=scale~, limits=limits~):
        return min(max(n * scale, limits[0]), limits[1])
    scale~ = 4
    """,
    "clipped~(x), scale~, clipped~.__defaults__[1] is limits~",
    change=("limits~[0] = 2", "scale~ = 8", "clipped~.__defaults__ = (5, limits~)"),
    names="scale~",
    gives="limits~",
)
add(
    "function: partial",
    """
    import functools
    def blend~(a, b, table):
        return a + b + len(table)
    table~ = {"k": 1}
    blended~ = functools.partial(blend~, 10, table=table~)
    """,
    "blended~(x), blended~.keywords['table'] is table~",
    change=("table~['more'] = 2", "blended~ = functools.partial(blend~, 100, table=table~)"),
    names="blended~",
    gives="table~",
)
add(
    "function: cached",
    """
    import functools
    @functools.lru_cache(maxsize=None)
    def slow~(n):
        return n + 7
    slow~(1)
    """,
    "slow~(x)",
    change="slow~(2)",
)
add(
    "function: contents of a cache",
    """
    import functools
    @functools.cache
    def looked_up~(n):
        return [n]
    looked_up~(1)
    looked_up~(2)
    """,
    "looked_up~.cache_info().currsize",
    differs="what a function's cache contains is not sent",
)
add(
    "function: recursion of two",
    """
    def even~(n):
        return True if n == 0 else odd~(n - 1)
    def odd~(n):
        return False if n == 0 else even~(n - 1)
    """,
    "even~(x), odd~(x)",
    change="def odd~(n):\n    return 'changed'",
    names="odd~",
)
add(
    "function: context manager",
    """
    import contextlib
    depth~ = []
    @contextlib.contextmanager
    def deeper~(name):
        depth~.append(name)
        try:
            yield list(depth~)
        finally:
            depth~.pop()
    with deeper~("top") as inside~:
        pass
    def nested~(name):
        with deeper~(name) as found:
            return found
    """,
    "inside~, nested~(x), depth~",
    change="depth~.append('base')",
    gives="depth~",
)
add(
    "function: made by exec",
    """
    space~ = {"k": 2}
    exec("def made~(n):\\n    return n * k", space~)
    made~ = space~["made~"]
    """,
    "made~(x)",
    change="space~['k'] = 9",
)
add(
    "function: helper that evaluates",
    """
    unit~ = 6
    def calculated~(text):
        return eval(text, {"unit": unit~})
    """,
    "calculated~('unit * 2')",
    change="unit~ += 1",
    names="unit~",
)
add(
    "function: names by globals()",
    """
    for letter in "ab":
        globals()[f"named_{letter}~"] = [letter]
    """,
    "named_a~, named_b~",
    change="globals()['named_a~'].append(1)",
)
add(
    "function: generator function",
    """
    pieces~ = ["p", "q"]
    def walked~(n):
        for piece in pieces~:
            yield piece * n
    """,
    "list(walked~(x))",
    change="pieces~.append('r')",
    gives="pieces~",
)
add(
    "function: made under the guard",
    "base~ = 10",
    "shifted~(x)",
    "local_class~(x).n, local_class~.__name__",
    inside="""
        offset~ = 5
        def shifted~(n):
            return n + offset~ + base~
        class local_class~:
            def __init__(self, n):
                self.n = n * offset~
        """,
    change="base~ = 90",
    names="base~",
)

# torch -------------------------------------------------------------------------------------------

add(
    "torch: network and optimizer",
    """
    import torch
    net~ = torch.nn.Linear(3, 1)
    optim~ = torch.optim.SGD(net~.parameters(), lr=0.25)
    def trained~(n):
        before = net~.weight.detach().clone()
        optim~.zero_grad()
        with torch.enable_grad():
            net~(torch.ones(2, 3).to(before)).sum().backward()
        optim~.step()
        return bool((before != net~.weight).all())
    """,
    "optim~.param_groups[0]['params'][0] is net~.weight, optim~.param_groups[0]['lr']",
    "trained~(x)",
    change=("optim~.param_groups[0]['lr'] = 0.5", "net~.requires_grad_(True)"),
)
add(
    "torch: weights changed in place",
    """
    import torch
    def load_net~():
        note_load()
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    model~ = load_net~()
    torch.nn.init.constant_(model~[0].weight, 0.5)
    model~.eval()
    """,
    "model~[0].weight, model~.training, model~(torch.ones(2).to(model~[0].weight)).detach()",
    change=(
        "with torch.no_grad():\n    model~[0].weight.add_(1)",
        "model~.train()",
        "model~[0].bias.data.fill_(3)",
        "model~.load_state_dict({k: v * 0 for k, v in model~.state_dict().items()})",
    ),
    gives="model~",
)
add(
    "torch: tied weights",
    """
    import torch
    class Tied~(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.outer = torch.nn.Linear(2, 2)
            self.outer.weight = self.inner.weight
            self.register_buffer("steps", torch.zeros(1))
    tied~ = Tied~()
    """,
    "tied~.outer.weight is tied~.inner.weight, tied~.steps, type(tied~) is Tied~",
    change=("tied~.steps += 1", "tied~.name = 'b'"),
    gives="tied~",
)
add(
    "torch: tensor and its view",
    """
    import torch
    def load_batch~():
        note_load()
        return torch.arange(8.0)
    batch~ = load_batch~()
    head~ = batch~[:2]
    head~ += 0.5
    """,
    "batch~, head~, batch~.data_ptr() == head~.data_ptr()",
    change=("head~.mul_(2)", "batch~[5] = -1"),
    gives="batch~",
)
add(
    "torch: scheduler",
    """
    import torch
    weight~ = torch.nn.Parameter(torch.ones(2))
    adam~ = torch.optim.Adam([weight~], lr=0.1)
    plan~ = torch.optim.lr_scheduler.StepLR(adam~, step_size=1, gamma=0.5)
    """,
    "plan~.optimizer is adam~, adam~.param_groups[0]['params'][0] is weight~",
    "plan~.get_last_lr()",
    change="weight~.grad = torch.ones(2)\nadam~.step()\nplan~.step()",
)
add(
    "torch: dataset",
    """
    import torch
    class Squares~(torch.utils.data.Dataset):
        scale = 1
        def __len__(self):
            return 4
        def __getitem__(self, at):
            return torch.tensor(at * at * self.scale)
    squares~ = Squares~()
    loader~ = torch.utils.data.DataLoader(squares~, batch_size=2)
    """,
    "list(loader~), loader~.dataset is squares~",
    change="Squares~.scale = 3",
)
add(
    "torch: generator",
    """
    import torch
    source~ = torch.Generator().manual_seed(5)
    noise~ = torch.rand(3, generator=source~)
    """,
    "noise~, source~.device.type",
    change="noise~ = torch.rand(2, generator=source~)",
    names="noise~",
)
add(
    "torch: default dtype",
    "import torch",
    "str(torch.ones(1).dtype)",
    change="torch.set_default_dtype(torch.float64)",
    once=True,
)
add(
    "torch: no gradients",
    "import torch\ntorch.set_grad_enabled(False)",
    "torch.is_grad_enabled()",
    change="torch.set_grad_enabled(True)",
    once=True,
)
add(
    "torch: deterministic",
    "import torch\ntorch.use_deterministic_algorithms(True)",
    "torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()",
    change="torch.set_float32_matmul_precision('high')",
    once=True,
)
add(
    "torch: print options",
    "import torch\ntorch.set_printoptions(precision=2)",
    "str(torch.tensor([1.23456]))",
    once=True,
)

# Settings ----------------------------------------------------------------------------------------

add(
    "setting: environment",
    'os.environ["PLACE~"] = "home"\nos.environ.setdefault("KIND~", "a")',
    "[os.environ.get(name) for name in ('PLACE~', 'KIND~', 'MORE~')]",
    change=("os.environ['MORE~'] = '1'", "os.environ.pop('KIND~')", "os.environ['PLACE~'] = 'b'"),
)
add(
    "setting: decimal places",
    "import decimal\ndecimal.getcontext().prec = 9",
    "str(decimal.Decimal(1) / 7)",
    change=("decimal.getcontext().prec = 12", "decimal.getcontext().rounding = 'ROUND_DOWN'"),
    once=True,
)
add(
    "setting: numbers of numpy",
    "import numpy as np\nold~ = np.seterr(divide='ignore', over='raise')",
    "np.geterr()['divide'], np.geterr()['over'], sorted(old~)",
    change="np.seterr(under='warn')",
    once=True,
)
add(
    "setting: how numpy prints",
    "import numpy as np\nnp.set_printoptions(precision=2, suppress=True)",
    "str(np.array([1.23456, 7e-9]))",
    change="np.set_printoptions(precision=4)",
    once=True,
)
add(
    "setting: warnings",
    "import warnings\nwarnings.filterwarnings('error', category=UnicodeWarning)",
    "[one[0] for one in warnings.filters if one[2] in (UnicodeWarning, BytesWarning)]",
    change=("warnings.simplefilter('ignore', BytesWarning)",),
)
add(
    "setting: warnings of the program",
    """
    import warnings
    class Stale~(UserWarning):
        pass
    warnings.simplefilter("error", Stale~)
    def warned~():
        try:
            warnings.warn("old", Stale~)
        except Stale~:
            return "raised"
        return "passed"
    """,
    "warned~()",
    change="warnings.simplefilter('ignore', Stale~)",
)
add(
    "setting: arguments of the program",
    "import argparse\nimport sys\nsys.argv = ['train', '--deep', '3']",
    "sys.argv",
    change=("sys.argv.append('--wide')", "sys.argv = sys.argv[:1]"),
    once=True,
)
add(
    "setting: recursion",
    "import sys\nsys.setrecursionlimit(3000)",
    "sys.getrecursionlimit()",
    change="sys.setrecursionlimit(4000)",
    once=True,
)
add(
    "setting: digits",
    "import sys\nsys.set_int_max_str_digits(9000)",
    "sys.get_int_max_str_digits()",
    change="sys.set_int_max_str_digits(8000)",
    once=True,
)
add(
    "setting: mask of files",
    "mask~ = os.umask(0o027)",
    "oct(os.umask(os.umask(0o077)))[-3:]",
    once=True,
)
add(
    "setting: folder",
    """
    deep~ = os.path.abspath("deep~")
    os.makedirs(os.path.join(deep~, "two"))
    """,
    "os.path.basename(os.getcwd())",
    inside="os.chdir(deep~)",
    change="os.chdir(os.path.join(deep~, 'two'))",
    places=("guard", "between"),
    once=True,
    modes=("script", "bare"),
)
add(
    "setting: time zone",
    "import time\nos.environ['TZ'] = 'Asia/Tokyo'\ntime.tzset()",
    "time.localtime(0).tm_hour, time.tzname[0]",
    change="os.environ['TZ'] = 'UTC'\ntime.tzset()",
    once=True,
)
add(
    "setting: patience of sockets",
    "import socket\nsocket.setdefaulttimeout(40)",
    "socket.getdefaulttimeout()",
    change="socket.setdefaulttimeout(50)",
    once=True,
)
add(
    "setting: locale",
    "import locale\nlocale.setlocale(locale.LC_ALL, 'C')",
    "locale.setlocale(locale.LC_NUMERIC), locale.localeconv()['decimal_point']",
    once=True,
)
add(
    "setting: made in every worker",
    """
    import mimetypes
    import xpool
    xpool.everywhere(mimetypes.add_type, "text/x-kind~", ".kind~")
    """,
    "mimetypes.guess_type('a.kind~')[0]",
)

# Loggers -----------------------------------------------------------------------------------------

add(
    "logger: level",
    "log~ = logging.getLogger('app.part~')\nlog~.setLevel(logging.ERROR)",
    "log~.level, log~ is logging.getLogger('app.part~'), log~.isEnabledFor(20)",
    change=("log~.setLevel(15)", "log~.propagate = False", "log~.disabled = True"),
    gives="log~",
)
add(
    "logger: set by a function",
    """
    def quiet~(name):
        found = logging.getLogger(name)
        found.setLevel(33)
        return found
    quiet_log~ = quiet~("lib~.deep")
    """,
    "quiet_log~.level, logging.getLogger('lib~.deep.more').getEffectiveLevel()",
    change="logging.getLogger('lib~').setLevel(5)\nquiet_log~.setLevel(0)",
)
add(
    "logger: of a module",
    "import own_noise~",
    "own_noise~.log.disabled, own_noise~.log.propagate, own_noise~.log.isEnabledFor(40)",
    change=("own_noise~.log.disabled = True", "own_noise~.log.propagate = False"),
    files={"own_noise~.py": "import logging\nlog = logging.getLogger(__name__)\n"},
)
add(
    "logger: of a class of its own",
    """
    class Verbose~(logging.Logger):
        prefix = ">"
        def note(self, text):
            return self.prefix + text
    before~ = logging.getLoggerClass()
    logging.setLoggerClass(Verbose~)
    verbose~ = logging.getLogger("verbose~")
    logging.setLoggerClass(before~)
    """,
    "verbose~.note('a'), type(verbose~) is Verbose~, verbose~ is logging.getLogger('verbose~')",
    change=("Verbose~.prefix = '!'", "verbose~.setLevel(35)"),
)
add(
    "logger: in an object",
    """
    class Service~:
        def __init__(self):
            self.log = logging.getLogger("service~")
            self.adapted = logging.LoggerAdapter(self.log, {"run": 3})
    service~ = Service~()
    service~.log.setLevel(25)
    """,
    "service~.log.level, service~.adapted.extra, service~.adapted.logger is service~.log",
    change=("service~.adapted.extra['more'] = 1", "service~.log.setLevel(7)"),
    gives="service~",
)
add(
    "logger: basic setup",
    "logging.basicConfig(level=logging.WARNING + 2)",
    "logging.getLogger().level",
    change="logging.getLogger().setLevel(31)",
    once=True,
)
add(
    "logger: all below a level",
    "logging.disable(logging.DEBUG)",
    "logging.root.manager.disable",
    change="logging.disable(logging.INFO)",
    once=True,
)
add(
    "logger: handlers",
    """
    handled~ = logging.getLogger("handled~")
    handled~.addHandler(logging.NullHandler())
    """,
    "len(handled~.handlers)",
    differs="handlers of loggers are not sent",
)

# Values of this run ------------------------------------------------------------------------------

add(
    "random: id of the run",
    "import uuid\nrun~ = uuid.uuid4()\nprefix~ = f'run-{run~.hex[:6]}'",
    "run~, prefix~",
    change="run~ = uuid.uuid4()",
    names="run~",
    gives="run~",
)
add(
    "random: drawn at the top",
    "import random\ndraw~ = [random.random() for _ in range(2)]",
    "draw~",
    change="draw~.append(random.random())",
    gives="draw~",
)
add(
    "random: generator object",
    """
    import random
    dice~ = random.Random(4)
    class Player~:
        def __init__(self, dice):
            self.dice = dice
    players~ = [Player~(dice~), Player~(dice~)]
    dice~.random()
    """,
    "players~[0].dice is dice~ is players~[1].dice",
    change=("dice~.random()", "players~[0].dice.seed(9)"),
    gives="dice~",
)
add(
    "random: of the system",
    "import random\nsystem~ = random.SystemRandom()",
    "0 <= system~.random() < 1",
)
add(
    "random: generator of numpy",
    "import numpy as np\nrng~ = np.random.default_rng(3)\nfirst~ = rng~.normal(size=2)",
    "first~, type(rng~.bit_generator).__name__",
    change="first~ = rng~.normal(size=1)",
    names="first~",
    gives="rng~",
)
add(
    "random: start and process",
    "import time\nstarted~ = time.time()\nmain_pid~ = os.getpid()",
    "started~, main_pid~, os.getpid() == main_pid~",
    change="started~ = time.monotonic()",
    names="started~",
)
add(
    "random: id as a key",
    "thing~ = ['thing']\nby_id~ = {id(thing~): 'found'}",
    "by_id~.get(id(thing~))",
    differs="the id of an object is another one in a worker",
)

# Files, locks and connections --------------------------------------------------------------------

add(
    "held: folder made anew",
    """
    import shutil
    out~ = os.path.abspath("out~")
    shutil.rmtree(out~, ignore_errors=True)
    os.makedirs(out~)
    """,
    "os.listdir(out~)",
    inside="with open(os.path.join(out~, 'rows'), 'w') as rows~:\n    rows~.write('one')",
    after="os.path.getsize(os.path.join(out~, 'rows')) == 3",
)
add(
    "held: log file begun anew",
    """
    begun~ = open(os.path.abspath("begun~.log"), "w")
    begun~.write("begin\\n")
    begun~.close()
    """,
    "begun~.closed",
    inside="with open(begun~.name, 'a') as more~:\n    more~.write('end')",
    after="open(begun~.name).read() == 'begin\\nend'",
    unsent="a file, also a closed one",
)
add(
    "held: file open for reading",
    "lines~ = open('lines~.txt')\ntitle~ = lines~.readline()",
    "title~",
    "lines~.readline()",
    files={"lines~.txt": "title\none\ntwo\nthree\n"},
    unsent="an open file",
)
add(
    "held: file open for writing",
    "sink~ = open(os.path.abspath('sink~.txt'), 'w')\nsink~.write('head')\nsink~.flush()",
    "sink~.name",
    after="open(sink~.name).read() == 'head'",
    unsent="an open file",
)
add(
    "held: lock in an object",
    """
    import threading
    class Shelf~:
        def __init__(self):
            self.lock = threading.Lock()
            self.books = []
        def put(self, book):
            with self.lock:
                self.books.append(book)
    shelf~ = Shelf~()
    shelf~.put("a")
    """,
    "shelf~.books, shelf~.lock.acquire(blocking=False) and shelf~.lock.release()",
    change=("shelf~.put('b')", "shelf~ = Shelf~()"),
    names="shelf~",
    gives="shelf~.books",
)
add(
    "held: lock that is held",
    "import threading\ngate~ = threading.Lock()\ngate~.acquire()",
    "gate~.locked()",
    change="gate~.release() if gate~.locked() else gate~.acquire()",
    unsent="a lock",
)
add(
    "held: condition and event",
    """
    import threading
    ready~ = threading.Event()
    ready~.set()
    changed~ = threading.Condition()
    """,
    "ready~.is_set()",
    "changed~.acquire(blocking=False)",
    change="ready~.clear()",
    unsent="an event has a lock",
)
add(
    "held: values of a thread",
    "import threading\nlocal~ = threading.local()\nlocal~.name = 'main'",
    "getattr(local~, 'name', None)",
    unsent="values of a thread",
    differs="values of a thread arrive new",
)
add(
    "held: queue with an item",
    "import queue\ninbox~ = queue.Queue()\ninbox~.put('letter')",
    "inbox~.qsize(), list(inbox~.queue)",
    change="inbox~.put('card')",
    unsent="a queue has locks",
)
add(
    "held: generator",
    "numbers~ = (n * n for n in range(20))\nfirst~ = next(numbers~)",
    "first~",
    "next(numbers~)",
    change="first~ = next(numbers~)",
    names="first~",
    unsent="a generator",
)
add(
    "held: place of an iterator",
    "import copy\ncursor~ = iter(['a', 'b', 'c', 'd'])\nnext(cursor~)",
    "list(copy.copy(cursor~))",
    change="next(cursor~)",
)
add(
    "held: count and cycle",
    "import itertools\nserial~ = itertools.count(5)\nnext(serial~)",
    "repr(serial~)",
    change="next(serial~)",
)
add(
    "held: database connection",
    """
    import sqlite3
    base~ = sqlite3.connect(":memory:", check_same_thread=False)
    base~.execute("create table t (n int)")
    """,
    "base~.execute('select count(*) from t').fetchone()[0]",
    change="base~.execute('insert into t values (1)')",
    unsent="a connection",
)
add(
    "held: connection at first use",
    """
    import sqlite3
    link~ = None
    def linked~():
        global link~
        if link~ is None:
            link~ = sqlite3.connect(":memory:", check_same_thread=False)
        return link~
    """,
    "linked~().execute('select 5').fetchone()[0]",
    change="linked~()",
)
add(
    "held: connection of a module",
    "import own_base~",
    "own_base~.fetched()",
    change="own_base~.fetched()",
    files={
        "own_base~.py": """
            import sqlite3
            _link = None
            def fetched():
                global _link
                if _link is None:
                    _link = sqlite3.connect(":memory:", check_same_thread=False)
                return _link.execute("select 6").fetchone()[0]
            """
    },
)
add(
    "held: threads",
    """
    from concurrent.futures import ThreadPoolExecutor
    threads~ = ThreadPoolExecutor(1)
    lengths~ = list(threads~.map(len, ["a", "bb"]))
    threads~.shutdown()
    """,
    "lengths~",
    "threads~._max_workers",
    change="lengths~.append(3)",
    gives="lengths~",
    unsent="an executor",
)
add(
    "held: shared number",
    """
    import multiprocessing
    shared~ = multiprocessing.get_context("fork").Value("i", 4)
    """,
    "shared~.value",
    change="shared~.value += 1",
    unsent="it is shared with children that inherit it",
)
add(
    "held: digest and match",
    """
    import hashlib
    import re
    digest~ = hashlib.sha256(b"a")
    hit~ = re.match(r"(\\w+)", "word and more")
    stem~ = hit~.group(1)
    """,
    "stem~",
    "digest~.hexdigest()[:6]",
    "hit~.start()",
    change="digest~.update(b'b')",
    unsent="a digest, a match",
)
add(
    "held: socket",
    """
    import atexit
    import socket
    near~, far~ = socket.socketpair()
    atexit.register(near~.close)
    atexit.register(far~.close)
    """,
    "near~.fileno() >= 0",
    unsent="a socket",
)
add(
    "held: buffer and text",
    "import io\ntext~ = io.StringIO()\nprint('one', file=text~)\nraw~ = io.BytesIO(b'ab')",
    "text~.getvalue(), text~.tell(), raw~.getvalue()",
    change=("text~.write('two')", "raw~.seek(1)\nraw~.write(b'x')"),
    gives="text~",
)
add(
    "held: variable of a context",
    "from contextvars import ContextVar\nuser~ = ContextVar('user~', default='none')",
    "user~.get(), user~.name",
)
add(
    "held: view of memory",
    "import numpy as np\nmemory~ = memoryview(bytearray(b'abc'))",
    "bytes(memory~)",
    change="memory~[0] = 90",
    unsent="a view of memory",
)

# Imports -----------------------------------------------------------------------------------------

add(
    "import: codec that it registers",
    "import own_codec~",
    "'abc'.encode('turned~')",
    files={
        "own_codec~.py": """
            import codecs
            def _encode(text, errors="strict"):
                return text[::-1].encode(), len(text)
            def _search(name):
                return codecs.CodecInfo(_encode, None, name=name) if name == "turned~" else None
            codecs.register(_search)
            """
    },
)
add(
    "import: types that it registers",
    "import mimetypes\nimport own_types~  # registers",
    "mimetypes.guess_type('a.own~')[0]",
    files={"own_types~.py": "import mimetypes\nmimetypes.add_type('text/x-own~', '.own~')\n"},
)
add(
    "import: entries of another module",
    "import own_menu~\nimport own_dishes~  # fills the menu",
    "own_menu~.dishes(), len(own_menu~.MENU)",
    change="own_menu~.MENU['water'] = 0",
    gives="own_menu~.MENU",
    files={
        "own_menu~.py": "MENU = {}\ndef dishes():\n    return sorted(MENU)\n",
        "own_dishes~.py": """
            try:
                from own_menu~ import MENU
            except ImportError:
                from .own_menu~ import MENU
            MENU["soup"] = 4
            """,
    },
)
add(
    "import: optional",
    """
    try:
        import no_such_package~ as fast~
    except ImportError:
        fast~ = None
    try:
        import json as coder~
    except ImportError:
        coder~ = None
    """,
    "fast~ is None, coder~.dumps([x])",
    change="fast~ = coder~",
    names="fast~",
)
add(
    "import: in a function",
    """
    def lazy~(n):
        import own_late~
        return own_late~.answer(n)
    """,
    "lazy~(x)",
    files={"own_late~.py": "BASE = 70\ndef answer(n):\n    return BASE + n\n"},
    modes=("script", "bare", "stdin", "runpy"),
)
add(
    "import: submodule in a function",
    """
    def deep~(n):
        from own_shed~ import tools
        import own_shed~.parts.bolts
        return tools.SIZE * n, own_shed~.parts.bolts.COUNT
    """,
    "deep~(x)",
    change=(
        "import own_shed~.tools\nown_shed~.tools.SIZE = 9",
        "import own_shed~.parts.bolts as bolts~\nbolts~.COUNT = 8",
    ),
    files={
        "own_shed~/__init__.py": "",
        "own_shed~/tools.py": "SIZE = 2\n",
        "own_shed~/parts/__init__.py": "",
        "own_shed~/parts/bolts.py": "COUNT = 3\n",
    },
    modes=("script", "bare", "stdin", "runpy"),
)
add(
    "import: names by the modules of the process",
    """
    import inspect
    import sys
    grain~ = 2
    def by_name_a~(n):
        return n * grain~
    def by_name_b~(n):
        return n + grain~
    def chosen~(name):
        return getattr(sys.modules[__name__], name)
    def all~(n):
        members = inspect.getmembers(sys.modules["__main__"], inspect.isfunction)
        return [one(n) for name, one in members if name.startswith("by_name_")]
    """,
    "chosen~('by_name_b~')(x), len(all~(x)) >= 2",
    change=("grain~ = 40", "def by_name_b~(n):\n    return 'changed'"),
    names="grain~ by_name_b~",
)
add(
    "import: source of a class",
    """
    import inspect
    class Shown~:
        size = 3
    """,
    "inspect.getsource(Shown~)",
    modes=("script", "bare", "runpy"),
)
add(
    "import: added to the built-in names",
    """
    import builtins
    builtins.loud~ = True
    builtins.shout~ = lambda text: text.upper() if loud~ else text
    """,
    "shout~('a'), loud~",
    change=("builtins.loud~ = False", "setattr(builtins, 'shout~', str)"),
)
add(
    "import: module by another name",
    "import os.path as paths~\nimport collections.abc\npaths_too~ = paths~",
    "paths~.join('a', 'b'), paths_too~ is paths~, collections.abc.Sized.__name__",
)
add(
    "import: the script itself",
    "import sys\nitself~ = sys.modules[__name__]\nweight~ = [2]",
    "itself~.weight~, itself~.weight~ is weight~",
    change=("weight~ = [3]", "itself~.weight~.append(4)"),
    names="weight~",
)

# Links: a statement that uses the object of another, ``@`` ---------------------------------------

LINKS = {
    one.name: one
    for one in (
        Statement("link: list of two", "twice~ = [@, @]", ("twice~[0] is twice~[1] is @",)),
        Statement(
            "link: attribute of a class", "class Has~:\n    part = @", ("Has~.part is @",),
        ),
        Statement(
            "link: default", "def using~(part=@):\n    return part", ("using~() is @",),
        ),
        Statement(
            "link: closure",
            "def of~(part):\n    return lambda: part\nreader~ = of~(@)",
            ("reader~() is @",),
        ),
        Statement(
            "link: kept by a module",
            "import own_keep~\nown_keep~.keep(@)",
            ("own_keep~.kept() is @",),
            files={
                "own_keep~.py": "_kept = []\ndef keep(one):\n    _kept.append(one)\n"
                "def kept():\n    return _kept[-1]\n"
            },
        ),
        Statement(
            "link: second name", "import copy\nsame~ = @\nother~ = copy.copy(@)", ("same~ is @",),
        ),
        Statement(
            "link: record",
            "from types import SimpleNamespace\nrecord~ = SimpleNamespace(of=@)",
            ("record~.of is @", "record~.copies"),
            ("record~.copies = [record~.of]",),
        ),
        Statement(
            "link: partial",
            "import functools\nshown~ = functools.partial(id, @)",
            ("shown~.args[0] is @",),
        ),
    )
}  # fmt: skip
LINKS["link: record"] = replace(
    LINKS["link: record"],
    top="from types import SimpleNamespace\nrecord~ = SimpleNamespace(of=@, copies=None)",
    probes=("record~.of is @", "record~.copies is None or record~.copies[0] is @"),
)


# A script ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A statement in a script, with its changes, as (index, place, whether in a thread)."""

    statement: Statement
    number: int
    changes: tuple[tuple[int, str, bool], ...] = ()
    forms: tuple[str, ...] = ()
    other: int = 0  # the part whose object a link uses

    def told(self, text: str, others: dict[int, Part]) -> str:
        """Return a text of the statement with its numbers."""
        if self.other:
            gives = others[self.other].statement.gives
            text = text.replace("@", gives.replace("~", str(self.other)))
        return text.replace("~", str(self.number))


@dataclass(frozen=True)
class Script:
    """A script: its parts, and how it is run."""

    mode: str
    parts: tuple[Part, ...]
    in_main: bool = False  # its main part is a function
    early: bool = False  # the pool is made before the changes under the guard
    first: bool = False  # the probes are defined before the statements

    @property
    def needs_torch(self) -> bool:
        """Whether a statement needs torch."""
        return any(part.statement.kind == "torch" for part in self.parts)

    def files(self) -> dict[str, str]:
        """Return the files of the program but for the script."""
        found = {}
        folder = "app/" if self.mode == "module" else ""
        for part in self.parts:
            for path, text in part.statement.files.items():
                path, text = (one.replace("~", str(part.number)) for one in (path, text))
                found[folder * path.startswith("own_") + path] = text.lstrip("\n")
        if folder:
            found["app/__init__.py"] = ""
        return found

    def keys(self) -> dict[str, Part]:
        """Return the part of each probe's key."""
        return {
            f"{part.number}.{at}": part
            for part in self.parts
            for at in range(len(part.statement.probes))
        }

    def text(self) -> str:
        """Return the script."""
        return _Text(self).whole()


class _Text:
    """The text of a script, as it is put together."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.others = {part.number: part for part in script.parts}
        self.imports = ["import logging", "import os", "import threading"]
        self.top: list[str] = []
        self.defined: list[str] = []
        self.main: list[str] = []
        self.asks: list[str] = []
        self.between: list[str] = []

    def whole(self) -> str:
        for part in self.script.parts:
            self._statement(part)
            for at in range(len(part.statement.probes)):
                self._probe(part, at)
        tops = [*self.defined, *self.top] if self.script.first else [*self.top, *self.defined]
        lines = [*self.imports, "from xpool import Pool", _NOTE, *tops, *self._main()]
        return "\n".join(lines) + "\n"

    def _statement(self, part: Part) -> None:
        said = part.statement
        lines = part.told(said.top, self.others).split("\n")
        while lines and re.match(r"(import|from) ", lines[0]):
            line = _of_package(lines.pop(0)) if self.script.mode == "module" else lines.pop(0)
            if line not in self.imports:
                self.imports.append(line)
        self.top += ["\n".join(lines)] if lines else []
        if said.inside:
            inside = textwrap.dedent(said.inside).strip("\n")
            self.main.append(part.told(inside, self.others))
        for at, place, threaded in part.changes:
            text = part.told(said.changes[at], self.others)
            if threaded:
                text = self._in_thread(part, text, f"change_{part.number}_{at}")
            {"top": self.top, "guard": self.main, "between": self.between}[place].append(text)

    def _in_thread(self, part: Part, text: str, name: str) -> str:
        names = part.told(part.statement.names, self.others).split()
        declared = [f"    global {', '.join(names)}"] if names else []
        return "\n".join(
            [
                f"def {name}():",
                *declared,
                textwrap.indent(text, "    "),
                f"thread_{name} = threading.Thread(target={name})",
                f"thread_{name}.start()",
                f"thread_{name}.join()",
            ]
        )

    def _probe(self, part: Part, at: int) -> None:
        key, name = f"{part.number}.{at}", f"ask_{part.number}_{at}"
        text = part.told(part.statement.probes[at], self.others)
        form = part.forms[at] if part.forms else "def"
        if part.statement.inside:
            form = "lambda"  # it reads names of the main part
        if form == "lambda":
            self.asks.append(f'referee("{key}", lambda x: ({text}))')
            return
        if form == "method":
            self.defined.append(f"class Ask_{name}:\n    def ask(self, x):\n        return {text}")
            self.asks.append(f'referee("{key}", Ask_{name}().ask)')
            return
        lines = f"def {name}(x):\n    return {text}"
        if form == "helper":
            lines = lines.replace(name, f"of_{name}") + f"\ndef {name}(x):\n    return of_{name}(x)"
        self.defined.append(lines)
        self.asks.append(f'referee("{key}", {name})')

    def _main(self) -> list[str]:
        referee = "referee = Referee(pool)"
        before, after = ([], self.main) if self.script.early else (self.main, [])
        inner = [referee, *after, *self.asks]
        inner += [*self.between, "referee.again()", *self.asks]
        for part in self.script.parts:
            if part.statement.after:
                expression = part.told(part.statement.after, self.others)
                inner.append(f'referee.after("{part.number}.after", lambda: {expression})')
        body = [
            "from differential.scripts_generator import Referee",
            *before,
            "with Pool(2) as pool:",
            *(textwrap.indent(one, "    ") for one in inner),
        ]
        if self.script.mode == "bare":
            return body
        body = [textwrap.indent(one, "    ") for one in body]
        if not self.script.in_main:
            return ['if __name__ == "__main__":', *body]
        names = {
            name
            for part in self.script.parts
            for name in part.told(part.statement.names, self.others).split()
            if any(not threaded and place != "top" for _, place, threaded in part.changes)
        }
        declared = [f"    global {', '.join(sorted(names))}"] if names else []
        guard = ['if __name__ == "__main__":', "    main()"]
        return ["def main():", *declared, *body, *guard]


_NOTE = """\
def note_load():
    with open(os.environ["LOADS"], "a") as loads:
        loads.write(f"{os.getpid()}\\n")"""


def _of_package(line: str) -> str:
    """Return an import of a module of the program as one from the package `app`."""
    line = re.sub(r"^from (own_)", r"from app.\1", line)
    return re.sub(r"^import (own_\w+)", r"from app import \1", line)


def script(seed: int) -> Script:
    """Return the script of a seed."""
    draw = random.Random(f"script {seed}")
    mode = draw.choices(MODES, (5, 2, 2, 3, 1))[0]
    torch = draw.random() < 0.12
    known = [
        one for one in STATEMENTS.values() if mode in one.modes and (torch or one.kind != "torch")
    ]
    weights = [4 if one.kind == "torch" else 1 for one in known]
    parts: list[Part] = []
    taken: set[str] = set()
    while len(parts) < draw.randint(7, 9):
        one = draw.choices(known, weights)[0]
        if one.name in taken:
            continue
        taken.add(one.name)
        parts.append(_drawn(draw, one, len(parts) + 1))
    givers = [part for part in parts if part.statement.gives]
    for _ in range(draw.randint(0, 3)):
        if givers:
            giver = draw.choice(givers)
            link = draw.choice(list(LINKS.values()))
            part = replace(_drawn(draw, link, len(parts) + 1), other=giver.number)
            # Anywhere behind what it uses.
            parts.insert(draw.randint(parts.index(giver) + 1, len(parts)), part)
    return Script(mode, tuple(parts), draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.3)


def _drawn(draw: random.Random, one: Statement, number: int) -> Part:
    """Return a part with changes and forms at random."""
    changes = []
    most = min(len(one.changes), draw.choice((0, 1, 1, 2)))
    for at in draw.sample(range(len(one.changes)), most):
        place = draw.choice((*one.places, "between"))
        changes.append((at, place, draw.random() < 0.2 and not one.once))
    forms = draw.choices(("def", "lambda", "method", "helper"), (6, 1, 1, 2), k=len(one.probes))
    order = {"top": 0, "guard": 1, "between": 2}
    changes.sort(key=lambda change: order[change[1]])
    return Part(one, number, tuple(changes), tuple(forms))


def alone(name: str) -> Iterator[Script]:
    """Yield scripts of one statement, with each of its changes at each place."""
    one = STATEMENTS[name]
    for mode in one.modes:
        if mode in ("script", "module", "stdin"):
            yield Script(mode, (Part(one, 1),))
    for at in range(len(one.changes)):
        for place in one.places:
            for threaded in (False, True) if not one.once else (False,):
                if not (place == "top" and threaded) and "script" in one.modes:
                    part = Part(one, 1, ((at, place, threaded),))
                    yield Script("script", (part,), place == "guard")


# In the script -----------------------------------------------------------------------------------

_probe: Callable[[Any], Any] = repr  # what a forked worker evaluates


def _ask(item: int) -> Any:
    return _probe(item)


class Referee:
    """Compares the answers of a pool with those of workers that are forked right before."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.round = 1
        self._fork = multiprocessing.get_context("fork")

    def __call__(self, key: str, probe: Callable[[Any], Any]) -> None:
        """Ask workers of both kinds, and print what they say."""
        global _probe
        _probe = probe
        with self._fork.Pool(1) as forked:
            wanted, _ = _answer(forked, _ask)
        found, error = _answer(self.pool, probe)
        self._print(key, wanted, found, error)

    def again(self) -> None:
        """Begin the second round."""
        self.round = 2

    def after(self, key: str, check: Callable[[], bool]) -> None:
        """Print whether a check of the program holds."""
        try:
            self._print(key, "True", repr(check()), "")
        except Exception as error:
            self._print(key, "True", repr(error), traceback.format_exc())

    def _print(self, key: str, *told: str) -> None:
        sys.stdout.flush()
        text = json.dumps([key, self.round, os.getpid(), *told])
        os.write(1, f"\n{_MARK}{text}\n".encode())


_MARK = "the referee says "
_RAISED = "raised "


def _answer(pool: Any, func: Callable[[Any], Any]) -> tuple[str, str]:
    """Return the answers to three items in canonical form, and the text of an error."""
    try:
        return json.dumps(canonical(pool.map(func, range(3), 1))), ""
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        notes = "".join(map(str, getattr(error, "__notes__", ())))
        return f"{_RAISED}{type(error).__name__}: {error}", text + notes


def canonical(value: Any) -> Any:
    """Return what JSON can write, without addresses; of an object its class and attributes."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return repr(value)
    if type(value) in (list, tuple):
        return [canonical(one) for one in value]
    if type(value) is dict:
        return {f"{canonical(key)}": canonical(one) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(canonical(one)) for one in value)
    if hasattr(value, "tolist"):
        return ["array", str(getattr(value, "dtype", "")), canonical(value.tolist())]
    cls = type(value)
    home = sys.modules.get(cls.__module__)
    same = home is not None and getattr(home, cls.__qualname__, None) is cls
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return [cls.__qualname__, same, text, canonical(dict(getattr(value, "__dict__", {})))]


# Running -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What became of a probe: `kind` is one of `KINDS`."""

    kind: str
    key: str
    round: int
    name: str
    wanted: str = ""
    found: str = ""
    error: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether xpool, or this generator, is wrong."""
        return KINDS[self.kind]


KINDS = {
    "same": False,
    "refused by name": False,
    "documented": False,
    "different in silence": True,
    "confusing error": True,
    "refused without need": True,
    "loaded in a worker": True,
    "hang": True,
    "the script fails": True,
    "the fork fails": True,
}
"""The verdicts, and whether they are faults."""


def judged(script: Script, folder: Path) -> tuple[list[Verdict], str]:
    """Run a script in an empty folder.  Return its verdicts, and its output."""
    code, out, err = _run(script, folder)
    keys, rows = script.keys(), []
    numbers = {str(part.number): part for part in script.parts}
    pid = 0
    for line in out.splitlines():
        if line.startswith(_MARK):
            key, turn, pid, wanted, found, error = json.loads(line[len(_MARK) :])
            part = numbers[key.split(".")[0]]
            kind = _kind(part, wanted, found, error, err)
            rows.append(Verdict(kind, key, turn, part.statement.name, wanted, found, error))
    if code is None:
        rows.append(Verdict("hang", "*", 0, f"after {len(rows)} probes", error=err[-4000:]))
    elif code or len([row for row in rows if row.key in keys]) != 2 * len(keys):
        rows.append(Verdict("the script fails", "*", 0, f"exit code {code}", error=err[-4000:]))
    elif other := {*(folder / "loads").read_text().split()} - {str(pid)}:
        rows.append(Verdict("loaded in a worker", "*", 0, f"{len(other)} processes loaded"))
    return rows, f"{out}\n--- stderr\n{err}"


def _kind(part: Part, wanted: str, found: str, error: str, err: str) -> str:
    if wanted.startswith(_RAISED):
        return "the fork fails"
    if wanted == found:
        return "same"
    said = part.statement
    if found.startswith(_RAISED):
        if not NAMED.search(error):
            return "confusing error"
        return "refused by name" if said.unsent or part.other else "refused without need"
    # The warning names the lock: one of this statement ends in its number.
    if re.search(rf"own copy of the lock '\w+[a-z_]{part.number}\b", err):
        return "refused by name"
    return "documented" if said.differs else "different in silence"


def _run(script: Script, folder: Path) -> tuple[int | None, str, str]:
    """Return the exit code (None if it hangs), stdout and stderr of a script."""
    for path, text in script.files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    text = script.text()
    arguments, given = ["main.py"], ""
    if script.mode == "module":
        arguments = ["-m", "app.main"]
        (folder / "app/main.py").write_text(text)
    elif script.mode == "stdin":
        arguments, given = ["-"], text
    else:
        (folder / "main.py").write_text(text)
    if script.mode == "runpy":
        run = "import runpy; runpy.run_path('main.py', run_name='__main__')"
        arguments = ["-c", run]
    (folder / "loads").touch()
    tests = Path(__file__).resolve().parents[1]
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(tests.parent), str(tests)]
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "LOADS": str(folder / "loads"),
        },
        start_new_session=True,
    )
    try:
        out, err = process.communicate(given, LIMIT)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return None, out, err


def faults(script: Script) -> list[Verdict]:
    """Run a script in a folder of its own.  Return its faults."""
    with tempfile.TemporaryDirectory() as folder:
        return [one for one in judged(script, Path(folder))[0] if one.is_fault]


def shortened(script: Script, fault: Verdict) -> Script:
    """Remove parts and changes while the script has this fault."""

    def holds(shorter: Script) -> bool:
        found = faults(shorter)
        return any((one.kind, one.key) == (fault.kind, fault.key) for one in found)

    def fewer(one: Script) -> Iterator[Script]:
        for part in one.parts:
            if not any(other.other == part.number for other in one.parts):
                yield replace(one, parts=tuple(other for other in one.parts if other is not part))
        for at, part in enumerate(one.parts):
            for change in part.changes:
                left = tuple(other for other in part.changes if other is not change)
                parts = (*one.parts[:at], replace(part, changes=left), *one.parts[at + 1 :])
                yield replace(one, parts=parts)

    known = fault.key.split(".")[0]
    just = tuple(part for part in script.parts if known in (str(part.number), "*"))
    others = {part.other for part in just}
    just = tuple(part for part in script.parts if part in just or part.number in others)
    if just and len(just) < len(script.parts) and holds(replace(script, parts=just)):
        script = replace(script, parts=just)
    again = True
    while again:
        again = False
        for shorter in fewer(script):
            if shorter.parts and holds(shorter):
                script, again = shorter, True
                break
    return script


def story(script: Script, fault: Verdict) -> str:
    """Return a report of a fault, with the script."""
    files = "".join(f"--- {path}\n{text}" for path, text in script.files().items())
    return (
        f"{fault.kind}: {fault.name} (probe {fault.key}, round {fault.round}, {script.mode})\n"
        f"    fork:  {fault.wanted}\n    xpool: {fault.found}\n{fault.error[-1500:]}\n"
        f"{files}--- the script\n{script.text()}"
    )


# By hand -----------------------------------------------------------------------------------------


def main() -> None:
    """Run or print scripts."""
    parser = argparse.ArgumentParser(description="random scripts; see the module's docstring")
    parser.add_argument("command", choices=("show", "run", "each"))
    parser.add_argument("which", nargs="?", default="")
    parser.add_argument("--whole", action="store_true", help="do not shorten scripts that fail")
    given = parser.parse_args()
    if given.command == "each":
        names = [name for name in STATEMENTS if name.startswith(given.which)]
        scripts = {f"{name} {at}": one for name in names for at, one in enumerate(alone(name))}
    else:
        first, _, last = given.which.partition("-")
        seeds = range(int(first or 0), int(last or first or 0) + 1)
        scripts = {f"seed {seed}": script(seed) for seed in seeds}
    if given.command == "show":
        for name, one in scripts.items():
            for path, text in {**one.files(), f"{name}, run as {one.mode}": one.text()}.items():
                print(f"# --- {path}\n{text}")
        return
    sys.exit(_by_hand(scripts, given.whole))


def _by_hand(scripts: dict[str, Script], whole: bool) -> int:
    count: Counter = Counter()
    known: set[tuple[str, str]] = set()
    for name, one in scripts.items():
        with tempfile.TemporaryDirectory() as folder:
            verdicts, _ = judged(one, Path(folder))
        count.update(verdict.kind for verdict in verdicts)
        for fault in filter(lambda verdict: verdict.is_fault, verdicts):
            print(f"{name} ({one.mode}): {fault.kind}: {fault.name}, probe {fault.key}", flush=True)
            if (fault.kind, fault.name) not in known:
                known.add((fault.kind, fault.name))
                short = one if whole else shortened(one, fault)
                print(textwrap.indent(story(short, fault), "  | "))
    print(", ".join(f"{n} {kind}" for kind, n in count.most_common()), f"in {len(scripts)} scripts")
    return int(any(KINDS[kind] for kind in count))


if __name__ == "__main__":
    main()
