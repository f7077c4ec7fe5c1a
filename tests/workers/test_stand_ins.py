"""Temporary workers, used while the fork server still imports torch."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

TORCH = """
    import multiprocessing, os, sys, types

    PID = os.getpid()
    version = types.SimpleNamespace(cuda=None, hip=None)
    seed = 0

    def manual_seed(n):
        global seed
        seed = n

    default_generator = types.SimpleNamespace(manual_seed=manual_seed)

    threads = 0

    def set_num_threads(n):
        global threads
        threads = n

    if "xpool._worker.server" in sys.modules and multiprocessing.parent_process() is None:
        with open(os.path.dirname(__file__) + "/gate") as gate:  # it opens when the program does
            gate.read()
"""

NEEDY = """
    import os
    import torch

    def where(x):
        with open(os.path.dirname(__file__) + "/ran", "a") as file:
            file.write("x")
        return torch.PID, os.getpid(), os.getppid()
"""

PLAIN = """
    import os, sys

    def open_gate():
        with open(os.path.dirname(__file__) + "/gate", "w"):
            pass

    def times_run():
        with open(os.path.dirname(__file__) + "/ran") as file:
            return len(file.read())

    def begin():
        with open(os.path.dirname(__file__) + "/ran", "a") as file:
            file.write("x")

    def note(x):
        sys.noted = x

    def noted(x):
        return sys.noted, os.getpid()

    def has_torch(x):
        return "torch" in sys.modules

    def imports_torch(x):
        import torch
        raise ValueError(torch.PID == os.getpid())
"""

TESTLIKE = """
    import pytest
    import sys

    def has_torch(x):
        return "torch" in sys.modules
"""

TOP = """
    import os, sys
    sys.path.insert(0, os.path.dirname(__file__) + "/lib")
    import torch
    import xpool
    from plain import *

"""


def run(folder: Path, program: str, top: str = TOP) -> str:
    """Run a program whose fork server cannot finish the import of torch yet."""
    modules = folder / "lib"
    modules.mkdir()
    os.mkfifo(modules / "gate")
    texts = {"torch": TORCH, "needy": NEEDY, "plain": PLAIN, "testlike": TESTLIKE}
    for name, text in texts.items():
        scripts.write(modules / f"{name}.py", text)
    path = scripts.write(folder / "program.py", textwrap.dedent(top) + textwrap.dedent(program))
    return scripts.run_ok([path])


SETTINGS = """
    import os, sys
    sys.path.insert(0, os.path.dirname(__file__) + "/lib")
    import torch
    import plain
    import xpool

    torch.set_num_threads(len("one"))
    torch.version.cuda = None
    if torch.version.cuda:
        torch.set_num_threads(1)

    class Net(torch.types.SimpleNamespace):
        pass

    model = Net(weight=1)

    def light(x):
        return plain.has_torch(x)

    def heavy(x):
        return torch.PID, os.getppid(), torch.threads

    if __name__ == "__main__":
        with xpool.Pool(2) as pool:
            assert not any(pool.map(light, range(20), 1))
            os.kill(pool.apply(os.getpid), 9)
            assert not pool.apply(light, (0,))
        pool.join()
        with xpool.Pool(2) as pool:
            results = pool.map_async(heavy, range(9), 1)
            plain.open_gate()
            assert all(one == two and n == 3 for one, two, n in results.get())
            assert pool.statistics()["deaths"] == 0
        pool.join()
"""


def test_settings_of_torch_do_not_delay_other_tasks(tmp_path):
    """A function that does not use torch is answered early, although the script's top configures
    torch. A function that uses torch gets a worker with the configured torch."""
    assert run(tmp_path, SETTINGS, "") == ""


INSIDE = """
    import os, sys
    sys.path.insert(0, os.path.dirname(__file__) + "/lib")
    import torch
    import plain
    import xpool

    number = len("four")
    torch.set_num_threads(number)

    def inside(x):
        import importlib
        torch = importlib.import_module("tor" + "ch")
        return torch.threads, torch.seed != 0

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            assert not pool.apply(plain.has_torch, (0,))
            assert not pool.apply(lambda x: plain.has_torch(x), (0,))
            assert pool.apply(inside, (0,)) == (4, True)
        pool.join()
"""


def test_settings_of_torch_are_made_when_a_task_imports_it(tmp_path):
    """In a temporary worker, torch is seeded and configured as soon as a task imports it."""
    assert run(tmp_path, INSIDE, "") == ""


NUMPY = """
    import os, random, sys
    import numpy as np
    import xpool

    np.random.seed(0)
    random.seed(0)
    table = np.zeros(3)

    def light(x):
        return "numpy" in sys.modules

    def heavy(x):
        with open(f"/proc/{os.getppid()}/maps") as file:
            return float(np.exp(table[0])), os.getppid(), "numpy" in file.read()

    if __name__ == "__main__":
        with xpool.Pool(2) as pool:
            assert not any(pool.map(light, range(20), 1))
        pool.join()
        with xpool.Pool(2) as pool:
            found = set(pool.map(heavy, range(9), 1))
            assert pool.statistics()["deaths"] == 0
        pool.join()
        ((one, server, shared),) = found
        assert one == 1 and shared, found
        with xpool.Pool(1, sys.intern, ("x",)) as pool:  # nothing stands in for these
            assert pool.apply(light, (0,))
        pool.join()
"""


def test_a_task_without_numpy_does_not_wait_for_it(tmp_path):
    """A function without numpy is answered before its import. Other workers share numpy."""
    pytest.importorskip("numpy", reason="numpy is not installed")
    path = scripts.write(tmp_path / "program.py", textwrap.dedent(NUMPY))
    assert scripts.run_ok([path]) == ""


BROKEN = """
    import os, sys
    class ndarray:
        pass
    if "xpool._worker.server" in sys.modules:  # in the server, and in its workers
        {what}
