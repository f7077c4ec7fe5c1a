"""Modules that a worker cannot import by the path of now, and classes that no name finds."""

import pytest
from support import scripts
from support.tiers import also

pytestmark = pytest.mark.xpool_only

MODULE = """
    RATE = 1

    class Rate:
        def __init__(self, v):
            self.v = v

        def get(self):
            return self.v * RATE

    def rated(x):
        return x * RATE
"""

PROGRAM = """
    import os, sys
    import xpool

    here = os.path.dirname(os.path.abspath(__file__))
    os.chdir(here)
    sys.path.append({entry})
    import rates

    def task(x):
        return rates.rated(x), rates.Rate(x).get()

    def get(rate):
        return rate.get()

    def answers(pool):
        kept = pool.map(task, [1]), pool.map(rates.rated, [2]), pool.map(get, [rates.Rate(3)])
        return [one for (one,) in kept]

    def main(**options):
        with xpool.Pool(1, **options) as pool:
            if {before}:
                assert answers(pool) == [(1, 1), 2, 3]
            {change}
            rates.RATE = 10
            assert answers(pool) == [(10, 10), 20, 30]
            assert answers(pool) == [(10, 10), 20, 30]

    if __name__ == "__main__":
        if (child := os.fork()) == 0:
            main(maxtasksperchild=1)
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0
        main()
"""

ENTRIES = {"relative": "'lib'", "absolute": "os.path.join(here, 'lib')"}
CHANGES = {
    "another folder": "os.makedirs('other/lib', exist_ok=True); os.chdir('other')",
    "removed from the path": "sys.path.pop()",
    "both": "sys.path.pop(); os.chdir('/')",
}


# In the first two, no path of now finds the module; in the last one it stays where it was.
MOVES = [("relative", "another folder", False), ("absolute", "removed from the path", True)]
MOVES += also(
    *((entry, change, before) for entry in ENTRIES for change in CHANGES for before in (False, True)
      if (entry, change, before) not in MOVES)
)  # fmt: skip


@pytest.mark.parametrize(("entry", "change", "before"), MOVES)
def test_a_module_that_moved(tmp_path, entry, change, before):
    """A worker of now, and one of before, have the functions, classes and data of the program."""
    (tmp_path / "lib").mkdir()
    scripts.write(tmp_path / "lib" / "rates.py", MODULE)
    text = PROGRAM.format(entry=ENTRIES[entry], change=CHANGES[change], before=before)
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", text)]) == ""


REMOVED = """
    import os
    import xpool
    import rates

    def task(x):
        return rates.rated(x)

    if __name__ == "__main__":
        with xpool.Pool(1, maxtasksperchild=1) as pool:
            if {before}:
                assert pool.map(task, [1]) == [1]
            os.remove(rates.__file__)
            try:
                assert pool.map(task, [1]) == [1]
            except ModuleNotFoundError as exc:
                print(exc)
"""


@pytest.mark.parametrize("before", [False, True], ids=["at first", "later"])
def test_a_module_whose_file_was_removed(tmp_path, before):
    """It is sent.  If workers were told to import it, their error says why they could not."""
    scripts.write(tmp_path / "rates.py", MODULE)
    program = scripts.write(tmp_path / "program.py", REMOVED.format(before=before))
    said = scripts.run_ok([program])
    assert "the module's file was moved or removed" in said if before else said == ""


def test_a_module_that_the_program_has_removed(tmp_path):
    """New workers do without a module that is gone from `sys.modules`, and whose file is gone."""
    scripts.write(tmp_path / "gone_soon.py", "RATE = 2\n\ndef rate():\n    return RATE\n")
    text = """
        import os, sys, xpool
        sys.dont_write_bytecode = True
        import gone_soon
        gone_soon.RATE = 3

        def other():
            return "other"

        if __name__ == "__main__":
            with xpool.Pool(1, maxtasksperchild=1) as pool:
                print(pool.apply(gone_soon.rate))
                os.remove(gone_soon.__file__)
                del sys.modules["gone_soon"], gone_soon
                print(pool.apply(other), pool.apply(other))
            pool.join()
    """
    script = scripts.write(tmp_path / "program.py", text)
    assert scripts.run_ok([script]) == "3\nother other\n"


FACTORIES = """
    import collections, dataclasses, enum

    def of_class_statement(factor):
        class Made:
            def get(self):
                return factor
        return Made

    def of_type(factor):
        return type("Typed", (), {"get": lambda self: factor, "__module__": __name__})

    def of_namedtuple(factor):
        return collections.namedtuple("Pair", "factor")

    def of_dataclass(factor):
        return dataclasses.make_dataclass("Data", ["factor"])

    def of_enum(factor):
        return enum.Enum("Color", {"RED": factor}, module=__name__)
"""

MADE = """
    import factories
    import xpool

    Made, Typed = factories.of_class_statement(3), factories.of_type(4)
    Pair, Data = factories.of_namedtuple(5), factories.of_dataclass(6)
    Color = factories.of_enum(7)
    objects = [Made(), Typed(), Pair(5), Data(6), Color.RED]

    def same(x):
        return x

    def made(x):
        return [Made(), Typed(), Pair(5), Data(6), Color.RED][x]

    if __name__ == "__main__":
        for options in {}, {"maxtasksperchild": 1}:
            with xpool.Pool(2, **options) as pool:
                for found in pool.map(same, objects, 1), pool.map(made, range(5), 1):
                    assert list(map(type, found)) == [Made, Typed, Pair, Data, Color], found
                    assert found[0].get() == 3 and found[1].get() == 4 and found[4] is Color.RED
                    assert found[2] == (5,) and found[3].factor == 6
"""


def test_classes_that_a_factory_of_a_module_makes(tmp_path):
    """They are sent by value, and results are of the program's classes."""
    scripts.write(tmp_path / "factories.py", FACTORIES)
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", MADE)]) == ""
