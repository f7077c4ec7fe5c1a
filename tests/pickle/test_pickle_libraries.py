"""Local classes that libraries such as pydantic make are sent by value.

Each test is skipped if its library is not installed.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from receiver import Receiver
from support import scripts


def _library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


def test_pydantic_validators(receiver: Receiver):
    """A local model keeps its validators, serializers and fields."""
    pydantic = _library("pydantic")

    class Part(pydantic.BaseModel):
        size: int

    class Model(pydantic.BaseModel):
        count: int
        name: str = pydantic.Field("a", max_length=5)
        part: Part = Part(size=1)
        _own: int = pydantic.PrivateAttr(3)

        @pydantic.field_validator("count")
        @classmethod
        def _counts(cls, value: int) -> int:
            if value < 0:
                raise ValueError("negative")
            return value + 1

        @pydantic.field_validator("name", mode="before")
        @classmethod
        def _names(cls, value: str) -> str:
            return value.upper()

        @pydantic.model_validator(mode="after")
        def _whole(self) -> Any:
            return self

        @pydantic.computed_field
        @property
        def double(self) -> int:
            return 2 * self.count

        @pydantic.field_serializer("count")
        def _written(self, value: int) -> str:
            return str(value)

    class Child(Model):
        more: int = 7

    def look(model: Any) -> Any:
        made = Child(count=5, name="q", part={"size": 4})
        try:
            Model(count=-1)
        except pydantic.ValidationError as error:
            return type(model) is Model, made, made.model_dump(), model._own, error.error_count()

    same, made, dumped, own, errors = receiver.call(look, Model(count=1))
    assert type(made) is Child and (same, own, errors) == (True, 3, 1)
    assert (made.count, made.double, made.name, made.part.size) == (6, 12, "Q", 4)
    assert dumped == {"count": "6", "double": 12, "more": 7, "name": "Q", "part": {"size": 4}}


def test_other_models_of_pydantic(receiver: Receiver):
    """Generic and recursive models, models made by a call, dataclasses and adapters can be sent."""
    pydantic = _library("pydantic")
    kind = typing.TypeVar("kind")

    class Box(pydantic.BaseModel, typing.Generic[kind]):
        inside: kind  # type: ignore[valid-type]

    class Node(pydantic.BaseModel):
        children: list[Node] = []

    Node.model_rebuild(_types_namespace={"Node": Node})

    @pydantic.dataclasses.dataclass
    class Point:
        x: int

        @pydantic.field_validator("x")
        @classmethod
        def _next(cls, value: int) -> int:
            return value + 1

    made = pydantic.create_model("made", x=(int, 3))
    numbers = pydantic.TypeAdapter(list[int])

    def look(box: Any, point: Any) -> Any:
        node = Node(children=[Node()])
        return box, Box[int](inside="3").inside, len(node.children), point.x, Point(5).x, made()

    box, *rest, one = receiver.call(look, Box[int](inside=1), Point(1))
    assert type(box) is Box[int] and rest == [3, 1, 2, 6] and type(one) is made
    assert receiver.call(lambda: numbers.validate_python(["1"])) == [1]


def test_generic_models_of_pydantic(receiver: Receiver):
    """`Box[int]` is the class of the objects that have arrived, also in code of the receiver."""
    pydantic = _library("pydantic")
    kind = typing.TypeVar("kind")

    class Box(pydantic.BaseModel, typing.Generic[kind]):
        inside: kind  # type: ignore[valid-type]

    class Pair(pydantic.BaseModel, typing.Generic[kind]):
        box: Box[kind]

    def look(pair: Any) -> Any:
        same = type(pair) is Pair[int], type(pair.box) is Box[int]
        return *same, isinstance(Box[int](inside=1), type(pair.box)), Box[int](inside=2)

    *same, made = receiver.call(look, Pair[int](box=Box[int](inside=1)))
    assert same == [True, True, True] and type(made) is Box[int]


def test_sqlmodel(receiver: Receiver):
    """A local model without a table can be sent like one of pydantic."""
    sqlmodel = _library("sqlmodel")

    class Data(sqlmodel.SQLModel):
        n: int

    found = receiver.call(lambda one: (one, Data(n=3)), Data(n=1))
    assert found == (Data(n=1), Data(n=3))


def test_attrs(receiver: Receiver):
    """Classes with slots, defaults, converters and validators can be sent."""
    attrs = _library("attrs")

    @attrs.define
    class Point:
        x: Any = attrs.field(converter=int)
        near: Any = attrs.field()

        @x.validator
        def _positive(self, attribute: Any, value: int) -> None:
            if value < 0:
                raise ValueError(attribute.name)

        @near.default
        def _near(self) -> list[int]:
            return [self.x]

    @attrs.define
    class Child(Point):
        z: int = 3

        def text(self) -> str:
            return super().__repr__()

    @attrs.frozen
    class Pair:
        one: Point

    def look(pair: Any, child: Any) -> Any:
        try:
            Point(-1)
        except ValueError as error:
            return pair, Point("4"), attrs.evolve(child, x=3), child.text(), str(error)

    pair, point, evolved, text, error = receiver.call(look, Pair(Point(1)), Child(2))
    assert pair == Pair(Point(1)) and point == Point(4) and evolved == Child(3, [2])
    assert (error, text) == ("x", Child(2).text())


@pytest.mark.parametrize(
    ("library", "make", "shown"),
    [
        ("numpy", lambda numpy: numpy.finfo("f4"), "bits"),
        ("jinja2", lambda jinja2: jinja2.Template("a"), "name"),
        ("tqdm.utils", lambda utils: utils.ObjectWrapper(3), "real"),
        ("unittest.mock", lambda mock: mock.MagicMock(total=3), "total"),
    ],
)
def test_objects_that_pickle_cannot_load(receiver: Receiver, library: str, make: Any, shown: str):
    """Objects whose `__new__` needs arguments, or that delegate by `__getattr__`, can be sent."""
    one = make(_library(library))
    assert receiver.call(lambda: getattr(one, shown)) == getattr(one, shown)


def test_numba(receiver: Receiver):
    """Compiled local functions can be sent, also those that call each other."""
    numba = _library("numba")

    @numba.njit
    def add(a: int, b: int) -> int:
        return a + b

    @numba.njit
    def total(n: int) -> int:
        found = 0
        for i in range(n):
            found += add(i, 1)
        return found

    assert total(3) == receiver.call(lambda: total(3)) == receiver.call(total, 3) == 6


def test_polars(receiver: Receiver):
    """Frames, series and expressions can be sent as arguments and in closures."""
    polars = _library("polars")
    frame = polars.DataFrame({"a": [1, 2, 3]})
    double = polars.col("a") * 2
    found = receiver.call(lambda one: one.with_columns(b=double), frame)
    assert found["b"].to_list() == [2, 4, 6]
    assert (
        receiver.call(lambda lazy: lazy.select(double).sum().collect(), frame.lazy()).item() == 12
    )
    assert receiver.call(lambda: frame.height) == 3


def test_peewee(receiver: Receiver):
    """A local model has its database, whose state is a `threading.local` of a class of its own."""
    peewee = _library("peewee")

    class Point(peewee.Model):
        x = peewee.IntegerField()

        class Meta:
            database = peewee.SqliteDatabase(":memory:")

    def stored() -> list[int]:
        Point.create_table()
        Point.create(x=3)
        return [point.x for point in Point.select()]

    assert receiver.call(stored) == [3]


BOUND = """
    from loguru import logger
    from xpool import Pool

    logger.remove()
    logger.add("run.log", format="{message} {extra}")
    bound = logger.bind(part="a")

    def task(i):
        bound.info(f"task {i}")

    if __name__ == "__main__":
        with Pool(1) as pool, logger.contextualize(run=7):
            pool.map(task, [1, 2])
        with open("run.log") as lines:
            print(lines.read())
"""


def test_a_bound_logger_of_loguru(tmp_path: Path):
    """It has the handlers of the worker, and the fields of the program's context."""
    _library("loguru")
    out = scripts.program(tmp_path, BOUND.replace("run.log", str(tmp_path / "run.log")))
    assert out.splitlines() == [f"task {i} {{'run': 7, 'part': 'a'}}" for i in (1, 2)] + [""]


IN_RUST = """
    import os, sys
    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))

    from rusty import Opened
    from xpool import Pool

    def task(kind):
        return Opened is kind is sys.modules["rusty"].Opened, isinstance(Opened(), kind)

    with Pool(1) as pool:
        print(pool.apply(task, (Opened,)))
"""


def test_classes_that_do_not_name_their_module(tmp_path: Path):
    """Those in Rust are found where an installed module has them, as `safetensors.safe_open`."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "rusty.py").write_text("class Opened:\n    __module__ = 'builtins'\n")
    assert scripts.program(tmp_path, IN_RUST) == "(True, True)\n"
