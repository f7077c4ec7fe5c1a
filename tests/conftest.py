"""For every test: a tier, a time limit that dumps all stacks, a leak check, and pools.

`tests/README.md` says how a test is assigned to a tier.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import os
import re
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import clusters, work
from support.kinds import (
    KINDS,
    OVER_HOSTS,
    PROCESS_KINDS,
    START_METHODS,
    STDLIB,
    THREAD_KINDS,
    Kind,
)
from support.leaks import Snapshot, mark_this_run
from support.limits import TEST_LIMIT, WAIT
from support.waiting import Gate, Mailbox

ALL_LEAKS = bool(os.environ.get("XPOOL_TEST_LEAKS"))
"""Check for processes and shared memory after each test, which finds the test that leaks."""

_stderr = sys.__stderr__.fileno() if sys.__stderr__ else 2


# Markers -----------------------------------------------------------------------------------------


def _no_gpu() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _no_peer() -> str | None:
    missing = [
        name for name in ("mpire", "loky", "pebble", "ray") if not importlib.util.find_spec(name)
    ]
    return f"peer packages not installed: {', '.join(missing)}" if missing else None


def _no_module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


def _no_cluster() -> str | None:
    # Each process of pytest-xdist would start its own cluster.
    return _no_module("ray") or (None if OVER_HOSTS else "on a Ray cluster: run by make test-ray")


MARKERS: dict[str, tuple[str, Callable[[], str | None]]] = {
    "torch": ("needs torch", lambda: _no_module("torch")),
    "gpu": ("needs a CUDA device", _no_gpu),
    "xla": ("needs torch_xla", lambda: _no_module("torch_xla")),
    "torch_tpu": ("needs torch_tpu", lambda: _no_module("torch_tpu")),
    "ray": ("needs a Ray cluster, which the run starts", _no_cluster),
    "peer": ("compares with other pool libraries", _no_peer),
    "pure": ("starts no process, which is checked: run by make check", lambda: None),
    "starts": ("starts processes although its pool has threads", lambda: None),
    "exhaustive": ("run by make test-all or by name, not by make test", lambda: None),
    "slow": (
        "takes long: run by make nightly, or with XPOOL_TEST_SLOW=1",
        lambda: None if os.environ.get("XPOOL_TEST_SLOW") else "slow; set XPOOL_TEST_SLOW=1",
    ),
    "xpool_only": (
        "tests what the standard library's pools do not have",
        lambda: "the standard library does not promise this" if STDLIB else None,
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and keep the real stderr before pytest captures it."""
    global _stderr
    for name, (text, _) in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    _stderr = os.dup(2)
    # Restore signals that the parent ignores: a background shell ignores SIGINT, nohup SIGHUP.
    for number, action in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, action)
    mark_this_run()
    sys.addaudithook(_audit)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for exhaustive tests."""
    parser.addoption("--all", action="store_true", help="exhaustive tests too (make test-all)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one process, since they share pools and templates."""
    return importlib.import_module("xdist.scheduler").LoadFileScheduling(config, log)


def _is_pure(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("pure")) and not item.get_closest_marker("starts")


def _without(item: pytest.Item) -> str | None:
    """Return why a test's kind of pool lacks the tested feature; None if it has it."""
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        for given in item.callspec.params.values():
            if isinstance(given, Kind) and item.originalname in given.without:
                return given.without[item.originalname]
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect exhaustive tests, and skip tests that cannot run here, with the reason."""
    for item in items:
        if not _is_pure(item):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "pure"]
    named = any("::" in str(argument) for argument in config.args)
    if not (config.getoption("--all") or named):
        left = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left)
    reasons: dict[str, str | None] = {}
    for item in items:
        for mark in item.iter_markers():
            if mark.name in MARKERS:
                # Ask only if a test needs it, because looking for a GPU imports torch.
                if mark.name not in reasons:
                    reasons[mark.name] = MARKERS[mark.name][1]()
                if reason := reasons[mark.name]:
                    item.add_marker(pytest.mark.skip(reason=reason))
        if reason := _without(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Exclude imported modules from collections, which would take half a second each with torch."""
    gc.collect()
    gc.freeze()


# Processes ---------------------------------------------------------------------------------------

