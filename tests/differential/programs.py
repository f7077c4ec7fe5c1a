"""A generator of random programs. A seed gives a program of several blocks of lines.

Each block does one thing with a pool. Blocks avoid results that the standard library leaves to
chance, such as which of several errors `map` raises. If xpool differs and the documentation says
so, the block names the difference and the expected outcome (`Recorder`).
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
)  # fmt: skip

NO_EXCEPTION = ("KeyboardInterrupt('task')", "GeneratorExit('task')", "BaseException('task')")


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
        # If a chunk fails, the standard library ends the iterator. See `_goes_on`.
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
        f"if got{i} == []:",
        f"    t.documented('a callback of an empty map', lambda: calls{i}, lambda: [('ok', [])])",
        "else:",
        f"    t.value(calls{i})",
        f"t.call(r{i}.successful)",
    ]


def _map_that_fails(draw: Draw, i: int, processes: bool) -> Block:
    func, bad = _failing(draw)
    numbers = list(dict.fromkeys([*_numbers(draw), int(bad)]))
    draw.shuffle(numbers)
    return _verb(draw, i, func, draw.choice((f"{numbers}", f"iter({numbers})")), _chunksize(draw))


def _goes_on(draw: Draw, i: int, processes: bool) -> Block:
    func, bad = _failing(draw)
    numbers, size = [*_numbers(draw), int(bad), *_numbers(draw)], draw.randint(2, 5)
    verb = draw.choice(("imap", "imap_unordered"))
    return [
        (
            "t.documented_each('imap goes on after an error', "
            f"lambda: pool.{verb}({func}, {numbers}, {size}), "
            f"lambda: goes_on({func}, {numbers}, {size}), in_order={verb == 'imap'})"
        )
    ]


def _errors(draw: Draw, i: int, processes: bool) -> Block:
    error = draw.choice((*ERRORS, "StopIteration(1)", "StopIteration()"))
    call = draw.choice((f"apply(fail_with, (functools.partial({_made(error)}),))",
                        "apply(chained, (1,))", "apply(with_note, (1,))",
                        f"apply_async(fail_with, (functools.partial({_made(error)}),)).get"
                        ))  # fmt: skip
    return [f"t.call(lambda: pool.{call})" if not call.endswith("get")
            else f"t.call(pool.{call})"]  # fmt: skip


def _no_exception(draw: Draw, i: int, processes: bool) -> Block:
    """Errors that end the standard library's worker, so its call never returns."""
    error = draw.choice(NO_EXCEPTION)
    func, bad = f"functools.partial(fail_with, functools.partial({_made(error)}))", 0
    call = draw.choice((f"pool.apply({func})", f"pool.map({func}, [{bad}, 1])",
                        f"pool.starmap({func}, [(1, 2)], 2)", f"next(pool.imap({func}, [1]))",
                        f"pool.map_async({func}, [1, 2], 5).get()"))  # fmt: skip
    return [f"t.documented('not an Exception', lambda: {call}, lambda: {func}())"]


def _stop_iteration(draw: Draw, i: int, processes: bool) -> Block:
    """StopIteration in a chunk, after which the standard library loses results."""
    bad, size = draw.randint(0, 7), draw.choice(("", ", 1", ", 3", ", 100"))
    func = f"functools.partial(fail_at, {bad}, functools.partial(StopIteration, 'task'))"
    verb = draw.choice(("map", "starmap", "imap"))
    items = "zip(range(8))" if verb == "starmap" else "range(8)"
    if verb == "imap":
        return [
            (
                f"t.documented('StopIteration in map', lambda: refuses(RuntimeError, lambda: "
                f"list(pool.imap({func}, {items}{size}))), lambda: 'refused')"
            )
        ]
    return [
        (
            "t.documented('StopIteration in map', "
            f"lambda: pool.{verb}({func}, {items}{size}), lambda: {func}({bad}))"
        )
    ]


