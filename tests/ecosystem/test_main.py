"""``python -m xpool`` prints the facts for a bug report."""

from __future__ import annotations

import json
import subprocess

from support import scripts

import xpool
from xpool import __main__ as program
from xpool._memory import system


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return scripts.run(["-W", "error", "-m", "xpool", *arguments])


def test_the_whole_program():
    """It prints versions, limits, devices and the result of the self-test."""
    done = run()
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert f"xpool                   {xpool.__version__}" in done.stdout
    titles = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert titles == [
        "versions:", "workers:", "processors:", "memory:", "limits:", "devices:", "to do:",
        "self-test:",
    ]  # fmt: skip


def test_json():
    """``--json`` prints one object. ``--no-test`` starts no workers."""
    done = run("--json", "--no-test")
    found = json.loads(done.stdout)
    assert found["versions"]["xpool"] == xpool.__version__
    assert found["processors"]["usable"] >= 1 and "self-test" not in found


def test_a_self_test_that_fails(monkeypatch, capsys):
    """If the self-test fails, the output has the error, and the exit status is 1."""

    def broken(*args, **kwargs):
        raise OSError("no processes here")

    monkeypatch.setattr(program, "Pool", broken)
    assert program.main([]) == 1
    assert "OSError: no processes here" in capsys.readouterr().out


def test_a_machine_in_a_container(tmp_path, monkeypatch):
    """Limits of the cgroup are shown, and the number of workers obeys them."""
    monkeypatch.setattr(system, "_CGROUPS", str(tmp_path / "sys/fs/cgroup"))
    monkeypatch.setattr(system, "_PROC", str(tmp_path / "proc"))
    files = {
        "sys/fs/cgroup/cpu.max": "150000 100000",
        "sys/fs/cgroup/memory.max": str(1 << 30),
        "sys/fs/cgroup/memory.current": "8192",
        "sys/fs/cgroup/memory.stat": "anon 4096\ninactive_file 4096\n",
        "proc/self/cgroup": "0::/",
        "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4096 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = program.look(tmp_path)
    assert found["processors"]["workers of a pool"] == min(2, found["processors"]["usable"])
    assert found["memory"] == {
        "total": 8 << 30, "available": 4 << 20, "cgroup allows": 1 << 30, "cgroup has": 4096,
        "huge pages": "madvise",
    }  # fmt: skip
    found["limits"] |= {"addresses": 1 << 30, "open files": 64, "file size": 1}
    said = " ".join(program.advice(found))
    for word in ("ulimit -v", "ulimit -n", "ulimit -f"):
        assert word in said
