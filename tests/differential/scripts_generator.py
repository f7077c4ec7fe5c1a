"""A generator of random scripts, and the referee that compares what their workers see.

A script is made of statements of programs as people write them: they load data, fill registries,
configure modules, open connections.  Some are changed later: under the guard, in `main()`, between
two maps, in a thread.  Workers evaluate *probes*: expressions of what the statements made.  The
referee compares each answer of xpool with that of a process which is forked right before, in the
same run of the script: so random values, addresses and folders are the same::

    cd tests
    python -m differential.scripts_generator show 17        # print the script of a seed
    python -m differential.scripts_generator run 0-299      # run seeds, and shorten what fails
    python -m differential.scripts_generator each           # run every statement by itself
    python -m differential.scripts_generator each torch     # those whose name begins with a text
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support import scripts

from differential.statements import LINKS, MODES, STATEMENTS, Statement

__all__ = [
    "BY_THEMSELVES",
    "KINDS_OF_STATEMENTS",
    "Part",
    "Script",
    "Verdict",
    "complete",
    "judged",
    "script",
    "shortened",
    "story",
]

NAMED = re.compile(r"was not sent to this worker|could not be sent")
"""In an error of a task that reads what cannot be sent."""

LIMIT = float(os.environ.get("XPOOL_TEST_TIMEOUT", "300")) * 0.9
"""Seconds after which a script hangs."""


# A script ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A statement in a script, with its changes, as (index, place, whether in a thread).

    The place "between" is before the second round of probes, "between 3" before the third one.
    """

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


def _round(place: str) -> int:
    """Return the round before which a change at a place happens."""
    return int(place.partition(" ")[2] or 2) if place.startswith("between") else 1


@dataclass(frozen=True)
class Script:
    """A script: its parts, and how it is run."""

    mode: str
    parts: tuple[Part, ...]
    in_main: bool = False  # its main part is a function
    early: bool = False  # the pool is made before the changes under the guard
    first: bool = False  # the probes are defined before the statements
    # Workers are asked only about what has changed, and those of a new pool about all at the end.
    late: bool = False
    context: str | None = None  # the start method

    @property
    def needs_torch(self) -> bool:
        return any(part.statement.kind == "torch" for part in self.parts)

    def files(self) -> dict[str, str]:
        """Return the files of the program but for the script."""
        found = {}
        folder = "app/" if self.mode == "module" else ""
        for part in self.parts:
            for path, text in part.statement.files.items():
                path, text = (one.replace("~", str(part.number)) for one in (path, text))
                found[folder * path.startswith("own_") + path] = text
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

    def rounds(self, part: Part) -> list[int]:
        """Return the rounds in which workers of the first pool are asked about a part."""
        if not self.late:
            return [1, 2]
        about = [one for one in self.parts if one.number in (part.number, part.other)]
        return sorted({1, *(_round(place) for one in about for _, place, _ in one.changes)})

    def text(self) -> str:
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
        self.asks: list[tuple[Part, str]] = []
        self.between: dict[int, list[str]] = {}

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
            self.main.append(part.told(said.inside, self.others))
        for at, place, threaded in part.changes:
            text = part.told(said.changes[at], self.others)
            if threaded:
                text = self._in_thread(part, text, f"change_{part.number}_{at}")
            between = self.between.setdefault(_round(place), [])
            {"top": self.top, "guard": self.main}.get(place, between).append(text)

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
            self.asks.append((part, f'referee("{key}", lambda x: ({text}))'))
            return
        if form == "method":
            self.defined.append(f"class Ask_{name}:\n    def ask(self, x):\n        return {text}")
            self.asks.append((part, f'referee("{key}", Ask_{name}().ask)'))
            return
        lines = f"def {name}(x):\n    return {text}"
        if form == "helper":
            lines = lines.replace(name, f"of_{name}") + f"\ndef {name}(x):\n    return of_{name}(x)"
        self.defined.append(lines)
        self.asks.append((part, f'referee("{key}", {name})'))

    def _main(self) -> list[str]:
        referee = "referee = Referee(pool)"
        before, after = ([], self.main) if self.script.early else (self.main, [])
        inner = [referee, *after]
        for turn in range(1, 1 + max([2, *self.between])):
            inner += [*self.between.get(turn, ()), f"referee.round = {turn}"]
            inner += [ask for part, ask in self.asks if turn in self.script.rounds(part)]
        late = [referee, f"referee.round = {turn + 1}", *(ask for _, ask in self.asks)]
        for part in self.script.parts:
            if part.statement.after:
                expression = part.told(part.statement.after, self.others)
                inner.append(f'referee.after("{part.number}.after", lambda: {expression})')
        body = [
            "from differential.scripts_generator import Referee",
            *before,
            f"with Pool(2, context={self.script.context!r}) as pool:",
            *(textwrap.indent(one, "    ") for one in inner),
        ]
        if self.script.late:
            body += ["with Pool(1) as pool:", *(textwrap.indent(one, "    ") for one in late)]
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
    left_out = {"program"} if torch else {"program", "torch"}
    known = [one for one in STATEMENTS.values() if mode in one.modes and one.kind not in left_out]
    weights = [4 if one.kind == "torch" else 1 for one in known]
    parts: list[Part] = []
    taken: set[str] = set()
    while len(parts) < draw.randint(7, 9):
        one = draw.choices(known, weights)[0]
        if one.name in taken:
            continue
        taken.add(one.name)
        parts.append(_drawn(draw, one, len(parts) + 1))
    for part in _links(draw, parts, draw.randint(0, 3)):
        # Anywhere behind what it uses.
        giver = next(at for at, one in enumerate(parts) if one.number == part.other)
        parts.insert(draw.randint(giver + 1, len(parts)), part)
    in_main, early, first = draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.3
    context = draw.choice((None, None, "fork", "spawn"))
    if any("cache_clear" in change for part in parts for change in part.statement.changes):
        context = context if context == "spawn" else None  # a fork keeps results: see the docs
    return Script(mode, tuple(parts), in_main, early, first, context=context)


