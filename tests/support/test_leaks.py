"""The leak checks report leaks, and nothing that ends in time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from support.leaks import Snapshot
from support.limits import WAIT
from support.scripts import run_ok
from support.waiting import Gate, Mailbox, eventually, wait_gone
from xpool.testing import _leaks as leaks
from xpool.testing import no_leaks


def test_orphan_left():
    """A grandchild whose parent has ended is reported too."""
    before = Snapshot.take()
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdout=subprocess.DEVNULL)\n"
        "print(child.pid)\n"
    )
    reading, writing = os.pipe()
    out = subprocess.run([sys.executable, "-c", code], stdin=reading, stdout=subprocess.PIPE)
    orphan = int(out.stdout)
    os.close(reading)
    assert any(f"process {orphan}" in leak for leak in before.leaks(0.1))
    os.kill(orphan, signal.SIGKILL)
    os.close(writing)
    assert wait_gone([orphan]) == []


def test_thread_left():
    """A running thread is reported by its name."""
    before = Snapshot.take()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(20,), name="left-over")
    thread.start()
    assert "thread left-over" in before.leaks(0.1)
    stop.set()
    assert before.leaks(5) == []


def test_descriptor_left(tmp_path):
    """An open descriptor is reported with its target."""
    before = Snapshot.take()
    with (tmp_path / "open").open("w"):
        # Look at descriptors only: other programs may leave names in /dev/shm for a while.
        (leak,) = [one for one in before.leaks(0.1) if one.startswith("descriptor")]
        assert leak.endswith("open")
    assert before.leaks(5) == []


def test_shared_memory_left():
    """A name in /dev/shm that this process has open is reported."""
    before = Snapshot.take()
    path = Path(f"/dev/shm/xpool-test-{uuid.uuid4().hex}")
    with path.open("x") as file:
        try:
            found = [one for one in before.leaks(0.1) if str(path) in one]
            assert found == [f"descriptor {file.fileno()}: {path}", str(path)]
        finally:
            path.unlink()
    folder = path.with_suffix(".folder")
    folder.mkdir()
    try:
        assert before.leaks(0.1) == []
        with (folder / "inside").open("x"):
            assert str(folder) in before.leaks(0.1)
    finally:
        shutil.rmtree(folder)


def test_process_left():
    """A running child is reported until it has been waited for. A name with its pid is reported
    also after that."""
    before = Snapshot.take()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = Path(f"/dev/shm/torch_{child.pid}_{uuid.uuid4().hex}")
    assert any(f"process {child.pid}" in leak for leak in before.leaks(0.1))
    child.communicate()
    path.touch()
    try:
        assert before.leaks(0.1) == [str(path)]
    finally:
        path.unlink()
    assert before.leaks(5) == []


@pytest.mark.torch
def test_files_that_cuda_keeps(monkeypatch):
    """CUDA and torch keep files of shared GPU memory open until the process ends: no leaks."""
    import torch

    before = Snapshot.take()
    unique = uuid.uuid4().int % 10**9
    cudas = Path(f"/dev/shm/cuda.shm.0.{unique:x}.1")
    counters = Path(f"/dev/shm/torch_{os.getpid()}_{unique}_0")
    with cudas.open("x"):
        counters.write_bytes(bytes(leaks.COUNTERS))
        try:
            assert before.leaks(0.1) == [str(counters)]
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            assert before.leaks(0.1) == []
            counters.write_bytes(bytes(leaks.COUNTERS + 1))
            assert before.leaks(0.1) == [str(counters)]
        finally:
            counters.unlink()
            cudas.unlink()


def test_shared_memory_of_strangers(monkeypatch):
    """A name is reported if our processes have it open, but not if only other programs do."""
    before = Snapshot.take()
    path = Path(f"/dev/shm/xpool-test-{uuid.uuid4().hex}")
    code = "import sys; file = open(sys.argv[1], 'x'); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline()
        assert str(path) in before.leaks(0.1)  # our child's name is ours
        with monkeypatch.context() as patch:
            patch.setattr(leaks, "_ours", dict)
            assert str(path) not in before.leaks(0.1)
    finally:
        child.communicate()
    try:
        assert path.exists()
        with no_leaks(0.1):  # another program could do this
            path.with_suffix(".other").touch()
        assert before.leaks(0.1) == []
    finally:
        path.unlink()
        path.with_suffix(".other").unlink()


def test_shared_memory_removed_in_time():
    """A name of ours is not reported if it is removed in time."""
    before = Snapshot.take()
    path = Path(f"/dev/shm/xpool-test-{os.getpid()}")
    path.touch()
    assert str(path) in before.leaks(0)
    looked = threading.Event()
    taken = leaks._shm_of

    def look(pid):
        looked.set()
        return taken(pid)

    def put_away():
        looked.wait(WAIT)
        path.unlink()

    thread = threading.Thread(target=put_away)
    before.threads.add(thread)
    thread.start()
    leaks._shm_of = look
    try:
        assert before.leaks(WAIT) == []
    finally:
        leaks._shm_of = taken
        thread.join()


def test_semaphores_of_strangers():
    """multiprocessing's semaphores are reported, unless they are another program's."""
    code = (
        "import multiprocessing\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(flush=True)\n"
        "input()\n"
    )
    before = Snapshot.take()
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline()
        # A child's semaphore is ours; without children it counts as another program's.
        assert any("/dev/shm/sem." in leak for leak in before.leaks(0.1))
        ours, leaks._ours = leaks._ours, dict
        try:
            assert not any("/dev/shm/sem." in leak for leak in before.leaks(0.1))
        finally:
            leaks._ours = ours
    finally:
        child.communicate()
    assert before.leaks(5) == []


def test_wait_gone_has_a_limit():
    """`wait_gone` stops at its limit and returns the remaining process."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert wait_gone([child.pid], 0.05) == [child.pid]
    finally:
        child.communicate()
    assert wait_gone([child.pid]) == []


