"""Faults around a pool: memory, descriptors, the clock, names."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from multiprocessing import resource_tracker

import pytest
from support import scripts, work
from support.limits import PROGRAM_LIMIT, WAIT
from support.tiers import also
from support.waiting import eventually

from xpool import Pool, ResultNotPicklable, WorkerStartFailed, XPoolError

from .test_limits import script

pytestmark = pytest.mark.xpool_only


# Memory ------------------------------------------------------------------------------------------

FULL = """
    import os
    import xpool
    from support import work

    if __name__ == "__main__":
        fd = os.open("/dev/shm/filler", os.O_CREAT | os.O_WRONLY)
        try:
            while os.write(fd, bytes(4096)):
                continue
        except OSError as error:
            print(error.strerror)
        with xpool.Pool(2) as pool:
            got = pool.map(work.large, [3_000_000] * 10, chunksize=1)
            print([len(x) for x in got] == [3_000_000] * 10)
            print(pool.apply(len, (bytes(3_000_000),)))
        pool.join()
"""


def test_dev_shm_is_full(tmp_path):
    """If /dev/shm is full, large values are still sent, because xpool stores nothing there."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a private /dev/shm needs root and unshare")
    path = scripts.write(tmp_path / "full.py", FULL)
    command = "mount -t tmpfs -o size=64k none /dev/shm && exec python3 -c '' "
    if subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True).returncode:
        pytest.skip("this machine does not allow a private /dev/shm")
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, path],
        capture_output=True, text=True, timeout=PROGRAM_LIMIT, env=scripts.environment(),
    )  # fmt: skip
    said = done.stdout.splitlines()
    assert said == ["No space left on device", "True", "3000000"], done.stderr


def limit_addresses(mebibytes):
    """Limit this process's address space to its present size plus that many MiB."""
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + (mebibytes << 20),) * 2)


def take_memory(n):
    return len(bytearray(n))


def test_workers_at_their_memory_limit(process_kind, make_pool):
    """With RLIMIT_AS, a task that needs too much memory fails. The worker stays usable."""
    pool = make_pool(process_kind, 2, limit_addresses, (64,))
    tasks = [pool.apply_async(take_memory, (n,)) for n in (1000, 1 << 30, 2000, 1 << 32)]
    assert tasks[0].get(WAIT) == 1000 and tasks[2].get(WAIT) == 2000
    for task in tasks[1::2]:
        with pytest.raises((MemoryError, XPoolError)):
            task.get(WAIT)
    large = pool.map_async(work.large, [40 << 20] * 4, 1)
    try:
        assert [len(x) for x in large.get(WAIT)] == [40 << 20] * 4
    except (MemoryError, ResultNotPicklable) as error:
        assert "MemoryError" in repr(error) or "memory" in str(error)
    assert pool.map(work.square, range(50)) == [i * i for i in range(50)]


def limit_to_two_gib():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def test_a_limit_below_what_a_worker_has_mapped(process_kind, make_pool):
    """Programs limit the memory of forked workers by RLIMIT_AS. Here it would refuse everything, so
    the pool says at the start which option to use."""
    pool = make_pool(process_kind, 1, limit_to_two_gib)
    with pytest.raises(WorkerStartFailed, match=r"RLIMIT_AS .* use Pool\(worker_memory=2147483648"):
        pool.apply(work.square, (3,))


def test_the_parent_at_its_memory_limit(tmp_path):
    """A program under ``ulimit -v`` has no arena. Results go through the pipe or are refused; share
    mode is refused."""
    text = """
        import resource, sys
        import xpool
        from support import work

        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_AS, (2 << 30,) * 2)
            with xpool.Pool(2) as pool:
                got = pool.map(work.large, [3_000_000] * 10, chunksize=1)
                print([len(x) for x in got] == [3_000_000] * 10)
                try:
                    print(len(pool.apply(work.large, (3 << 30,))))
                except (MemoryError, xpool.XPoolError) as error:
                    print("refused")
                print(pool.apply(work.square, (3,)))
            pool.join()
            try:
                xpool.Pool(2, is_copy_tensor=False)
            except xpool.OptionError as error:
                print("ulimit -v" in str(error) and "is_copy_tensor=False" in str(error))
    """
    assert script(tmp_path, text) == ["True", "refused", "9", "True"]


