"""The fork server ends, and workers that it has forked go on."""

from __future__ import annotations

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

KILLED = """
    import os, signal, sys
    import xpool
    from support import leaks, work
    from support.waiting import Gate, Mailbox, wait_gone

    if __name__ == "__main__":
        mailbox, gate = Mailbox(sys.argv[1] + "/mailbox"), Gate(sys.argv[1] + "/gate")
        pool = xpool.Pool(2)
        running = [pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, i))
                   for i in range(2)]
        before = {int(line) for line in mailbox.lines(2)}
        (server,) = leaks.servers()
        os.kill(server, signal.SIGKILL)
        assert wait_gone([server]) == []
        gate.open(2)
        assert [r.get() for r in running] == [0, 1]
        assert {pool.apply(os.getpid) for _ in range(4)} <= before
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert wait_gone(list(before)) == []
        after = {pool.apply_async(os.getpid, retries=3).get() for _ in range(4)}
        assert not after & before
        pool.close()
        pool.join()
"""


def test_the_server_is_killed_while_its_workers_run(tmp_path):
    """Their tasks are answered, they take more, and what comes after them has a new server."""
    path = scripts.write(tmp_path / "killed.py", KILLED)
    assert scripts.run_ok([path, str(tmp_path)]) == ""


UNBORN = """
    import os, pathlib, signal, sys
    import xpool
    from support import leaks

    if __name__ == "__main__":
        begun = pathlib.Path(sys.argv[1]) / "begun"
        with xpool.Pool(1) as pool:
            pool.apply(os.getpid)
            (server,) = leaks.servers()
            os.kill(server, signal.SIGSTOP)
            ending = xpool.Pool(2, pathlib.Path.touch, (begun,))
            ending.terminate_workers()
            os.kill(server, signal.SIGCONT)
            ending.terminate()
        assert not begun.exists()
"""


def test_workers_that_are_not_there_yet_are_ended(tmp_path):
    """They run nothing of the program's, and nothing waits for what they would do when asked."""
    path = scripts.write(tmp_path / "unborn.py", UNBORN)
    assert scripts.run_ok([path, str(tmp_path)]) == ""
