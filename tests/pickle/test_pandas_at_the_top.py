"""A script that imports pandas: tasks that do not use pandas do not import it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

SCRIPT = """
    import dataclasses
    import enum
    import functools
    import sys
    import pandas as pd
    from xpool import Pool

    pd.set_option("display.width", 77)
    frame = pd.DataFrame({"a": [1, 2]})

    def imported(x):
        return "pandas" in sys.modules

    @functools.cache
    def width():
        return pd.get_option("display.width")

    def default(x, one=pd.NaT):
        return one is pd.NaT

    class Frame(pd.DataFrame):
        @property
        def _constructor(self):
            return Frame

    @dataclasses.dataclass
    class Record:
        value: pd.Timestamp
        rows: list = dataclasses.field(default_factory=list)

    class Color(enum.Enum):
        RED = 1
        def series(self):
            return pd.Series([self.value])

    def calls(x):
        return width()

    def derives(x):
        return type(Frame({"a": [x]}).copy()).__name__

    def reads(x):
        return int(frame["a"].sum())

    def is_given(x):
        import pandas
        return isinstance(x, pandas.DataFrame), pandas.get_option("display.width")

    def annotated(record):
        return Record.__annotations__["value"] is pd.Timestamp, record.rows

    def member(color):
        return color is Color.RED, int(color.series()[0])

    if __name__ == "__main__":
        for func, x in [
            (imported, 0), (calls, 0), (default, 0), (derives, 1), (reads, 0),
            (is_given, frame), (is_given, Frame({"a": [1]})), (annotated, Record(None, [1])),
            (member, Color.RED),
        ]:
            with Pool(1) as pool:  # the task is the first of its worker
                print(func.__name__, pool.map(func, [x])[0])
            pool.join()
"""


def test_a_task_gets_what_it_uses_of_pandas(tmp_path: Path):
    """A task finds pandas in defaults, bases, globals and arguments, with the script's settings."""
    pytest.importorskip("pandas", reason="pandas is not installed")
    path = scripts.write(tmp_path / "script.py", SCRIPT)
    assert scripts.run_ok([path]).splitlines() == [
        "imported False",
        "calls 77",
        "default True",
        "derives Frame",
        "reads 3",
        "is_given (True, 77)",
        "is_given (True, 77)",
        "annotated (True, [1])",
        "member (True, 1)",
    ]
