"""Reducers of random generators, and of objects of the standard library that have none.

If a global is a random generator, each worker has a generator of its own in this place, with
another seed.  With copies, all workers would draw the same numbers.  The seed is derived from the
worker's seed and the global's name, so a pool with ``seed=`` draws the same numbers in each run.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import io
import itertools
import operator
import os
import struct
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pickle import PickleBuffer
from typing import Any

from xpool._memory.system import array_type
from xpool._pickling import reducers
from xpool._pickling.by_value import registry
from xpool._pickling.by_value.origin import MISSING, program_modules
from xpool._pickling.by_value.reads import in_python, own_classes
from xpool._pickling.by_value.settings_rows import OF_LOGGERS
from xpool._pickling.frame import INLINE_BELOW
from xpool._pickling.reducers import (
    FOR_SUBCLASSES,
    LAZY,
    NEW,
    Context,
    Refused,
    is_message,
    register,
    set_attributes,
)

_KINDS: dict[tuple[str, str], Callable[[Any, int], Any]] = {
    ("random", "Random"): lambda random, seed: random.Random(seed),
    ("numpy.random._generator", "Generator"): lambda numpy, seed: numpy.random.default_rng(seed),
    ("numpy.random.mtrand", "RandomState"): (
        lambda numpy, seed: numpy.random.RandomState(seed & 0xFFFF_FFFF)
    ),
    ("torch._C", "Generator"): (
        lambda torch, seed: torch.Generator().manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
    ),
}
"""By module and class: how a package makes one with a seed."""

_STATES: dict[tuple[str, str], tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    ("random", "Random"): (lambda one: one.getstate(), lambda one, state: one.setstate(state)),
    ("numpy.random._generator", "Generator"): (
        lambda one: one.bit_generator.state,
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
    **dict.fromkeys(
        (("numpy.random.mtrand", "RandomState"), ("torch._C", "Generator")),
        (lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    ),
}
"""By the same: how its state is read and set."""

_made: dict[str, tuple[tuple[str, str], Any]] = {}
"""In a worker, its own generators, by the names of the globals."""

_OF_PACKAGES: dict[str, Callable[[Any], Any]] = {
    "random": lambda random: random.random.__self__,
    "numpy.random.mtrand": lambda mtrand: mtrand._rand,
    "torch._C": lambda _: sys.modules["torch"].default_generator,
}
"""By the same module: the generator that the functions of the package use."""

seed_of: Any = None
"""In a worker, the function that returns the seed for a name (`xpool._worker.seeds`)."""


def is_generator(value: Any) -> bool:
    kind = type(value)
    return (kind.__module__, kind.__name__) in _KINDS


def _reduce(pickler: Context, obj: Any) -> Any:
    module = type(obj).__module__
    if module in _OF_PACKAGES and _OF_PACKAGES[module](sys.modules[module]) is obj:
        return package_generator, (module,)  # `draw = random.uniform` refers to it
    key = None if pickler.group is None else pickler.group.own.get(id(obj))
    if key is None:
        return NotImplemented
    kind = type(obj)
    return own_generator, (kind.__module__, kind.__name__, ".".join(key))


def package_generator(module: str) -> Any:
    return _OF_PACKAGES[module](import_module(module))


def own_generator(module: str, kind: str, name: str) -> Any:
    """Return a new generator, with a seed for this worker and name."""
    seed = int.from_bytes(os.urandom(8), "big") if seed_of is None else seed_of(name)
    generator = _with_seed((module, kind), seed)
    _made[name] = (module, kind), generator
    return generator


def _with_seed(kind: tuple[str, str], seed: int) -> Any:
    return _KINDS[kind](import_module(kind[0].partition(".")[0]), seed)


def sow_own_generators(seed_of: Callable[[str], int]) -> list[Callable[[], object]]:
    """Seed the generators of this worker's globals; return functions that restore them."""
    restores: list[Callable[[], object]] = []
    for name, (kind, generator) in _made.items():
        state, set_state = _STATES[kind]
        restores.append(partial(set_state, generator, state(generator)))
        set_state(generator, state(_with_seed(kind, seed_of(name))))
    return restores


def _lazy_generator(module: str, kind: str) -> None:
    register(getattr(sys.modules[module], kind))(_reduce)


