"""`xpool.xla.spawn` with a fake torch_xla."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch_xla needs torch")

import torch
from support import scripts

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]

PACKAGE = """
    import os, sys, threading, types

    class _XLAC:
        started = None

        @classmethod
        def _xla_runtime_is_initialized(cls):
            return cls.started is not None

        @staticmethod
        def _xla_set_default_device(device):
            here.device = device

    here = threading.local()

    def devices():
        # As a true runtime, it looks at the variables once.
        if _XLAC.started is None:
            _XLAC.started = int(os.environ.get("CPU_NUM_DEVICES", 1))
        return [f"xla:{i}" for i in range(_XLAC.started)]

    def device(index=None):
        return getattr(here, "device", devices()[index or 0])

    def ordinal():
        return int(device().partition(":")[2])

    core = types.ModuleType("torch_xla.core")
    xm = types.ModuleType("torch_xla.core.xla_model")
    xm.get_xla_supported_devices = devices
    xm.set_replication = lambda *_: None
    runtime = types.ModuleType("torch_xla.runtime")
    runtime._init_world_size_ordinal = lambda: None
    runtime.global_ordinal = ordinal
    runtime.initialize_cache = lambda *_, **__: None
    for one in core, xm, runtime:
        sys.modules[one.__name__] = one
"""

PROGRAM = """
    import os
    import xpool.xla as xla
    from xpool import WorkerDied

    def ordinal(index, x):
        return index * x

    def seen(index):
        return [os.environ.get(name) for name in ("CPU_NUM_DEVICES", "PJRT_LOCAL_PROCESS_COUNT")]

    def end(index):
        os._exit(3)

    if __name__ == "__main__":
        os.environ["CPU_NUM_DEVICES"] = "4"
        before = dict(os.environ)
        for one in xla.spawn(seen, nprocs=1), xla.launch(seen, debug_single_process=True):
            assert one == [["1", "1"]] or one == [["4", None]], one
            assert os.environ == before
        context = xla.spawn(ordinal, (10,), nprocs=1, join=False)
        assert context.join() and context.results() == [0] and context.pids() == [os.getpid()]
        assert xla.spawn(ordinal, (10,)) == [0, 10, 20, 30]
        context = xla.spawn(ordinal, (10,), join=False)
        (pid,) = context.pids()
        assert pid != os.getpid()
        assert context.join() and context.results() == [0, 10, 20, 30]
        try:
            xla.spawn(end)
        except WorkerDied as exc:
            assert exc.exitcode == 3 and "retries" not in str(exc), exc
        else:
            raise AssertionError("it has ended")
"""


def test_replicas(tmp_path: Path):
    """A replica in this process restores the variables, so the next spawn uses all devices.
    Replicas in processes have process ids. The error of a dead replica does not suggest `retries`.
    """
    folder = tmp_path / "site-packages"  # else it would be a module of the program
    (folder / "torch_xla").mkdir(parents=True)
    scripts.write(folder / "torch_xla/__init__.py", PACKAGE)
    version = torch.__version__.partition("+")[0]
    (folder / f"torch_xla-{version}.dist-info").mkdir()
    scripts.write(
        folder / f"torch_xla-{version}.dist-info/METADATA",
        f"Metadata-Version: 2.1\nName: torch_xla\nVersion: {version}\n",
    )
    program = scripts.write(tmp_path / "program.py", PROGRAM)
    assert scripts.run_ok([program], PYTHONPATH=str(folder)) == ""
