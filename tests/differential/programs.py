"""A generator of random programs. A seed gives a program of several blocks of lines.

Each block does one thing with a pool. Blocks avoid results that the standard library leaves to
chance, such as which of several errors `map` raises, and those in which xpool differs as the
documentation says (`tests/conformance` has these).
"""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Block", "blocks", "program"]

Block = list[str]
"""Lines of the program's body."""

Draw = random.Random

VERBS = ("map", "starmap", "imap", "imap_unordered", "map_async", "starmap_async")

ERRORS = (
    "ValueError('bad')", "KeyError('k')", "OSError(2, 'gone', '/nowhere')", "ZeroDivisionError()",
    "UnicodeDecodeError('utf-8', b'x', 0, 1, 'why')", "IndexError(1, 2)", "ImportError('m')",
    "RuntimeError(b'bytes', [1])", "StopAsyncIteration(3)", "Stubborn(1, 'b')", "AssertionError()",
    "AttributeError('no a')", "MemoryError('much')", "TimeoutError('task')", "BrokenPipeError()",
    "EOFError('task')", "RecursionError('deep')", "NotImplementedError()", "KeyError(Boxed(1))",
    "KeywordOnly(code=5)",
)  # fmt: skip


def program(seed: int, processes: bool) -> list[Block]:
    """Return the blocks of a program for a pool of processes, or of threads."""
    draw = Draw(f"{seed}/{processes}")
    made = []
    for i in range(draw.randint(2, 5)):
        make = draw.choices(_MAKERS, _WEIGHTS)[0]
        made.append(make(draw, i, processes))
    return made


def blocks(parts: list[Block]) -> str:
    """Return the source of a program of these blocks."""
    body = [f"    {line}" for part in parts for line in part] or ["    pass"]
    return "\n".join(["def program(pool, t):", *body]) + "\n"


# Arguments ---------------------------------------------------------------------------------------


def _numbers(draw: Draw) -> list[int]:
    return [draw.randint(-3, 9) for _ in range(draw.choice((0, 1, 2, 3, 3, 5, 8, 13, 40)))]


def _chunksize(draw: Draw) -> str:
    return draw.choice(("", "", ", 1", ", 2", ", 3", ", 7", ", chunksize=4", ", 100", ", True"))


def _size_of(chunksize: str) -> int:
    text = chunksize.removeprefix(", ").removeprefix("chunksize=")
    return int(text == "True") or int(text) if text else 1


def _iterable(draw: Draw, items: list[int]) -> str:
    """Return an expression for an iterable, usually of these numbers."""
    small = [abs(x) for x in items]
    return draw.choice(
        (
            f"{items}", f"{items}", f"{tuple(items)}", f"range({len(items)})",
            f"generator({items})", f"iter({items})", f"(x for x in {items})", f"OnlyIter({items})",
            f"OnlyGetitem({items})", f"Counted({items})", f"Sized({items})",
            f"collections.deque({items})", f"array.array('l', {items})", f"bytes({small})",
            f"bytearray({small})", f"dict.fromkeys({items})", f"dict.fromkeys({items}).keys()",
            f"set({sorted(set(small))})", f"{'7' * len(items)!r}", f"map(abs, {items})",
            f"reversed({items})", f"enumerate({items})", f"zip({items}, {items})",
            f"Pair({items[:1]}, {items[1:]})", f"memoryview(bytes({small}))",
            f"[[x] for x in {items}]", f"[None for x in {items}]", f"[Boxed(x) for x in {items}]",
            f"range({len(items)}, 0, -1)", f"filter(None, {items})",
            f"[bytes(99_000)] * {len(items) % 4}",
        )
    )  # fmt: skip


def _func(draw: Draw) -> str:
    return draw.choice(
        (
            "same", "same", "square", "empty", "echo", "both", "boxed", "add_one", "CallMe('c')",
            "CallMe([1]).method", "CallMe.of_class", "CallMe.of_none", "str", "repr", "type",
            "functools.partial(echo, 1, k=2)", "functools.partial(add_one, by=3)", "count", "Boxed",
            "operator.neg", "operator.itemgetter(0)", "[1, 2, 3].count", "'a{}'.format",
            "WithState", "step", "int", "functools.partial(step, 5)",
        )
    )  # fmt: skip


def _failing(draw: Draw, errors: tuple[str, ...] = ERRORS) -> tuple[str, str]:
    """Return a function that raises for one number, and that number."""
    error, bad = draw.choice(errors), draw.randint(0, 9)
    return f"functools.partial(fail_at, {bad}, functools.partial({_made(error)}))", str(bad)


