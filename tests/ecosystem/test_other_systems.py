"""Pools on a system without Linux's own calls, such as macOS."""

import os
import sys

import pytest
from support import scripts

pytestmark = [pytest.mark.exhaustive, pytest.mark.starts]

# Python imports it in each process.  It takes away what macOS does not have.
WITHOUT = """
import builtins, errno, fcntl, io, mmap, os, select, signal, socket, sys
import multiprocessing.context, multiprocessing.util  # these decide by the platform

sys.platform = "darwin"
GONE = {
    os: "memfd_create pidfd_open sched_getaffinity sched_setaffinity posix_fallocate eventfd "
        "splice getrandom",
    select: "epoll",
    socket: "MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED",
    signal: "sigtimedwait sigwaitinfo pidfd_send_signal",
    fcntl: "F_SETSIG F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ F_GETPIPE_SZ",
    mmap: "MADV_POPULATE_WRITE",
}
for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def without_packets(family=None, type=socket.SOCK_STREAM, proto=0, make=socket.socketpair):
    if type == socket.SOCK_SEQPACKET:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")
    return make(family, type, proto)

def without_proc(call):
    def opened(path, *args, **keywords):
        if isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(("/proc", "/dev/shm")):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return call(path, *args, **keywords)
    return opened

socket.socketpair = without_packets
builtins.open = io.open = without_proc(open)
os.open = without_proc(os.open)
"""

PROGRAM = """
import logging, os, sys, time
import xpool

rate = 2

def double(x):
    return rate * x

def die(x):
    if x == 3:
        os._exit(7)
    return x

def log(x):
    logging.getLogger("tasks").warning("task %d %s", x, "." * 20_000)

def wait(x):
    time.sleep(60)

def failed(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    with xpool.{kind}(2{context}) as pool:
        print(pool.apply(double, (3,)), pool.map(double, range(4)), list(pool.imap(double, [5])))
        rate = 5
        print(pool.submit(double, 2).result(), len(pool.apply(bytes, (500_000,))))
        print(failed(lambda: pool.apply(divmod, (1, 0))))
        print(failed(lambda: pool.map(die, range(6), chunksize=1)))
        print(failed(lambda: pool.apply(wait, (1,), timeout=0.3)))
        pool.map(log, [1])
        print(pool.map(double, range(3)))
        pool.close()
        pool.join()
"""

SAYS = [
    "6 [0, 2, 4, 6] [10]",
    "10 500000",
    "ZeroDivisionError",
    "WorkerDied",
    "TaskTimeout",
    "[0, 5, 10]",
]


@pytest.mark.parametrize(
    ("kind", "context"),
    [("Pool", ""), ("Pool", ', context="forkserver"'), ("P2PPool", "")],
    ids=["default", "forkserver", "peers"],
)
def test_pools_work(tmp_path, kind, context):
    """Pools start, answer, replace dead workers, stop tasks, and pass on long log records."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT)
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(kind=kind, context=context))
    paths = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", ""), *sys.path]
    lines = scripts.run_ok(
        [str(file)], PYTHONPATH=os.pathsep.join(filter(None, paths))
    ).splitlines()
    assert "task 1 " + "." * 20_000 in lines
    assert [line for line in lines if not line.startswith("task 1")] == SAYS