def test_eventually_has_a_limit():
    """`eventually` fails at its limit with the name of the fact."""
    with pytest.raises(AssertionError, match="the moon"):
        eventually(lambda: False, "the moon", 0.05)


def test_mailbox_and_gate(mailbox: Mailbox, gate: Gate):
    """Lines arrive in order, and the gate lets the given number of tasks pass."""
    from support import work

    work.post(mailbox.path, "one")
    work.post(mailbox.path, "two")
    assert mailbox.lines(2) == ["one", "two"] and mailbox.empty()
    with pytest.raises(AssertionError, match="nobody posted"):
        mailbox.line(0.05)
    thread = threading.Thread(target=work.pass_gate, args=(gate.path,))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    gate.open()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_leaks_outside_this_process(tmp_path):
    """A snapshot with ``outside=True`` ignores threads and descriptors of this process."""
    before = Snapshot.take(outside=True)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="stays")
    thread.start()
    with open(tmp_path / "open", "w"):
        assert before.leaks(5) == []
        name = Path("/dev/shm", f"xpool-test-{os.getpid()}")
        name.touch()
        try:
            assert before.leaks(0.1) == [str(name)]
        finally:
            name.unlink()
    stop.set()
    thread.join()


@pytest.mark.xpool_only
def test_kept_servers():
    """Connections to servers that this process keeps are no leak."""
    run_ok(
        ["-"],
        """
        from multiprocessing import forkserver, resource_tracker
        import xpool
        from support.leaks import Snapshot
        from support.waiting import eventually
        forkserver.set_forkserver_preload([])  # Python 3.14 preloads a script, here "<stdin>"
        for start in (
            resource_tracker.ensure_running, forkserver.ensure_running,
            lambda: xpool.preload("json"),
        ):
            before = Snapshot.take()
            start()
            # A server is known for one when it has its own program.
            eventually(lambda: before.more_fds() == {}, "only descriptors of servers")
            assert (found := before.leaks(5)) == [], found
        """,
    )


@pytest.mark.xpool_only
def test_forks_of_this_process():
    """The pipe by which the arena sees the end of a forked process is no leak."""
    pytest.importorskip("numpy", reason="numpy is not installed")
    run_ok(
        ["-"],
        """
        import os
        import warnings
        import numpy
        import xpool
        from xpool.testing._leaks import Snapshot, descriptors
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        with xpool.Pool(1) as pool:
            kept = pool.apply(numpy.zeros, (1 << 20,))
        pool.join()
        before = Snapshot.take()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert before.fds != descriptors()
        assert (found := before.leaks(1)) == [], found
        """,
    )
