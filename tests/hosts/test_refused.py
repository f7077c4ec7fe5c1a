"""Faults of a cluster, a host or a program raise one error, which says what to do."""

import importlib
import os

import pytest
from support import clusters, scripts, work
from support.limits import WAIT

import xpool._hosts.hosts_engine
from xpool import CtxPool, OptionError, Pool, XPoolError
from xpool._hosts.agent import facts

pytestmark = [pytest.mark.ray, pytest.mark.xpool_only]


def over(**where):
    """Make a pool over the cluster."""
    import xpool.ray

    return Pool(hosts=xpool.ray.hosts(**where))


def test_no_cluster():
    """Without a cluster, the error names the address and says how to start one."""
    out = scripts.run(
        ["-"],
        """
        import xpool.ray
        from xpool import OptionError, Pool
        try:
            Pool(hosts=xpool.ray.hosts("127.0.0.2:1"))
        except OptionError as error:
            print(error)
        """,
    )
    assert "127.0.0.2:1" in out.stdout and "ray start --head" in out.stdout, out


def test_a_client_of_ray(monkeypatch):
    """A Ray Client driver is refused. The error says where to run the program."""
    import ray.util.client

    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(OptionError, match="Ray Client.*ray job submit"):
        over()


def test_generators():
    """`yields=True` is refused, with the reason."""
    with over(n=1, per_host=1) as pool, pytest.raises(OptionError, match="agents of hosts"):
        pool.imap(range, [1], yields=True)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"per_host": 1000}, "1000 CPUs.*ask for less, or add a host"),
        ({"resources": {"moon": 1}}, "'moon': 1.*ask for less"),
        ({"labels": {"zone": "moon"}}, "'zone': 'moon'"),
        ({"n": 0}, "n must be"),
        ({"per_host": 0}, "per_host must be"),
        ({"per_host": 1.5}, "per_host must be"),
    ],
    ids=str,
)
def test_requests_that_no_host_fulfils(cluster, where, why):
    """A request that no host fulfils is refused when the pool is made."""
    with pytest.raises((OptionError, TypeError, ValueError), match=why):
        over(**where)


@pytest.mark.parametrize("what", ["Python", "xpool", "numpy"])
def test_versions_differ(cluster, make_pool, monkeypatch, what):
    """If a host has another version of Python or a package, the error names both versions."""
    monkeypatch.setattr(
        xpool._hosts.hosts_engine, "facts", lambda modules: {**facts(modules), what: "0.0.1"}
    )
    pool = make_pool(over, n=1, per_host=1)
    with pytest.raises(XPoolError, match=rf"host .*127.* has {what} .*program has {what} 0.0.1"):
        pool.apply_async(work.square, (2,)).get(WAIT)


def test_a_host_without_a_module(cluster, make_pool, tmp_path, monkeypatch):
    """If a host lacks an installed module, only this task fails. The error names the host."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "only_here.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(folder))
    only_here = importlib.import_module("only_here")
    (folder / "only_here.py").unlink()  # the hosts of this test are this machine
    pool = make_pool(over, n=1, per_host=1)
    with pytest.raises(ModuleNotFoundError, match="only_here") as caught:
        pool.apply_async(only_here.double, (2,)).get(WAIT)
    assert "127.0.0" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert pool.apply_async(work.square, (2,)).get(WAIT) == 4


def test_a_reply_that_cannot_be_taken(cluster, make_pool, monkeypatch):
    """If the program has no memory for a reply, the pool fails with this error."""
    from xpool._hosts import ray_fleet

    def reply(*_):
        raise MemoryError("no memory for a reply")

    pool = make_pool(over, n=1, per_host=1)
    assert pool.apply_async(work.square, (2,)).get(WAIT) == 4
    monkeypatch.setattr(ray_fleet, "_reply", reply)
    with pytest.raises(MemoryError, match="for a reply"):
        pool.apply_async(work.square, (2,)).get(WAIT)


def test_variables_by_runtime_env(cluster, make_pool):
    """`runtime_env` sets variables of the workers."""
    clusters.needs_runtime_env()
    pool = make_pool(over, n=1, per_host=1, runtime_env={"env_vars": {"BROUGHT": "yes"}})
    assert pool.apply_async(os.getenv, ("BROUGHT",)).get(WAIT) == "yes"


def test_contexts_of_this_program(cluster):
    """Contexts that were not made for the hosts are refused."""
    import xpool.ray

    with pytest.raises(OptionError, match=r"xpool\.ray\.devices\(\)"):
        CtxPool(hosts=xpool.ray.hosts(n=1, per_host=1), worker_contexts=["a"])
