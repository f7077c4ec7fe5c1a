"""The backend ``"xpool"`` of joblib."""

import decimal
import multiprocessing
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import work
from support.tiers import also
from support.waiting import Gate, wait_gone

from xpool import WorkerDied

joblib = pytest.importorskip("joblib", reason="joblib is not installed")
backend_module = pytest.importorskip("xpool.joblib")

delayed = joblib.delayed


@pytest.fixture(autouse=True)
def backend():
    """Run calls of the test in two workers, which end with the test."""
    with joblib.parallel_config("xpool", n_jobs=2):
        yield
    backend_module.shutdown()


@pytest.fixture(params=["xpool", "xpool-threads"])
def any_backend(request):
    """Run calls of the test in two workers, then in two threads."""
    with joblib.parallel_config(request.param, n_jobs=2):
        yield


@pytest.mark.usefixtures("any_backend")
def test_results_in_order():
    """A call returns the results in order. Functions may be lambdas."""
    squares = joblib.Parallel()(delayed(work.square)(n) for n in range(100))
    assert squares == [n * n for n in range(100)]
    assert joblib.Parallel()(delayed(lambda n: n + 1)(n) for n in range(5)) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("how", ["generator", "generator_unordered"])
def test_generators(how):
    """A generator yields results while others are computed."""
    got = joblib.Parallel(return_as=how)(delayed(work.square)(n) for n in range(50))
    assert sorted(got) == [n * n for n in range(50)]


def _sum(array):
    return float(array.sum())


def _total_into(output, rows, i):
    output[i] = rows[i].sum()
    return type(rows).__name__


@pytest.mark.parametrize("order", ["C", "F"])
def test_results_in_a_file(tmp_path, order):
    """A file that is an argument is mapped in the worker, as loky does; a part of one is copied."""
    np = pytest.importorskip("numpy")
    rows = np.memmap(tmp_path / "rows", float, "w+", 16, (10, 4), order)
    rows[:] = np.arange(40).reshape(10, 4)
    output = np.memmap(tmp_path / "out", float, "w+", 0, 10)
    kinds = joblib.Parallel(n_jobs=2)(
        delayed(_total_into)(output, rows=rows, i=i) for i in range(10)
    )
    assert output.tolist() == rows.sum(1).tolist()
    assert set(kinds) == {"memmap"}
    assert joblib.Parallel(n_jobs=2)(delayed(len)(rows[1:]) for _ in range(2)) == [9, 9]
    own = np.memmap(tmp_path / "rows", float, "c", 16, (10, 4), order)
    own[0] = 9
    (tmp_path / "rows").unlink()
    for array in own, rows:
        total = float(array.sum())
        assert joblib.Parallel(n_jobs=2)(delayed(_sum)(array) for _ in range(2)) == [total] * 2


def _descriptors(same, also):
    assert same is also
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_many_calls_have(tmp_path):
    """The worker maps it once for all calls of a batch."""
    np = pytest.importorskip("numpy")
    array = np.memmap(tmp_path / "file", float, "w+", 0, 10)
    calls = (delayed(_descriptors)(array, array) for _ in range(400))
    found = joblib.Parallel(n_jobs=2, batch_size=200)(calls)
    assert max(found) - min(found) < 100


def test_an_error_stops_the_call_and_leaves_the_workers():
    """A function's exception is raised. The next call uses the same workers."""
    before = set(joblib.Parallel()(delayed(os.getpid)() for _ in range(20)))
    with pytest.raises(ZeroDivisionError):
        joblib.Parallel()(delayed(divmod)(1, n % 2) for n in range(100))
    after = set(joblib.Parallel()(delayed(os.getpid)() for _ in range(20)))
    assert before & after and os.getpid() not in before


@pytest.mark.usefixtures("any_backend")
def test_errors_and_timeouts(tmp_path):
    """An exception, or joblib's TimeoutError of a call that takes too long, ends the call. The next
    call works."""
    with pytest.raises(ZeroDivisionError):
        joblib.Parallel()(delayed(divmod)(1, n % 2) for n in range(100))
    gate = Gate(tmp_path / "gate")
    with pytest.raises((TimeoutError, joblib.parallel.TimeoutError)):
        joblib.Parallel(timeout=0.2)(delayed(work.pass_gate)(gate.path) for _ in range(2))
    gate.close()
    assert joblib.Parallel()(delayed(work.square)(n) for n in range(4)) == [0, 1, 4, 9]


def test_a_worker_dies_once(tmp_path):
    """If a worker dies, its batch runs again."""

    def die_once(n):
        return os._exit(1) if work.first(tmp_path / "died") else n

    assert joblib.Parallel()(delayed(die_once)(n) for n in range(6)) == list(range(6))


def test_a_worker_dies_again_and_again():
    """A batch that kills every worker fails with the reason."""
    with pytest.raises(WorkerDied, match="exit"):
        joblib.Parallel()(delayed(os._exit)(3) for _ in range(1))


@pytest.mark.usefixtures("any_backend")
def test_nested_calls():
    """A call inside a task runs in threads of its worker, as with joblib's own backends."""

    def inner(n):
        pids = joblib.Parallel(n_jobs=2)(delayed(os.getpid)() for _ in range(3))
        return set(pids) == {os.getpid()}

    assert all(joblib.Parallel()(delayed(inner)(n) for n in range(4)))


def test_threads_of_libraries():
    """Numerical libraries in the workers use `inner_max_num_threads`."""
    with joblib.parallel_config("xpool", n_jobs=2, inner_max_num_threads=3):
        look = delayed(lambda: os.environ["OMP_NUM_THREADS"])
        found = joblib.Parallel()(look() for _ in range(4))
    assert found == ["3"] * 4


