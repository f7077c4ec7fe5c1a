"""Few descriptors, many pools, and the end of the interpreter."""

import itertools
import sys
import threading

import pytest
from support import scripts, work

from xpool import WorkerStartFailed

pytestmark = pytest.mark.xpool_only


def script(tmp_path, text, *arguments):
    """Run a script that must succeed and print no errors. Return its output lines."""
    return scripts.program(tmp_path, text, *arguments).splitlines()


def test_many_results_under_few_descriptors(tmp_path):
    """Five thousand results held at once do not need a descriptor each."""
    text = """
        import os
        import xpool
        from support import work

        if __name__ == "__main__":
            work.lower_limit(128)
            with xpool.Pool(2) as pool:
                small = pool.map(work.large, [100] * 5000, chunksize=1)
                large = pool.map(work.large, [100_000] * 500, chunksize=1)
                async_ = [pool.apply_async(work.large, (1000,)) for _ in range(5000)]
                assert [len(x) for x in small] == [100] * 5000
                assert [len(x) for x in large] == [100_000] * 500
                assert [len(r.get()) for r in async_] == [1000] * 5000
                print(len(os.listdir("/proc/self/fd")) < 60)
            pool.join()
    """
    assert script(tmp_path, text) == ["True"]


def test_a_program_with_many_descriptors(tmp_path):
    """A pool works although its descriptors are too large for `select`."""
    text = """
        import os, resource
        import xpool

        if __name__ == "__main__":
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
            held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
            with xpool.Pool(2) as pool:
                print(pool.map(abs, [-1, -2]))
            print(pool.apply_async if pool.state == "RUN" else "over")
        """
    assert script(tmp_path, text) == ["[1, 2]", "over"]


def test_descriptors_run_out_in_the_constructor(tmp_path):
    """Without free descriptors, the constructor raises an error and leaks nothing."""
    text = """
        import os
        import xpool
        from support import leaks, work

        if __name__ == "__main__":
            with xpool.Pool(1) as pool:
                pool.apply(work.square, (1,))
            pool.join()
            work.lower_limit(len(os.listdir("/proc/self/fd")) + 3)
            before = leaks.Snapshot.take()
            try:
                with xpool.Pool(8) as pool:
                    pool.map(work.square, range(10))
                print("no error")
            except (OSError, xpool.XPoolError) as error:
                print(type(error).__name__, error)
                try:
                    pool.join()
                except (NameError, ValueError):
                    pass
            del pool
            print(before.leaks(5))
            work.lower_limit(512)
            with xpool.Pool(2) as pool:
                print(pool.map(work.square, range(3)))
            pool.join()
    """
    said, leaks, after = script(tmp_path, text)
    assert said != "no error"
    assert leaks == "[]" and after == "[0, 1, 4]"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="ctypes needs two descriptors there")
def test_the_first_large_result_without_a_free_descriptor(tmp_path):
    """It arrives, although the program has to import modules for it."""
    text = """
        import os
        import xpool
        from support import work

        if __name__ == "__main__":
            with xpool.Pool(1) as pool:
                pool.apply(work.square, (2,))
                work.lower_limit(len(os.listdir("/proc/self/fd")) + 10)
                taken = []
                try:
                    while True:
                        taken.append(os.dup(0))
                except OSError:
                    pass
                print(len(pool.apply(work.large, (10_000_000,))))
                for one in taken:
                    os.close(one)
    """
    assert script(tmp_path, text) == ["10000000"]


def test_descriptors_run_out_while_workers_are_replaced(tmp_path):
    """If no descriptor is free for a replacement, no caller waits for ever."""
    text = """
        import os
        import xpool
        from support import work

        if __name__ == "__main__":
            pool = xpool.Pool(2)
            pool.map(work.square, range(10))
            work.lower_limit(len(os.listdir("/proc/self/fd")))
            for how in ("SIGKILL", "os._exit", "SIGKILL"):
                try:
                    pool.apply_async(work.end, (how,)).get()
                except (xpool.XPoolError, OSError) as error:
                    assert not isinstance(error, xpool.TimeoutError)
            try:
                assert pool.apply_async(work.square, (3,)).get() == 9
            except (xpool.XPoolError, OSError) as error:
                assert not isinstance(error, xpool.TimeoutError)
            pool.terminate()
            pool.join()
            work.lower_limit(512)
            with xpool.Pool(1) as pool:
                print(pool.apply(work.square, (3,)))
            pool.join()
    """
    assert script(tmp_path, text) == ["9"]


@pytest.mark.exhaustive
@pytest.mark.torch
def test_one_fork_server(tmp_path):
    """After several pools and imports, only one fork server runs. When the server that has imported
    torch is ready, the next pool ends its temporary substitute."""
    text = """
        import importlib
        import xpool
        from support import leaks, work
        from support.waiting import eventually

        if __name__ == "__main__":
            def one_more():
                with xpool.Pool(1) as pool:
                    pool.apply(work.square, (1,))
                pool.join()
                return len(leaks.servers())

            for name in ("json", "numpy", "torch"):
                importlib.import_module(name)
                one_more()
                assert one_more() <= 2
            eventually(lambda: one_more() <= 1, "all but one server gone")
            print("ok")
    """
    assert script(tmp_path, text) == ["ok"]