def test_no_addresses_for_a_replacement(tmp_path):
    """Below what the program has mapped, the system may still give a thread the stack of one that
    has ended, but no frame. The pool says why no worker starts, and the next one works."""
    text = """
        import contextlib, os, resource, threading
        import xpool
        from support import work
        from support.waiting import eventually

        if __name__ == "__main__":
            pool = xpool.Pool(2)
            pids = pool.run_all(os.getpid)
            before, gate = len(os.listdir("/proc/self/task")), threading.Event()
            threads = [threading.Thread(target=gate.wait) for _ in range(4)]
            for thread in threads:
                thread.start()
            gate.set()
            eventually(lambda: len(os.listdir("/proc/self/task")) == before, "the threads ended")
            unlimited = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, unlimited[1]))
            for pid in pids:
                os.kill(pid, 9)
            try:
                while True:
                    with contextlib.suppress(xpool.WorkerDied):  # the task was sent before the end
                        pool.apply_async(work.square, (3,)).get()
            except (xpool.WorkerStartFailed, xpool.PoolClosed) as error:
                print("Cannot allocate memory" in str(error))
            pool.terminate()
            pool.join()
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
            with xpool.Pool(1) as pool:
                print(pool.apply(work.square, (3,)))
    """
    assert script(tmp_path, text) == ["True", "9"]


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool"])
def test_no_addresses_for_a_thread_of_a_verb(kind, tmp_path):
    """Threads of verbs are refused as by the system: before, `Thread.start` waited for ever for one
    that had the stack of an ended thread but no frame."""
    text = """
        import resource, sys, threading, time
        import xpool
        from support import work

        def refused(call):
            try:
                return f"returned {call()}"
            except (RuntimeError, xpool.XPoolError) as error:
                return str(error).partition(":")[0]

        if __name__ == "__main__":
            pool = getattr(xpool, sys.argv[1])(2)
            executor = pool.executor()
            assert list(pool.imap(work.square, (i for i in range(4)))) == [0, 1, 4, 9]
            threads = [threading.Thread(target=threading.get_ident) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            unlimited = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (1 << 27, unlimited[1]))
            found = [
                refused(lambda: list(pool.imap(work.square, (i for i in range(4))))),
                refused(lambda: pool.apply_async(work.square, (3,), callback=print).get()),
                refused(lambda: executor.submit(work.square, 3).result()),
            ]
            bars = []
            threading.excepthook = lambda args: bars.append(str(args.exc_value).partition(":")[0])
            found.append(pool.map(work.square, range(4), progress=lambda state: None))
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
            print(*found, bars, sep="\\n")
            print(list(pool.imap(work.square, (i for i in range(4)))))
            print(executor.submit(work.square, 3).result())
            pool.close()
            pool.join()
    """
    none = "can't start new thread"
    assert script(tmp_path, text, kind) == [
        none, none, none, "[0, 1, 4, 9]", f'["{none}"]', "[0, 1, 4, 9]", "9"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1 << 31) - 1, 1 << 31, (1 << 31) + 1, 3 << 30])
@pytest.mark.parametrize("way", ["argument", "result"])
def test_gibibytes(make_pool, way, size):
    """Values of about 2^31 bytes, and larger ones, arrive whole."""
    from xpool._memory.system import available_memory

    if available_memory() < 5 * size:
        pytest.skip(f"needs {5 * size >> 30} GiB of free memory")
    pool = make_pool(Pool, 1)
    if way == "argument":
        assert pool.apply(len, (bytes(size),)) == size
    else:
        got = pool.apply(work.large, (size,))
        assert len(got) == size and not any(got[:: 1 << 20])


# The clock, many pools, and forks
# ------------------------------------------------------------------


def test_the_clock_jumps(tmp_path):
    """If the wall clock jumps by years in the parent and the workers, time limits still work."""
    text = """
        import random, time
        import xpool
        from support import work

        def jump():
            true, jumps = time.time, [1e9, -1e9, 0.0, 3e9]
            time.time = lambda: true() + jumps[random.randrange(4)]
            time.time_ns = lambda: int(time.time() * 1e9)

        if __name__ == "__main__":
            jump()
            pool = xpool.Pool(2, jump, initializer_timeout=30)
            print(pool.map(work.square, range(4), timeout=20, retries=2))
            begin = time.monotonic()
            try:
                pool.apply_async(work.spin, timeout=0.3).get()
            except xpool.TaskTimeout as error:
                print(error.seconds, time.monotonic() - begin >= 0.3)
            try:
                pool.apply_async(work.sleep_long).get(0.2)
            except xpool.TimeoutError:
                print("not yet")
            pool.terminate()
            pool.join()
    """
    assert script(tmp_path, text) == ["[0, 1, 4, 9]", "0.3 True", "not yet"]


def test_values_held_at_the_end(tmp_path):
    """Pools and values may live until the interpreter ends, which prints no message: in a module, a
    cycle, another module, a thread, and an object whose finalizer calls the pool."""
    pytest.importorskip("numpy")
    text = """
        import builtins, sys, threading
        import numpy
        import xpool

        class Holder:
            def __init__(self):
                self.pool = xpool.Pool(1)
                self.values = self.pool.map(numpy.zeros, [100_000] * 20)  # in the arena
                self.unopened = self.pool.apply_async(numpy.zeros, (100_000,))
                self.unopened.wait()
                self.me = self

        class Uses(Holder):
            def __del__(self):
                try:
                    self.pool.apply(len, (b"",))
                except (xpool.XPoolError, RuntimeError):
                    return

        def wait(holder):
            threading.Event().wait()

        if __name__ == "__main__":
            held = Holder()
            Holder()
            builtins.kept = [Holder()]
            sys.kept = Uses()
            threading.Thread(target=wait, args=(Holder(),), daemon=True).start()
            print("bye")
    """
    assert script(tmp_path, text) == ["bye"]