def _made(error: str) -> str:
    """Return the arguments of a `partial` that makes the error."""
    name, _, rest = error.partition("(")
    rest = rest[:-1]
    return f"{name}, {rest}" if rest else name


# Blocks ------------------------------------------------------------------------------------------


def _apply(draw: Draw, i: int, processes: bool) -> Block:
    func, args = _func(draw), draw.choice(("(3,)", "[4]", "(1, 2)", "()", "('ab',)", "iter((5,))"))
    if processes is False or args != "iter((5,))":
        kwds = draw.choice(("", "", ", {}", ", {'by': 4}", ", kwds={'b': 1}"))
    else:
        kwds = ""
    if draw.random() < 0.4:
        return [f"t.call(lambda: pool.apply({func}, {args}{kwds}))"]
    return [
        f"calls{i} = []",
        (
            f"r{i} = t.start(lambda: pool.apply_async({func}, {args}{kwds}, "
            f"callback=lambda x: calls{i}.append(('ok', x)), "
            f"error_callback=lambda x: calls{i}.append(('error', type(x).__name__, x.args))))"
        ),
        f"t.call(r{i}.get)",
        f"t.value(calls{i})",
        f"t.call(r{i}.successful)",
        f"t.value(r{i}.ready())",
    ]


def _map(draw: Draw, i: int, processes: bool) -> Block:
    func, iterable, chunksize = _func(draw), _iterable(draw, _numbers(draw)), _chunksize(draw)
    return _verb(draw, i, func, iterable, chunksize)


def _verb(draw: Draw, i: int, func: str, iterable: str, chunksize: str) -> Block:
    verb = draw.choice(VERBS)
    if verb.startswith("starmap"):
        iterable = draw.choice((f"zip({iterable})", f"[(x,) for x in {iterable}]"))
    call = f"pool.{verb}({func}, {iterable}{chunksize})"
    if verb.startswith("imap"):
        ordered = verb == "imap"
        # If a chunk fails, the standard library ends the iterator.
        return [
            f"t.each(lambda: {call}, in_order={ordered}, to_error={_size_of(chunksize) > 1})"
            if ordered
            else f"t.each(lambda: pool.{verb}({func}, {iterable}), in_order=False)"
        ]
    if not verb.endswith("async"):
        return [f"t.call(lambda: {call})"]
    call = call[:-1] + (
        f", callback=lambda x: calls{i}.append(('ok', x)), "
        f"error_callback=lambda x: calls{i}.append(('error', type(x).__name__)))"
    )
    return [
        f"calls{i} = []",
        f"r{i} = t.start(lambda: {call})",
        f"got{i} = t.call(r{i}.get)",
        f"if got{i} != []:",  # xpool calls the callback of an empty map, too
        f"    t.value(calls{i})",
        f"t.call(r{i}.successful)",
    ]


def _map_that_fails(draw: Draw, i: int, processes: bool) -> Block:
    func, bad = _failing(draw)
    numbers = list(dict.fromkeys([*_numbers(draw), int(bad)]))
    draw.shuffle(numbers)
    return _verb(draw, i, func, draw.choice((f"{numbers}", f"iter({numbers})")), _chunksize(draw))


def _errors(draw: Draw, i: int, processes: bool) -> Block:
    error = draw.choice((*ERRORS, "StopIteration(1)", "StopIteration()"))
    call = draw.choice((f"apply(fail_with, (functools.partial({_made(error)}),))",
                        "apply(chained, (1,))", "apply(with_note, (1,))",
                        f"apply_async(fail_with, (functools.partial({_made(error)}),)).get"
                        ))  # fmt: skip
    return [f"t.call(lambda: pool.{call})" if not call.endswith("get")
            else f"t.call(pool.{call})"]  # fmt: skip


def _bad_arguments(draw: Draw, i: int, processes: bool) -> Block:
    bad = draw.choice(
        (
            "pool.map(None, [1])", "pool.map(same, 5)", "pool.map(same, None)", "pool.apply(5)",
            "pool.starmap(same, [1])", "pool.imap(same, [1], 0)", "pool.imap(same, [1], -2)",
            "pool.imap_unordered(same, [1], 0)", "list(pool.imap(same, 7))", "pool.apply()",
            "pool.map(same)", "pool.map(same, [1], 1, 1, 1, 1)", "pool.apply(same, 5)",
            "pool.apply(same, (1,), 5)", "pool.imap(same, [1], '2')", "pool.join()",
            "pool.apply(same, (1,), {'x': 1})", "pool.apply(same, (1, 2))",
            "pool.apply(echo, (), {1: 2})", "list(pool.imap_unordered(same, None))",
            "pool.map(same, [1, 2], 'x')", "list(pool.imap(5, [1]))",
            "__import__('pickle').dumps(pool)", "pool.starmap(add, [(1, 2, 3)])",
        )
    )  # fmt: skip
    return [f"t.refused(lambda: {bad})"]


