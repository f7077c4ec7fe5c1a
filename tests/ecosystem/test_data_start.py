"""How a loader's workers start: as forks of the program or of the fork server.

The programs are forks of one process that has imported torch, because that takes a second.
"""

import multiprocessing
import textwrap

import pytest
from support import scripts
from support.tiers import also

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        multiprocessing.get_all_start_methods()[0] != "fork",
        reason="torch's loader does not fork here, so this one does not either",
    ),
]

PARENTS = """
    import os, signal, sys, threading
    import torch
    import xpool
    from xpool.data import DataLoader

    sys.path.insert(0, FOLDER)
    import settings

    class Parents(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return i, os.getpid(), os.getppid(), settings.SIZE

    def epoch(loader, kills=False):
        batches = iter(loader)
        seen, pid, parents, sizes = (values.tolist() for values in next(batches))
        print("fork" if parents[0] == os.getpid() else "server")
        if kills:
            os.kill(pid[0], signal.SIGKILL)
        for places, _, parent, size in batches:
            seen += places.tolist()
            parents += parent.tolist()
            sizes += size.tolist()
        assert sorted(seen) == list(range(40)), seen
        forked = {size for size, parent in zip(sizes, parents) if parent == os.getpid()}
        assert forked <= {224}, "forks see the values of globals of modules, also if a server runs"
        assert not kills or set(parents) - {os.getpid()}, "the worker was replaced by a fork"

    if __name__ == "__main__":
        settings.SIZE = 224
        BEFORE
        loader = DataLoader(Parents(), 2, num_workers=1)
        epoch(loader, KILLS)
        epoch(loader)
"""

IMPORTS = """
    import sys
    import xpool.data._loader_worker
    print([name for name in sys.modules if name.startswith(("xpool.pool", "xpool._pools"))])
"""

HANDLERS = """
    import os, signal, socket
    import torch
    from xpool.data import DataLoader

    class Signals(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            assert os.getppid() == PROGRAM
            return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1)

    PROGRAM = os.getpid()
    if __name__ == "__main__":
        signal.signal(signal.SIGTERM, lambda *args: print("the program's handler"))
        end, other = socket.socketpair()
        end.setblocking(False)
        signal.set_wakeup_fd(end.fileno())
        for defaults, descriptors in DataLoader(Signals(), 2, num_workers=1):
            print(*defaults.tolist(), *descriptors.tolist())
        signal.set_wakeup_fd(-1)
"""

CLASSES = """
    from xpool.data import DataLoader

    def make():
        class Batch(list):
            pass

        return Batch

    Other = make()

    if __name__ == "__main__":
        for batch in DataLoader(range(2), num_workers=1, collate_fn=lambda items: Other(items)):
            print(type(batch) is Other)
"""


def parents(before, kills=False):
    """Return a program that prints whether its workers are forks or come from the server."""
    return PARENTS.replace("BEFORE", before).replace("KILLS", str(kills))


PROGRAMS = {
    # In a program without other threads, workers are forks. The server replaces dead ones; the
    # next epoch still forks.
    "alone": (parents("pass", True), "fork fork"),
    "bare thread": (
        parents("lock = __import__('_thread').start_new_thread(threading.Event().wait, ())"),
        "server server",
    ),
    # Making batches imports no pools, because each worker of the first epoch waits for its imports.
    "imports": (IMPORTS, "[]"),
    # A fork runs neither the program's signal handlers nor its event loop's.
    "handlers": (HANDLERS, "True True -1 -1"),
    # Batches of a class that its own name does not lead to are of the program's class.
    "classes": (CLASSES, "True True"),
}
MORE = {
    "thread": (
        parents("threading.Thread(target=threading.Event().wait, daemon=True).start()", True),
        "server server",
    ),
    "spawn": (parents("__import__('multiprocessing').set_start_method('spawn')"), "server server"),
    "preload": (parents("xpool.preload('torch')", True), "fork fork"),
}

RUN = """
    import os, sys
    import torch

    for name, text in PROGRAMS.items():
        if not (child := os.fork()):
            exec(text, globals())
            sys.exit()
        print("end of", name, os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.parametrize("programs", [PROGRAMS, *also(MORE)], ids=["", "more"])
def test_programs(tmp_path, programs):
    """Each program prints what it should. The list has the reason for each."""
    scripts.write(tmp_path / "settings.py", "SIZE = 1")
    begin = f"FOLDER = {str(tmp_path)!r}\n"
    texts = {name: begin + textwrap.dedent(text) for name, (text, _) in programs.items()}
    out = scripts.run_ok(["-"], f"PROGRAMS = {texts!r}\n" + textwrap.dedent(RUN))
    assert " ".join(out.split()) == " ".join(
        f"{wanted} end of {name} 0" for name, (_, wanted) in programs.items()
    )