def _odd_errors(draw: Draw, i: int, processes: bool) -> Block:
    """Errors that `pickle` cannot load or save."""
    error = draw.choice(
        ("TwoArguments, 'what', 3", "KeywordOnly, code=5", "KeepsLock, 'with lock'")
    )
    func = f"functools.partial(fail_with, functools.partial({error}))"
    call = draw.choice((f"pool.apply({func})", f"pool.map({func}, [1, 2])"))
    if not processes:
        return [f"t.call(lambda: {call})"]
    if error.startswith("KeywordOnly"):
        return [f"t.call(lambda: {call})"]
    return [f"t.documented('errors that do not pickle', lambda: {call}, lambda: {func}())"]


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


def _chunks_of_none(draw: Draw, i: int, processes: bool) -> Block:
    size, error = draw.choice(((0, "ValueError"), (-7, "ValueError"), (2.5, "TypeError")))
    verb = draw.choice(("map", "starmap"))
    return [
        (
            "t.documented('chunksize below 1', "
            f"lambda: refuses({error}, lambda: pool.{verb}(same, [[1], [2]], {size})), "
            "lambda: 'refused')"
        )
    ]


def _iterables_that_raise(draw: Draw, i: int, processes: bool) -> Block:
    error, items = draw.choice(ERRORS), [abs(x) for x in _numbers(draw)]
    source = f"Raises({items}, functools.partial({_made(error)}))"
    if draw.random() < 0.5:
        return [f"t.call(lambda: pool.map(same, {source}{_chunksize(draw)}))"]
    verb = draw.choice(("imap", "imap_unordered"))
    return [f"t.each(lambda: pool.{verb}(same, {source}), in_order={verb == 'imap'})"]


def _lying_length(draw: Draw, i: int, processes: bool) -> Block:
    numbers = [*_numbers(draw), 1, 2, 3]
    kind = draw.choice(("TooFew", "TooMany", "Longer", "Shorter"))
    verb, size = draw.choice(("map", "map_async")), _chunksize(draw)
    get = ".get()" if verb == "map_async" else ""
    return [
        (
            f"t.documented('a length that is not true', lambda: pool.{verb}(same, {kind}({numbers})"
            f"{size}){get}, lambda: list({kind}({numbers})))"
        )
    ]


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
    thing = draw.choice(
        ("threading.Lock()", "ReduceRaises()", "generator([1])", "Holder()", "threading.local()")
    )
    call = draw.choice(
        (f"pool.apply(count, ({thing},))", f"pool.map(count, [{thing}])",
         f"pool.map(count, [[1], [2], {thing}], 2)", f"next(pool.imap(count, iter([{thing}])))",
         f"pool.apply_async(count, (), {{'x': {thing}}}).get()",
         f"pool.starmap(count, [({thing},)])")
    )  # fmt: skip
    if not processes:
        return ["t.call(lambda: type(pool.apply(lock_of)).__name__)"]
    if "Reduce" in thing:
        return [f"t.refused(lambda: {call})"]
    return draw.choice(
        (
            [("t.documented('arguments that do not pickle', "
             f"lambda: refuses(__import__('pickle').PicklingError, lambda: {call}), "
             "lambda: 'refused')")],
            ["t.refused(lambda: pool.apply(lock_of))"],
            ["t.refused(lambda: pool.map(lock_of, [1, 2]))"],
            ["t.refused(lambda: pool.map(lock_of, [1, 2, 3], 3))"],
            ["t.refused(lambda: pool.apply(ReduceRaises))"],
            [f"calls{i} = []", (f"t.refused(pool.apply_async(lock_of, (), {{}}, None, "
             f"lambda e: calls{i}.append(e.args != ())).get)"), f"t.value(calls{i})"],
            [("t.documented('results that do not unpickle', "
             "lambda: pool.apply(UnloadRaises), lambda: fail_with(functools.partial("
             "LookupError, 'will not load')))")],
        )
    )  # fmt: skip


def _by_value(draw: Draw, i: int, processes: bool) -> Block:
    """Functions that a process of the standard library cannot import."""
    k = draw.randint(0, 9)
    func = draw.choice((f"lambda x: x + {k}", f"(lambda k: lambda x: x * k)({k})"))
    if not processes:
        return [f"t.call(lambda: pool.map({func}, range(5)))"]
    return [
        (
            f"t.documented('functions by value', lambda: pool.map({func}, range(5)), "
            f"lambda: list(map({func}, range(5))))"
        )
    ]


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