def test_interpreter_ends_with_work_pending(tmp_path):
    """A script ends without waiting for busy workers. The output of a task before is printed,
    although it is buffered."""
    text = """
        import xpool
        from support import work

        if __name__ == "__main__":
            pool = xpool.Pool(2)
            pool.apply(print, ("from the worker",))
            pending = [pool.apply_async(work.sleep_long) for _ in range(10)]
    """
    assert script(tmp_path, text) == ["from the worker"]


def test_pool_used_at_exit(tmp_path):
    """A function registered with `atexit` uses the pool or gets an error. It does not hang."""
    text = """
        import atexit
        import xpool
        from support import work

        def use():
            try:
                print(pool.apply(work.square, (3,)))
            except (xpool.XPoolError, RuntimeError) as error:
                print(9 if str(error) else error)

        if __name__ == "__main__":
            atexit.register(use)
            pool = xpool.Pool(1)
            pool.apply(work.square, (2,))
            atexit.register(use)
    """
    assert script(tmp_path, text) == ["9", "9"]


def test_a_killed_script_leaves_no_shared_memory(tmp_path):
    """The script creates nothing in /dev/shm, so killing it leaves nothing there."""
    text = """
        import os, signal, sys
        import xpool
        from support import work
        from xpool.testing._leaks import _shm_of

        if __name__ == "__main__":
            pool = xpool.Pool(2)
            held = pool.map(work.large, [3_000_000] * 8)
            pending = pool.map_async(work.large, [3_000_000] * 100)
            print(set().union(*map(_shm_of, map(str, [os.getpid(), *pool.statistics()["pids"]]))))
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = scripts.run([scripts.write(tmp_path / "script.py", text)])
    assert done.returncode == -9
    assert done.stdout == "set()\n"


# Threads ------------------------------------------------------------------------------------------


def refuse_threads(monkeypatch, which):
    """Make the start of the given worker threads fail. The first thread has number 1."""
    start, count = threading.Thread.start, itertools.count(1)

    def maybe(self):
        if "-worker-" in self.name and next(count) in which:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", maybe)


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool"])
def test_no_thread_for_a_call(tmp_path, kind):
    """A call that needs a thread raises. No caller waits, and the pool goes on."""
    lines = script(
        tmp_path,
        f"""
        import threading
        import xpool

        def refused(call):
            try:
                call()
            except (RuntimeError, xpool.XPoolError) as error:
                return "can't start new thread" in str(error)

        def refuse(*args, **keywords):
            raise RuntimeError("can't start new thread")

        if __name__ == "__main__":
            with xpool.{kind}(2) as pool:
                assert pool.map(abs, [-1]) == [1]
                name = "_start_new_thread"
                if not hasattr(threading, name):
                    name = "_start_joinable_thread"
                start = getattr(threading, name)
                setattr(threading, name, refuse)
                got = []
                print(refused(lambda: pool.apply_async(abs, (-1,), callback=got.append)))
                print(refused(lambda: pool.map_async(abs, [-1], error_callback=got.append)))
                print(refused(lambda: pool.imap(abs, iter([-1]))))
                print(refused(lambda: pool.executor().submit(abs, -1)))
                print(pool.map(abs, [-1, -2]), list(pool.imap(abs, [-3])), got)
                setattr(threading, name, start)
                pool.apply_async(abs, (-1,), callback=got.append).get()
                print(list(pool.imap(abs, iter([-1]))), got)
                pool.close()
                pool.join()
        """,
    )
    assert lines == [*["True"] * 4, "[1, 2] [3] []", "[1] [1]"]


@pytest.mark.parametrize("first", [1, 2])
def test_no_thread_for_a_new_pool(thread_kind, monkeypatch, first):
    """The constructor raises and leaves no thread. The next pool works."""
    refuse_threads(monkeypatch, [first])
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread_kind(2)
    with thread_kind(2) as pool:
        assert pool.map(work.square, range(4)) == [0, 1, 4, 9]
    pool.join()


def test_no_thread_for_a_replacement(thread_kind, make_pool, monkeypatch):
    """If a replacement thread cannot start, the pool tries again and loses no task."""
    refuse_threads(monkeypatch, [3, 4, 5])
    pool = make_pool(thread_kind, 2, maxtasksperchild=1)
    assert pool.map(work.square, range(8), 1) == [i * i for i in range(8)]
    pool.close()
    pool.join()


def test_no_thread_for_a_long_time(thread_kind, make_pool, monkeypatch):
    """If no thread can start for long, the pool stops with the reason."""
    from xpool._engine.jobs import states

    monkeypatch.setattr(states, "SYSTEM_ATTEMPTS", 2)
    refuse_threads(monkeypatch, range(3, 1000))
    pool = make_pool(thread_kind, 2, maxtasksperchild=1)
    with pytest.raises(WorkerStartFailed, match="can't start new thread"):
        pool.map(work.square, range(8), 1)
