"""Checks the arguments of the constructors and verbs."""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import functools
import math
import multiprocessing
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Annotated, Any, NamedTuple, NoReturn, TypedDict, TypeVar

from xpool._calls.terms import ONCE, Terms, terms_of
from xpool._memory.system import default_processes
from xpool.errors import OptionError

Exceptions = type[BaseException] | tuple[type[BaseException], ...]
"""One class of exceptions, or a tuple of classes, as in an ``except`` clause."""


ProgressOption = bool | str | Callable[[int, int | None], object]
"""True, a title, or a function that gets the number of done items and the number of all items."""


T = TypeVar("T")


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """Return ``value`` as an int of at least ``least``."""
    __tracebackhide__ = True
    # `multiprocessing.pool` accepts True and False in these.
    mistaken = isinstance(value, bool) and name not in ("processes", "chunksize")
    if mistaken or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, not {reprlib.repr(value)}")
    number = value.__index__()
    if number < least:
        raise OptionError(f"{name} must be at least {least}, not {number}")
    return int(number)


def check_optional(check: Callable[..., T], name: str, value: Any, **limits: Any) -> T | None:
    """Return None, or what ``check`` returns for another value."""
    return None if value is None else check(name, value, **limits)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def check_bytes(name: str, value: Any, *, least: int = 1) -> int:
    """Return a number of bytes, given as a number or as text such as "2GB", "512 MiB" or "1.5g".

    "GB" and "GiB" are both 1024**3 bytes, and so for the other units.
    """
    if not isinstance(value, str):
        return check_count(name, value, least=least)
    text = value.strip().upper()
    number = text.rstrip(" BIKMGT")
    unit = text[len(number) :].strip().removesuffix("B").removesuffix("I")
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise OptionError(
            f'{name} must be a number of bytes, or text like "2GB" or "512MiB", not {value!r}'
        ) from None
    return check_count(name, size, least=least)