def test_settings_of_the_callers_thread():
    """All batches have them, also those that another thread submits when a first one has ended."""
    with decimal.localcontext() as context:
        context.prec = 5
        thirds = [delayed(lambda: str(decimal.Decimal(1) / 3))() for _ in range(20)]
        assert set(joblib.Parallel(batch_size=1)(thirds)) == {"0.33333"}


def test_two_calls_at_once():
    """Two threads with different numbers of workers do not end each other's pools."""

    def call(n_jobs):
        with joblib.parallel_config("xpool", n_jobs=n_jobs):
            return joblib.Parallel()(delayed(work.square)(n) for n in range(200))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(call, (2, 3))) == [[n * n for n in range(200)]] * 2


def test_shutdown():
    """`shutdown` ends idle workers."""
    (pid,) = joblib.Parallel()(delayed(os.getpid)() for _ in range(1))
    backend_module.shutdown()
    assert wait_gone([pid]) == []
    assert joblib.Parallel()(delayed(abs)(-n) for n in range(3)) == [0, 1, 2]


@pytest.mark.exhaustive
def test_a_grid_search():
    """Searches and cross-validation of scikit-learn run in the workers."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from sklearn.datasets import load_iris
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.neighbors import KNeighborsClassifier

    x, y = load_iris(return_X_y=True)
    search = GridSearchCV(KNeighborsClassifier(), {"n_neighbors": [1, 5]}, cv=3, n_jobs=-1)
    assert search.fit(x, y).best_score_ > 0.9
    assert cross_val_score(KNeighborsClassifier(), x, y, cv=3, n_jobs=2).min() > 0.9


def init(path, text):
    """Log a text and this process's pid."""
    with open(path, "a") as file:
        file.write(f"{text} {os.getpid()}\n")


@pytest.mark.parametrize("where", ["parallel_config", "Parallel"])
def test_an_initializer(tmp_path, where):
    """`initializer` runs in each worker. Other `initargs` start new workers."""
    log = tmp_path / "log"
    pids = []
    for text in ("one", "one", "other"):
        options = {"initializer": init, "initargs": (str(log), text)}
        inner, outer = (options, {}) if where == "Parallel" else ({}, options)
        with joblib.parallel_config("xpool", n_jobs=2, **outer):
            pids.append(set(joblib.Parallel(**inner)(delayed(os.getpid)() for _ in range(20))))
    assert pids[0] & pids[1] and not pids[1] & pids[2]
    lines = [line.split() for line in log.read_text().splitlines()]
    assert {int(pid) for text, pid in lines if text == "one"} >= pids[0] | pids[1]
    assert {int(pid) for text, pid in lines if text == "other"} >= pids[2]


def test_initargs_that_cannot_be_compared():
    """Initargs that cannot be compared, such as arrays, start new workers."""
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    for _ in range(2):
        options = {"initializer": work.nothing, "initargs": (np.zeros(3),)}
        assert joblib.Parallel(**options)(delayed(abs)(-n) for n in range(3)) == [0, 1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="the server is for Linux")
def test_workers_come_from_the_server():
    """The fork server forks the workers, unless the caller asks for forks of the program."""
    look = delayed(os.getppid)
    (parent,) = set(joblib.Parallel()(look() for _ in range(4)))
    assert parent != os.getpid()
    with joblib.parallel_config("xpool", n_jobs=2, context="fork"):
        assert set(joblib.Parallel()(look() for _ in range(4))) == {os.getpid()}


def alone(n):
    """Return whether a call inside a worker runs in this process, and its warnings."""
    import xpool.joblib  # noqa: F401 - a fresh worker has not imported it

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pids = joblib.Parallel(n_jobs=2, backend="xpool")(delayed(os.getpid)() for _ in range(n))
    return set(pids) == {os.getpid()}, [str(warning.message) for warning in seen]


@pytest.mark.parametrize("method", ["forkserver", *also("spawn")])
def test_in_a_worker_of_multiprocessing(method):
    """A call in a worker of `multiprocessing.Pool` runs in that worker, with a warning."""
    with multiprocessing.get_context(method).Pool(1) as pool:
        is_alone, seen = pool.apply(alone, (3,))
    assert is_alone and "n_jobs is 1" in seen[0]


@pytest.fixture
def in_threads():
    """Run calls of the test in two threads."""
    with joblib.parallel_config("xpool-threads", n_jobs=2):
        yield


@pytest.mark.usefixtures("in_threads")
def test_threads_share_objects():
    """Threads use the caller's own objects."""
    found = []
    names = joblib.Parallel(require="sharedmem")(
        delayed(lambda n: found.append(n) or threading.current_thread().name)(n) for n in range(50)
    )
    assert sorted(found) == list(range(50))
    assert set(names) <= {"joblib-worker-0", "joblib-worker-1"}


@pytest.mark.usefixtures("in_threads")
def test_options_of_threads():
    """Other options go to the pool. One job runs in the caller's thread; zero jobs are refused."""
    started = []
    parallel = joblib.Parallel(initializer=started.append, initargs=("started",))
    assert parallel(delayed(abs)(-n) for n in range(9)) == list(range(9))
    assert set(started) == {"started"}  # one thread may have made all calls
    (name,) = joblib.Parallel(n_jobs=1)([delayed(threading.current_thread)()])
    assert name is threading.current_thread()
    with pytest.raises(ValueError, match="n_jobs == 0"):
        joblib.Parallel(n_jobs=0)([delayed(abs)(1)])
    with pytest.raises(TypeError, match="initialiser.*initializer="):
        joblib.Parallel(initialiser=abs)([delayed(abs)(1)])