def _iterables_that_raise(draw: Draw, i: int, processes: bool) -> Block:
    error, items = draw.choice(ERRORS), [abs(x) for x in _numbers(draw)]
    source = f"Raises({items}, functools.partial({_made(error)}))"
    if draw.random() < 0.5:
        return [f"t.call(lambda: pool.map(same, {source}{_chunksize(draw)}))"]
    verb = draw.choice(("imap", "imap_unordered"))
    return [f"t.each(lambda: pool.{verb}(same, {source}), in_order={verb == 'imap'})"]


def _own_iter(draw: Draw, i: int, processes: bool) -> Block:
    return _verb(draw, i, "same", f"ListWithIter({_numbers(draw)})", _chunksize(draw))


def _results(draw: Draw, i: int, processes: bool) -> Block:
    """The answers of a result before its arrival, during a wait, and after it."""
    verb = draw.choice(
        ("apply_async(through, (g{i}.path,))", "map_async(through, [g{i}.path])",
         "starmap_async(through, [[g{i}.path]], 3)")
    ).format(i=i)  # fmt: skip
    return [
        f"g{i} = t.gate()",
        f"r{i} = pool.{verb}",
        f"t.value(r{i}.ready())",
        f"t.refused(r{i}.successful)",
        f"t.refused(lambda: r{i}.get({draw.choice(('0', '0.001', 'timeout=0.002', '-1'))}))",
        f"t.value(r{i}.wait(0.001))",
        *draw.choice(([], [f"it{i} = pool.imap(same, [7, 8])", f"t.call(lambda: it{i}.next(60))"])),
        f"g{i}.open()",
        f"t.value(r{i}.wait())",
        f"t.value((r{i}.ready(), r{i}.successful(), r{i}.get(), r{i}.get() is r{i}.get()))",
        f"g{i}.close()",
    ]


def _iterators(draw: Draw, i: int, processes: bool) -> Block:
    verb = draw.choice(("imap", "imap_unordered"))
    wait = draw.choice(("0.001", "0", "timeout=0.001"))
    return [
        f"g{i} = t.gate()",
        f"it{i} = pool.{verb}(through, [g{i}.path])",
        f"t.refused(lambda: it{i}.next({wait}))",
        f"t.value(iter(it{i}) is it{i})",
        f"g{i}.open()",
        f"t.call(lambda: next(it{i}))",
        f"t.refused(lambda: it{i}.next())",
        f"t.refused(lambda: next(it{i}))",
        f"g{i}.close()",
    ]


def _dropped(draw: Draw, i: int, processes: bool) -> Block:
    """Results that are not taken, or only in part."""
    return [
        f"it{i} = pool.imap(square, range({draw.randint(0, 30)}))",
        f"t.value([x for x, _ in zip(it{i}, range({draw.randint(0, 5)}))])",
        f"pool.map_async(fail_with, [functools.partial(ValueError, 1)] * {draw.randint(0, 9)})",
        "pool.imap_unordered(same, range(20), 3)",
        f"del it{i}",
        "t.call(lambda: pool.map(same, range(3)))",
    ]


def _copies(draw: Draw, i: int, processes: bool) -> Block:
    """Copies and shared objects, and the changes that each side sees."""
    size = draw.choice((0, 65535, 65536, 10**6))
    return draw.choice(
        (
            [f"x{i} = [1]", f"t.call(lambda: pool.apply(grow, (x{i},)))", f"t.value(x{i})"],
            [f"x{i} = [1]", f"t.call(lambda: pool.map(grow, [x{i}] * 4, 4))", f"t.value(x{i})"],
            [f"x{i} = [1]", f"t.call(lambda: sorted(pool.map(count, [x{i}] * 4, 1)))"],
            [f"x{i} = Boxed(1)", f"t.call(lambda: pool.apply(same, (x{i},)) is x{i})"],
            [f"x{i} = [1]", f"t.call(lambda: pool.apply(alias, ((x{i}, x{i}),)))"],
            [f"x{i} = pool.map(both, [1, 2, 3], {draw.randint(1, 4)})",
             f"t.value([a is b for a, b in x{i}])"],
            ["x = [1]", "r = pool.map(same, [x, x], 2)", "t.value(r[0] is r[1])"],
            [f"x{i} = []", f"x{i}.append(x{i})",
             f"t.call(lambda: (lambda y: y[0] is y)(pool.apply(same, (x{i},))))"],
            ["t.call(lambda: pool.map(large, range(5), 2) == [large(x) for x in range(5)])"],
            ["t.call(lambda: pool.map(count, [large(x) for x in range(5)]))"],
            [f"t.call(lambda: pool.apply(count, (bytes({size}),)))"],
            ["t.call(lambda: pool.apply(is_main))"],
        )
    )  # fmt: skip