"""

WITHOUT = """
    import os, sys
    sys.path.insert(0, os.path.dirname(__file__) + "/lib")
    import numpy
    import xpool

    def light(x):
        return x + 1

    def heavy(x):
        return numpy.ndarray

    if __name__ == "__main__":
        with xpool.Pool(2) as pool:
            assert pool.map(light, range(3)) == [1, 2, 3]
        pool.join()
        with xpool.Pool(2) as pool:
            try:
                pool.map(heavy, range(3))
            except Exception as exc:
                print(type(exc).__name__, exc)
        pool.join()
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise RuntimeError('broken')", "RuntimeError broken"),
        ("os._exit(3)", "the fork server ended before it had forked the worker, exit code 3"),
    ],
)
def test_a_numpy_that_the_server_cannot_import(tmp_path, what, said):
    """Functions that do not use numpy are answered. Others fail with the reason."""
    package = tmp_path / "lib" / "numpy"
    package.mkdir(parents=True)
    scripts.write(package / "__init__.py", BROKEN.format(what=what))
    scripts.write(package / "random.py", "")
    done = scripts.run([scripts.write(tmp_path / "program.py", WITHOUT)])
    assert done.returncode == 0 and said in done.stdout, done


LIGHT = """
    if __name__ == "__main__":
        with xpool.Pool(2) as pool:
            assert not any(pool.map(has_torch, range(20), 1))
            os.kill(pool.apply(os.getpid), 9)
            assert not pool.apply(has_torch, (0,))
        pool.join()
"""


def test_a_task_without_torch_does_not_wait_for_it(tmp_path):
    """Tasks are answered and workers replaced, although the server has not imported torch yet."""
    assert run(tmp_path, LIGHT) == ""


TESTED = """
    if __name__ == "__main__":
        import pytest
        from testlike import has_torch
        with xpool.Pool(2) as pool:
            assert not any(pool.map(has_torch, range(20), 1))
        pool.join()
"""


def test_a_task_with_pytest_does_not_wait_for_torch(tmp_path):
    """A temporary worker imports pytest itself, although the server imports it too."""
    assert run(tmp_path, TESTED) == ""


NEEDED = """
    if __name__ == "__main__":
        from needy import where
        with xpool.Pool(2) as pool:
            results = pool.map_async(where, range(9), 1)
            open_gate()
            for imported, worker, server in results.get():
                assert imported == server != os.getpid(), (imported, worker, server)
            assert times_run() == 9
            assert pool.statistics()["deaths"] == 0
        pool.join()
"""


def test_a_first_task_with_torch_gets_a_worker_that_shares_it(tmp_path):
    """A first task that uses torch runs once, in a worker of the server with torch."""
    assert run(tmp_path, NEEDED) == ""


CALLED = """
    if __name__ == "__main__":
        import threading
        from needy import where
        with xpool.Pool(1) as pool:
            threading.Thread(target=open_gate).start()
            imported, worker, server = pool.apply(where, (0,), timeout=3600)
            assert imported == server and times_run() == 1
        pool.join()
"""


def test_a_caller_that_waits_at_the_pipe_of_a_stand_in(tmp_path):
    """`apply` waits for a temporary worker, but gets the answer of its replacement."""
    assert run(tmp_path, CALLED) == ""


LATER = """
    if __name__ == "__main__":
        from needy import where
        with xpool.Pool(1) as pool:
            pool.apply(note, (7,))
            imported, worker, _ = pool.apply(where, (0,))
            assert imported == worker
            assert pool.apply(noted, (0,)) == (7, worker)
            assert pool.statistics()["deaths"] == 0
        pool.join()
"""


def test_a_stand_in_that_has_run_a_task_is_kept(tmp_path):
    """A temporary worker that has run a task is kept. It imports torch itself."""
    assert run(tmp_path, LATER) == ""


RUNNING = """
    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            try:
                pool.apply(imports_torch, (0,))
            except ValueError as error:
                assert error.args == (True,)
            else:
                raise AssertionError
            assert pool.statistics()["deaths"] == 0
        pool.join()
"""


def test_a_task_that_imports_torch_itself_is_not_run_twice(tmp_path):
    """A task that has begun continues in the same worker, which imports torch."""
    assert run(tmp_path, RUNNING) == ""


SEEN = """
    if __name__ == "__main__":
        import threading
        threading.Thread(target=open_gate).start()
        with xpool.Pool(2, begin) as pool:
            assert all(pool.run_all(has_torch, 0))
        pool.join()
        assert times_run() == 2
        with xpool.Pool(2) as pool:
            assert all(pool.run_all(has_torch, 0))
        pool.join()
"""


def test_no_stand_ins_with_an_initializer(tmp_path):
    """With an initializer or `run_all`, there are no temporary workers, so each initializer runs
    once."""
    assert run(tmp_path, SEEN) == ""


KILLED = """
    if __name__ == "__main__":
        import signal
        from needy import where
        from support import leaks
        with xpool.Pool(1) as pool:
            pool.apply(note, (7,))
            for server in leaks.servers():
                os.kill(server, signal.SIGKILL)
            results = pool.apply_async(where, (0,))
            imported, ran_in, _ = results.get()
            assert imported == ran_in
        pool.join()
"""


def test_servers_that_are_killed(tmp_path):
    """Workers of killed servers continue. New workers come from new servers."""
    assert run(tmp_path, KILLED) == ""
