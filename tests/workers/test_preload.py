"""`xpool.preload` starts the fork server early. The server and the program import in parallel."""

import pytest
from support import scripts
from support.tiers import also

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
    """All workers share the server's module. The program does not import it."""
    assert scripts.program(tmp_path, EARLY, slow=SLOW) == ""


TESTED = """
    import sys
    import pytest
    import xpool

    KNOWN = "'pytest' in __import__('sys').modules"

    def test():
        pytest.skip()  # else the import would be one for its effect, which workers repeat

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            assert pool.apply(eval, (KNOWN,))  # which needs nothing of this script
        xpool.preload("math")
        with xpool.Pool(1) as pool:
            assert not pool.apply(eval, (KNOWN,))  # all was named
"""


def test_pytest_is_in_the_server(tmp_path):
    """The server imports pytest. Otherwise each worker would import it with the test's module."""
    assert scripts.program(tmp_path, TESTED) == ""


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
    """The server started early serves a program that has since imported torch."""
    assert scripts.program(tmp_path, IMPORTED) == ""


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


def test_making_a_pool_imports_nothing(tmp_path):
    """Making a pool imports no module of xpool, because that would be slow after torch's import."""
    done = scripts.run([scripts.write(tmp_path / "ready.py", READY)])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stdout + done.stderr


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
    """The program does not wait for an endless import, and nothing stays behind."""
    endless = """
        import os, threading
        from support.waiting import post
        post(os.path.dirname(__file__) + "/mailbox", str(os.getpid()))
        threading.Event().wait()
    """
    assert scripts.program(tmp_path, ENDS, endless=endless) == ""


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
    "blocks SIGCHLD, closes its streams": """
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        os.close(1), os.close(2)
    """,
    "ignores SIGCHLD, replaces its streams": """
        import signal, sys
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        sys.stdout = sys.stderr = None
    """,
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_a_module_with_effects_on_the_server(tmp_path, what):
    """Workers start, the pool detects their deaths, and replaces them."""
    assert scripts.program(tmp_path, USED, unusual=UNUSUAL[what]) == "used\n"


@pytest.mark.parametrize("how", ["SystemExit('needs a GPU')", *also("KeyboardInterrupt()")])
def test_a_module_that_wants_to_end_the_process(tmp_path, how):
    """The server reports an exception that would end the process, and continues."""
    scripts.write(tmp_path / "unusual.py", f"raise {how}")
    done = scripts.run([scripts.write(tmp_path / "used.py", USED)])
    assert (done.returncode, done.stdout) == (0, "used\n"), done.stderr
    assert done.stderr == f"xpool: the fork server cannot preload unusual: {how}\n"


def test_a_module_that_ends_the_process(tmp_path):
    """The pool's error has the server's exit code and the modules that it imports."""
    scripts.write(tmp_path / "unusual.py", "import os; os._exit(7)")
    done = scripts.run([scripts.write(tmp_path / "used.py", USED)])
    assert done.returncode == 1
    assert "WorkerStartFailed" in done.stderr and "exit code 7; it imports unusual" in done.stderr


@pytest.mark.parametrize("name", [1, "", "a module", ".relative"])
def test_only_names_are_preloaded(name):
    """An object that is not a module's name is refused."""
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
    """For a missing module, the program gets a warning, the server reports it, and pools work."""
    done = scripts.run([scripts.write(tmp_path / "missing.py", MISSING)])
    assert done.returncode == 0
    assert done.stdout == "RuntimeWarning: preload: there is no module 'nosuchmodule.part'\n"
    assert "cannot preload nosuchmodule.part" in done.stderr