def _unpicklable(draw: Draw, i: int, processes: bool) -> Block:
    thing = "ReduceRaises()"  # of other things, the class of the error differs
    call = draw.choice(
        (f"pool.apply(count, ({thing},))", f"pool.map(count, [{thing}])",
         f"pool.map(count, [[1], [2], {thing}], 2)", f"next(pool.imap(count, iter([{thing}])))",
         f"pool.apply_async(count, (), {{'x': {thing}}}).get()",
         f"pool.starmap(count, [({thing},)])")
    )  # fmt: skip
    if not processes:
        return ["t.call(lambda: type(pool.apply(lock_of)).__name__)"]
    return draw.choice(
        (
            [f"t.refused(lambda: {call})"],
            ["t.refused(lambda: pool.apply(lock_of))"],
            ["t.refused(lambda: pool.map(lock_of, [1, 2]))"],
            ["t.refused(lambda: pool.map(lock_of, [1, 2, 3], 3))"],
            ["t.refused(lambda: pool.apply(ReduceRaises))"],
            [f"calls{i} = []", (f"t.refused(pool.apply_async(lock_of, (), {{}}, None, "
             f"lambda e: calls{i}.append(e.args != ())).get)"), f"t.value(calls{i})"],
        )
    )  # fmt: skip


def _callbacks(draw: Draw, i: int, processes: bool) -> Block:
    return draw.choice(
        (
            [  # a callback that submits
                f"more{i} = []",
                (f"r{i} = pool.apply_async(square, (3,), callback=lambda x: more{i}.append("
                "pool.apply_async(square, (x,))))"),
                f"t.call(r{i}.get)",
                f"t.call(more{i}[0].get)",
            ],
            [  # a callback changes its argument
                f"seen{i} = []",
                f"r{i} = pool.map_async(square, [1, 2], callback=lambda x: x.append('seen'))",
                f"t.call(r{i}.get)",
            ],
            [  # one error, one call of the callback
                f"seen{i} = []",
                (f"r{i} = pool.map_async(fail_with, [functools.partial(ValueError, 1)] * 9, 2, "
                f"seen{i}.append, lambda e: seen{i}.append(type(e).__name__))"),
                f"t.call(r{i}.get)",
                f"t.value(seen{i})",
            ],
            [  # no callbacks
                "t.call(lambda: pool.apply_async(same, (1,), {}, None, None).get())",
            ],
        )
    )  # fmt: skip


def _threads(draw: Draw, i: int, processes: bool) -> Block:
    calls = [f"lambda: pool.map(square, range({draw.randint(0, 20)}){_chunksize(draw)})"
             for _ in range(draw.randint(2, 4))]  # fmt: skip
    return [f"t.together({', '.join(calls)}, lambda: list(pool.imap(add_one, range(9))))"]


def _bad_pools(draw: Draw, i: int, processes: bool) -> Block:
    bad = draw.choice(
        ("t.Pool(0)", "t.Pool(-1)", "t.Pool('2')", "t.Pool(1, 5)", "t.Pool(1.5)",
         *(("t.Pool(1, None, (), 0)", "t.Pool(1, maxtasksperchild=-1)",
            "t.Pool(1, maxtasksperchild='x')", "t.Pool(1, maxtasksperchild=1.5)")
           if processes else ()))
    )  # fmt: skip
    return [f"t.refused(lambda: {bad})"]


Maker = Callable[[Draw, int, bool], Block]

_TABLE: dict[Maker, float] = {
    _apply: 10,
    _map: 24,
    _map_that_fails: 8,
    _errors: 6,
    _bad_arguments: 6,
    _iterables_that_raise: 4,
    _own_iter: 3,
    _results: 4,
    _iterators: 3,
    _dropped: 2,
    _copies: 6,
    _unpicklable: 5,
    _callbacks: 4,
    _threads: 2,
    _bad_pools: 1.5,
}
_MAKERS, _WEIGHTS = list(_TABLE), list(_TABLE.values())
