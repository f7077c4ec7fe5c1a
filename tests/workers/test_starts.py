"""Workers of programs that use torch or numpy: what their server imports, and what they import."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

TORCH = """
    import os, sys, types

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

    gate = os.path.dirname(__file__) + "/gate"
    if os.path.exists(gate) and "xpool._worker.server" in sys.modules:
        open(gate).close()  # waits for a writer
"""

NEEDY = """
    import os
    import torch

    def where(x):
        return torch.PID, os.getpid(), os.getppid()
"""

PLAIN = """
    import os, sys

    def note(x):
        sys.noted = x

    def noted(x):
        return sys.noted, os.getpid()

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
    """Run a program that finds another torch, which tells where it was imported."""
    modules = folder / "lib"
    modules.mkdir()
    for name, text in {"torch": TORCH, "needy": NEEDY, "plain": PLAIN}.items():
        scripts.write(modules / f"{name}.py", text)
    return scripts.program(folder, textwrap.dedent(top) + textwrap.dedent(program))


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
            assert all(pool.map(light, range(20), 1))
            results = pool.map(heavy, range(9), 1)
            assert all(one == two and n == 3 for one, two, n in results)
            assert pool.statistics()["deaths"] == 0
        pool.join()
"""


def test_workers_share_the_servers_torch_with_the_settings_of_the_top(tmp_path):
    """The server imports torch once for all workers. A task finds it as the script's top has
    configured it."""
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
        with xpool.Pool(1, context="spawn") as pool:  # its worker is no fork of a server
            assert not pool.apply(plain.has_torch, (0,))
            assert not pool.apply(lambda x: plain.has_torch(x), (0,))
            assert pool.apply(inside, (0,)) == (4, True)
        pool.join()
"""


def test_settings_of_torch_are_made_when_a_task_imports_it(tmp_path):
    """In a worker without torch, torch is seeded and configured as soon as a task imports it."""
    assert run(tmp_path, INSIDE, "") == ""


LATER = """
    import os, sys
    sys.path.insert(0, os.path.dirname(__file__) + "/lib")
    import plain
    import xpool

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            pool.apply(plain.note, (7,))
            from needy import where
            imported, worker, _ = pool.apply(where, (0,))
            assert imported == worker
            assert pool.apply(plain.noted, (0,)) == (7, worker)
            assert pool.statistics()["deaths"] == 0
        pool.join()
"""


def test_a_pool_that_is_older_than_the_import_of_torch(tmp_path):
    """Its workers import torch when a task needs it, and keep what tasks have left in them."""
    assert run(tmp_path, LATER, "") == ""


NUMPY = """
    import os, random, sys
    import numpy as np
    import xpool

    np.random.seed(0)
    random.seed(0)
    table = np.zeros(3)

    def heavy(x):
        with open(f"/proc/{os.getppid()}/maps") as file:
            return float(np.exp(table[0])), os.getppid(), "numpy" in file.read()

    if __name__ == "__main__":
        with xpool.Pool(2) as pool:
            found = set(pool.map(heavy, range(9), 1))
        pool.join()
        ((one, server, shared),) = found
        assert one == 1 and shared, found
"""


def test_workers_share_the_servers_numpy(tmp_path):
    """In a program that has imported numpy, the server imports it for all workers."""
    pytest.importorskip("numpy", reason="numpy is not installed")
    assert scripts.program(tmp_path, textwrap.dedent(NUMPY)) == ""


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
        for func in light, heavy:
            with xpool.Pool(2) as pool:
                try:
                    print(pool.map(func, range(3)))
                except Exception as exc:
                    print(type(exc).__name__, exc)
            pool.join()
"""


@pytest.mark.parametrize(
    ("what", "of_light", "of_heavy"),
    [
        ("raise RuntimeError('broken')", "[1, 2, 3]", "RuntimeError broken"),
        ("os._exit(3)", "exit code 3; it imports numpy first", "exit code 3"),
    ],
)
def test_a_numpy_that_the_server_cannot_import(tmp_path, what, of_light, of_heavy):
    """If its import raises an error, tasks that use it raise this error. If it ends the server, the
    pool fails with the reason."""
    package = tmp_path / "lib" / "numpy"
    package.mkdir(parents=True)
    scripts.write(package / "__init__.py", BROKEN.format(what=what))
    scripts.write(package / "random.py", "")
    done = scripts.run([scripts.write(tmp_path / "program.py", WITHOUT)])
    assert done.returncode == 0, done
    light, heavy = done.stdout.splitlines()
    assert of_light in light and of_heavy in heavy, done


ENDED = """
    if __name__ == "__main__":
        os.mkfifo(torch.gate)
        pools = [xpool.Pool(2), xpool.Pool(1, note, (1,)), xpool.P2PPool(2)]
        results = [pool.apply_async(has_torch, (0,)) for pool in pools]
        for pool in pools:
            pool.terminate()
            pool.join()
        for result in results:
            try:
                result.get()
            except xpool.PoolClosed:
                print("closed")
"""


def test_a_pool_that_ends_while_the_server_imports(tmp_path):
    """Its end does not wait for the import, which never ends here."""
    assert run(tmp_path, ENDED) == "closed\n" * 3