def _lazy_random() -> None:
    _lazy_generator("random", "Random")
    module = sys.modules["random"]
    register(module.SystemRandom)(lambda pickler, obj: (module.SystemRandom, ()))


LAZY.update({place[0]: partial(_lazy_generator, *place) for place in _KINDS})
LAZY["random"] = _lazy_random


_STREAMS = ("stdout", "stderr", "stdin", "__stdout__", "__stderr__", "__stdin__")


def _reduce_stream(pickler: Context, obj: Any) -> Any:
    """Pickle a standard stream: in the receiver, it is the receiver's own."""
    for name in _STREAMS:
        stream = getattr(sys, name, None)
        if obj is stream or obj is getattr(stream, "buffer", None):
            return standard_stream, (name, obj is not stream)
    return NotImplemented


def standard_stream(name: str, binary: bool) -> Any:
    stream = getattr(sys, name)
    return stream.buffer if binary else stream


register(io.BufferedWriter, io.BufferedReader, io.FileIO)(_reduce_stream)  # buffers of streams
FOR_SUBCLASSES[io.TextIOWrapper] = _reduce_stream


_ENVIRON: Any = getattr, (os, "environ")
register(type(os.environ))(lambda _, obj: _ENVIRON if obj is os.environ else NotImplemented)
register(struct.Struct)(lambda _, obj: (struct.Struct, (obj.format,)))


@register(itertools.count)
def _reduce_count(pickler: Context, counter: Any) -> Any:
    """Pickle a counter by its text: Python 3.14 has removed the ``__reduce__`` of `itertools`."""
    texts = repr(counter)[len("count(") : -1].split(", ")
    try:
        numbers = [int(one) if one.lstrip("-").isdigit() else float(one) for one in texts]
    except ValueError:  # other types, such as `Fraction`
        return NotImplemented
    return itertools.count, tuple(numbers)


_MAKERS: Any = (contextlib.contextmanager, contextlib.asynccontextmanager)


@register(*(type(make(iter)(())) for make in _MAKERS))
def _reduce_manager(pickler: Context, obj: Any) -> Any:
    """Pickle the call that makes the manager, unless it was entered.  Decorators have these."""
    begun = not hasattr(obj, "func")
    return NotImplemented if begun else (type(obj), (obj.func, obj.args, obj.kwds))


@register(contextvars.ContextVar)
def _reduce_variable(pickler: Context, var: Any) -> Any:
    """Pickle a context variable with its value; a receiver has one variable for each of ours."""
    if pickler.group is None:
        return NotImplemented
    try:
        default = contextvars.Context().run(var.get)
    except LookupError:
        default = MISSING
    value = var.get(MISSING)
    given = () if default is MISSING else (default,)
    state = None if value is MISSING or value is default else (value,)
    return context_variable, (registry.token_of(var), var.name, given, state)


def context_variable(token: str, name: str, default: tuple[Any, ...], state: Any) -> Any:
    options = {"default": default[0]} if default else {}
    var = registry.shell(token, lambda: contextvars.ContextVar(name, **options))
    if state is not None:
        before = var.set(state[0])
        _before.setdefault(token, before)
    elif token in _before:
        with contextlib.suppress(ValueError):  # set in another thread, which has its own value
            var.reset(_before.pop(token))
    return var


_before: dict[str, Any] = {}  # by token: what makes a variable have no value again


def _lazy_logging() -> None:
    import logging

    def reduce(pickler: Context, logger: Any) -> Any:
        """Pickle a logger of an own class with this class; in a global, with its attributes."""
        kind = type(logger)
        if kind.__module__ == "logging":
            return NotImplemented
        known = logging.root.manager.loggerDict.get(logger.name) is logger
        if is_message(pickler):
            return own_logger, (kind, logger.name)
        if not known:  # made by a call of the class
            state = {name: one for name, one in vars(logger).items() if name != "manager"}
            return NEW, (kind,), {**state, "_cache": {}}, None, None, set_attributes
        own = {name: one for name, one in vars(logger).items() if name not in OF_LOGGERS}
        return own_logger, (kind, logger.name), own, None, None, set_attributes

    FOR_SUBCLASSES[logging.Logger] = reduce


def own_logger(kind: Any, name: str) -> Any:
    import logging

    logger = logging.getLogger(name)
    if type(logger) is logging.Logger:
        logger.__class__ = kind
    return logger


