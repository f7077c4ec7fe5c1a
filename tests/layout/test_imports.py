"""Imports go one way, the policy is pure, and a worker imports little."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import scripts

pytestmark = pytest.mark.pure

PACKAGE = Path(__file__).resolve().parents[2] / "xpool"

# Lower rows first: a package may import from lower rows, and from its own row without cycles.
ROWS = [
    {"errors", "_python"},
    {"_calls", "_memory", "devices"},
    {"_wire", "_pickling"},
    {"pickle"},
    {"queue"},
    {"_worker", "distributed"},
    {"_engine", "server"},
    {"_pools"},
    {"pool", "_hosts"},
    {"assigner", "data", "joblib", "ray", "xla"},
    {"testing", "__main__"},
]
RANK = {room: rank for rank, row in enumerate(ROWS) for room in row}

PURE = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "heapq", "itertools", "math",
    "typing",
}  # fmt: skip

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = ("xpool", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and module of every import in a tree, in functions and type-checking blocks
    too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its target"
            assert node.module is not None
            if node.module == "xpool":
                yield from ((node.lineno, f"xpool.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def room_of(module: str) -> str:
    return module.split(".")[1]


@functools.cache
def inner_imports() -> list[tuple[str, str, str]]:
    """Return imports between xpool's modules: importing module, imported module, file and line."""
    found = []
    for path in FILES:
        module = module_name(path)
        if module == "xpool":  # its names are lazy, as `test_importing_pool_is_light` checks
            continue
        for line, target in imports(tree_of(path)):
            if target.split(".")[0] == "xpool":
                found.append((module, target, f"{path.relative_to(PACKAGE.parent)}:{line}"))
    return found


