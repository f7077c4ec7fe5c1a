"""The program is interrupted, terminated or killed, and no worker stays behind."""

import contextlib
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
    os.write(hold, b"..")
    [r.get() for r in seen]
    {body}
"""


@contextlib.contextmanager
def parent(tmp_path, mailbox, body, what="-", method="forkserver"):
    """Run a program with two workers that have run a task each; yield it and their pids."""
    path = scripts.write(tmp_path / "parent.py", PARENT.replace("{body}", body.strip()))
    process = scripts.popen([path, what, method, mailbox.path])
    try:
        yield process, [int(line) for line in mailbox.lines(2)]
    finally:
        process.kill()
        process.communicate()


def started(process):
    """Wait until the script prints that it is ready."""
    assert select.select([process.stdout], [], [], LIMIT)[0], "the script printed nothing"
    line = process.stdout.readline()
    assert line == "ready\n", (line, process.stderr.read())


STATES = """
    from support import cells
    others = xpool.Pool(2, context=method)
    pending = [others.apply_async(work.stop_self, (box,)) for _ in range(2)]
    starting = xpool.Pool(2, work.post_and_sleep, (box,), context=method)
    slow = xpool.Pool(2, memory_limit=0, context=method)
    pending += [slow.apply_async(cells.stay_half_written, (box, 5_000_000)) for _ in range(2)]
    print("ready", flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize("method", ["forkserver", *also("spawn", "fork")])
def test_parent_killed_with_workers_in_each_state(tmp_path, mailbox, method):
    """SIGKILL of the parent ends its workers within three seconds: idle ones, and those that are
    stopped, that start, and that write."""
    with parent(tmp_path, mailbox, STATES, method=method) as (process, workers):
        started(process)
        workers += [int(line) for line in mailbox.lines(6)]
        process.kill()
        assert wait_gone(workers, 3) == []


CALLS = {
    "spin": "pool.map(work.post_and_spin, [box] * 4, chunksize=1)",
    "apply": "pool.apply(work.post_and_sleep, (box,))",
    "get": "pool.apply_async(work.post_and_sleep, (box,)).get()",
    "imap": "list(pool.imap(work.post_and_sleep, [box] * 100))",
    "join": "pool.apply_async(work.post_and_sleep, (box,)); pool.close(); pool.join()",
    "with": "exec('with pool: pool.map(work.post_and_sleep, [box] * 100, chunksize=1)')",
}

CAUGHT = """
    try:
        {call}
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
    pool.terminate()
    pool.join()
    print("bye", flush=True)
"""


@pytest.mark.parametrize("what", ["spin", "join", *also("apply", "get", "imap")])
def test_ctrl_c(tmp_path, mailbox, what):
    """Ctrl-C raises one KeyboardInterrupt in the caller. The workers stop without output."""
    body = CAUGHT.format(call=CALLS[what])
    with parent(tmp_path, mailbox, body, what) as (process, workers):
        mailbox.line()  # the caller waits for a running task
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert (out, err, process.returncode) == ("KeyboardInterrupt\nbye\n", "", 0)
    assert wait_gone(workers, 3) == []


ENDS = [
    ("with", signal.SIGINT, "forkserver"),
    *(("with", signal.SIGINT, method) for method in ("spawn", "fork")),
    *(("with", number, "forkserver") for number in (signal.SIGTERM, signal.SIGHUP)),
    *(
        (verb, number, "forkserver")
        for verb in ("apply", "imap", "join")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ),
]


@pytest.mark.parametrize(("verb", "number", "method"), [ENDS[0], *also(*ENDS[1:])])
def test_a_signal_to_the_group(tmp_path, mailbox, verb, number, method):
    """The signal ends the program and its workers. Only Ctrl-C prints a traceback, one."""
    with parent(tmp_path, mailbox, CALLS[verb], verb, method) as (process, workers):
        mailbox.line()  # the caller waits for a running task
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=10)
    interrupts = int(number == signal.SIGINT)
    assert (err.count("Traceback"), err.count("KeyboardInterrupt")) == (interrupts,) * 2, err
    assert process.returncode == -number or (interrupts and process.returncode == 130)
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
    out = scripts.program(tmp_path, STARTING, method)
    assert out == "interrupted interrupted [0, 1, 2, 3]\n"


