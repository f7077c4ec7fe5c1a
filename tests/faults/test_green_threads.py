"""Pools in programs whose threads gevent or eventlet has replaced."""

from __future__ import annotations

import sys
import types

import pytest
from support import scripts

from xpool import XPoolError

pytestmark = pytest.mark.xpool_only

LIBRARIES = {"gevent": "gevent.monkey", "eventlet": "eventlet.patcher"}


def install(monkeypatch: pytest.MonkeyPatch, library: str, patched: str) -> None:
    """Install a module that reports one patched module, as the library does."""
    module = types.ModuleType(LIBRARIES[library])
    for name in "is_module_patched", "is_monkey_patched":
        setattr(module, name, lambda one: one == patched)
    monkeypatch.setitem(sys.modules, LIBRARIES[library], module)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("patched", ["thread", "socket", "select"])
def test_a_patched_program_is_refused(kind, make_pool, monkeypatch, library, patched):
    """The first pool raises an error that names the library and what it has patched."""
    install(monkeypatch, library, patched)
    with pytest.raises(XPoolError, match=f"^{library} has patched {patched} in this program"):
        make_pool(kind, 1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_program_that_only_imports_it(kind, make_pool, monkeypatch, library):
    """A library that has patched nothing is no reason to refuse."""
    install(monkeypatch, library, "")
    assert make_pool(kind, 1).apply(abs, (-1,)) == 1


PATCHED = """
    import sys
    {patch}
    import xpool

    if __name__ == "__main__":
        for kind in xpool.Pool, xpool.ThreadPool, xpool.Executor:
            try:
                kind(1)
            except xpool.XPoolError as exc:
                assert str(exc).startswith("{library} has patched"), exc
            else:
                sys.exit("not refused")
"""

PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import warnings; warnings.simplefilter('ignore'); import eventlet; "
    "eventlet.monkey_patch()",
}


@pytest.mark.parametrize("library", PATCHES)
def test_the_library_itself(tmp_path, library):
    """The installed library reports what it has patched."""
    pytest.importorskip(library)
    text = PATCHED.format(patch=PATCHES[library], library=library)
    scripts.program(tmp_path, text)