@pytest.mark.parametrize("context", ["fork", *also("spawn")])
def test_a_process_that_was_forked_while_a_worker_started(make_pool, monkeypatch, context):
    """The forked process has the worker's end of the pipe that multiprocessing watches. So the pipe
    stays open, but the pool still detects the worker's death."""
    bystanders: list[int] = []
    pipe = os.pipe

    def forking_pipe() -> tuple[int, int]:
        ends = pipe()
        if inside and not bystanders:  # another thread may fork at any moment
            bystanders.append(os.fork())
            if bystanders == [0]:
                signal.pause()
                os._exit(0)
        return ends

    inside: list[bool] = []
    start = multiprocessing.process.BaseProcess.start

    def starting(process):
        inside.append(True)
        try:
            start(process)
        finally:
            inside.clear()

    if context == "spawn":
        resource_tracker.ensure_running()  # the tracker opens a pipe too
    monkeypatch.setattr(os, "pipe", forking_pipe)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", starting)
    try:
        pool = make_pool(Pool, 1, context=context)
        pid = pool.apply(os.getpid)
        assert len(bystanders) == 1
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: pool.statistics()["deaths"] == 1, "the death is seen")
        assert pool.apply(abs, (-1,)) == 1
        pool.terminate()
        pool.join(WAIT)
    finally:
        for bystander in bystanders:
            os.kill(bystander, signal.SIGKILL)
            os.waitpid(bystander, 0)


def test_a_signal_handler_uses_the_pool_while_another_thread_does(make_pool, on_signal):
    """A handler that calls `apply` gets its result, wherever it interrupts the main thread."""
    pool = make_pool(Pool, 2)
    got = []
    on_signal(lambda *_: got.append(pool.apply(work.square, (3,))))
    for i in range(30):
        results = [pool.apply_async(work.square, (j,)) for j in range(20)]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert pool.map(work.square, range(20)) == [j * j for j in range(20)]
        assert [r.get(WAIT) for r in results] == [j * j for j in range(20)]
        eventually(lambda i=i: len(got) == i + 1, "the handler has its answer")
    assert got == [9] * 30


NAMES = """
    import ctypes, mmap, os, sys
    import xpool

    def rename():
        ctypes.CDLL(None).prctl(15, b"n\\xff", 0, 0, 0)  # PR_SET_NAME (linux/prctl.h)

    def stop_here(path):
        with open(path):
            raise AssertionError("nobody writes there")

    if __name__ == "__main__":
        folder = sys.argv[1]
        os.mkfifo(f"{folder}/fifo")
        with open(os.fsencode(folder) + b"/\\xff", "w+b") as file:
            file.write(bytes(4096))
            file.flush()
            mapped = mmap.mmap(file.fileno(), 4096)
        with xpool.Pool(1) as pool:
            pool.apply(rename)
            try:
                pool.apply(stop_here, (f"{folder}/fifo",), timeout=0.5)
            except xpool.TaskTimeout as error:
                assert "in stop_here" in str(error)
            pool.apply(rename)
            print(pool.stacks())
        if sys.argv[2] == "torch":
            import torch

            rows = torch.from_file(f"{folder}/rows", shared=True, size=5000)
            with xpool.Pool(1, is_copy_tensor=False) as pool:
                pool.apply(torch.Tensor.fill_, (rows, 2))
            assert rows.sum() == 10_000
"""


@pytest.mark.parametrize(
    "what", ["core", pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.exhaustive])]
)
def test_names_of_any_bytes(tmp_path, what):
    """The kernel's files on processes and mappings may have names that are no UTF-8."""
    assert scripts.program(tmp_path, NAMES, str(tmp_path), what).startswith("worker 0")


ENCODINGS = """
    import xpool

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            print(pool.map(abs, [-1]), pool.report().workers[0].tasks)
"""


def test_no_encoding_is_left_out(tmp_path):
    """With ``-X warn_default_encoding``, neither the program nor a worker warns of xpool."""
    path = scripts.write(tmp_path / "encodings.py", ENCODINGS)
    done = scripts.run(["-X", "warn_default_encoding", path])
    assert done.stdout == "[1] 1\n"
    warnings = [line for line in done.stderr.splitlines() if "EncodingWarning" in line]
    assert [line for line in warnings if "/dill/" not in line] == []
