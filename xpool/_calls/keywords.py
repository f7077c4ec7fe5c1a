"""The error for a keyword that a function does not have.  It suggests the right one."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import NoReturn

_ELSEWHERE = {
    "batch_size": "chunksize",
    "chunk_size": "chunksize",
    "init_args": "initargs",
    "initializer_args": "initargs",
    "kwargs": "kwds",
    "max_tasks_per_child": "maxtasksperchild",
    "max_workers": "processes",
    "max_retries": "retries",
    "method": "context",
    "mp_context": "context",
    "n_jobs": "processes",
    "n_workers": "processes",
    "nprocs": "processes",
    "num_workers": "processes",
    "prefetch": "buffersize",
    "retry": "retries",
    "start_method": "context",
    "time_limit": "timeout",
    "tqdm": "progress",
    "workers": "processes",
    "worker_lifespan": "maxtasksperchild",
}
"""The argument of xpool that has the meaning of another library's argument."""

_FOR_EXECUTORS = {
    "context": "mp_context",
    "maxtasksperchild": "max_tasks_per_child",
    "processes": "max_workers",
}


_ITS_VERBS = {
    "buffersize": "imap and imap_unordered have",
    "callback": "apply_async, map_async and starmap_async have",
    "error_callback": "apply_async, map_async and starmap_async have",
    "journal": "map, starmap, imap and imap_unordered have",
    "key": "map, starmap, imap and imap_unordered have",
    "version": "map, starmap, imap and imap_unordered have",
    "with_index": "imap_unordered has",
    "worker": "apply and apply_async of P2PPool have",
    "yields": "imap and imap_unordered have",
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
    ours = _ELSEWHERE.get(name, name)
    ours = _FOR_EXECUTORS.get(ours, ours) if "max_workers" in known else ours
    near = [ours] if ours in known and ours != name else get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]}=?" if near else ""
    if not near:
        others = f"; {_ITS_VERBS[name]} it" if name in _ITS_VERBS else ""
        meant = f"{others}; it has {', '.join(known)}"
        if "kwds" in known:
            meant += ". Arguments of the called function go into args=() and kwds={}"
    raise TypeError(f"{function}() has no keyword {name!r}{meant}")
