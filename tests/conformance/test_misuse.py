"""Common mistakes: each error names the cause, and says what to write instead."""

import multiprocessing
import pickle

import pytest
from support import work

import xpool
from xpool import CtxPool, OptionError, P2PPool, Pool, PoolClosed, ThreadPool
from xpool.queue import SimpleQueue

pytestmark = pytest.mark.xpool_only


@pytest.fixture(scope="module")
def pool():
    """A thread pool. It checks arguments of verbs as all pools do."""
    with ThreadPool(1) as shared:
        yield shared


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: p.map(work.square), r"Pool.map\(\) missing .* 'iterable'"),
        (lambda p: p.map(work.square, 5), r"iterable, not int; for one call .* use apply"),
        (lambda p: p.map_async(work.square, 5), r"iterable, not int; for one call .* use apply"),
        (lambda p: p.apply(work.square, (1,), [2]), r"kwds must be a dict .*, not \[2\]"),
        (lambda p: p.apply(work.square, (1,), retry=3), r"'retry'; did you mean retries=\?"),
        (lambda p: p.apply(abs, (1,), callback=print), r"apply_async.* have it; it has func"),
        (lambda p: p.apply(abs, (1,), worker=1), r"apply and apply_async of P2PPool have it"),
        (lambda p: p.map(abs, [1], with_index=True), r"imap_unordered has it"),
        (lambda p: p.map(abs, [1], buffersize=3), r"imap and imap_unordered have it"),
        (lambda p: p.map(abs, [1], journal=5), r"journal must be the path .*, not 5"),
    ],
)
def test_arguments_of_verbs(pool, call, says):
    """The error names the verb and the argument, and says what to write."""
    with pytest.raises(TypeError, match=says):
        call(pool)


@pytest.mark.parametrize("timeout", ["5", [1]])
def test_timeouts_of_waits(timeout, tmp_path):
    """For every wait, a timeout that is not a number raises an error that names it."""
    with ThreadPool(1) as pool:
        lock = multiprocessing.Lock()
        with lock:
            result = pool.apply_async(lock.acquire)
            for wait in (result.get, result.wait, pool.imap(lock.acquire, [True]).next):
                with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
                    wait(timeout)
        result.get()
        lock.release()
        pool.close()
        with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
            pool.join(timeout)
    with SimpleQueue() as queue, pytest.raises(TypeError, match="timeout must be a number"):
        queue.get(timeout)


@pytest.mark.parametrize("hosts", ["localhost", ["a", "b"], 2])
def test_hosts(hosts):
    """If hosts are given by name, the error says how to make hosts."""
    with pytest.raises(OptionError, match=r"xpool\.ray\.hosts\(\)"):
        Pool(hosts=hosts)


def test_how_a_pool_has_ended():
    """The error of a closed pool says closed, the error of a terminated pool says terminated."""
    pool = ThreadPool(1)
    pool.close()
    for _ in range(2):
        with pytest.raises(PoolClosed, match="was closed and takes no more work; make a new"):
            pool.apply(abs, (1,))
        pool.join()
    other = ThreadPool(1)
    other.terminate()
    with pytest.raises(PoolClosed, match="was terminated and takes no more work; make a new"):
        other.apply(abs, (1,))
    other.join()


@pytest.mark.starts
def test_a_function_without_the_context():
    """If a function does not take the context, the error says that the pool passes one."""
    with CtxPool(worker_contexts=["context"]) as pool:
        for call in (lambda: pool.map(work.square, [1]), lambda: pool.apply(work.square, (1,))):
            with pytest.raises(TypeError, match="positional") as caught:
                call()
            assert "it calls func(context, *args)" in str(vars(caught.value)["__notes__"])
        with pytest.raises(TypeError) as caught:
            pool.map(lambda context, x: context + x, [1])
        assert "it calls func" not in str(vars(caught.value)["__notes__"])


@pytest.mark.starts
@pytest.mark.parametrize("options", [{}, {"chunksize": 2}, {"seed": 1}])
def test_map_of_tuples(options):
    """If a function needs the parts of a tuple, the error names `starmap`."""
    with Pool(1) as pool:
        with pytest.raises(TypeError, match="missing 1") as caught:
            pool.map(lambda x, y: x, [(1, 2)], **options)
        assert "starmap passes the parts" in str(vars(caught.value)["__notes__"])
        with pytest.raises(TypeError) as caught:
            pool.map(lambda x: x + 1, [(1, 2)], **options)
        assert "starmap" not in str(vars(caught.value)["__notes__"])


def test_a_name_that_xpool_does_not_have():
    """The AttributeError has the fields from which a traceback suggests the right name."""
    with pytest.raises(AttributeError, match="has no attribute 'Pol'") as caught:
        xpool.Pol  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("Pol", xpool)  # for "Did you mean: 'Pool'?"


@pytest.mark.parametrize("kind", [Pool, ThreadPool, P2PPool])
def test_verbs_are_pickled_by_name(kind):
    """A verb taken from a pool's class is the same function after pickling."""
    for name in ("map", "imap", "starmap_async"):
        assert pickle.loads(pickle.dumps(getattr(kind, name))) is getattr(kind, name)
