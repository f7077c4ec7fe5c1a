"""Workers are forked while another thread imports a module; no worker waits for that import."""

import os
import sys
import threading
import time

import pytest
from support import scripts
from support.tiers import also

import xpool
from xpool._engine.launch import ProcessLauncher
from xpool._python import import_hooks

pytestmark = [
    pytest.mark.xpool_only,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

HALF = """
    import sys

    FIRST = 1
    sys.half_begun.set()
    sys.half_may_go_on.wait()
    LAST = 2
"""

LATE = """
    import os, sys
    import late_half.part

    if os.getpid() == sys.late_half[0]:
        sys.late_half[1].set()
        sys.late_half[2].wait()
    LAST = 5
"""

USES_POOL = """
    import xpool
    from xpool._python import import_hooks

    import_hooks._STILL = import_hooks._LONGEST = 1e9
    FACTOR = 3

    def times(x):
        import uses_pool
        return x * uses_pool.FACTOR

    with xpool.Pool(2, context="fork", maxtasksperchild=1) as pool:
        print(pool.map(times, range(4), 1), pool.apply(times, (5,)))
        print([*pool.imap(times, range(4))], pool.apply_async(times, (5,)).get())
"""


@pytest.fixture
def half(tmp_path, monkeypatch):
    """A thread is in the middle of the import of `half`; the event lets it go on."""
    begun, may_go_on = threading.Event(), threading.Event()
    scripts.write(tmp_path / "half.py", HALF)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "half_begun", begun, raising=False)
    monkeypatch.setattr(sys, "half_may_go_on", may_go_on, raising=False)
    thread = threading.Thread(target=__import__, args=("half",))
    thread.start()
    begun.wait()
    yield may_go_on
    may_go_on.set()
    thread.join()
    del sys.modules["half"]


def last_of_half():
    import half  # type: ignore[import-not-found]

    return half.LAST if hasattr(half, "LAST") else None


def test_worker_has_the_whole_module(half, monkeypatch):
    """A worker is forked after the import that another thread has begun."""

    def sleep(seconds):
        half.set()  # the worker's start waits
        time_sleep(seconds)

    time_sleep = time.sleep
    monkeypatch.setattr(time, "sleep", sleep)
    with xpool.Pool(1, context="fork") as pool:
        assert pool.apply(last_of_half) == 2


def test_import_that_does_not_go_on(half, monkeypatch):
    """A worker does not wait for a thread that may itself wait for the worker."""
    monkeypatch.setattr(import_hooks, "_STILL", 0.0)
    with xpool.Pool(1, context="fork", maxtasksperchild=1) as pool:
        assert [pool.apply(last_of_half) for _ in range(2)] == [None, None]


def test_import_that_begins_just_before_the_fork(tmp_path, monkeypatch):
    """A worker imports anew what another thread began to import after the wait."""
    begun, may_go_on = threading.Event(), threading.Event()
    folder = tmp_path / "site-packages"  # modules of the program would be sent
    (folder / "late_half").mkdir(parents=True)
    scripts.write(folder / "late_half" / "__init__.py", LATE)
    scripts.write(folder / "late_half" / "part.py", "VALUE = 3")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "late_half", (os.getpid(), begun, may_go_on), raising=False)
    thread = threading.Thread(target=__import__, args=("late_half",))
    start = ProcessLauncher._start

    def start_late(launcher, process):
        thread.start()
        begun.wait()
        start(launcher, process)
        may_go_on.set()

    monkeypatch.setattr(ProcessLauncher, "_start", start_late)
    with xpool.Pool(1, context="fork") as pool:
        thread.join()
        assert pool.apply(values_of_late_half) == (3, 5)
    del sys.modules["late_half"], sys.modules["late_half.part"]


def values_of_late_half():
    import late_half.part  # type: ignore[import-not-found]

    return late_half.part.VALUE, late_half.LAST


def test_module_whose_import_waits_for_workers(tmp_path):
    """A module uses a pool while it is imported, and its tasks import it."""
    scripts.write(tmp_path / "uses_pool.py", USES_POOL)
    program = f"import sys; sys.path.append({str(tmp_path)!r}); import uses_pool"
    assert scripts.run_ok(["-W", "ignore", "-c", program]) == "[0, 3, 6, 9] 15\n" * 2


def test_fork_of_the_program(half):
    """A process that the program forks imports the module as it was at the fork."""
    child = os.fork()
    if not child:
        os._exit(7 if last_of_half() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


FIRST_CALL = """
    import os, sys, threading, warnings
    from importlib.machinery import PathFinder
    import xpool

    class Halting:
        "Halts the import of a module in its middle, in the first process."

        def find_spec(self, name, path, target=None):
            if name != sys.argv[1] or os.getpid() != main:
                return None
            spec = PathFinder.find_spec(name, path)
            self.own, spec.loader = spec.loader, self
            return spec

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            begun.set()
            may_go_on.wait()
            module.__spec__.loader = module.__loader__ = self.own
            self.own.exec_module(module)

    def double(x):
        return 2 * x

    def use():
        with xpool.Pool(1) as pool:
            assert pool.map(double, [1, 2]) == [2, 4]

    if __name__ == "__main__":
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        main, begun, may_go_on = os.getpid(), threading.Event(), threading.Event()
        sys.meta_path.insert(0, Halting())
        thread = threading.Thread(target=use)
        thread.start()
        assert begun.wait(60)
        pid = os.fork()
        if not pid:
            use()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        may_go_on.set()
        thread.join()
        use()
"""


@pytest.mark.parametrize(
    "module",
    ["xpool._pickling.by_value.script_top",
     *also("dis", "multiprocessing", "xpool._pools.process", "xpool._pools.assembly")],
)  # fmt: skip
def test_fork_of_the_program_in_a_first_call(tmp_path, module):
    """The program forks while another thread imports a module that its first pool needs.  A pool of
    the child imports the module anew."""
    scripts.program(tmp_path, FIRST_CALL, module)