def run_python(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the names in its ``sys.modules``."""
    code += "\nimport sys; print('\\n'.join(sys.modules))"
    done = scripts.run(["-c", code])
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_package_has_a_row():
    """Every file and folder of the package has a row."""
    rooms = {room_of(module_name(path)) for path in FILES if path.parent != PACKAGE}
    rooms |= {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert rooms == set(RANK), f"packages and rows differ: {rooms ^ set(RANK)}"


def test_imports_point_one_way():
    """No module imports from a higher row, not even lazily or for types."""
    wrong = []
    for module, target, where in inner_imports():
        if target == "xpool" or room_of(target) not in RANK:
            wrong.append(f"{where}: import from the module itself, not through {target!r}")
        elif RANK[room_of(target)] > RANK[room_of(module)]:
            wrong.append(f"{where}: {room_of(module)} must not import {target}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.starts
def test_fields_of_named_tuples_are_not_strings():
    """Fields of a NamedTuple are not written as strings, which take milliseconds to compile."""
    imported = run_python(
        "from xpool import Pool\n"
        "import xpool._pools.assembly, xpool._worker.loop, xpool._pickling.by_value.script_top"
    )
    wrong = []
    for path in FILES:
        tree = tree_of(path)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        bases = {base.id for one in classes for base in one.bases if isinstance(base, ast.Name)}
        texts = "__future__" in {target for _, target in imports(tree)}
        if "NamedTuple" in bases and texts and module_name(path) in imported:
            wrong.append(str(path.relative_to(PACKAGE.parent)))
    assert not wrong, f"leave `from __future__ import annotations` out of {wrong}"


def test_packages_form_no_cycle():
    """Packages of one row may import one another, but not in a cycle."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module, target, _ in inner_imports():
        if target != "xpool" and room_of(target) != room_of(module):
            graph[room_of(module)].add(room_of(target))
    graphlib.TopologicalSorter(graph).prepare()


def test_files_form_no_cycle():
    """Files do not import each other in a cycle, not even in functions or for types."""
    names = {module_name(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        found = set[str]()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        graph[module] = found & set(names) - {module}
    del graph["xpool"]  # its names are lazy; its imports are for type checkers
    for targets in graph.values():
        targets.discard("xpool")
    graphlib.TopologicalSorter(graph).prepare()


def test_jobs_are_pure():
    """The policy imports neither threads, clock, pickle nor the operating system."""
    wrong = []
    terms = PACKAGE / "_calls" / "terms.py"  # a part of the policy that callers make
    for path in [terms, *sorted((PACKAGE / "_engine" / "jobs").rglob("*.py"))]:
        for line, target in imports(tree_of(path)):
            own = target == "xpool.errors" or target.startswith(
                ("xpool.errors.", "xpool._engine.jobs", "xpool._calls.terms")
            )
            if not own and target.split(".")[0] not in PURE:
                wrong.append(f"{path.relative_to(PACKAGE.parent)}:{line}: imports {target}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_sockets_are_made_in_one_place():
    """Only `xpool._python.descriptors` makes sockets, since each needs a time limit of its own."""
    makers = ("socket.socket(", "socketpair(", "fromfd(", "create_server(")
    telling = {
        path.name: [one for one in makers if one in path.read_text("utf-8")] for path in FILES
    }
    assert {name for name, found in telling.items() if found} == {
        "descriptors.py",
        "_kinds.py",  # binds sockets to find free ports, and waits for nothing
    }


def test_threads_are_prompt():
    """Threads are `PromptThread`s: without memory, the start of a usual one waits for ever."""
    usual = [
        path.name
        for path in FILES
        if re.search(r"threading\.Thread\(|class \w+\(threading\.Thread\)", path.read_text("utf-8"))
    ]
    # Where there is no signal for the end of a pipe; and programs of tests.
    assert sorted(usual) == ["_conformance.py", "_test_tasks.py", "entry.py", "starting.py"]


def test_functions_have_one_mark_for_signal_handlers():
    """A second mark of a shielded function would be one of the code that all of these share."""
    marks, wrong = {"shielded", "uninterrupted", "interruptible"}, []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            given = [
                one for one in getattr(node, "decorator_list", ()) if isinstance(one, ast.Name)
            ]
            if len([one for one in given if one.id in marks]) > 1:
                wrong.append(f"{path.relative_to(PACKAGE.parent)}:{given[0].lineno}")
    assert not wrong, wrong


def test_fork_hooks_are_in_one_place():
    """Fork hooks are registered in `xpool._python.at_fork` alone, so that their order is
    visible."""
    telling = [path.name for path in FILES if "register_at_fork" in path.read_text("utf-8")]
    assert telling == ["at_fork.py"]


@pytest.mark.starts
def test_pools_load_without_heavy_packages():
    """A pool without tensors imports neither torch nor numpy, and dill only when needed."""
    loaded = run_python("from xpool import BasePool, CtxPool, P2PPool, Pool, ThreadPool")
    assert not loaded & {"torch", "dill", "numpy"}


@pytest.mark.starts
def test_worker_entry_is_light():
    """A worker binds its device before it imports torch or the parent's side."""
    loaded = run_python("import xpool._worker.entry")
    heavy = {"torch", "dill", "numpy", "xpool._pools", "xpool._engine", "xpool._calls"}
    assert not loaded & heavy


@pytest.mark.starts
def test_the_codec_imports_no_family():
    """The codec does not import the families, which register their reducers with it."""
    loaded = run_python("import xpool._pickling.pickler")
    assert not {
        name
        for name in loaded
        if name.startswith(("xpool._pickling.by_value", "xpool._pickling.tensors"))
    }


@pytest.mark.starts
def test_a_first_worker_imports_little():
    """The fork server imports slow modules only after the first worker has started."""
    loaded = run_python("import xpool._worker.server, xpool._worker.loop")
    late = {"multiprocessing.pool", "multiprocessing.util", "multiprocessing.resource_tracker"}
    late |= {"inspect", "ast", "dis", "traceback", "tempfile", "subprocess", "dill"}
    late |= {"xpool._engine"}
    late |= {"xpool._pools", "xpool._pickling.by_value.script_top"}
    late |= {"ctypes", "xpool._pickling.tensors"}
    if sys.version_info >= (3, 14):
        late -= {"ast"}  # there dataclasses import it for annotations
    assert not (loaded & late) - run_python("")


@pytest.mark.starts
def test_importing_pool_is_light():
    """`from xpool import Pool` imports neither engine nor pickler."""
    loaded = run_python("from xpool import Pool")
    assert not loaded & {
        "xpool._engine.engine",
        "xpool._engine.jobs.scheduler",
        "xpool._pickling.pickler",
        "xpool._memory.arena",
        "ctypes",
    }
    late = {"multiprocessing.pool", "multiprocessing.util", "inspect", "dill", "torch"}
    assert not (loaded & late) - run_python("")


@pytest.mark.starts
def test_no_collection_visits_the_objects_of_imports():
    """They belong to the oldest generation.  What the program has frozen stays frozen."""
    run_python(
        "import gc; from xpool import ThreadPool\n"
        "assert len(gc.get_objects(0)) + len(gc.get_objects(1)) < 1000"
    )
    run_python(
        "import gc; gc.freeze(); frozen = gc.get_freeze_count(); from xpool import ThreadPool\n"
        "assert gc.get_freeze_count() > frozen / 2"
    )


_DOCUMENTED = {"sys._getframe", "sys._current_frames", "os._exit"}


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of private names of the standard library."""
    modules = {name for _, name in imports(tree)} & sys.stdlib_module_names
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in sys.stdlib_module_names:
                yield from ((node.lineno, f"{module}.{one.name}") for one in node.names)


def test_private_names_of_python_are_in_one_place():
    """Private names of the standard library are used in `_python` only."""
    wrong = [
        f"{module_name(path)}:{line}: {name}"
        for path in FILES
        if path.parent.name != "_python"
        for line, name in private_names(tree_of(path))
        if name.rpartition(".")[2].startswith("_") and not name.endswith("__")
        if name not in _DOCUMENTED
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.starts
def test_a_first_map_imports_no_more_than_it_needs(tmp_path: Path):
    """Rarely needed modules are not imported for a first map."""
    program = scripts.write(
        tmp_path / "program.py",
        "import sys\nfrom xpool import Pool\n"
        "def square(x): return x * x\n"
        "def there(x): return sorted(sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    before = set(sys.modules)\n"
        "    with Pool(1) as pool:\n"
        "        found, = pool.map(there, [1])\n"
        "        print(sorted(sys.modules))\n"
        "        print(found)\n"
        "    pool.join()\n",
    )
    begun = run_python("")  # with what an installed `.pth` file imports
    late = {"multiprocessing.pool", "tempfile", "shutil", "lzma", "bz2", "random", "traceback"}
    late |= {"dataclasses", "inspect", "pathlib", "urllib.parse", "unicodedata"}
    if sys.version_info < (3, 14):  # there annotations need it
        late.add("ast")
    late -= begun
    # A slow program makes the fork server wait 0.2 s and then import more: run the program again.
    for _ in range(5):
        done = scripts.run_ok([program])
        ours, workers = map(set, map(ast.literal_eval, done.splitlines()))
        assert not late & ours
        if not late & workers:
            break
    assert not late & workers
    for modules in ours - begun, workers - begun:
        assert sum(name.startswith("xpool") for name in modules) <= 104
