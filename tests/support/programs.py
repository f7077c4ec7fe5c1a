"""A program whose parts have names, for `test_identity` to edit."""

import textwrap

PROGRAM = textwrap.dedent("""
    import dataclasses
    import enum
    import functools
    import random
    import typing
    from abc import ABC, abstractmethod

    K = 2
    TABLE = {"a": [1, 2, {"deep": (1.5, None)}], "set": {"p", "q", "r"}}

    def helper(x, *, scale=1):
        return x + K

    class Color(enum.Enum):
        RED = 1
        BLUE = "b"

    @dataclasses.dataclass
    class Config:
        rate: float = 0.5
        tags: list = dataclasses.field(default_factory=list)

        def apply(self, x):
            return x * self.rate

    class Base(ABC):
        factor = 3

        @abstractmethod
        def go(self, x): ...

        @property
        def twice(self):
            return 2

    class Model(Base):
        __slots__ = ("weights",)

        def __init__(self, weights):
            self.weights = weights

        def go(self, x):
            return super().go(x)

    T = typing.TypeVar("T")

    class Box(typing.Generic[T]):
        def open(self):
            return 1

    CONFIG = Config(0.25)
    MODEL = Model([1, 2, 3])

    @functools.lru_cache
    def cached(x):
        return x - 1

    def logged(func):
        @functools.wraps(func)
        def inside(*args):
            return func(*args)
        return inside

    @logged
    def decorated(x):
        return x + 10

    def adder(n):
        def add(x):
            return x + n
        return add

    plus = adder(5)
    minus = [lambda x: x - 1, lambda x: x - 2]
    partial = functools.partial(helper, scale=4)
    half = functools.partial(lambda x, by: x / by, by=2)

    def f(x, offset=7):
        if Color.RED:
            try:
                sums = helper(x) + cached(x) + decorated(x) + plus(x)
                return Box[int]().open() + sums + minus[0](x) + partial(x)
            except ValueError:
                return [half(y) for y in TABLE["a"]]
        class Local:
            value = 1
        return MODEL.go(CONFIG.apply(x)) + offset
""")
"""The program's function is ``f``."""
