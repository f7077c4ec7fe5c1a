"""Python 3.15's lazy imports: they travel as imports, and stay lazy in workers."""

from __future__ import annotations

import sys

import pytest
from support import scripts

pytestmark = [
    pytest.mark.xpool_only,
    pytest.mark.skipif(sys.version_info < (3, 15), reason="lazy imports are new in Python 3.15"),
]

# Written by hand: older Pythons cannot parse the statement.
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
    """A worker imports a module when a task uses it, as the program would; both stay lazy."""
    path = scripts.write(tmp_path / "lazily.py", PROGRAM.replace("GUARD", guard))
    assert scripts.run_ok([*options, path]) == "well False\n"


def test_lazy_imports_on_stdin():
    """The same for a program without a file, whose functions travel by value."""
    program = PROGRAM.replace("GUARD", "if True:")
    assert scripts.run_ok(["-"], program) == "well False\n"
