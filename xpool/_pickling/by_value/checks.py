"""Warns of globals whose comparison takes long, and of locks and shared memory that are copied."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

from xpool._pickling import Key, reducers
from xpool._pickling.by_value.caches import CACHE
from xpool._pickling.by_value.origin import (
    IMPORTED,
    INSTALLED,
    SENT,
    attributes_of,
    is_patch,
    origin_of,
    owner_of,
)
from xpool._pickling.by_value.own_objects import slots_of
from xpool._pickling.diagnose import path_to
from xpool._pickling.reducers import Group
from xpool._python.interrupt import pass_on

_TOO_LONG = 1.0
"""If the checks of one global take more seconds in total, there is a warning."""


_seconds: dict[Key, float] = {}  # the total time of the checks, by global
_warned: set[tuple[Key, str]] = set()


def said(key: Key) -> str:
    """Return a global's name, as messages show it."""
    return f"{key[1].replace(':', '.')!r} of {key[0]}"


def took(key: Key, about: str, seconds: float) -> None:
    """Count the time of a check.  Warn once if the checks of this global have taken too long.

    ``about``: the global's size, or that it cannot be sent.
    """
    before, (owner, _, name) = _seconds.get(key, 0.0), key[1].rpartition(".")
    after = _seconds[key] = before + seconds
    if before < _TOO_LONG <= after:
        what = f"the global {said(key)}"
        remedy = (
            f"If it does not change, write `{name}: Final = ...` in the script, which ends them, "
            "or give it to the workers by `pool.broadcast` or an initializer."
        )
        if name == CACHE:
            what = f"the results that the cached function {said((key[0], owner))} keeps"
            remedy = f"If tasks do not need these results, call `{owner}.cache_clear()`."
        warn(
            f"xpool compares {what} ({about}) at each "
            "call with the copy of the workers, since the program may have changed it in place. "
            f"The comparisons have taken {after:.1f} s. {remedy}"
        )


def warn_of(key: Key, value: Any, group: Group) -> None:
    """Warn once of locks and shared memory in a global, of which workers get their own."""
    # A module that is imported makes its locks in each process anyway.
    sent = origin_of(key[0]) == SENT
    locks = [lock for lock in group.locks if sent and type(lock) in _LOCKS]
    owned = _owned_by_libraries(group.objects or []) if locks else ()
    locks = [lock for lock in locks if id(lock) not in owned]
    if locks:
        holder = _holder(group.objects or [], locks[0])
        path = key[1].replace(f".{CACHE}", "(...)") + path_to(value, holder)
        kind, what = type(holder).__name__, "lock"
        fault = "tasks of two workers can hold it at the same time. To prevent that"
        if holder is not locks[0]:
            what = kind
            fault = "tasks of other workers do not see what a task does with it. To share one"
        _once(
            key,
            "lock",
            f"Each worker has its own copy of the {what} {path!r} of {key[0]}, so {fault}, pass a "
            f"multiprocessing.{'Lock' if kind == 'lock' else kind} in initargs=; if it is for the "
            "threads of one task, ignore this warning.",
        )
    mapped = set(map(id, group.mapped))
    copied = (one for one in arrays_among(group.objects or []) if id(one) not in mapped)
    shared = next(filter(_is_shared, copied), None)
    if shared is not None:
        remedy = "make an array in a multiprocessing.shared_memory.SharedMemory"
        if hasattr(shared, "is_shared"):  # a tensor
            remedy = "make the pool with is_copy_tensor=False and pass it as an argument"
        _once(
            key,
            "memory",
            f"Workers get a copy of the global {said(key)}, also with is_copy_tensor=False. To "
            f"share its memory, {remedy}.",
        )


def _holder(objects: list[Any], lock: Any) -> Any:
    """Return the `threading.Event`, `queue.Queue` or the like that contains a lock, or the lock."""
    for one in objects:  # the pickler comes to an object before its attributes
        kind = type(one)
        known = kind.__name__ in _SHARED_KINDS and kind.__module__ in _MADE_BY_PROGRAMS
        if known and path_to(one, lock):
            return one
    return lock


