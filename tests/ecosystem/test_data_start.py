"""How the workers of a loader start: forks of the program at once, and a server's after them."""

from __future__ import annotations

import multiprocessing

import pytest
from support import scripts

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        multiprocessing.get_all_start_methods()[0] != "fork",
        reason="torch's loader does not fork here, so this one does not either",
    ),
]

PROGRAM = """
    import os, signal, threading
    import torch
    from xpool.data import DataLoader

    class Parents(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return i, os.getpid(), os.getppid()

    if __name__ == "__main__":
        BEFORE
        loader = DataLoader(Parents(), 2, num_workers=2, prefetch_factor=1)
        batches = iter(loader)
        seen, pid, parent = (values.tolist() for values in next(batches))
        print("fork" if parent[0] == os.getpid() else "server")
        os.kill(pid[0], signal.SIGKILL)
        parents = set()
        for places, _, parent in batches:
            seen += places.tolist()
            parents.add(parent[0])
        assert sorted(seen) == list(range(40)), seen
        assert parents - {os.getpid()}, "the worker was replaced by a fork"
"""


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("pass", "fork"),
        ("__import__('multiprocessing').set_start_method('spawn')", "server"),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "server"),
    ],
    ids=["alone", "spawn", "thread"],
)
def test_the_first_workers_are_forks_where_that_is_safe(before, kind):
    """Only of a program without other threads; whoever dies is replaced from the server."""
    program = PROGRAM.replace("BEFORE", before)
    assert scripts.run_ok(["-"], program).split() == [kind]
