"""Statements that are run by themselves, and not in random scripts.

What other statements send could hide that theirs is missing, and others may look at all globals,
such as a proxy that raises.
"""

TEXT = r"""
= program: class that a module gives itself
import own_typed~
? own_typed~.doubled
> own_typed~.scale = 5
%file own_typed~.py
import sys, types
scale = 1
class Own(types.ModuleType):
    @property
    def doubled(self):
        return scale * 2
sys.modules[__name__].__class__ = Own
= program: definition under a condition
import own_choice~
own_choice~.fast = True
import own_solver~
own_choice~.fast = False
? own_solver~.solve(x), own_solver~.twice(x)
%after pool.map(own_solver~.solve, [1]) == [own_solver~.solve(1)]
%modes script stdin bare runpy
%file own_choice~.py
fast = False
%file own_solver~.py
import own_choice~
if own_choice~.fast:
    def solve(x, *, steps=[1]):
        return "fast", x, steps
else:
    def solve(x, *, steps=[2]):
        return "slow", x, steps
def twice(x):
    return solve(x), solve(x)
= program: function that wraps itself
import own_wraps~
? own_wraps~.same(x)
%after pool.map(own_wraps~.same, [7]) == [7]
%file own_wraps~.py
import time
def same(x):
    return x
same.__wrapped__ = same
= program: object whose class is computed and may raise
stack~ = []
class Proxy~:
    @property
    def __class__(self):
        if not stack~:
            raise RuntimeError("outside of a context")
        return type(stack~[-1])
    def __getattr__(self, name):
        return getattr(stack~[-1], name)
class App~:
    debug = True
    proxy = Proxy~()
current~ = Proxy~()
def debug~(x):
    stack~.append(App~())
    try:
        return current~.debug, App~.proxy.debug, x
    finally:
        stack~.pop()
? debug~(x)
= program: object with arguments of new
class Unit~:
    kinds = {}
    def __new__(cls, name):
        if name not in cls.kinds:
            cls.kinds[name] = super().__new__(cls)
            cls.kinds[name].name = name
        return cls.kinds[name]
    def __getnewargs__(self):
        return (self.name,)
metre~ = Unit~("m")
Unit~.kinds.clear()
? metre~.name, list(Unit~.kinds)
> Unit~("s")
= program: members with data, and named tuples
import collections
import enum
import typing
class Point~(typing.NamedTuple):
    x: int
    y: int = 0
class OfPoints~(Point~, enum.Enum):
    A = 1, 2
class OfOldPoints~(collections.namedtuple("Old", "x y"), enum.Enum):
    A = 1, 2
class Scaled~(float):
    def __new__(cls, value, scale=2):
        self = super().__new__(cls, value * scale)
        self.given = value
        return self
class OfFloats~(Scaled~, enum.Enum):
    A = 1.5
class Hex~(int):
    def __new__(cls, text, base=16):
        return super().__new__(cls, text, base)
class OfNumbers~(Hex~, enum.Enum):
    A = "ff"
class Color~(tuple, enum.Enum):
    RED = (255, 0, 0)
Row~ = collections.namedtuple("Row~", ["id", "first name", "id"], rename=True)
Pair~ = collections.namedtuple("Pair~", "x y")
Pair~._asdict = lambda self: {"only": self.x}
old_new~ = Pair~.__new__
Pair~.__new__ = lambda cls, x, y=7: old_new~(cls, x, y)
def members~():
    a, f, old = OfPoints~.A, OfFloats~.A, OfOldPoints~.A
    data = a.x, a.y, a.value, old.x, old.y, float(f), f.given, int(OfNumbers~.A)
    return data, Color~.RED[0], Color~.RED.value
def tuples~():
    return Row~(1, 2, 3), Row~._fields, Pair~(1), Pair~(1)._asdict()
def shown~(value):
    return repr(value), value[0], list(value)
values~ = OfPoints~.A, Color~.RED, Row~(1, 2, 3), Pair~(2)
? members~()
? tuples~()
%after pool.map(shown~, values~, 1) == [*map(shown~, values~)]
%after [*map(type, pool.apply(tuples~)[::2])] == [Row~, Pair~]
= program: functions without code, as in Cython
import own_compiled~
import own_numbers~
own_numbers~.value = 5
own_numbers~.settings["a"] = 6
own_compiled~.scale = 7
own_compiled~.Options.rate = 8
? own_compiled~.compute()
> own_numbers~.value = 50
> own_compiled~.scale = 70
%after pool.apply(own_compiled~.compute) == own_compiled~.compute()
%modes script stdin bare runpy
%file own_numbers~.py
value, settings = 1, {"a": 1}
%file own_compiled~.py
import own_numbers~
from own_numbers~ import settings
# The name of Cython's type; a true one needs a compiler.
class cython_function_or_method:
    def __init__(self, code):
        self.__module__, self.__qualname__ = __name__, "compute"
        self.__call = compile(code, "hidden", "eval")
    def __call__(self):
        return eval(self.__call)
    def __reduce__(self):
        return self.__qualname__
class Options:
    rate = 1
scale = 1
compute = cython_function_or_method("scale, own_numbers~.value, settings['a'], Options.rate")
"""