def check_seconds(name: str, value: Any, endless: str = "None means no limit") -> float | None:
    """Return ``value`` as seconds above 0, or None (no limit) for None and infinity.

    ``endless``: says, for errors, which value means that there is no limit.
    """
    if value is None:
        return None
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number of seconds or None, not {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        raise OptionError(f"{name} is too large; {endless}") from None
    if not seconds > 0:  # refuses NaN, too
        raise OptionError(f"{name} must be above 0 seconds, not {value!r}; {endless}")
    return None if seconds == math.inf else seconds


def check_timeout(name: str, value: Any) -> float | None:
    """Check the ``timeout=`` of a verb: None means the pool's ``task_timeout``."""
    return check_seconds(name, value, "infinity means no limit, and None the pool's task_timeout")


def check_priority(name: str, value: Any) -> float:
    """Return ``value`` as an int or a float."""
    if isinstance(value, bool) or not (hasattr(value, "__index__") or hasattr(value, "__float__")):
        raise TypeError(f"{name} must be a real number, not {reprlib.repr(value)}")
    if hasattr(value, "__index__"):
        return int(value.__index__())
    try:
        number = float(value)
    except OverflowError:
        raise OptionError(f"{name} is too large for a float; pass an int") from None
    if math.isnan(number):
        raise OptionError(f"{name} must be a number that can be compared, not NaN")
    return number


def check_progress(name: str, value: Any) -> Any:
    if not isinstance(value, (bool, str)) and not callable(value):
        raise TypeError(f"{name} must be True, a title or a callable (done, total), not {value!r}")
    return value


def check_choice(name: str, value: T, *choices: str | None) -> T:
    if value not in choices:
        *others, last = map(repr, choices)
        raise OptionError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")
    return value


def check_exceptions(name: str, value: Any) -> tuple[type[BaseException], ...]:
    """Return an exception class, or a tuple of them, as a tuple."""
    classes = value if isinstance(value, tuple) else (value,) if value else ()
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise TypeError(f"{name} must be an exception class or a tuple of these, not {value!r}")
    return classes


def check_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a callable, not {value!r}")


def check_args(
    func: Callable[..., Any] | None,
    args: Any,
    kwds: Mapping[str, Any],
    before: int,
    name: str = "args",
) -> tuple[Any, ...]:
    """Return the ``args`` of a call as a tuple.

    ``before``: how many arguments the pool itself passes in front of these.

    Each character of a string would be an argument: a string is refused if ``func`` cannot be
    called with so many.
    """
    if not hasattr(args, "__iter__"):
        raise TypeError(f"{name} must be iterable, not {reprlib.repr(args)}; {_hint(name, args)}")
    values = tuple(args)
    if isinstance(args, (str, bytes)) and func is not None:
        import inspect  # here, because it takes longer to import than this module

        try:
            inspect.signature(func).bind(*([None] * before), *values, **kwds)
        except TypeError as exc:
            raise TypeError(
                f"{name} is a string, so each of its {len(values)} characters would be an argument "
                f"of {label(func)} ({exc}); {_hint(name, args)}"
            ) from None
        except ValueError:
            return values  # a function without a signature
    return values


def _hint(name: str, args: Any) -> str:
    return f"for one argument write {name}=({reprlib.repr(args)},)"


def check_iterable(name: str, value: Any) -> tuple[Any, ...]:
    if not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be iterable, not {value!r}")
    if isinstance(value, (str, bytes)):
        raise TypeError(
            f"{name} is a string, so each of its characters would be one of the {name}; for a "
            f"single one write {name}=[{value!r}]"
        )
    return tuple(value)


def check_can_iterate(iterable: Any) -> None:
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise TypeError(
            f"iterable must be iterable, not {type(iterable).__name__}; for one call of a function "
            "use apply(func, (x,))"
        )


def resolve_processes(processes: Any, contexts: Sequence[Any] | None = None) -> int:
    __tracebackhide__ = True
    if contexts is not None:
        n = len(contexts)
        if n == 0:
            raise OptionError("worker_contexts is empty: give one context for each worker")
        if processes is not None and check_count("processes", processes) != n:
            raise OptionError(
                f"processes is {processes}, but worker_contexts has {n}; leave processes out"
            )
        return n
    return default_processes() if processes is None else check_count("processes", processes)


def check_chunksize(chunksize: Any) -> int:
    if type(chunksize) is int and chunksize > 0:
        return chunksize
    __tracebackhide__ = True
    if isinstance(chunksize, Iterable):
        raise TypeError(
            f"chunksize must be a whole number, not {reprlib.repr(chunksize)}. A pool's map takes "
            "one iterable: to call func(x, y) for two, use starmap(func, zip(xs, ys))"
        )
    return check_count("chunksize", chunksize)


def default_chunksize(length: int, workers: int) -> int:
    """Return the chunk size of `map`: about four chunks for each worker."""
    return max(1, math.ceil(length / (4 * workers)))


def check_context(name: str, value: Any) -> None:
    """Raise an error unless ``value`` is a context or a start method of `multiprocessing`."""
    if isinstance(value, str):
        check_choice(name, value, *multiprocessing.get_all_start_methods())
    elif not hasattr(value, "Process"):
        raise TypeError(
            f"{name} must be the name of a start method or a multiprocessing context, not {value!r}"
        )


def check_memory(worker: Any, high: Any) -> tuple[int | None, float | None]:
    """Check ``worker_memory`` and ``memory_high``.  Return the first as a number of bytes."""
    if worker is not None:
        worker = check_bytes("worker_memory", worker)
    if high is not None:
        if isinstance(high, bool) or not isinstance(high, (int, float)):
            raise TypeError(f"memory_high must be a number from 0 to 1, not {high!r}")
        if not 0 < high < 1:
            raise OptionError(f"memory_high must be between 0 and 1, not {high!r}")
    if (worker is not None or high is not None) and sys.platform != "linux":
        raise OptionError(
            "worker_memory and memory_high need Linux, whose /proc reports the use of memory"
        )
    return worker, high


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` as Python's bool: a bool of numpy would make workers import numpy."""
    if not isinstance(value, bool) and value not in (0, 1):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _check_type(types: Any, what: str, name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, types):
        raise TypeError(f"{name} must be {what}, not {reprlib.repr(value)}")
    return value


check_seed = functools.partial(_check_type, int, "an int or None")
_check_journal = functools.partial(_check_type, (str, bytes, os.PathLike), "the path of a database")
_check_version = functools.partial(_check_type, (str, int), "a str or an int")


def label(func: Callable[..., Any]) -> str:
    """Return a function's name for error texts."""
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None)
    if name is None and type(func) is functools.partial:
        return label(func.func)
    return f"{name}()" if isinstance(name, str) else f"a {type(func).__name__}"


# -- the keywords of the verbs ---------------------------------------------------------------------

# Each keyword is declared with its type and the function that checks it.  Its default is in the
# field of the same name: of `TaskOptions` if the pool obeys the keyword, and of `Terms` if queues
# and workers obey it.


class CallOptions(TypedDict, total=False):
    """Keywords of all verbs that submit tasks.  `BasePool.apply` describes them."""

    timeout: Annotated[float | None, check_timeout]
    retries: Annotated[int, functools.partial(check_count, least=0)]
    retry_on: Annotated[Exceptions, check_exceptions]
    priority: Annotated[float, check_priority]


class OneCallOptions(CallOptions, total=False):
    """Keywords of `apply` and `apply_async`; ``worker`` is for a `P2PPool`."""

    worker: Annotated[int | None, functools.partial(check_optional, check_count, least=0)]


class ManyOptions(CallOptions, total=False):
    """Keywords of the verbs that submit many tasks.  `BasePool.map` describes them."""

    progress: Annotated[ProgressOption, check_progress]
    seed: Annotated[int | None, check_seed]


class JournalOptions(ManyOptions, total=False):
    """Keywords of the verbs that can use a journal."""

    journal: Annotated[str | os.PathLike[str] | None, _check_journal]
    key: Annotated[Callable[[Any], str | bytes | int] | None, lambda name, value: value]
    version: Annotated[str | int | None, _check_version]


_CHECKS = {
    name: one.__metadata__[0]
    for kind in (OneCallOptions, JournalOptions)
    for name, one in kind.__annotations__.items()
}


class TaskOptions(NamedTuple):
    """The checked options of a job."""

    terms: Terms = ONCE
    retry_on: tuple[type[BaseException], ...] = ()  # exceptions after which a task runs again
    progress: Any = False
    seed: int | None = None  # seeds the generators of each item, with the item's number
    journal: Any = None  # the path of a database
    key: Any = None
    version: Any = None
    worker: int | None = None  # index of a worker of a `P2PPool`; -1: the least busy one
    # Not keywords of these names:
    returns_errors: bool = False
    waits: bool = False  # whether the submitting thread waits for the result at once

    @property
    def plain(self) -> bool:
        """Whether the options have the default for everything that queues obey."""
        return self.terms is ONCE


OF_TERMS = [name for name in _CHECKS if name not in TaskOptions._fields]
"""The keywords that make the `Terms` of a task."""


def check_keywords(given: Mapping[str, Any], task_timeout: float | None) -> TaskOptions:
    """Check keywords of verbs; ``task_timeout``: the limit if none is given."""
    __tracebackhide__ = True
    found: dict[str, Any] = {}
    terms: dict[str, Any] = {}
    for name, value in given.items():
        checked = _CHECKS[name](name, value)
        (terms if name in OF_TERMS else found)[name] = checked
    timeout, on = terms.pop("timeout", None), found.get("retry_on", ())
    if given.get("timeout") is None:
        timeout = task_timeout
    options = TaskOptions(terms_of(timeout, on, **terms), **found)
    if on and not options.terms.retries:
        raise OptionError("retry_on= needs retries=, the number of further tries: pass both")
    journal, key, version = options.journal, options.key, options.version
    if journal is None and (key is not None or version is not None):
        name = "version" if key is None else "key"
        raise OptionError(f"{name}= is an option of a journal: pass journal= too")
    return options


Verb = TypeVar("Verb", bound=Callable[..., Any])


def takes_keywords(options: Any) -> Callable[[Verb], Verb]:
    """Show these keywords in a verb's signature, for `help`, in place of ``**keywords``."""
    names, defaults = list(options.__annotations__), TaskOptions._field_defaults
    defaults = {"timeout": None, **Terms._field_defaults, **defaults}

    def with_signature(verb: Verb) -> Verb:
        code = verb.__code__

        # `inspect.signature` follows `__wrapped__`, and its import takes longer than all of these.
        def shown() -> None: ...

        own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        shown.__code__ = shown.__code__.replace(
            co_varnames=(*own, *names), co_nlocals=len(own) + len(names),
            co_argcount=code.co_argcount, co_kwonlyargcount=code.co_kwonlyargcount + len(names),
            co_filename=code.co_filename, co_firstlineno=code.co_firstlineno,
        )  # fmt: skip
        shown.__defaults__ = verb.__defaults__
        shown.__kwdefaults__ = {
            **(verb.__kwdefaults__ or {}), **{name: defaults[name] for name in names}
        }  # fmt: skip
        types = {name: one.__origin__ for name, one in options.__annotations__.items()}
        shown.__annotations__ = {**verb.__annotations__, **types}
        verb.__wrapped__ = shown  # type: ignore[attr-defined]
        return verb

    return with_signature


# -- a keyword that a function does not have -------------------------------------------------------

_ELSEWHERE = {
    "batch_size": "chunksize",
    "chunk_size": "chunksize",
    "init_args": "initargs",
    "initializer_args": "initargs",
    "kwargs": "kwds",
    "max_tasks_per_child": "maxtasksperchild",
    "max_workers": "processes",
    "max_retries": "retries",
    "max_tasks_active": "buffersize",
    "method": "context",
    "mp_context": "context",
    "n_jobs": "processes",
    "n_workers": "processes",
    "ncpus": "processes",
    "nodes": "processes",
    "nprocs": "processes",
    "num_workers": "processes",
    "prefetch": "buffersize",
    "retry": "retries",
    "start_method": "context",
    "time_limit": "timeout",
    "tqdm": "progress",
    "workers": "processes",
    "worker_init": "initializer",
    "worker_lifespan": "maxtasksperchild",
}
"""The argument of xpool that has the meaning of another library's argument."""

_FOR_EXECUTORS = {
    "context": "mp_context",
    "maxtasksperchild": "max_tasks_per_child",
    "processes": "max_workers",
}


_ITS_VERBS = {
    "with_index": "imap_unordered has",
    "worker": "apply and apply_async of P2PPool have",
    **dict.fromkeys(("buffersize", "yields"), "imap and imap_unordered have"),
    **dict.fromkeys(
        ("callback", "error_callback"), "apply_async, map_async and starmap_async have"
    ),
    **dict.fromkeys(("journal", "key", "version"), "map, starmap, imap and imap_unordered have"),
}
"""The verbs that have a keyword which the others lack."""


def names_of(*codes: CodeType) -> list[str]:
    """Return the arguments that functions accept by keyword, without ``self``."""
    found: dict[str, None] = {}
    for code in codes:
        end = code.co_argcount + code.co_kwonlyargcount
        found.update(dict.fromkeys(code.co_varnames[max(1, code.co_posonlyargcount) : end]))
    return list(found)


def names_of_inits(obj: object) -> list[str]:
    """Return the arguments that the constructors of an object's class accept by keyword."""
    inits = (vars(cls).get("__init__") for cls in type(obj).__mro__)
    inits = (getattr(init, "__wrapped__", init) for init in inits)
    return names_of(*(init.__code__ for init in inits if isinstance(init, FunctionType)))


def refuse_unknown(function: str, known: list[str], unknown: Iterable[str]) -> NoReturn:
    """Raise `TypeError` for the first keyword that ``function`` does not have."""
    from difflib import get_close_matches  # imported here, because few programs need it

    name = next(iter(unknown))
    names = {one: one for one in known}
    for theirs, ours in _ELSEWHERE.items():
        ours = _FOR_EXECUTORS.get(ours, ours) if "max_workers" in known else ours
        if ours in known:
            names.setdefault(theirs, ours)
    near = [name] if name in names else get_close_matches(name, names, 1)
    meant = f"; did you mean {names[near[0]]}=?" if near else ""
    if not near:
        others = f"; {_ITS_VERBS[name]} it" if name in _ITS_VERBS else ""
        meant = f"{others}; it has {', '.join(known)}"
        if "kwds" in known:
            meant += ". Arguments of the called function go into args=() and kwds={}"
    raise TypeError(f"{function}() has no keyword {name!r}{meant}")
