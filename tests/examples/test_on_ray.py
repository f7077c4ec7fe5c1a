"""The example of a pool on Ray, made with hooks only: verbs, errors, a dying worker."""

from __future__ import annotations

import os
import textwrap

import pytest
from support import scripts
from support.scripts import ROOT

pytest.importorskip("ray", reason="ray is not installed: pip install xpool[ray]")

# Only on loopback, and without unused services.
CLUSTER = """
import ray
ray.init(
    num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False,
    logging_level="ERROR",
)
"""


def run(code: str) -> list[str]:
    """Run code with its own cluster; return its output without Ray's lines."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    done = scripts.run(["-c", CLUSTER + textwrap.dedent(code)], PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "(raylet)" not in line]


def test_the_example():
    """The example prints what the gallery shows."""
    shown = (ROOT / "docs/gallery.md").read_text(encoding="utf-8").split("pool_on_ray.py\n")[1]
    assert run("import pool_on_ray; pool_on_ray.main()") == (shown.partition("```")[0].splitlines())


def test_a_lost_host():
    """When one of two hosts is killed, no result of the evaluation is missing."""
    for module in ("torch", "sklearn"):
        pytest.importorskip(module, reason=f"examples/cluster.py uses {module}")
    # A death is noticed after one second instead of ten.
    health = {"initial_delay_ms": "500", "period_ms": "500", "timeout_ms": "500"}
    health["failure_threshold"] = "2"
    variables = {f"RAY_health_check_{name}": value for name, value in health.items()}
    done = scripts.run([str(ROOT / "examples/cluster.py")], **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = (ROOT / "docs/gallery.md").read_text(encoding="utf-8").split("cluster.py\n")[1]
    *first, last = shown.partition("```")[0].splitlines()
    out = done.stdout.splitlines()
    assert [line for line in out if line in first] == first, done.stdout
    assert any(line.endswith(last.partition("digits")[2]) for line in out), done.stdout


def test_the_verbs():
    """The pool handles results, order, callbacks, errors, lambdas, an initializer and a worker's
    death."""
    out = run(
        """
        import os
        from pool_on_ray import RayPool
        from xpool import WorkerDied

        def begin(x):
            os.environ["STARTED"] = x

        with RayPool(2, begin, ("yes",)) as pool:
            assert pool.map(lambda x: x * 5, range(50)) == [5 * x for x in range(50)]
            assert list(pool.imap(lambda x: x + 1, range(20))) == list(range(1, 21))
            assert sorted(pool.imap_unordered(lambda x: -x, range(20))) == list(range(-19, 1))
            assert pool.starmap(divmod, [(7, 2), (9, 4)]) == [(3, 1), (2, 1)]
            seen = []
            pool.apply_async(divmod, (9, 2), callback=seen.append).wait()
            results = pool.map(lambda x: 1 // x, [1, 0], on_error="return")
            for task in (lambda: {}["key"], lambda: os._exit(3)):
                try:
                    pool.apply(task)
                except (KeyError, WorkerDied) as error:
                    print(type(error).__name__)
            assert pool.map(lambda x: os.environ["STARTED"], range(20)) == ["yes"] * 20
            assert pool.executor().submit(pow, 2, 5).result() == 32
            print(seen, results)
        """
    )
    assert out == [
        "KeyError",
        "WorkerDied",
        "[(4, 1)] [1, ZeroDivisionError('integer division or modulo by zero')]",
    ]
