"""What stands for handlers of the program in workers that fork."""

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

FORKS = """
    import logging, os, sys
    import xpool

    logging.getLogger("lib").addHandler(logging.NullHandler())
    logging.getLogger("lib").setLevel(logging.DEBUG)

    def fork(x):
        (handler,) = logging.getLogger("lib").handlers
        assert handler.lock is not None and isinstance(handler, logging.NullHandler)
        pid = os.fork()
        if pid == 0:
            sys.stderr.flush()
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            assert pool.apply(fork, (1,)) == 0
"""


def test_a_fork_in_a_worker_with_a_null_handler(tmp_path):
    """What stands for the program's handler has a lock, which logging renews in a fork."""
    assert scripts.program(tmp_path, FORKS) == ""