LAZY["logging"] = _lazy_logging


def _lazy_loguru() -> None:
    logger: Any = sys.modules["loguru"].logger

    @register(type(logger._core))
    def reduce(pickler: Context, core: Any) -> Any:
        """Leave a global `logger.bind(...)` the handlers of the receiver."""
        if is_message(pickler) or core is not logger._core:
            return NotImplemented
        return operator.attrgetter("logger._core"), (sys.modules["loguru"],)


LAZY["loguru._logger"] = _lazy_loguru


def load_library(kind: Any, name: Any, use_errno: bool) -> Any:
    return kind(name, use_errno=use_errno)


def set_function(function: Any, types: tuple[Any, ...]) -> None:
    function.restype, function.argtypes = types[:2]
    if types[2] is not None:
        function.errcheck = types[2]


def set_functions(library: Any, functions: dict[str, tuple[Any, ...]]) -> None:
    for name, types in functions.items():
        set_function(getattr(library, name), types)


def _lazy_ctypes() -> None:
    """Register reducers of libraries that ctypes has loaded, and of their functions."""
    ctypes: Any = sys.modules["ctypes"]

    def types_of(function: Any) -> tuple[Any, ...]:
        return function.restype, function.argtypes, getattr(function, "errcheck", None)

    def reduce_library(pickler: Context, library: Any) -> Any:
        name = library._name
        uses_errno = bool(library._FuncPtr._flags_ & ctypes._FUNCFLAG_USE_ERRNO)
        if name is not None and os.path.dirname(name):
            name = os.path.abspath(name)
        functions = {
            key: types_of(one)
            for key, one in vars(library).items()
            if isinstance(one, ctypes._CFuncPtr)
        }
        args = type(library), name, uses_errno
        return load_library, args, functions, None, None, set_functions

    def reduce_function(pickler: Context, function: Any) -> Any:
        library = (function._objects or {}).get("0")
        if not isinstance(library, ctypes.CDLL) or not hasattr(function, "__name__"):
            return NotImplemented
        return getattr, (library, function.__name__), types_of(function), None, None, set_function

    def reduce_pointer_type(pickler: Context, kind: Any) -> Any:
        target = vars(kind).get("_type_")
        if isinstance(target, type) and ctypes.POINTER(target) is kind:
            return ctypes.POINTER, (target,)
        return usual(pickler, kind)

    def reduce_array_type(pickler: Context, kind: Any) -> Any:
        target, length = vars(kind).get("_type_"), vars(kind).get("_length_")
        if isinstance(target, type) and target * length is kind:
            return operator.mul, (target, length)
        return usual(pickler, kind)

    usual = reducers.REDUCERS[type]
    register(type(ctypes._Pointer))(reduce_pointer_type)
    register(type(ctypes.Array))(reduce_array_type)
    FOR_SUBCLASSES[ctypes.CDLL] = reduce_library
    FOR_SUBCLASSES[ctypes._CFuncPtr] = reduce_function


LAZY["ctypes"] = LAZY["_ctypes"] = _lazy_ctypes

_COMPARISON = functools.cmp_to_key(lambda one, other: 0)


@register(type(_COMPARISON))
def _reduce_comparison(pickler: Context, key: Any) -> Any:
    """Pickle what `functools.cmp_to_key` returns; it does not show its function otherwise."""
    functions = [one for one in gc.get_referents(key) if one is not type(key)]
    return (functools.cmp_to_key, (functions[0],)) if len(functions) == 1 else NotImplemented


# Weak references in globals; others are left to dill.


@register(weakref.ref, weakref.WeakMethod)
def _reduce_reference(pickler: Context, reference: Any) -> Any:
    kind = "WeakMethod" if type(reference) is weakref.WeakMethod else "ref"
    return NotImplemented if pickler.group is None else (weak, (kind, reference()))


