"""Functions, classes and globals of ``__main__`` in another process."""

from __future__ import annotations

from pathlib import Path

import pytest
from receiver import HERE
from support import scripts


def run(folder: Path, program: str) -> str:
    """Run a program that can import the receiver; return its output."""
    path = folder / "program.py"
    path.write_text(f"import sys; sys.path.append({str(HERE)!r})\n{program}")
    return scripts.run_ok(["-W", "error", str(path)])


NOT_CLOBBERED = """
from receiver import Receiver
count = 1
def bump():
    global count
    count += 10
    return bump
with Receiver() as other:
    back = other.call(bump)
    assert count == 1
    assert other.call(bump) is not None
    other.call(back)
    assert count == 1
    back()
    assert count == 11, "a function that came back works on the globals here"
    assert other.call(lambda: count) == 11, "the caller has changed it since"
print("ok")
"""

DISPATCH = """
import contextlib, enum, functools, re, sys, typing
from receiver import Receiver
pattern = re.compile("a+")
@functools.singledispatch
def kind(x): return "object"
@kind.register(int)
def _(x): return "int"
@contextlib.contextmanager
def manager(): yield 5
def managed():
    with manager() as x: return x
class Property(property): pass
class Many:
    @Property
    def x(self): return 3
    @functools.cached_property
    def y(self): return 4
    @functools.singledispatchmethod
    def z(self, a): return "object"
    @z.register
    def _(self, a: int): return "int"
    partial = functools.partialmethod(lambda self, a, b: a + b, 3)
    table = {"k": lambda self: 9}
    def t(self): return self.table["k"](self)
class Same(int, enum.Enum):
    A = 1
    def f(self): return Same.A
def default(k=Many()): return k.x
sources = {}
if sys.version_info >= (3, 12):
    exec("type Alias = int | str", globals())
    exec("def gf[T](x: T) -> T: return x\\nclass G[T]:\\n  x: T", globals())
    sources = {(lambda: gf(3)): 3, (lambda: Alias.__name__): "Alias"}
    sources[lambda: G[int]() and 1] = 1
with Receiver() as other:
    assert other.call(kind, 3) == "int" and other.call(kind, "a") == "object"
    assert other.call(managed) == 5
    assert other.call(lambda: (Many().x, Many().y)) == (3, 4)
    assert other.call(lambda: (Many().z(3), Many().partial(5))) == ("int", 8)
    assert other.call(Many().t) == 9
    assert other.call(lambda: Same.A.f() is Same.A)
    assert other.call(default) == 3
    assert other.call(lambda: bool(pattern.match("aa")))
    assert other.call(functools.reduce, lambda a, b: a + b, [1, 2, 3]) == 6
    for function, expected in sources.items():
        assert other.call(function) == expected
print("ok")
"""


def test_imports_nothing_heavy(tmp_path: Path) -> None:
    """Importing the package and sending lambdas imports neither dill nor torch nor numpy."""
    program = """
import sys
import xpool.pickle as p
f = p.loads(p.dumps(lambda x: x + 1))
assert f(1) == 2
print([name for name in ("dill", "torch", "numpy") if name in sys.modules])
"""
    assert run(tmp_path, program).strip() == "[]"


def test_without_dill(tmp_path: Path) -> None:
    """Without dill, objects that need it are refused with that reason; others are sent."""
    program = """
import sys
sys.modules["dill"] = None
import xpool.pickle as p
from xpool.errors import TaskNotPicklable
assert p.loads(p.dumps([lambda: 1]))[0]() == 1
try:
    p.dumps(iter(x for x in ()))
except TaskNotPicklable as error:
    assert "dill" in str(error), error
    assert "generator" in str(error), error
    print("ok")
"""
    assert run(tmp_path, program).strip() == "ok"


def test_functions_by_name_bring_no_globals(tmp_path: Path) -> None:
    """A pickle of a function that goes by name contains no globals, also if it is pickled twice."""
    pytest.importorskip("numpy")
    program = """
import numpy, xpool.pickle as p
RATES = [1, 2]
def rate(): return RATES
x = numpy.arange(10.0)
if __name__ == "__main__":
    print([b"RATES" in p.dumps(one) for one in ([rate], [rate, x, x[2:]])])
"""
    assert run(tmp_path, program).strip() == "[False, False]"


@pytest.mark.parametrize("program", [NOT_CLOBBERED, DISPATCH], ids=["not clobbered", "dispatch"])
def test_by_value(tmp_path: Path, program: str) -> None:
    """The functions, classes and globals of ``__main__`` are sent by value."""
    assert run(tmp_path, program).strip() == "ok"


INTERRUPTED = """
import itertools, pickle, sys
from xpool._pickling.by_value import classes, main, names, received, registry
from xpool._pickling.by_value.sent import Book
from xpool._pickling.frame import BY_PIPE
from xpool.pickle import decode, encode

class Interrupt(BaseException): pass

def at_each_call(codes, act):
    # As a signal handler would, raise after the first call in these functions, then the second ...
    for number in itertools.count():
        left = number
        def hook(frame, event, arg):
            nonlocal left
            caller = frame if event == "c_return" else frame.f_back
            if event in ("return", "c_return") and caller and caller.f_code in codes:
                left -= 1
                if left == -1:
                    raise Interrupt
        main.install_main()
        main.mark_worker()
        received._incoming.__init__()
        registry._by_id.clear()
        registry._by_token.clear()
        sys.setprofile(hook)
        try:
            act()
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)
        yield number
        if left >= 0:
            return

rate = {"a": 5}
class Six:
    value = 6
def double(x): return 2 * x + rate["a"] + Six.value
message = encode((double, (2,)), layout=BY_PIPE._replace(book=Book()))
receive = lambda: decode(message)
inner = received._take, received._set, received._receive, received._define, received.prepare
for tried in at_each_call({func.__code__ for func in inner}, receive):
    function, args = receive()
    assert function(*args) == 15, tried
assert tried >= 10

def local_class():
    class Seven:
        def value(self): return 7
    return Seven

message = encode(local_class())
inner = registry.shell, registry.enter, classes._fill, classes.load
for tried in at_each_call({func.__code__ for func in inner}, lambda: decode(message)):
    assert decode(message)().value() == 7, tried
assert tried >= 10
print("ok")
"""


def test_interrupted_after_each_call() -> None:
    """A worker that was interrupted still gets the program's definitions and globals."""
    assert scripts.run_ok(["-"], INTERRUPTED) == "ok\n"
