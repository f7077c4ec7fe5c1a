"""`CtxPool` and `CtxThreadPool`: every worker owns a context, and tasks get it first."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from xpool._calls.options import check_iterable, resolve_processes
from xpool._pools.process import Pool
from xpool._pools.thread import ThreadPool
from xpool._pools.verbs import PublicVerbs
from xpool._worker.entry import MOST_WORKERS
from xpool.devices._device_context import PROCESS
from xpool.errors import OptionError

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    from concurrent.futures import Future

    from typing_extensions import TypeVar as TypeVarWithDefault
    from typing_extensions import TypeVarTuple, Unpack

    from xpool._calls.options import OneCallOptions
    from xpool._calls.results import AsyncResult

    C = TypeVarWithDefault("C", default=Any)
    Ts = TypeVarTuple("Ts")
else:
    C = TypeVar("C")


class ContextVerbs(PublicVerbs[C]):
    """The common base of `CtxPool` and `CtxThreadPool`, for contexts of one type."""

    _fixed_size = "it has a worker for each of its contexts"
    _gives_context = True

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[object] = (),
        maxtasksperchild: int | None = None,
        context: BaseContext | str | None = None,
        *,
        worker_contexts: Iterable[C] | None = None,
        **options: Any,
    ) -> None:
        n = self._take_contexts(worker_contexts, processes, maxtasksperchild, options)
        super().__init__(  # type: ignore[call-arg]
            n, initializer, initargs, maxtasksperchild, context, **options
        )

    def _take_contexts(
        self, contexts: Any, processes: int | None, maxtasksperchild: Any, options: dict[str, Any]
    ) -> int | None:
        """Keep the contexts; return the number of workers."""
        __tracebackhide__ = True
        if isinstance(processes, (list, tuple)):
            raise TypeError(
                f"processes must be a number, not a {type(processes).__name__}; to give each "
                "worker a context, write worker_contexts="
            )
        if contexts is None:
            self._contexts = [None] * resolve_processes(processes)
        else:
            self._contexts = list(check_iterable("worker_contexts", contexts))
        return resolve_processes(processes, self._contexts)

    if TYPE_CHECKING:

        def submit(
            self, func: Callable[Concatenate[C, P], T], /, *args: P.args, **kwds: P.kwargs
        ) -> Future[T]: ...

        def apply(
            self,
            func: Callable[Concatenate[C, ...], T],
            args: Iterable[object] = (),
            kwds: Mapping[str, object] | None = None,
            **options: Unpack[OneCallOptions],
        ) -> T: ...

        def apply_async(
            self,
            func: Callable[Concatenate[C, ...], T],
            args: Iterable[object] = (),
            kwds: Mapping[str, object] | None = None,
            callback: Callable[[T], object] | None = None,
            error_callback: Callable[[BaseException], object] | None = None,
            **options: Unpack[OneCallOptions],
        ) -> AsyncResult[T]: ...


class CtxPool(ContextVerbs[C], Pool):  # type: ignore[misc]
    """A `Pool` in which every worker owns a context: tasks are ``func(ctx, *args, **kwds)``.

    Args:
        worker_contexts: one for each worker; ``processes`` may be left out.  None: each worker's
            context is None.  Worker ``i`` gets the i-th, and so does each process that replaces it.

    A context may have:

    * ``env``, a mapping: variables that are set in the worker before it imports anything else.
    * ``cpus``: the cores that the worker runs on.
    * ``enter()``: a method that is called once in the worker, before the initializer.
    * ``exit()``: one that is called at the worker's orderly end, and not if the worker is killed.
    * ``group``, other than 0: these contexts form one replica group.  If one of its workers dies,
      the pool stops with `DeviceError`, since the others cannot continue with a replacement.

    Contexts of `xpool.devices` have all of them but ``exit()``.  `xpool.assigner.ModelAssigner`
    makes a context for each of its devices, with the models placed there.  Workers whose contexts
    name the same process (``XPOOL_PROCESS`` in ``env``, as ``devices("tpu")`` does for the cores of
    TPU v2 and v3) are threads of it: they end and are restarted together (docs/devices.md).

    The other arguments are those of `Pool`.  The initializer gets only ``initargs``; it finds the
    context in ``current_worker().context``.
    """

    if TYPE_CHECKING:

        def run_all(  # type: ignore[override]
            self,
            func: Callable[[C, Unpack[Ts]], T],
            *args: Unpack[Ts],
            timeout: float | None = None,
        ) -> list[T]: ...

    def _take_contexts(
        self, contexts: Any, processes: int | None, maxtasksperchild: Any, options: dict[str, Any]
    ) -> int | None:
        __tracebackhide__ = True
        hosts = getattr(contexts, "hosts", None)
        if hosts is not None:
            options.setdefault("hosts", hosts)
        if options.get("hosts") is not None:
            if contexts is not None and hosts is None:
                raise OptionError(
                    "worker_contexts of a pool over hosts must come from xpool.ray.devices(), "
                    "which makes each on its host; make further state of a worker in the "
                    "initializer"
                )
            # `Pool` counts the workers of the hosts.
            self._contexts = list(contexts or ()) or None
            return processes
        n = super()._take_contexts(contexts, processes, maxtasksperchild, options)
        _check_env(self._contexts or ())
        self._processes = shared_processes(self._contexts or ())
        self._is_group = any(getattr(context, "group", 0) for context in self._contexts or ())
        if self._is_group and maxtasksperchild is not None:
            raise OptionError(
                "maxtasksperchild: workers of a replica group (independent=False) cannot be "
                "replaced one by one; leave it out"
            )
        if self._processes:
            self._seeds_items = False
            files = "files" if options.get("output") == "files" else None
            _refuse(maxtasksperchild=maxtasksperchild, seed=options.get("seed"), output=files)
        return n


def _check_env(contexts: Sequence[Any]) -> None:
    __tracebackhide__ = True
    for i, context in enumerate(contexts):
        env = getattr(context, "env", None) or {}
        if not isinstance(env, Mapping):
            raise TypeError(
                f"worker_contexts[{i}].env must be a mapping of environment variables, not "
                f"{reprlib.repr(env)}"
            )
        for name, value in env.items():
            if not isinstance(name, str):
                raise TypeError(f"a name in worker_contexts[{i}].env must be a str, not {name!r}")
            if not (value is None or isinstance(value, str)):
                raise TypeError(
                    f"worker_contexts[{i}].env[{name!r}] must be a str, or None to delete the "
                    f"variable, not {reprlib.repr(value)}"
                )


def shared_processes(contexts: Sequence[Any]) -> list[list[int]]:
    """Return the processes that these contexts share: the workers of each, by index."""
    found: dict[str, list[int]] = {}
    for i, context in enumerate(contexts):
        name = (getattr(context, "env", None) or {}).get(PROCESS)
        if name is not None:
            found.setdefault(name, []).append(i)
    for name, workers in found.items():
        what = f"worker_contexts {workers} share a process ({PROCESS}={name!r})"
        room = name.partition("/")[2]
        most = min(MOST_WORKERS, int(room) if room.isdigit() else MOST_WORKERS)
        if len(workers) > most:
            raise OptionError(
                f"{what}, which has room for {most}: make all contexts of a pool by one call of "
                "devices()"
            )
        for fact in ("env", "cpus"):
            first, *others = (getattr(contexts[i], fact, None) for i in workers)
            if any(other != first for other in others):
                raise OptionError(f"{what}, but differ in {fact}; give all the same")
    return [workers for workers in found.values() if len(workers) > 1]


def _refuse(**options: Any) -> None:
    why = {
        "maxtasksperchild": "they cannot be replaced one by one",
        "output": "they share its stdout and stderr",
        "seed": "they draw from the same generators, in no fixed order",
    }
    for name, value in options.items():
        if value is not None:
            raise OptionError(
                f"{name}={value!r}: some of these workers are threads of one process, so "
                f"{why[name]}; leave it out, or use devices(..., per_process=1)"
            )


class CtxThreadPool(ContextVerbs[C], ThreadPool):  # type: ignore[misc]
    """A `ThreadPool` in which every worker owns a context: ``func(ctx, *args, **kwds)``.

    Args:
        worker_contexts: as for `CtxPool`; an ``enter()`` is called in each thread, before the
            initializer, and an ``exit()`` at its end.  Contexts with ``env`` or ``cpus``, such as
            those of `xpool.devices`, are refused, since they bind a process.

    The other arguments are those of `ThreadPool`.
    """

    def _take_contexts(
        self, contexts: Any, processes: int | None, maxtasksperchild: Any, options: dict[str, Any]
    ) -> int | None:
        __tracebackhide__ = True
        n = super()._take_contexts(contexts, processes, maxtasksperchild, options)
        for i, context in enumerate(self._contexts or ()):
            for name, kinds in ("env", (Mapping,)), ("cpus", (tuple, list, set)):
                binding = getattr(context, name, None)
                if isinstance(binding, kinds) and binding:
                    raise OptionError(
                        f"worker_contexts[{i}] has {name}, which binds a process, but threads "
                        "share the program's process; use CtxPool, or give contexts without it"
                    )
        return n
