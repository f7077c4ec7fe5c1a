"""Verbs have the outcomes of the standard library's pool, for inputs, functions and errors of all
kinds."""

from __future__ import annotations

import collections
import functools
import itertools
import multiprocessing.pool
import re
from typing import Any

import pytest
from support.waiting import drained

pytestmark = pytest.mark.xpool_only


@pytest.fixture(scope="module", autouse=True)
def standard():
    """The standard library's pool of threads, which pickles nothing. It closes its descriptors when
    it is collected, so it is made before the leak checks begin."""
    pool = object.__new__(multiprocessing.pool.ThreadPool)
    # In another context, the default of Python 3.14, its semaphores have names until then.
    multiprocessing.pool.Pool.__init__(pool, 2, context=multiprocessing.get_context("fork"))
    with pool:
        yield pool
    pool.join()


# Functions, errors and inputs, whose texts are the same in all processes --------------------------


def same(x):
    return x


def echo(*args, **kwds):
    return args, sorted(kwds.items())


def add_one(x, *, by=1):
    return x + by


def both(x):
    return [x], [x]


def fail_at(bad, exc, x):
    if x == bad:
        raise exc()
    return x


def grow(x):
    x.append(0)
    return len(x)


def are_one(pair):
    return pair[0] is pair[1]


def cyclic():
    found = []
    found.append(found)
    return found


class CallMe:
    """An object that can be called."""

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x, self.by

    def method(self, x):
        return self.by, x

    @classmethod
    def of_class(cls, x):
        return cls.__name__, x

    @staticmethod
    def of_none(x):
        return x


class Boxed:
    """A wrapped value, which is pickled by its own state."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Boxed) and self.value == other.value

    def __hash__(self):
        return hash(self.value)

    def __repr__(self):
        return f"Boxed({self.value!r})"

    def __getstate__(self):
        return {"was": self.value}

    def __setstate__(self, state):
        self.value = state["was"]


class KeywordOnly(Exception):
    """Its ``__init__`` accepts keywords only. Its ``args`` are empty."""

    def __init__(self, *, code=0):
        super().__init__()
        self.code = code


class Stubborn(Exception):
    """Defines its own pickling correctly."""

    def __init__(self, a, b):
        super().__init__(a)
        self.b = b

    def __reduce__(self):
        return type(self), (self.args[0], self.b)


class OnlyGetitem:
    """Can be iterated over by index only."""

    def __init__(self, items):
        self._items = list(items)

    def __getitem__(self, i):
        return self._items[i]


class OnlyIter:
    """Has only ``__iter__``."""

    def __init__(self, items):
        self._items = list(items)

    def __iter__(self):
        return iter(self._items)


class Sized(OnlyIter):
    """Has a length but no index."""

    def __len__(self):
        return len(self._items)


class ItsIterator(OnlyIter):
    """Is its own iterator, so it works once."""

    def __iter__(self):
        return self

    def __next__(self):
        if not self._items:
            raise StopIteration
        return self._items.pop(0)


class Grown(list):
    """A list that yields other items than it contains."""

    def __iter__(self):
        return iter([x + 1 for x in super().__iter__()])


class Raises:
    """Yields its items, then raises."""

    def __init__(self, items, exc):
        self._items, self._exc = items, exc

    def __iter__(self):
        yield from self._items
        raise self._exc()


Pair = collections.namedtuple("Pair", "left right")

NUMBERS = [], [4], [3, -1, 2], [*range(40)]

INPUTS = """
    n; tuple(n); range(len(n)); range(len(n), 0, -1); iter(n); (x for x in n); OnlyIter(n)
    OnlyGetitem(n); ItsIterator(n); Sized(n); Grown(n); collections.deque(n); array.array('l', n)
    bytes(map(abs, n)); bytearray(map(abs, n)); memoryview(bytes(map(abs, n))); dict.fromkeys(n)
    dict.fromkeys(n).keys(); set(n); '7' * len(n); map(abs, n); reversed(n); enumerate(n); zip(n, n)
    Pair(n[:1], n[1:]); filter(None, n); [[x] for x in n]; [None for x in n]; [Boxed(x) for x in n]
    [bytes(99_000)] * (len(n) % 4)