_pure_test = ""  # the running test, if it must start no process


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _pure_test and event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        raise AssertionError(
            f"{_pure_test} is marked as pure but starts a process ({event}): mark it as starts"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a pure test that starts a process."""
    global _pure_test
    _pure_test = item.nodeid if _is_pure(item) else ""
    try:
        return (yield)
    finally:
        _pure_test = ""


# Time --------------------------------------------------------------------------------------------


class TestTookTooLong(BaseException):
    """Not an `Exception`, because the code under test may catch those and go on waiting."""

    __test__ = False


_timed_out = False


def _alarm(*_: Any) -> None:
    global _timed_out
    _timed_out = True
    os.write(_stderr, b"\n--- the test took too long; stacks of all threads:\n")
    faulthandler.dump_traceback(_stderr, all_threads=True)
    raise TestTookTooLong(f"longer than {TEST_LIMIT:g} s; the stacks are on stderr")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Interrupt a test that hangs; if that fails, end the whole run."""
    faulthandler.dump_traceback_later(2 * TEST_LIMIT + 30, exit=True, file=_stderr)
    before = signal.signal(signal.SIGALRM, _alarm)
    # Repeat the alarm, because the first may end in a `finally` that waits for the same thing.
    signal.setitimer(signal.ITIMER_REAL, TEST_LIMIT, 20)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """Disable the garbage collector during reports.

    Reports build syntax trees. If a finalizer runs Python code during that, CPython 3.11 raises
    ``SystemError: AST constructor recursion depth mismatch``.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


# Leaks -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[clusters.Cluster | None]:
    """A Ray cluster of two hosts, if a test needs one; it starts before the leak checks."""
    marked = any(item.get_closest_marker("ray") for item in request.session.items)
    with clusters.started() if marked and not _no_cluster() else contextlib.nullcontext() as it:
        yield it


@pytest.fixture(scope="session")
def torch_files() -> None:
    """Start torch's server of named shared memory, which lasts until this process ends."""
    import torch

    torch.UntypedStorage._new_using_filename_cpu(1)


def _taken(**which: bool) -> Snapshot:
    before = Snapshot.take(**which)
    if clusters.is_connected():
        # Ray keeps its connections open.
        before.fds = dict.fromkeys(range(1 << 16), "")
    return before


@pytest.fixture(autouse=True, scope="module")
def module_leaves_nothing(request: pytest.FixtureRequest, cluster: object) -> Iterator[None]:
    """Fail a module's last test if processes or names in /dev/shm are left."""
    # Start the server before the snapshot, whichever test is first.
    items = (item for item in request.session.items if item.path == request.path)
    if any("torch_files" in getattr(item, "fixturenames", ()) for item in items):
        request.getfixturevalue("torch_files")
    before = _taken(outside=True)
    yield
    left = [] if STDLIB else before.leaks(WAIT)
    if left:
        pytest.fail(
            "left by the tests of this module (XPOOL_TEST_LEAKS=1 finds the test):\n  "
            + "\n  ".join(left),
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest, module_leaves_nothing: None) -> Iterator[None]:
    """Fail the test if threads or descriptors are left."""
    if "pool" in request.fixturenames:
        request.getfixturevalue("pool")
    elif "make_pool" in request.fixturenames:
        request.getfixturevalue("warm")
    before = _taken(inside=not ALL_LEAKS)
    yield
    # Threads for callbacks and logs start when needed and end with their pool. Those of pools that
    # existed before the test may stay.
    pools = [name[:-7] for t in before.threads if (name := t.name).endswith("-engine")]
    left = before.leaks(WAIT, rf"({'|'.join(map(re.escape, pools))})-(callbacks|logs).*")
    if STDLIB:
        # Its pools close their descriptors later, when they are collected.
        left = [what for what in left if what.startswith(("process", "thread"))]
    if left:
        pytest.fail("left after the test:\n  " + "\n  ".join(left), pytrace=False)


# Pools -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def warm(request: pytest.FixtureRequest) -> None:
    """Start what lasts until this process ends, so that it does not count as a test's leak."""
    from multiprocessing import Value, forkserver, resource_tracker

    pure = all(_is_pure(item) for item in request.session.items)
    if not pure:
        Value("i")  # multiprocessing keeps the memory that it takes here
        resource_tracker.ensure_running()
        forkserver.ensure_running()
    for kind in THREAD_KINDS if pure else KINDS:
        with kind(1) as pool:
            assert pool.apply(work.square, (2,)) == 4
        pool.join()


def tiers(kinds: list[Kind]) -> list[Any]:
    """Return kinds as parameters of a fixture. `make test` uses the first kind of processes and of
    threads; `make test-all` uses all."""
    params = []
    for kind in kinds:
        first = kind in (*PROCESS_KINDS[:1], *THREAD_KINDS[:1])
        marks = [] if kind.processes else [pytest.mark.pure]
        if OVER_HOSTS:
            marks = [pytest.mark.ray]
        params.append(
            pytest.param(kind, marks=marks if first else [*marks, pytest.mark.exhaustive])
        )
    return params


def each(kinds: list[Kind]) -> Any:
    """Return a fixture: each of these kinds in turn."""

    @pytest.fixture(params=tiers(kinds), ids=repr, scope="module")
    def one(request: pytest.FixtureRequest) -> Any:
        return request.param

    return one


kind, process_kind, thread_kind = each(KINDS), each(PROCESS_KINDS), each(THREAD_KINDS)
method_kind = each(START_METHODS)


class Shared:
    """The pool that tests of one module and kind share; after a test that hung it is replaced."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.pool = self._started()

    def _started(self) -> Any:
        """Build a pool and wait until both workers run, so that this is no test's leak."""
        pool = self.kind(2)
        name = uuid.uuid4().hex
        box, gate = Mailbox(self.folder / f"{name}.box"), Gate(self.folder / f"{name}.gate")
        try:
            results = [
                pool.apply_async(work.post_and_gate, (box.path, gate.path)) for _ in range(2)
            ]
            box.lines(2)
            gate.open(2)
            for result in results:
                result.get(WAIT)
        finally:
            gate.close()
            box.close()
        return pool

    def current(self) -> Any:
        global _timed_out
        if _timed_out:
            _timed_out = False
            self.pool.terminate()
            self.pool = self._started()
        return self.pool


@pytest.fixture(scope="module")
def _shared(kind: Kind, warm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    before = _taken()
    shared = Shared(kind, tmp_path_factory.mktemp("shared"))
    yield shared
    shared.pool.close()
    shared.pool.join()
    shared.pool = None
    # The last test's arguments still refer to the pool.
    left = [] if STDLIB else before.leaks(WAIT)
    if left:
        pytest.fail(f"left by the shared {kind!r}:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def pool(_shared: Shared) -> Any:
    """A pool of two workers, shared by a module's tests; a test must not end or change it."""
    return _shared.current()


@pytest.fixture
def make_pool(nothing_leaks: None) -> Iterator[Callable[..., Any]]:
    """Build pools by ``make_pool(kind, 2, ...)``, and end them after the test."""
    made = []

    def make(kind: Callable[..., Any], *args: Any, **kwds: Any) -> Any:
        made.append(kind(*args, **kwds))
        return made[-1]

    yield make
    pool = None
    for pool in made:
        pool.terminate()
    while made:
        made.pop().join()
    del pool


@pytest.fixture
def mailbox(tmp_path: Path, nothing_leaks: None) -> Iterator[Mailbox]:
    """Receives lines from tasks."""
    box = Mailbox(tmp_path / "mailbox")
    yield box
    box.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits for workers that the machine leaves without a processor."""
    monkeypatch.setattr("xpool._engine.monitor.STARVED_SECONDS", WAIT)


@pytest.fixture
def gate(tmp_path: Path, nothing_leaks: None) -> Iterator[Gate]:
    """Holds tasks until the test opens it."""
    barrier = Gate(tmp_path / "gate")
    yield barrier
    barrier.close()


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mailbox: Mailbox, gate: Gate) -> None:
    """A module for `import_plugin`: it registers itself in another module, posts, and waits at the
    gate."""
    (tmp_path / "registry.py").write_text("entries = []\n")
    (tmp_path / "plugin.py").write_text(
        "import registry\n"
        "registry.entries.append('plugin')\n"
        "from xpool.testing._test_tasks import pass_gate, post\n"
        f"post({mailbox.path!r}, 'half')\n"
        f"pass_gate({gate.path!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[..., Any]], Any]]:
    """A function that sets the handler of SIGUSR1 until the test ends."""
    before = signal.getsignal(signal.SIGUSR1)
    yield functools.partial(signal.signal, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """An empty file for tasks to append to."""
    path = tmp_path / "log"
    path.touch()
    return path
