"""`xpool.preload`: the fork server starts early, and imports while the program does."""

from __future__ import annotations

import pytest
from support import scripts

import xpool

pytestmark = pytest.mark.xpool_only

SLOW = """
    import os
    PID = os.getpid()
"""

EARLY = """
    import importlib.util, os, sys
    import xpool
    from support import leaks

    def importer():
        import slow
        return slow.PID, os.getpid()

    if __name__ == "__main__":
        assert leaks.servers() == []
        xpool.preload("slow")
        (server,) = leaks.servers()
        with xpool.Pool(2) as pool:
            assert {pool.apply(importer)[0] for _ in range(4)} == {server}
        pool.join()
        if importlib.util.find_spec("numpy"):
            import numpy
        with xpool.Pool(1) as pool:
            assert pool.apply(importer)[0] == server
        pool.join()
        assert leaks.servers() == [server] and "slow" not in sys.modules
"""


def test_preloaded_in_the_server(tmp_path):
    """Workers have what was asked for from the server, once and for all pools; the program not."""
    scripts.write(tmp_path / "slow.py", SLOW)
    assert scripts.run_ok([scripts.write(tmp_path / "early.py", EARLY)]) == ""


TESTED = """
    import sys
    import pytest
    import xpool

    KNOWN = "'pytest' in __import__('sys').modules"

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            assert pool.apply(eval, (KNOWN,))  # which needs nothing of this script
        xpool.preload("math")
        with xpool.Pool(1) as pool:
            assert not pool.apply(eval, (KNOWN,))  # all was named
"""


def test_pytest_is_in_the_server(tmp_path):
    """Each worker of each test would import it, with the module that its function is in."""
    assert scripts.run_ok([scripts.write(tmp_path / "tested.py", TESTED)]) == ""


IMPORTED = """
    import sys
    import xpool
    from support import leaks

    def find():
        return "numpy.random" in sys.modules, "torch" in sys.modules

    if __name__ == "__main__":
        xpool.preload("torch")
        (server,) = leaks.servers()
        import torch
        with xpool.Pool(1) as pool:
            assert pool.apply(find) == (True, True)
        pool.join()
        assert leaks.servers() == [server]
"""


@pytest.mark.exhaustive
@pytest.mark.torch
def test_preloaded_torch_is_the_one(tmp_path):
    """The server that was started early serves the program that has imported torch meanwhile."""
    path = scripts.write(tmp_path / "imported.py", IMPORTED)
    assert scripts.run_ok([path]) == ""


READY = """
    import sys
    import xpool

    if __name__ == "__main__":
        xpool.preload("json")
        before = set(sys.modules)
        with xpool.Pool(1) as pool:
            assert pool.apply(abs, (-3,)) == 3
        pool.join()
        print(sorted(name for name in set(sys.modules) - before if name.startswith("xpool")))
"""


def test_the_program_has_imported_what_a_pool_needs(tmp_path):
    """Making a pool imports nothing of xpool's engine, which takes long once torch is there."""
    done = scripts.run([scripts.write(tmp_path / "ready.py", READY)])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stdout + done.stderr


UNKNOWN = """
    import xpool

    if __name__ == "__main__":
        xpool.preload("no_such_module")
        with xpool.Pool(1) as pool:
            print(pool.apply(abs, (-3,)))
        pool.join()
"""


def test_a_module_that_is_not_there(tmp_path):
    """The server says so, and pools work."""
    done = scripts.run([scripts.write(tmp_path / "unknown.py", UNKNOWN)])
    assert (done.returncode, done.stdout) == (0, "3\n")
    assert "cannot preload no_such_module" in done.stderr


ENDS = """
    import sys
    import xpool
    from support.waiting import Mailbox

    if __name__ == "__main__":
        box = Mailbox(sys.path[0] + "/mailbox")
        xpool.preload("endless")
        box.line()
"""


def test_the_program_ends_while_the_server_imports(tmp_path):
    """Nobody waits for an import that goes on, and nothing is left of it."""
    endless = """
        import os, threading
        from support.waiting import post
        post(os.path.dirname(__file__) + "/mailbox", str(os.getpid()))
        threading.Event().wait()
    """
    scripts.write(tmp_path / "endless.py", endless)
    assert scripts.run_ok([scripts.write(tmp_path / "ends.py", ENDS)]) == ""


def test_names_only():
    """A module is refused: it would have been imported by the program first."""
    with pytest.raises(TypeError, match="names of modules"):
        xpool.preload(pytest)


USED = """
    import os
    import xpool

    if __name__ == "__main__":
        xpool.preload("unusual")
        with xpool.Pool(2) as pool:
            assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
            died = pool.apply_async(os._exit, (3,))
            try:
                died.get(60)
            except xpool.WorkerDied as exc:
                assert exc.exitcode == 3, exc
            assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
        pool.join()
        print("used")
"""

UNUSUAL = {
    "blocks SIGCHLD": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])",
    "ignores SIGCHLD": "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "closes its streams": "import os; os.close(1); os.close(2)",
    "replaces its streams": "import sys; sys.stdout = sys.stderr = None",
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_a_module_with_effects_on_the_server(tmp_path, what):
    """Workers start, their deaths are seen, and others come after them."""
    scripts.write(tmp_path / "unusual.py", UNUSUAL[what])
    assert scripts.run_ok([scripts.write(tmp_path / "used.py", USED)]) == "used\n"


@pytest.mark.parametrize("how", ["SystemExit('needs a GPU')", "KeyboardInterrupt()"])
def test_a_module_that_wants_to_end_the_process(tmp_path, how):
    """The server says so, as of one that cannot be imported, and goes on."""
    scripts.write(tmp_path / "unusual.py", f"raise {how}")
    done = scripts.run([scripts.write(tmp_path / "used.py", USED)])
    assert (done.returncode, done.stdout) == (0, "used\n"), done.stderr
    assert done.stderr == f"xpool: the fork server cannot preload unusual: {how}\n"


def test_a_module_that_ends_the_process(tmp_path):
    """The pool's error says how the server has ended, and what it has imported."""
    scripts.write(tmp_path / "unusual.py", "import os; os._exit(7)")
    done = scripts.run([scripts.write(tmp_path / "used.py", USED)])
    assert done.returncode == 1
    assert "WorkerStartFailed" in done.stderr and "exit code 7; it imports unusual" in done.stderr


@pytest.mark.parametrize("name", [1, "", "a module", ".relative"])
def test_only_names_are_preloaded(name):
    """What cannot be the name of a module is refused."""
    with pytest.raises(TypeError, match="preload takes names of modules"):
        xpool.preload(name)


MISSING = """
    import warnings
    import xpool

    if __name__ == "__main__":
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            xpool.preload("nosuchmodule.part", "math")
        print(*(f"{w.category.__name__}: {w.message}" for w in said))
        with xpool.Pool(1) as pool:
            assert pool.apply(abs, (-1,)) == 1
"""


def test_a_missing_module_is_a_warning(tmp_path):
    """The program is warned of a module that does not exist, and works without it."""
    out = scripts.run([scripts.write(tmp_path / "missing.py", MISSING)])
    assert out.stdout == "RuntimeWarning: preload: there is no module 'nosuchmodule.part'\n"