@register(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
def _reduce_weak(pickler: Context, obj: Any) -> Any:
    if pickler.group is None:
        if pickler.blob and len(obj):
            # The definition would have copies of these objects.
            raise Refused(f"cannot pickle a {type(obj).__name__} in a class of a function", obj)
        return NotImplemented
    items = [*(obj if type(obj) is weakref.WeakSet else obj.items())]
    return type(obj), (), items, None, None, _fill_weak


def weak(kind: str, obj: Any) -> Any:
    """Return a weak reference of a kind in `weakref`; None: to an object that is gone."""
    make = getattr(weakref, kind)
    return make(contextlib.ExitStack().close) if obj is None else make(obj, partial(_keep, obj))


def _keep(obj: Any, reference: Any) -> None:
    """Keep the object of a weak reference: what keeps it in the program may not be sent."""


@register(weakref.ProxyType, weakref.CallableProxyType)
def _reduce_proxy(pickler: Context, proxy: Any) -> Any:
    # Otherwise `pickle` sends a copy of the object itself.
    return NotImplemented if pickler.group is None else (weak, ("proxy", proxy.__init__.__self__))


def _fill_weak(obj: Any, items: list[Any]) -> None:
    obj.update(items)
    obj.__dict__["_kept"] = items


def _reduce_dict(pickler: Context, obj: Any) -> Any:
    """Pickle a dict whose attributes are its items (``self.__dict__ = self``) as such a dict."""
    kind: Any = type(obj)
    if getattr(obj, "__dict__", None) is not obj or any(in_python(kind, one) for one in _OF_STATE):
        own = hasattr(kind, "__getattr__") or any(in_python(kind, one) for one in _OF_NEW)
        reduce = reducers.own if own or not is_message(pickler) else None
        return NotImplemented if reduce is None else reduce(pickler, obj)
    return NEW, (kind,), True, None, iter(kind.items(obj)), _show_items


_OF_NEW = ("__reduce__", "__new__")
_OF_STATE = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")


def _show_items(obj: Any, _: bool) -> None:
    object.__setattr__(obj, "__dict__", obj)


FOR_SUBCLASSES[dict] = _reduce_dict


@register(defaultdict)
def _reduce_defaultdict(pickler: Context, obj: Any) -> Any:
    """Pickle a dict whose factory is a method of its own (`words.default_factory = words.__len__`).

    `pickle` writes the factory, and so the dict, before it has made the dict.
    """
    kind: Any = type(obj)
    is_own = getattr(obj.default_factory, "__self__", None) is obj
    if not is_own or not (kind is defaultdict or is_message(pickler)):
        return NotImplemented if kind is defaultdict else _reduce_dict(pickler, obj)
    state = obj.default_factory.__name__, getattr(obj, "__dict__", {})
    return NEW, (kind,), state, None, iter(dict.items(obj)), _set_factory


def _set_factory(obj: Any, state: tuple[str, dict[str, Any]]) -> None:
    name, attributes = state
    if attributes:
        vars(obj).update(attributes)
    obj.default_factory = getattr(obj, name)


FOR_SUBCLASSES[defaultdict] = _reduce_defaultdict


@register(memoryview)
def _reduce_memoryview(pickler: Context, view: memoryview) -> Any:
    if len(view.format.lstrip("@")) > 1 or not set(view.format) <= _CASTABLE:
        raise TypeError(
            f"cannot pickle a memoryview of format {view.format!r}; send the object that it "
            "shows, or view.tobytes()"
        )
    data: Any
    # A PickleBuffer must not get the memoryview itself (see `buffer_at`), and `from_buffer` of
    # ctypes accepts only writable memory.
    if view.nbytes < INLINE_BELOW or view.readonly or not view.c_contiguous:
        data = bytearray(view.tobytes())
    else:
        data = PickleBuffer(array_type(view.nbytes).from_buffer(view))
    return _memoryview, (data, view.format, view.shape, view.readonly)


def _memoryview(data: Any, kind: Any, shape: Any, readonly: bool) -> Any:
    flat = memoryview(data).cast("B")
    # `cast` refuses axes of length 0.
    view = flat.cast(kind, shape) if 0 not in shape else flat.cast(kind)
    return view.toreadonly() if readonly else view


_CASTABLE = frozenset("@cbB?hHiIlLqQnNefdP")  # characters of formats for memoryview.cast


def _of_managers() -> None:
    def reduce(pickler: Context, proxy: Any) -> Any:
        if pickler.follow and not pickler.home:  # a task may get any object from the manager
            pickler.names |= own_classes(program_modules())
        return reducers.own(pickler, proxy) if reducers.own else NotImplemented

    FOR_SUBCLASSES[import_module("multiprocessing.managers").BaseProxy] = reduce


LAZY["multiprocessing.managers"] = _of_managers
