"""A worker's first task may fail without descriptors or an import path."""

from __future__ import annotations

import pytest
from support import scripts
from support.tiers import also

pytestmark = pytest.mark.xpool_only

FAILING = """
    import os, resource, sys
    from xpool import Pool

    KEPT = []

    def take_all():
        try:
            while True:
                KEPT.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            raise ValueError("all is taken") from None

    def forget_the_path():
        sys.path[:] = []
        sys.path_importer_cache.clear()
        raise ValueError("nothing is found")  # größer: not ASCII

    def unsendable():
        take = KEPT.append
        try:
            while True:
                take(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return sys._getframe()

    if __name__ == "__main__":
        for func in take_all, forget_the_path, unsendable:
            # Each in a program's first workers: later ones have it all from their server.
            if os.fork() == 0:
                resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
                with Pool(1) as pool:
                    try:
                        pool.apply(func)
                    except Exception as exc:
                        text = str(exc.__cause__) if func is not unsendable else func.__name__
                        print(type(exc).__name__, func.__name__ in text, flush=True)
                    assert pool.apply(abs, (-1,)) == 1
                pool.join()
                os._exit(0)
            assert os.wait()[1] == 0
"""


def test_a_first_task_fails_without_imports(tmp_path):
    """The task fails with its own exception, without descriptors or an import path."""
    assert scripts.program(tmp_path, FAILING).splitlines() == [
        "ValueError True",
        "ValueError True",
        "ResultNotPicklable True",
    ]


FORKED = """
    import sys
    IMPORT
    from xpool import Pool

    if __name__ == "__main__":
        with Pool(1, context="fork") as pool:
            there = pool.apply(eval, ("sorted(__import__('sys').modules)",))
            print(sorted(set(there) - set(sys.modules)), "xpool.devices" in sys.modules)
"""


@pytest.mark.parametrize("line", ["", "import numpy"])
def test_a_fork_imports_nothing(tmp_path, line: str):
    """Before a fork, the program imports all that a worker needs. The worker imports nothing."""
    if line:
        pytest.importorskip("numpy")
    assert scripts.program(tmp_path, FORKED.replace("IMPORT", line)) == "[] False\n"


NOTED = """
    import sys

    def note(frame, event, function):
        if event == "c_call" and function is compile:
            callers.append(frame.f_globals["__name__"])

    callers = []
    sys.setprofile(note)
    from xpool import Pool

    def absolute(x):
        return abs(x)

    if __name__ == "__main__":
        with Pool(1) as pool:
            print(pool.map(absolute, [-1]))
        sys.setprofile(None)
        print([name for name in callers if name.startswith("xpool")])
"""


def test_a_first_answer_needs_no_compiler(tmp_path):
    """Before the first answer, the program does not call `compile`, whose first call takes long."""
    assert scripts.program(tmp_path, NOTED) == "[1]\n[]\n"


AUTOGRAD = """
    import os
    import sys
    import torch
    from xpool import Pool

    def begin():
        assert sys.renewed == [os.getpid()], sys.renewed

    def train():
        w = torch.ones(2, requires_grad=True)
        w.sum().backward()
        return w.grad.tolist()

    if __name__ == "__main__":
        ask = torch.autograd._is_checkpoint_valid
        sys.renewed = []
        torch.autograd._is_checkpoint_valid = lambda: sys.renewed.append(os.getpid()) or ask()
        with Pool(1, begin, context="fork") as pool:
            print(pool.apply(train), sys.renewed)
"""


def test_autograd_is_renewed_before_there_are_threads(tmp_path):
    """A forked worker renews torch's autograd engine before it starts threads."""
    pytest.importorskip("torch")
    assert scripts.program(tmp_path, AUTOGRAD) == "[1.0, 1.0] []\n"


ARRAY = """
    import os, resource
    from xpool import Pool

    KEPT = []

    def take_all(name):
        made = __import__(name).arange(3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                KEPT.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return made

    if __name__ == "__main__":
        with Pool(1, maxtasksperchild=1) as pool:
            assert pool.apply(take_all, ("NAME",)).tolist() == [0, 1, 2]
"""


ARGUMENT = """
    import os, resource
    import NAME as library
    from xpool import Pool

    if __name__ == "__main__":
        item = library.arange(3)
        item.sum()  # for which torch reads /proc/cpuinfo
        with Pool(1) as pool:
            pool.apply(len, ("",))
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            kept = []
            try:
                while True:
                    kept.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                pass
            assert pool.apply(sum, (item,)) == 3
"""


@pytest.mark.parametrize("text", [ARRAY, ARGUMENT], ids=["answer", "argument"])
@pytest.mark.parametrize("name", ["numpy", *also("torch")])
def test_a_first_array_needs_no_imports(tmp_path, name: str, text: str):
    """The modules that pickle an array are imported together with its library, or when the pool is
    made."""
    pytest.importorskip(name)
    assert scripts.program(tmp_path, text.replace("NAME", name)) == ""


IMPORTING = """
    import os, signal, sys, threading, warnings
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
    import numpy
    from xpool import pickle

    importing, forked = threading.Event(), threading.Event()

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "xpool._pickling.tensors.dense":
                importing.set()
                forked.wait(1)  # in vain, where the fork waits for the import

    sys.meta_path.insert(0, Finder())
    thread = threading.Thread(target=pickle.dumps, args=(numpy.arange(3),))
    thread.start()
    importing.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(int(pickle.loads(pickle.dumps(numpy.arange(3))).sum()))
    forked.set()
    thread.join()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_waits_for_an_import(tmp_path):
    """A fork waits for a thread that imports the pickling of arrays. Otherwise the child would
    hang."""
    pytest.importorskip("numpy")
    assert scripts.program(tmp_path, IMPORTING) == "3\n"