GOES_ON = """
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
    with parent(tmp_path, mailbox, GOES_ON) as (process, _):
        started(process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=LIMIT) == ("[0, 1, 4, 9, 16]\n", "")


FORKS_MEANWHILE = """
    import os, signal, subprocess, threading
    import xpool
    from support import leaks, work

    copies, threads = [], []

    def copy():
        pid = os.fork()
        if pid:
            copies.append(pid)
            return
        os.closerange(0, 3)
        signal.pause()

    def another_forks():
        thread = threading.Thread(target=copy, daemon=True)
        threads.append(thread)
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
        for thread in list(threads):
            thread.join()
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
    out = scripts.program(tmp_path, AT_EXIT)
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


@pytest.mark.parametrize("how", ["ignored", *also("handled")])
@pytest.mark.parametrize("context", ["fork", *also("spawn", "forkserver")])
def test_an_open_pool_where_sigterm_ends_nothing(tmp_path, context, how):
    """At the exit, `multiprocessing` sends SIGTERM to the workers that it has started, and waits
    for them. The pool has ended before."""
    assert scripts.program(tmp_path, OPEN_AT_EXIT, context, how) == "[1]\n"


HANDLERS = """
    import asyncio, multiprocessing, os, signal, sys
    import xpool

    def handle(signum, frame):
        print("a handler of the program runs in", "it" if os.getpid() == PROGRAM else "a worker")

    def own(signum):
        signal.signal(signum, lambda *_: print("the handler of a worker", flush=True))

    def initialize(lock):
        own(signal.SIGUSR2)

    def strike(signum):
        os.kill(os.getpid(), signum)
        return signal.set_wakeup_fd(-1), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    async def serve():
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        arguments = (multiprocessing.Lock(),) if context is None else (None,)
        for _ in range(3):
            with xpool.Pool(2, initialize, arguments, context=context) as pool:
                assert pool.apply(strike, (signal.SIGUSR2,)) == (-1, set())
                died = [pool.apply_async(strike, (n,)) for n in (signal.SIGUSR1, signal.SIGALRM)]
                for one in died:
                    try:
                        one.get()
                    except xpool.WorkerDied as error:
                        print(error.exitcode)
            await asyncio.sleep(0)  # the loop reads its descriptor
            await asyncio.sleep(0)
        print(stop.is_set())

    if __name__ == "__main__":
        PROGRAM, context = os.getpid(), eval(sys.argv[1])
        for signum in signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM:
            signal.signal(signum, handle)
        asyncio.run(serve())
    """


@pytest.mark.parametrize("context", ["None", "'fork'", *also("'spawn'")])
def test_handlers_of_signals_stay_in_the_program(tmp_path, context):
    """A worker that was forked, as with a lock in initargs, runs none of them, and its signals do
    not wake the program's event loop, which would take the pool's SIGTERM for its own."""
    died = [str(-number) for number in (signal.SIGUSR1, signal.SIGALRM)]
    said = ["the handler of a worker", *died] * 3 + ["False"]
    assert scripts.program(tmp_path, HANDLERS, context).splitlines() == said


DAEMONS = """
    import itertools, sys, threading, time
    import xpool

    def wait():
        pool.apply(time.sleep, (600,))

    def take(results):
        for n in results:
            if n == 3:
                begun.release()

    def submit():
        while True:
            pool.apply(abs, (1,))
            begun.release()

    if __name__ == "__main__":
        begun = threading.Semaphore(0)
        pool = getattr(xpool, sys.argv[1])(4)
        for call in lambda: take(pool.imap(abs, itertools.count())), submit:
            threading.Thread(target=call, daemon=True).start()
        for _ in range(3):
            begun.acquire()
        # Later, because a `P2PPool` may give other calls to the worker that sleeps, too.
        threading.Thread(target=wait, daemon=True).start()
"""


@pytest.mark.parametrize("name", ["Pool", *also("P2PPool", "ThreadPool")])
def test_daemon_threads_that_wait_for_a_pool_at_the_end(tmp_path, name):
    """When the program ends, daemon threads that wait for results end without a traceback."""
    assert scripts.program(tmp_path, DAEMONS, name) == ""