def _links(draw: random.Random, parts: list[Part], count: int) -> list[Part]:
    """Return statements that use objects of these parts."""
    givers = [part for part in parts if part.statement.gives]
    return [
        replace(
            _drawn(draw, draw.choice(list(LINKS.values())), len(parts) + number),
            other=draw.choice(givers).number,
        )
        for number in range(1, count + 1)
        if givers
    ]


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


KINDS_OF_STATEMENTS = list(dict.fromkeys(one.kind for one in STATEMENTS.values()))
KINDS_OF_STATEMENTS.remove("program")
BY_THEMSELVES = [one.name for one in STATEMENTS.values() if one.kind == "program"]


def complete(kind: str) -> Script:
    """Return a script of all statements of a kind, or of the one of this name, with each of their
    changes in a round of its own: the worker finds out about it although nothing else has changed.
    """
    draw = random.Random(f"all {kind}")
    said = [one for one in STATEMENTS.values() if kind in (one.kind, one.name)]
    modes = [mode for mode in MODES if all(mode in one.modes for one in said)]
    mode = modes[[*KINDS_OF_STATEMENTS, *BY_THEMSELVES].index(kind) % len(modes)]
    parts, turns = [], itertools.count(2)
    for number, one in enumerate(said, 1):
        changes = tuple((at, f"between {next(turns)}", False) for at in range(len(one.changes)))
        parts.append(replace(_drawn(draw, one, number), changes=changes))
    in_main = draw.random() < 0.5
    return Script(mode, (*parts, *_links(draw, parts, 3)), in_main, late=True)


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


class Referee:
    """Compares the answers of a pool with those of a process that is forked right before."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.round = 1

    def __call__(self, key: str, probe: Callable[[Any], Any]) -> None:
        """Ask a fork and the pool's workers, and print what they say."""
        wanted = _of_a_fork(probe)
        found, error = _answer(lambda: self.pool.map(probe, range(3), 1))
        self._print(key, wanted, found, error)

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


def _answer(ask: Callable[[], list[Any]]) -> tuple[str, str]:
    """Return the answers to three items in canonical form, and the text of an error."""
    try:
        return json.dumps(canonical(ask())), ""
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        notes = "".join(map(str, getattr(error, "__notes__", ())))
        return f"{_RAISED}{type(error).__name__}: {error}", text + notes


def _of_a_fork(probe: Callable[[Any], Any]) -> str:
    """Return the answers of a child of this process."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        try:
            with open(sink, "w") as file:
                file.write(_answer(lambda: [probe(x) for x in range(3)])[0])
        finally:
            os._exit(0)
    os.close(sink)
    with open(source) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


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
            forked = script.context == "fork"
            kind = _kind(part, wanted, found, error, err, forked)
            rows.append(Verdict(kind, key, turn, part.statement.name, wanted, found, error))
    if code is None:
        rows.append(Verdict("hang", "*", 0, f"after {len(rows)} probes", error=err[-4000:]))
    elif code or Counter(row.key for row in rows if row.key in keys) != {
        key: len(script.rounds(part)) + script.late for key, part in keys.items()
    }:
        rows.append(Verdict("the script fails", "*", 0, f"exit code {code}", error=err[-4000:]))
    elif other := {*(folder / "loads").read_text().split()} - {str(pid)}:
        rows.append(Verdict("loaded in a worker", "*", 0, f"{len(other)} processes loaded"))
    return rows, f"{out}\n--- stderr\n{err}"


def _kind(part: Part, wanted: str, found: str, error: str, err: str, forked: bool) -> str:
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
    if re.search(rf"own copy of the \w+ '\w+[a-z_]{part.number}\b", err):
        return "refused by name"
    inherited = forked and said.unsent  # a fork has it, as the docs say
    return "documented" if said.differs or inherited else "different in silence"


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
    process = scripts.popen(arguments, {"LOADS": str(folder / "loads")}, cwd=folder)
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
        chosen = {f"{name} {at}": one for name in names for at, one in enumerate(alone(name))}
    else:
        first, _, last = given.which.partition("-")
        seeds = range(int(first or 0), int(last or first or 0) + 1)
        chosen = {f"seed {seed}": script(seed) for seed in seeds}
    if given.command == "show":
        for name, one in chosen.items():
            for path, text in {**one.files(), f"{name}, run as {one.mode}": one.text()}.items():
                print(f"# --- {path}\n{text}")
        return
    sys.exit(_by_hand(chosen, given.whole))


def _by_hand(chosen: dict[str, Script], whole: bool) -> int:
    count: Counter = Counter()
    known: set[tuple[str, str]] = set()
    for name, one in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            verdicts, _ = judged(one, Path(folder))
        count.update(verdict.kind for verdict in verdicts)
        for fault in filter(lambda verdict: verdict.is_fault, verdicts):
            print(f"{name} ({one.mode}): {fault.kind}: {fault.name}, probe {fault.key}", flush=True)
            if (fault.kind, fault.name) not in known:
                known.add((fault.kind, fault.name))
                short = one if whole else shortened(one, fault)
                print(textwrap.indent(story(short, fault), "  | "))
    print(", ".join(f"{n} {kind}" for kind, n in count.most_common()), f"in {len(chosen)} scripts")
    return int(any(KINDS[kind] for kind in count))


if __name__ == "__main__":
    main()
