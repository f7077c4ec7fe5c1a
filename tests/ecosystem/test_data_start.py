"""How a loader's workers start: as forks of the program or of the fork server."""

from __future__ import annotations

import multiprocessing

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

PROGRAM = """
    import os, signal, sys, threading
    import torch
    import xpool
    from xpool.data import DataLoader

    class Parents(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return i, os.getpid(), os.getppid()

    def epoch(loader, kills=False):
        batches = iter(loader)
        seen, pid, parents = (values.tolist() for values in next(batches))
        print("fork" if parents[0] == os.getpid() else "server")
        if kills:
            os.kill(pid[0], signal.SIGKILL)
        for places, _, parent in batches:
            seen += places.tolist()
            parents += parent.tolist()
        assert sorted(seen) == list(range(40)), seen
        assert not kills or set(parents) - {os.getpid()}, "the worker was replaced by a fork"

    if __name__ == "__main__":
        BEFORE
        loader = DataLoader(Parents(), 2, num_workers=1)
        epoch(loader, KILLS)
        epoch(loader)
"""


BEFORE = {
    "alone": ("pass", "fork"),
    "bare thread": (
        "lock = __import__('_thread').start_new_thread(threading.Event().wait, ())", "server",
    ),
    "thread": ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "server"),
    "spawn": ("__import__('multiprocessing').set_start_method('spawn')", "server"),
    "preload": ("xpool.preload('torch')", "fork"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["alone", "bare thread", *also("thread", "spawn", "preload")])
def test_workers_are_forks_where_that_is_safe(name):
    """In a program without other threads, workers are forks. The server replaces dead ones."""
    before, kind = BEFORE[name]
    program = PROGRAM.replace("BEFORE", before).replace("KILLS", str(kind == "fork"))
    assert scripts.run_ok(["-"], program).split() == [kind] * 2


def test_workers_have_the_values_of_globals_in_each_epoch(tmp_path):
    """Workers see the program's values of globals, whether or not the server is ready."""
    scripts.write(tmp_path / "settings.py", "SIZE = 1")
    program = """
        import sys
        import torch
        import xpool
        from xpool.data import DataLoader

        sys.path.insert(0, FOLDER)
        import settings

        class Sizes(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                return settings.SIZE

        if __name__ == "__main__":
            settings.SIZE = 224
            xpool.preload("torch")
            loader = DataLoader(Sizes(), 4, num_workers=1)
            print(*next(iter(loader)).tolist())
            with xpool.Pool(1) as pool:  # from the server, which has torch then
                pool.apply(abs, (1,))
            print(*next(iter(loader)).tolist())
    """.replace("FOLDER", repr(str(tmp_path)))
    assert scripts.run_ok(["-"], program).split() == ["224"] * 8


def test_a_death_at_the_end_of_an_epoch(tmp_path):
    """After a worker's death, the next epoch still forks, although a fork server runs."""
    program = """
        import os, signal, sys
        import torch
        from xpool.data import DataLoader

        class Dying(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, i):
                if i == 0:
                    try:
                        os.close(os.open(FILE, os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        return os.getppid()
                    os.kill(os.getpid(), signal.SIGKILL)
                return os.getppid()

        FILE = sys.argv[1]
        if __name__ == "__main__":
            loader = DataLoader(Dying(), 1, num_workers=2)
            list(loader)
            print({parent.item() for parent in loader} == {os.getpid()})
    """
    assert scripts.run_ok(["-", str(tmp_path / "died")], program).split() == ["True"]


def test_forks_run_no_handlers_of_the_program():
    """A fork runs neither the program's signal handlers nor its event loop's."""
    program = """
        import os, signal, socket, threading
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
    assert scripts.run_ok(["-"], program).split() == ["True", "True", "-1", "-1"]
