"""A worker's output goes to the program's standard streams at the time of the worker's start."""

import os

import pytest
from support import scripts
from support.tiers import also

from xpool import Pool

pytestmark = pytest.mark.xpool_only


def shout(text):
    """Write to both streams, by Python and by the descriptor. Return the process id."""
    import sys

    print(text)
    print(text, file=sys.stderr)
    sys.stderr.flush()
    os.write(2, f"{text} raw\n".encode())
    return os.getpid()


@pytest.mark.parametrize("method", [None, *also("spawn", "fork")])
def test_output_during_a_capture(make_pool, capfd, method):
    """The output of a pool made during a capture is captured."""
    with capfd.disabled():
        make_pool(Pool, 1).apply(len, ("",))
    pool = make_pool(Pool, 1, context=method)
    pool.apply(shout, ("here",))
    pool.close()
    pool.join()
    captured = capfd.readouterr()
    assert captured.out == "here\n"
    assert captured.err == "here\nhere raw\n"


ROTATED = """
    import os, sys
    import xpool
    from workers.test_streams import shout

    def turn_to(name):
        fd = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)

    if __name__ == "__main__":
        folder = sys.argv[1]
        turn_to(folder + "/log.1")
        with xpool.Pool(1, None, (), 1) as pool:
            first = pool.apply(shout, ("first",))
            turn_to(folder + "/log.2")
            # The first worker's replacement may have been started before the log was turned.
            while pool.apply(shout, ("second",)) == first or not os.path.getsize(folder + "/log.2"):
                continue
        pool.join()
        for fd in ("1", "2"):
            assert os.readlink("/proc/self/fd/" + fd).endswith("log.2")
"""


def test_output_of_replacements(tmp_path):
    """After the program rotates its log, new workers write to the new file."""
    scripts.program(tmp_path, ROTATED, str(tmp_path))
    # Output to stdout is flushed after the task, so it may come last.
    lines = (tmp_path / "log.1").read_text().splitlines()
    assert sorted(lines[:3]) == ["first", "first", "first raw"]
    lines = (tmp_path / "log.2").read_text().splitlines()
    tasks = len(lines) // 3
    assert tasks and sorted(lines) == ["second"] * 2 * tasks + ["second raw"] * tasks


CLOSED = """
    import os, sys
    import xpool
    from workers.test_streams import shout

    if __name__ == "__main__":
        told = os.dup(1)
        for fd in map(int, sys.argv[1]):
            os.close(fd)
        with xpool.Pool(2) as pool:
            pids = set(pool.map(shout, ["x"] * 20, 1))
            ok = pool.map(len, [b"y" * 100_000] * 20, 1) == [100_000] * 20
            os.write(1, b"parent\\n")
        pool.join()
        os.write(told, b"%d %r" % (len(pids), ok))
"""


@pytest.mark.parametrize("closed", ["012", *also("0", "1", "2", "12")])
def test_closed_streams(tmp_path, closed):
    """If the program has closed its streams, no output gets into a channel."""
    done = scripts.run([scripts.write(tmp_path / "closed.py", CLOSED), closed])
    assert done.stdout.endswith(" True"), done
    # Two workers write at once, so their letters may be mixed.
    printed, warned = done.stdout.rpartition("\n")[0], done.stderr
    assert sorted(printed) == ([] if "1" in closed else sorted("x\n" * 20 + "parent"))
    assert sorted(warned) == ([] if "2" in closed else sorted("x\nx raw\n" * 20))


def where_stdin_leads():
    """Return the file of descriptor 0, and the text of `sys.stdin`."""
    import sys

    return os.readlink("/proc/self/fd/0"), sys.stdin.read()


@pytest.mark.parametrize("method", [None, *also("spawn", "fork")])
def test_stdin_is_empty(make_pool, method):
    """Tasks read an empty standard input, as in the standard library."""
    assert make_pool(Pool, 1, context=method).apply(where_stdin_leads) == ("/dev/null", "")
