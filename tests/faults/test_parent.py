"""The program is interrupted, terminated or killed, and no worker stays behind."""

import os
import select
import signal

import pytest
from support import scripts
from support.tiers import also
from support.waiting import LIMIT, wait_gone

pytestmark = pytest.mark.xpool_only

PARENT = """
import os, sys, threading
import xpool
from support import work

if __name__ == "__main__":
    what, method, box = sys.argv[1:]
    pool = xpool.Pool(2, context=method)
    gate = box + ".gate"
    os.mkfifo(gate)
    hold = os.open(gate, os.O_RDWR)
    seen = [pool.apply_async(work.post_and_gate, (box, gate)) for _ in range(2)]
    {body}
"""

WAIT = """
    os.write(hold, b"..")
    [r.get() for r in seen]
    print("ready", flush=True)
    threading.Event().wait(60)
"""


def started(process):
    """Wait until the script prints that it is ready."""
    assert select.select([process.stdout], [], [], LIMIT)[0], "the script printed nothing"
    line = process.stdout.readline()
    assert line == "ready\n", (line, process.stderr.read())


def finish(process, limit=LIMIT):
    """Wait for the script and return its output. Kill it after `limit` seconds."""
    try:
        return process.communicate(timeout=limit)
    finally:
        process.kill()
        process.communicate()


def test_parent_killed(tmp_path, mailbox):
    """If the parent is killed, its idle workers end within three seconds.

    `test_surroundings` has workers in other states.
    """
    path = scripts.write(tmp_path / "parent.py", PARENT.format(body=WAIT.strip()))
    process = scripts.popen([path, "-", "forkserver", mailbox.path])
    try:
        workers = [int(line) for line in mailbox.lines(2)]
        started(process)
        process.terminate()
        assert wait_gone(workers, 3) == []
        process.wait(LIMIT)
    finally:
        process.kill()
        process.communicate()


INTERRUPTED = """
    os.write(hold, b"..")
    [r.get() for r in seen]
    try:
        if what == "spin":
            pool.map(work.post_and_spin, [box] * 4, chunksize=1)
        elif what == "apply":
            pool.apply(work.post_and_sleep, (box,))
        elif what == "get":
            pool.apply_async(work.post_and_sleep, (box,)).get()
        elif what == "imap":
            list(pool.imap(work.post_and_sleep, [box] * 100))
        elif what == "join":
            pool.apply_async(work.post_and_sleep, (box,))
            pool.close()
            pool.join()
        print("finished", flush=True)
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
    pool.terminate()
    pool.join()
    print("bye", flush=True)
"""


@pytest.mark.parametrize("what", ["spin", "join", *also("apply", "get", "imap")])
def test_ctrl_c(tmp_path, mailbox, what):
    """Ctrl-C raises one KeyboardInterrupt in the caller. The workers stop without output."""
    path = scripts.write(tmp_path / "parent.py", PARENT.format(body=INTERRUPTED.strip()))
    process = scripts.popen([path, what, "forkserver", mailbox.path])
    try:
        workers = [int(line) for line in mailbox.lines(2)]
        mailbox.line()  # the caller waits for a running task
        os.killpg(process.pid, signal.SIGINT)
        out, err = finish(process)
    finally:
        process.kill()
        process.communicate()
    assert err == ""
    assert out == "KeyboardInterrupt\nbye\n"
    assert process.returncode == 0
    assert wait_gone(workers, 3) == []


UNCAUGHT = """
    os.write(hold, b"..")
    [r.get() for r in seen]
    with pool:
        pool.map(work.post_and_sleep, [box] * 100, chunksize=1)
"""


@pytest.mark.parametrize("method", ["forkserver", *also("spawn", "fork")])
def test_ctrl_c_not_caught(tmp_path, mailbox, method):
    """An uncaught interrupt ends the script with one traceback."""
    path = scripts.write(tmp_path / "parent.py", PARENT.format(body=UNCAUGHT.strip()))
    process = scripts.popen([path, "map", method, mailbox.path])
    try:
        workers = [int(line) for line in mailbox.lines(2)]
        mailbox.line()  # the caller waits for a running task
        os.killpg(process.pid, signal.SIGINT)
        _, err = finish(process, 10)
    finally:
        process.kill()
        process.communicate()
    assert err.count("Traceback") == 1 and err.count("KeyboardInterrupt") == 1, err
    assert process.returncode in (-signal.SIGINT, 130)
    assert wait_gone(workers, 3) == []


STARTING = """
import os, signal, sys
from xpool import Pool

if __name__ == "__main__":
    with Pool(2, context=sys.argv[1]) as pool:
        for pid in filter(None, pool.statistics()["pids"]):
            os.kill(pid, signal.SIGINT)
            print("interrupted", end=" ")
        print(pool.map(abs, range(4)))
"""


@pytest.mark.parametrize("method", ["fork", *also("spawn")])
def test_ctrl_c_while_workers_start(tmp_path, method):
    """Workers that still start ignore Ctrl-C."""
    out = scripts.run_ok([scripts.write(tmp_path / "program.py", STARTING), method])
    assert out == "interrupted interrupted [0, 1, 2, 3]\n"


