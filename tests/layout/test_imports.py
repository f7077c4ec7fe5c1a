"""Imports point one way, the policy is pure, and a worker starts with little."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.limits import PROGRAM_LIMIT

pytestmark = pytest.mark.pure

PACKAGE = Path(__file__).resolve().parents[2] / "xpool"

# Lower first; a room may import from lower rows and, where no circle arises, from its own.
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


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every import of a tree, also in functions and for type checkers: its line and module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it goes"
            assert node.module is not None
            if node.module == "xpool":
                yield from ((node.lineno, f"xpool.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def room_of(module: str) -> str:
    return module.split(".")[1]


def inner_imports() -> Iterator[tuple[str, str, str]]:
    """Imports of xpool by xpool: importing module, imported module, where it is written."""
    for path in FILES:
        module = module_name(path)
        if module == "xpool":  # its names are lazy; a test below holds that
            continue
        for line, target in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if target.split(".")[0] == "xpool":
                yield module, target, f"{path.relative_to(PACKAGE.parent)}:{line}"


def run_python(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the names in its ``sys.modules``."""
    code += "\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=PROGRAM_LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_room_has_a_rank():
    """A new file or folder of the package is given its place in the order of imports."""
    rooms = {room_of(module_name(path)) for path in FILES if path.parent != PACKAGE}
    rooms |= {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert rooms == set(RANK), f"rooms without a row, or rows without a room: {rooms ^ set(RANK)}"


def test_imports_point_one_way():
    """No module imports, lazily or for its types, from a room that stands above its own."""
    wrong = []
    for module, target, where in inner_imports():
        if target == "xpool" or room_of(target) not in RANK:
            wrong.append(f"{where}: import from the module itself, not through {target!r}")
        elif RANK[room_of(target)] > RANK[room_of(module)]:
            wrong.append(f"{where}: {room_of(module)} must not import {target}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.starts
def test_the_fields_of_named_tuples_are_no_texts():
    """What each pool imports makes no texts of a NamedTuple's fields: to compile them takes ms."""
    imported = run_python(
        "from xpool import Pool\n"
        "import xpool._pools.assembly, xpool._worker.loop, xpool._pickling.by_value.units"
    )
    wrong = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        bases = {base.id for one in classes for base in one.bases if isinstance(base, ast.Name)}
        texts = "__future__" in {target for _, target in imports(tree)}
        if "NamedTuple" in bases and texts and module_name(path) in imported:
            wrong.append(str(path.relative_to(PACKAGE.parent)))
    assert not wrong, f"leave `from __future__ import annotations` out of {wrong}"


def test_rooms_form_no_circle():
    """Rooms of one row may import one another, but never in a circle."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module, target, _ in inner_imports():
        if target != "xpool" and room_of(target) != room_of(module):
            graph[room_of(module)].add(room_of(target))
    graphlib.TopologicalSorter(graph).prepare()


def test_files_form_no_circle():
    """No file imports itself through others, in a function or for its types either: each can be
    read alone."""
    names = {module_name(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        found = set[str]()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        graph[module] = found & set(names) - {module}
    del graph["xpool"]  # its names are lazy; what it imports is for type checkers
    for targets in graph.values():
        targets.discard("xpool")
    graphlib.TopologicalSorter(graph).prepare()


def test_jobs_are_pure():
    """The policy knows no threads, no clock, no pickle and no operating system."""
    wrong = []
    for path in sorted((PACKAGE / "_engine" / "jobs").rglob("*.py")):
        for line, target in imports(ast.parse(path.read_text(encoding="utf-8"))):
            own = target == "xpool.errors" or target.startswith(
                ("xpool.errors.", "xpool._engine.jobs")
            )
            if not own and target.split(".")[0] not in PURE:
                wrong.append(f"{path.relative_to(PACKAGE.parent)}:{line}: imports {target}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_forks_are_told_in_one_place():
    """Hooks of forks are registered with `xpool._python.at_fork`, so their order can be seen."""
    telling = [path.name for path in FILES if "register_at_fork" in path.read_text("utf-8")]
    assert telling == ["at_fork.py"]


@pytest.mark.starts
def test_import_xpool_is_light():
    """``import xpool`` loads neither torch nor dill nor numpy nor the standard pools."""
    loaded = run_python("import xpool")
    assert not loaded & {"torch", "dill", "numpy", "multiprocessing.pool"}


@pytest.mark.starts
@pytest.mark.parametrize("name", ["Pool", "CtxPool", "P2PPool", "ThreadPool", "BasePool"])
def test_pools_load_without_heavy_packages(name: str):
    """A program that uses no tensors never pays for torch, and imports dill when it needs it."""
    loaded = run_python(f"from xpool import {name}")
    assert not loaded & {"torch", "dill", "numpy"}


@pytest.mark.starts
def test_worker_entry_is_light():
    """A worker binds its device before anything heavy or of the parent's side is imported."""
    loaded = run_python("import xpool._worker.entry")
    heavy = {"torch", "dill", "numpy", "xpool._pools", "xpool._engine", "xpool._calls"}
    assert not loaded & heavy


@pytest.mark.starts
def test_the_codec_knows_no_kind_of_object():
    """The codec imports nothing of the families, which register their reducers with it."""
    loaded = run_python("import xpool._pickling.pickler")
    assert not {
        name
        for name in loaded
        if name.startswith(("xpool._pickling.by_value", "xpool._pickling.tensors"))
    }


@pytest.mark.starts
def test_devices_import_no_framework():
    """`xpool.devices` describes devices; opening one is the worker's."""
    assert "torch" not in run_python("import xpool.devices; xpool.devices.devices(n=2)")


@pytest.mark.starts
def test_a_first_worker_imports_little():
    """What takes long to import, and no first task needs, the fork server imports later."""
    loaded = run_python("import xpool._worker.server, xpool._worker.loop")
    late = {"multiprocessing.pool", "multiprocessing.util", "multiprocessing.resource_tracker"}
    late |= {
        "inspect",
        "ast",
        "dis",
        "traceback",
        "tempfile",
        "subprocess",
        "dill",
        "xpool._engine",
    }
    late |= {"xpool._pools", "xpool._pickling.by_value.source", "xpool._pickling.by_value.units"}
    late |= {"ctypes", "xpool._pickling.tensors"}
    if sys.version_info >= (3, 14):
        late -= {"ast"}  # dataclasses import it there, for annotations
    assert not loaded & late


@pytest.mark.starts
def test_the_name_of_the_pool_imports_little():
    """The engine and the pickler are imported when a pool is made, after its fork server began."""
    loaded = run_python("from xpool import Pool")
    assert not loaded & {
        "xpool._engine.engine",
        "xpool._pickling.pickler",
        "xpool._memory.arena",
        "ctypes",
    }
    assert not loaded & {"multiprocessing.pool", "multiprocessing.util", "inspect", "dill", "torch"}


_DOCUMENTED = {"sys._getframe", "sys._current_frames", "os._exit"}


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names of imported modules of the standard library, with their lines."""
    modules = {name for _, name in imports(tree)} & sys.stdlib_module_names
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in sys.stdlib_module_names:
                yield from ((node.lineno, f"{module}.{one.name}") for one in node.names)


def test_insides_of_python_are_in_one_place():
    """Private names of the standard library are used in `_python` alone."""
    wrong = [
        f"{module_name(path)}:{line}: {name}"
        for path in FILES
        if path.parent.name != "_python"
        for line, name in private_names(ast.parse(path.read_text(encoding="utf-8")))
        if name.rpartition(".")[2].startswith("_") and not name.endswith("__")
        if name not in _DOCUMENTED
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.starts
def test_a_first_map_imports_no_more_than_it_needs(tmp_path: Path):
    """What only some programs need is imported when they need it: it would cost each of them."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom xpool import Pool\n"
        "def square(x): return x * x\n"
        "def there(x): return sorted(sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    before = set(sys.modules)\n"
        "    with Pool(1) as pool:\n"
        "        found, = pool.map(there, [1])\n"
        "        print(sorted(sys.modules))\n"
        "        print(found)\n"
        "    pool.join()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    late = {"multiprocessing.pool", "tempfile", "shutil", "lzma", "bz2", "random", "traceback"}
    late |= {"dataclasses", "inspect", "pathlib", "urllib.parse"}
    # A fork server that waits 0.2 s for a slow program imports more: then the program runs again.
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, str(program)],
            capture_output=True, text=True, check=True, env=environment,
        )  # fmt: skip
        ours, workers = map(set, map(ast.literal_eval, done.stdout.splitlines()))
        assert not late & ours
        if not late & workers:
            break
    assert not late & workers
    for modules in ours, workers:
        assert sum(name.startswith("xpool") for name in modules) <= 122