"""

FUNCTIONS = """
    same; echo; both; add_one; CallMe('c'); CallMe([1]).method; CallMe.of_class; CallMe.of_none; str
    repr; type; int; len; Boxed; functools.partial(echo, 1, k=2); functools.partial(add_one, by=3)
    operator.neg; operator.itemgetter(0); [1, 2, 3].count; 'a{}'.format
"""

ERRORS = """
    ValueError('bad'); KeyError('k'); OSError(2, 'gone', '/nowhere'); ZeroDivisionError()
    UnicodeDecodeError('utf-8', b'x', 0, 1, 'why'); IndexError(1, 2); ImportError('m')
    RuntimeError(b'bytes', [1]); StopAsyncIteration(3); Stubborn(1, 'b'); AssertionError()
    AttributeError('no a'); MemoryError('much'); TimeoutError('task'); BrokenPipeError()
    EOFError('task'); RecursionError('deep'); NotImplementedError(); KeyError(Boxed(1))
    KeywordOnly(code=5)
"""

REFUSED = """
    pool.map(None, [1]); pool.map(same, 5); pool.map(same, None); pool.map(same); pool.apply(5)
    pool.map(same, [1], 1, 1, 1, 1); pool.map(same, [1, 2], 'x'); pool.starmap(same, [1])
    pool.imap(same, [1], 0); pool.imap(same, [1], -2); pool.imap(same, [1], '2')
    pool.imap_unordered(same, [1], 0); list(pool.imap(same, 7)); list(pool.imap(5, [1]))
    list(pool.imap_unordered(same, None)); pool.apply(); pool.apply(same, 5)
    pool.apply(same, (1,), 5); pool.apply(same, (1,), {'x': 1}); pool.apply(same, (1, 2))
    pool.apply(echo, (), {1: 2}); pool.starmap(add_one, [(1, 2, 3)]); pool.join()
    __import__('pickle').dumps(pool)
"""

IDENTITIES = """
    pool.map(grow, [[1]] * 4, 4); pool.apply(are_one, ([[1]] * 2,))
    are_one(pool.map(same, [[1]] * 2, 2)); [a is b for a, b in pool.map(both, [1, 2, 3], 2)]
    (lambda x: x[0] is x)(pool.apply(same, (cyclic(),))); pool.apply(len, (bytes(65535),))
    pool.apply(len, (bytes(65536),)); pool.apply(len, (bytes(10**6),))
