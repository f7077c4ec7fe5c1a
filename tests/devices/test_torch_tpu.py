"""Real torch_tpu on a machine without a TPU: run by ``make test-tpu``."""

from __future__ import annotations

import pytest
from support import scripts

pytestmark = pytest.mark.torch_tpu

PREFIX = """
import dataclasses, os, sys
from xpool import CtxPool, Pool, WorkerStartFailed, current_worker
from xpool.devices import Chip, Host, devices

def loaded(*_):
    return sorted({"torch", "torch_tpu", "libtpu"} & set(sys.modules))

def with_torch():
    import torch
    return loaded()

def variables(*_):
    names = "TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS", "WORLD_SIZE", "TPU_PROCESS_ADDRESSES"
    return [os.environ.get(name) for name in names]

host = dataclasses.replace(Host.here(gpus=False), chips=(Chip("v6e"),) * 4)
"""


def run(code: str, **env: str) -> list[str]:
    """Run a program without variables about backends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
        done = scripts.run(["-c", PREFIX + code], **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_parent_does_not_load_the_backend():
    """Importing torch loads the backend, but not after `devices("tpu")`."""
    without = run("import torch; print(loaded())")
    assert without == ["['libtpu', 'torch', 'torch_tpu']"]
    kept_out = run(
        "contexts = devices('tpu', host=host); import torch\nprint(contexts[0].framework, loaded())"
    )
    assert kept_out == ["torch_tpu ['torch']"]


def test_the_fork_server_does_not_load_the_backend():
    """Workers of other pools load what their parent's torch loads; the fork server loads no
    backend."""
    out = run(
        "import torch\nwith Pool(1) as pool: print(pool.apply(with_torch))",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out == ["['torch']"]
    out = run("import torch\nwith Pool(1) as pool: print(pool.apply(with_torch))")
    assert out == ["['libtpu', 'torch', 'torch_tpu']"], "a worker loads the backend of its parent"


def test_a_worker_loads_the_backend_with_its_variables():
    """A bound worker imports the backend after it has set its variables."""
    out = run(
        "class Bound:\n"
        "    def __init__(self, context): self.env, self.context = context.env, context\n"
        "    def enter(self):\n"
        "        import torch_tpu\n"
        "contexts = [Bound(c) for c in devices('tpu', 1, host=host)]\n"
        "with CtxPool(worker_contexts=contexts) as pool:\n"
        "    print(pool.apply(loaded)); print(pool.apply(variables))",
        WORLD_SIZE="8",
        TPU_PROCESS_ADDRESSES="local",
    )
    assert out == ["['libtpu', 'torch', 'torch_tpu']", "['0', '1,1,1', None, None]"]


def test_a_chip_that_cannot_be_opened():
    """If the chip is missing, the parent gets one error with the remedy."""
    out = run(
        "try:\n"
        "    with CtxPool(worker_contexts=devices('tpu', 1, host=host)) as pool:\n"
        "        pool.apply(loaded)\n"
        "except WorkerStartFailed as exc: print(exc)"
    )
    assert len(out) == 1
    assert "worker 0 cannot open tpu device 0 with torch_tpu: " in out[0]
    assert "takes one process at a time: end the other one" in out[0]