def _killed(draw: Draw, i: int, processes: bool) -> Block:
    """A worker ends: its task fails, the others return."""
    if not processes:
        return ["t.call(lambda: pool.map(square, range(4)))"]
    how = draw.choice(("exit", "_exit", "SIGKILL", "SIGTERM", "SIGSEGV"))
    code = {"exit": 3, "_exit": 4, "SIGKILL": -9, "SIGTERM": -15, "SIGSEGV": -11}[how]
    return [
        f"r{i} = pool.apply_async(end, ({how!r},))",
        f"t.call(lambda: pool.map(square, range({draw.randint(1, 30)}), {draw.randint(1, 5)}))",
        f"t.documented('a killed worker', lambda: died(r{i}), lambda: ('WorkerDied', {code}))",
        f"t.call(lambda: pool.apply(add, (1, {i})))",
    ]


def _threads(draw: Draw, i: int, processes: bool) -> Block:
    calls = [f"lambda: pool.map(square, range({draw.randint(0, 20)}){_chunksize(draw)})"
             for _ in range(draw.randint(2, 4))]  # fmt: skip
    return [f"t.together({', '.join(calls)}, lambda: list(pool.imap(add_one, range(9))))"]


def _life(draw: Draw, i: int, processes: bool) -> Block:
    """A separate pool: its options, its remaining work, and its end.

    Chunksizes are given, because the standard library divides by the number of living workers. With
    maxtasksperchild this number may be 0 (ZeroDivisionError).
    """
    size = draw.choice((1, 2, True))
    options = draw.choice(
        ("", ", remember, (1, 'two')", ", initializer=remember, initargs=[3]", ", None, ()")
    )
    if processes and draw.random() < 0.3:
        options += f", maxtasksperchild={draw.randint(1, 3)}"
    p = f"p{i}"
    begun = [f"{p} = t.start(lambda: t.Pool({size}{options}))"]
    work = draw.sample(
        [
            f"t.call(lambda: {p}.map(square, range(6), 2))",
            f"t.call(lambda: {p}.apply(initialised))",
            f"r{i} = {p}.map_async(square, range(40), 7)",
            f"it{i} = {p}.imap(square, iter(range(9)))",
            f"t.refused({p}.join)",
        ],
        draw.randint(1, 4),
    )
    ended = draw.choice(
        (
            [f"{p}.close()", f"{p}.join()"],
            [f"{p}.terminate()", f"{p}.join()"],
            [f"{p}.close()", f"{p}.close()", f"{p}.terminate()", f"{p}.join()", f"{p}.join()"],
            [f"{p}.terminate()", f"{p}.terminate()", f"{p}.close()", f"{p}.join()"],
            [f"{p}.__exit__(None, None, None)", f"{p}.join()"],
            [f"t.call(lambda: {p}.__enter__() is {p})", f"{p}.close()", f"{p}.join()"],
        )
    )
    whole = not any("terminate" in line or "exit" in line for line in ended)
    after = [
        f"t.refused(lambda: {p}.map(square, [1]))",
        f"t.refused(lambda: {p}.apply(square, (1,)))",
        f"t.refused(lambda: {p}.apply_async(square, (1,)))",
        f"t.refused(lambda: {p}.imap(square, [1]))",
        f"t.refused({p}.__enter__)",
    ]
    draw.shuffle(after)
    if whole and any(line.startswith(f"r{i} =") for line in work):
        after.append(f"t.call(r{i}.get)")
    if whole and any(line.startswith(f"it{i} =") for line in work):
        after.append(f"t.call(lambda: list(it{i}))")
    return [*begun, *work, *ended, *after]


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
    _goes_on: 3,
    _errors: 6,
    _no_exception: 3,
    _stop_iteration: 2,
    _odd_errors: 3,
    _bad_arguments: 6,
    _chunks_of_none: 1,
    _iterables_that_raise: 4,
    _lying_length: 2,
    _own_iter: 3,
    _results: 4,
    _iterators: 3,
    _dropped: 2,
    _copies: 6,
    _unpicklable: 5,
    _by_value: 3,
    _callbacks: 4,
    _killed: 0.7,
    _threads: 2,
    _life: 0.7,
    _bad_pools: 1.5,
}
_MAKERS, _WEIGHTS = list(_TABLE), list(_TABLE.values())