"""


def each(texts):
    """Return the expressions of a table."""
    return [one.strip() for one in re.split("[;\n]", texts) if one.strip()]


def made(text, **names):
    """Return the value of an expression."""
    modules = {one: __import__(one) for one in ("array", "collections", "functools", "operator")}
    return eval(text, {**globals(), **modules, **names})


def told(value: Any) -> Any:
    """Return a value, or an exception without what xpool adds, as text."""
    if isinstance(value, Exception):
        state = {k: v for k, v in vars(value).items() if k != "__notes__"}
        return type(value).__name__, repr(value.args), repr(sorted(state.items()))
    return type(value).__name__, re.sub("0x[0-9a-f]+", "0x", repr(value))


def outcome(call, pool, *args):
    """Return what a call returns or raises, as text."""
    try:
        return told(call(pool, *args))
    except Exception as exc:
        return told(exc)


def stream(verb, pool, *args):
    """Return all that an iterator gives and raises."""
    values, errors = drained(getattr(pool, verb)(*args))
    found = [*map(told, values), *map(told, errors)]
    return sorted(found) if verb == "imap_unordered" else found


CHUNKSIZES = [(), (2,), (7,), (100,), (True,)]


@pytest.mark.parametrize("text", each(INPUTS))
def test_inputs(pool, standard, text):
    """Each verb takes each kind of input, in chunks of any size."""
    for n, chunksize in itertools.product(NUMBERS, CHUNKSIZES):
        for verb in "map", "map_async", "imap", "imap_unordered", "starmap", "starmap_async":

            def call(one, verb=verb, n=n, chunksize=chunksize):
                given = made(text, n=n)
                given = [(x,) for x in given] if "star" in verb else given
                if "imap" in verb:
                    return stream(verb, one, same, given, *chunksize)
                found = getattr(one, verb)(same, given, *chunksize)
                return found.get() if "async" in verb else found

            assert outcome(call, pool) == outcome(call, standard), (verb, n, chunksize)


@pytest.mark.parametrize("text", each(FUNCTIONS))
def test_functions(pool, standard, text):
    """Each callable has the same results and errors, for arguments that fit and others."""
    func = made(text)
    for args, kwds in itertools.product(
        [(3,), [4], (1, 2), (), ("ab",)], [{}, {"by": 4}, {"b": 1}]
    ):
        for call in (
            lambda one, args=args, kwds=kwds: one.apply(func, args, kwds),
            lambda one, args=args, kwds=kwds: one.apply_async(func, args, kwds).get(),
        ):
            assert outcome(call, pool) == outcome(call, standard), (args, kwds)
    for items in [1, 2, 3], ["ab", "c"], [[1], [2, 3]]:
        call = functools.partial(_stream_of, func, items)
        assert outcome(call, pool) == outcome(call, standard), items


def _stream_of(func, items, pool):
    return stream("imap", pool, func, items)


@pytest.mark.parametrize("text", each(ERRORS))
def test_errors(pool, standard, text):
    """Errors of a task and of an input keep their class, arguments and attributes."""
    name, _, rest = text.partition("(")
    exc = made(f"functools.partial({name}, {rest}" if rest != ")" else name)
    fail = functools.partial(fail_at, 3, exc)
    for n, chunksize in itertools.product(([3], [*range(9)], [5, 3]), ((), (1,), (4,))):
        source = functools.partial(Raises, n, exc)
        for call in (
            lambda one: one.apply(fail, (3,)),
            lambda one, n=n, c=chunksize: one.map(fail, n, *c),
            lambda one, n=n, c=chunksize: one.starmap_async(fail, zip(n), *c).get(),
            lambda one, n=n: stream("imap", one, fail, n),
            lambda one, n=n: stream("imap_unordered", one, fail, iter(n)),
            lambda one, c=chunksize, source=source: one.map(same, source(), *c),
            lambda one, source=source: stream("imap", one, same, source()),
        ):
            assert outcome(call, pool) == outcome(call, standard), (n, chunksize)


@pytest.mark.parametrize("text", each(REFUSED))
def test_refused(pool, standard, text):
    """A wrong call raises an error of the same class, or of a subclass."""
    with pytest.raises(Exception) as wanted:
        made(text, pool=standard)
    with pytest.raises(wanted.type):
        made(text, pool=pool)


@pytest.mark.parametrize("text", each(IDENTITIES))
def test_identities(pool, standard, text):
    """An object that comes twice in an argument, a chunk or a result is one object there."""
    assert made(text, pool=pool) == made(text, pool=standard)


@pytest.mark.parametrize("args", [(), (1,)])
def test_stop_iteration_of_a_call(pool, standard, args):
    """`apply` raises a task's StopIteration. (What streams do: `test_stop_iteration_of_a_task`.)"""
    fail = functools.partial(fail_at, 3, functools.partial(StopIteration, *args))

    def call(one):
        return one.apply(fail, (3,))

    assert outcome(call, pool) == outcome(call, standard) == told(StopIteration(*args))
