"""The results that a function of `functools.lru_cache` or `functools.cache` keeps.

They are data of the program: a task that calls the function gets the object that the program has
got, and nothing is computed again.  The key of these results is that of the function, with `CACHE`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from threading import get_ident
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

Result = tuple[tuple[Any, ...], dict[str, Any], Any]
"""The arguments of a call, the keyword arguments, and the result."""

CACHE = "=results"

# By function: the keys and results of its cache, their ids, and the list that was made of them.
_seen: WeakKeyDictionary[Any, tuple[Any, list[int], list[Result]]] = WeakKeyDictionary()


class Cache:
    """A namespace that has the results of a cached function under the name `CACHE`."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __contains__(self, name: str) -> bool:
        return self._function.cache_info().currsize > 0  # type: ignore[no-any-return]

    def __getitem__(self, name: str) -> list[Result]:
        found = _results_of(self._function)
        if not found:
            raise KeyError(name)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return _results_of(self._function) or default

    def fill(self, results: Iterable[Result] | None) -> None:
        """Replace all results."""
        function = self._function
        function.cache_clear()
        if results is None:
            return
        _, _, cache, called, mark = _inside(function)
        if cache is not None and function.cache_parameters()["maxsize"] is None:
            typed = function.cache_parameters()["typed"]
            cache.update((_key_of(args, kwds, typed, mark), one) for args, kwds, one in results)
        elif type(called) is FunctionType:
            _call_again(function, called, results)


def _inside(function: Any) -> tuple[list[Any], list[Any], Any, Any, Any]:
    """Return the keys and the results of a cache, its dict, the function that it calls, and the
    object before keyword arguments in keys.

    `functools` has no function for that, but it tells the garbage collector (lru_cache_tp_traverse
    in Modules/_functoolsmodule.c).
    """
    inside, at = gc.get_referents(function), 1
    # With a limit: a key (never a dict), a result, and the type of the link, for each result.
    while at < len(inside) and type(inside[at]) is not dict:
        at += 3
    cache, called, mark = (*inside[at : at + 3], None, None, None)[:3]
    if type(mark) is not object:
        return [], [], None, None, None  # another version of Python
    if at > 1:
        return inside[1:at:3], inside[2:at:3], cache, called, mark
    here = cache.copy()  # at once: other threads may call the function
    return [*here], [*here.values()], cache, called, mark


def _results_of(function: Any) -> list[Result]:
    """Return the results, as the same list while they are the same objects."""
    keys, results, _, _, mark = _inside(function)
    ids = [*map(id, keys), *map(id, results)]
    seen = _seen.get(function)
    if seen is None or (seen[1] != ids and _pairs(seen[1]) != _pairs(ids)):
        typed = function.cache_parameters()["typed"]
        found = [(*_arguments_of(key, typed, mark), one) for key, one in zip(keys, results)]
        _seen[function] = seen = (keys, results), ids, found
    return seen[2]


def _pairs(ids: list[int]) -> set[tuple[int, int]]:
    """A cache with a limit is in the order of its last calls, which does not count."""
    half = len(ids) // 2
    return set(zip(ids[:half], ids[half:]))


def forget() -> None:
    """Let all results go."""
    _seen.clear()


# As lru_cache_make_key in C: a single int or str is its own key.


def _key_of(args: tuple[Any, ...], kwds: dict[str, Any], typed: bool, mark: Any) -> Any:
    if len(args) == 1 and not kwds and not typed and type(args[0]) in (int, str):
        return args[0]
    named = (mark, *(one for pair in kwds.items() for one in pair)) if kwds else ()
    types = map(type, (*args, *kwds.values())) if typed else ()
    return (*args, *named, *types)


def _arguments_of(key: Any, typed: bool, mark: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if type(key) is not tuple:
        return (key,), {}
    at = next((at for at, one in enumerate(key) if one is mark), None)
    if at is None:
        return (key[: len(key) // 2] if typed else key), {}
    named = key[at + 1 :]
    if typed:
        named = named[: (len(named) - at) // 3 * 2]
    return key[:at], dict(zip(named[::2], named[1::2]))


def _call_again(function: Any, called: FunctionType, results: Iterable[Result]) -> None:
    """Fill a cache with a limit: only its own calls can."""
    code, named, me = called.__code__, called.__kwdefaults__, get_ident()
    original = FunctionType(
        code, called.__globals__, called.__name__, called.__defaults__, called.__closure__
    )
    original.__kwdefaults__ = named
    result = None

    def answer(args: tuple[Any, ...], kwds: dict[str, Any]) -> Any:
        return result if get_ident() == me else original(*args, **kwds)  # a thread of a task

    called.__kwdefaults__ = {**(named or {}), "_xpool_answer": answer}
    called.__code__ = _answered.__code__.replace(co_freevars=code.co_freevars)
    try:
        for args, kwds, result in results:  # noqa: B007  # `answer` returns it
            function(*args, **kwds)
    finally:
        called.__code__, called.__kwdefaults__ = code, named


def _answered(*args: Any, _xpool_answer: Any, **kwds: Any) -> Any:
    return _xpool_answer(args, kwds)
