"""Lazy imports of Python 3.15: they are sent as imports, and stay lazy in workers."""

import sys

import pytest
from support import scripts

pytestmark = [
    pytest.mark.xpool_only,
    pytest.mark.skipif(sys.version_info < (3, 15), reason="lazy imports are new in Python 3.15"),
]

# A string, because older Pythons cannot parse the statement.
PROGRAM = """
    lazy import json
    lazy import os.path as paths
    lazy import xml.dom.minidom
    lazy from collections import OrderedDict as Ordered
    lazy import wave
    import sys
    import xpool

    MODULES = ["json", "wave", "xml.dom.minidom"]

    def loaded(_=None):
        return [name for name in MODULES if name in sys.modules]

    def use(x):
        return json.dumps(x), paths.join("a", "b"), xml.dom.minidom.__name__, Ordered(a=x)

    class Reader:
        def read(self, text):
            return json.loads(text)

    GUARD
        with xpool.Pool(1) as pool:
            assert pool.apply(loaded) == []
            found = pool.apply(use, (1,))
            assert found == ("1", "a/b", "xml.dom.minidom", {"a": 1}), found
            assert type(found[-1]).__name__ == "OrderedDict"
            assert pool.apply(loaded) == ["json", "xml.dom.minidom"]
            assert pool.apply(Reader().read, ("[2]",)) == [2]
            assert pool.map(lambda x: json.dumps(x), [3]) == ["3"]
        print("well", "wave" in sys.modules)
"""


@pytest.mark.parametrize("options", [(), ("-X", "lazy_imports=all")], ids=["lazy", "all"])
@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_lazy_imports_of_a_script(tmp_path, options, guard):
    """A worker imports a module when a task first uses it. Unused modules are never imported."""
    path = scripts.write(tmp_path / "lazily.py", PROGRAM.replace("GUARD", guard))
    assert scripts.run_ok([*options, path]) == "well False\n"


def test_lazy_imports_on_stdin():
    """Lazy imports stay lazy if functions are sent by value from standard input."""
    program = PROGRAM.replace("GUARD", "if True:")
    assert scripts.run_ok(["-"], program) == "well False\n"


CELLS = """
    import sys
    from IPython.core.interactiveshell import InteractiveShell

    CELLS = [
        "lazy import json\\nlazy import wave\\nimport sys, xpool",
        "def loaded(name):\\n    return name in sys.modules",
        "def use(x):\\n    return json.dumps(x)",
        "with xpool.Pool(1) as pool:\\n"
        "    found = [pool.apply(use, ([1],)), pool.apply(loaded, ('wave',))]",
        "found.append(loaded('wave'))",
    ]
    shell = InteractiveShell.instance()
    for cell in CELLS:
        shell.run_cell(cell, store_history=True).raise_error()
    print(shell.user_ns["found"])
"""


def test_lazy_imports_of_a_notebook(tmp_path):
    """Lazy imports in cells of IPython stay lazy in workers."""
    pytest.importorskip("IPython", reason="cells are run by IPython")
    assert scripts.program(tmp_path, CELLS) == "['[1]', False, False]\n"