_SHARED_KINDS = frozenset(
    {"Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "Queue"}
)
"""Classes of `threading` and `queue` that `multiprocessing` has, too."""


def _owned_by_libraries(objects: list[Any]) -> set[int]:
    """Return the ids of what objects of installed classes contain.

    The program has not made these, and does not know of them.  But it may have made a `Condition`
    or a `Queue`, unless an object of a library contains this.
    """
    found = set[int]()
    for one in objects:  # the pickler comes to an object before its attributes
        module = type(one).__module__
        if type(one) in (list, deque):  # of the locks of threads that wait, for example
            found.update(map(id, one) if id(one) in found else ())
        elif id(one) in found if module in _MADE_BY_PROGRAMS else origin_of(module) == INSTALLED:
            found.update(map(id, list(attributes_of(one).values())))
            found.update(id(getattr(one, name, None)) for name in slots_of(type(one)))
    return found


_MADE_BY_PROGRAMS = frozenset({"threading", "queue"})


def warn_of_refused(key: Key, value: Any, reason: str) -> None:
    """Warn once that workers keep their own attribute of an installed module."""
    maker = value if issubclass(type(value), (type, FunctionType)) else type(value)
    if origin_of(maker.__module__) == SENT:  # not what the import of that module has made
        _once(
            key,
            "refused",
            f"Workers do not see what the program has assigned to {said(key)}: {reason}",
        )


_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def is_of_import(key: Key, value: Any) -> bool:
    """Whether the import of a module makes an object that each process should have for itself.

    These are locks, and definitions of installed modules under their own names.
    """
    if issubclass(type(value), (FunctionType, type, BuiltinFunctionType)):
        named = (value.__module__, value.__qualname__) == key and origin_of(key[0]) == INSTALLED
        return named and not is_patch(value, key[0])
    return type(value) in _LOCKS and origin_of(key[0]) == IMPORTED


def arrays_among(objects: list[Any]) -> list[Any]:
    array: Any = getattr(sys.modules.get("numpy"), "ndarray", ())
    tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
    kinds = array, tensor
    if not any(issubclass(kind, kinds) for kind in set(map(type, objects))):
        return []
    return [one for one in objects if issubclass(type(one), kinds)]


def memory_of(objects: list[Any]) -> set[int]:
    """Return the addresses of the memory of arrays and tensors, with the lowest bit set: no `id` of
    an object has this bit.
    """
    found = set[int]()
    for one in arrays_among(objects):
        if hasattr(one, "__array_interface__") and not hasattr(one, "untyped_storage"):
            base = one
            while hasattr(base.base, "__array_interface__"):
                base = base.base
            address = base.__array_interface__["data"][0] if base.nbytes else 0
        else:
            try:
                address = one.untyped_storage().data_ptr()
            except Exception as error:  # sparse and other tensors have no storage
                pass_on(error)
                continue
        found.add(address | 1)
    return found - {1}


def _is_shared(one: Any, any_file: bool = False) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not issubclass(type(one), numpy.ndarray):
        try:
            return bool(one.is_shared()) and one.device.type == "cpu"
        except Exception as error:  # sparse and other tensors have no storage
            pass_on(error)
            return False
    while issubclass(type(one), numpy.ndarray):
        if issubclass(type(one), numpy.memmap):
            # What a worker writes does not reach the file.
            return (any_file or bool(one.flags.writeable)) and one.mode != "c"
        one = one.base
    if issubclass(type(one), memoryview):
        one = one.obj
    # `multiprocessing.shared_memory` and the arrays of `multiprocessing.sharedctypes`.
    return issubclass(type(one), mmap.mmap) or hasattr(one, "_wrapper")


class SharedMemory(BaseException):
    """What is pickled holds shared memory.  After an `Exception`, dill would pickle it."""


@contextlib.contextmanager
def refusing_shared_memory(files: bool) -> Iterator[None]:
    """In this thread, raise `SharedMemory` if a tensor in shared memory is pickled.

    ``files``: also if an array is pickled whose memory a forked process would share.
    """

    def refuse(one: Any) -> None:
        if arrays_among([one]) and (files or hasattr(one, "is_shared")) and _is_shared(one, True):
            raise SharedMemory

    reducers.watches[threading.get_ident()] = refuse
    try:
        yield
    finally:
        del reducers.watches[threading.get_ident()]


def _once(key: Key, what: str, text: str) -> None:
    if (key, what) not in _warned:
        _warned.add((key, what))
        warn(text)


def warn(text: str) -> None:
    """Warn, with the first caller outside of xpool as the place."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "xpool":
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def is_final(key: Key) -> bool:
    """Whether the program declares a global or class attribute as ``NAME: Final = ...``."""
    try:
        kind = _annotations(owner_of(key)).get(key[1].rpartition(".")[2])
    except Exception as error:  # Python 3.14 evaluates them only now; a name may be undefined
        pass_on(error)
        return False
    if not isinstance(kind, str):
        kind = str(getattr(kind, "__origin__", kind))
    return kind.partition("[")[0].rpartition(".")[2] == "Final"


def _annotations(holder: Any) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib  # imported here, because few programs have a large global

        return annotationlib.get_annotations(holder, format=annotationlib.Format.STRING)
    return vars(holder).get("__annotations__", {})  # type: ignore[no-any-return]