GOES_ON = """
    os.write(hold, b"..")
    [r.get() for r in seen]
    try:
        print("ready", flush=True)
        threading.Event().wait(60)
    except KeyboardInterrupt:
        pass
    print(pool.map(work.square, range(5)))
    pool.close()
    pool.join()
"""


def test_ctrl_c_that_the_caller_survives(tmp_path, mailbox):
    """If the caller catches the interrupt, the pool stays usable."""
    path = scripts.write(tmp_path / "parent.py", PARENT.format(body=GOES_ON.strip()))
    process = scripts.popen([path, "-", "forkserver", mailbox.path])
    try:
        mailbox.lines(2)
        started(process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = finish(process)
    finally:
        process.kill()
        process.communicate()
    assert (out, err) == ("[0, 1, 4, 9, 16]\n", "")


SERVER = """
import os, signal, sys
import xpool
from support import leaks, work
from support.waiting import wait_gone

if __name__ == "__main__":
    pool = xpool.Pool(2)
    assert pool.map(work.square, range(10)) == [i * i for i in range(10)]
    servers = leaks.servers()
    assert servers, "no fork server found"
    for server in servers:
        os.kill(server, signal.SIGKILL)
    assert wait_gone(servers) == []
    for attempt in range(3):
        try:
            assert pool.map(work.square, range(10)) == [i * i for i in range(10)]
            if attempt == 1:
                try:
                    pool.apply_async(work.end, ("SIGKILL",)).get()
                except xpool.XPoolError:
                    pass
        except xpool.XPoolError as error:
            print(type(error).__name__, error)
            break
    pool.terminate()
    pool.join()
    with xpool.Pool(2) as pool:
        assert pool.map(work.square, range(10)) == [i * i for i in range(10)]
    pool.join()
    print("ok")
"""


def test_fork_server_killed(tmp_path):
    """If the fork server is killed, the pool works or gives the reason. A new pool works."""
    out = scripts.run_ok([scripts.write(tmp_path / "server.py", SERVER)])
    assert out.splitlines()[-1] == "ok", out


FORKS_MEANWHILE = """
    import os, signal, subprocess, threading
    import xpool
    from support import leaks, work

    copies = []

    def copy():
        pid = os.fork()
        if pid:
            copies.append(pid)
            return
        os.closerange(0, 3)
        signal.pause()

    def another_forks():
        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        thread.join(0.1)  # where it must not fork now, it does so when this goes on

    def then_fork(call):
        def wrapped(*args, **kwds):
            value = call(*args, **kwds)
            another_forks()
            return value
        return wrapped

    if __name__ == "__main__":
        popen = subprocess.Popen
        def start(*args, **kwds):
            another_forks()
            return popen(*args, **kwds)
        subprocess.Popen = start
        with xpool.Pool(1) as pool:
            pool.apply(os.getpid)
        subprocess.Popen = popen
        os.pipe = then_fork(os.pipe)
        pool = xpool.Pool(1)
        ours = [pool.apply(os.getpid), *leaks.servers()]
        running = pool.apply_async(work.spin)
        print(*ours, flush=True)
        print(*copies, flush=True)
        signal.pause()
"""


def test_parent_killed_that_has_forked(tmp_path):
    """Copies of the parent, forked while a server or a worker starts, do not keep these alive."""
    with scripts.popen([scripts.write(tmp_path / "forks.py", FORKS_MEANWHILE)]) as parent:
        ours = [int(pid) for pid in parent.stdout.readline().split()]
        copies = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    try:
        assert len(ours) == 2 and len(copies) >= 3
        assert wait_gone(ours) == []
    finally:
        for pid in copies:
            os.kill(pid, signal.SIGKILL)


AT_EXIT = """
    import os, signal
    import xpool

    class Interrupted(xpool.Pool):
        def terminate(self):
            os.kill(os.getpid(), signal.SIGINT)
            super().terminate()

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pool = Interrupted(2)
        print(*pool.run_all(os.getpid))
"""


def test_ctrl_c_at_the_end_of_the_program(tmp_path):
    """Ctrl-C while a program's end stops its pools prints nothing, and the workers end."""
    out = scripts.run_ok([scripts.write(tmp_path / "parent.py", AT_EXIT)])
    assert wait_gone([int(pid) for pid in out.split()]) == []


OPEN_AT_EXIT = """
    import signal, sys
    from xpool import Pool

    if __name__ == "__main__":
        handler = signal.SIG_IGN if sys.argv[2] == "ignored" else lambda *_: None
        signal.signal(signal.SIGTERM, handler)
        pool = Pool(2, context=sys.argv[1])
        print(pool.map(abs, [-1]))
"""


@pytest.mark.parametrize("how", ["ignored", "handled"])
@pytest.mark.parametrize("context", ["fork", *also("spawn", "forkserver")])
def test_an_open_pool_where_sigterm_ends_nothing(tmp_path, context, how):
    """At the exit, `multiprocessing` sends SIGTERM to the workers that it has started, and waits
    for them. The pool has ended before."""
    path = scripts.write(tmp_path / "open_at_exit.py", OPEN_AT_EXIT)
    assert scripts.run_ok([path, context, how]) == "[1]\n"
