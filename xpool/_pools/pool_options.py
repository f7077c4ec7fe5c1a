"""`PoolOptions`: the arguments of the constructors of `Pool` and `ThreadPool`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from xpool._calls.options import (
    check_bytes,
    check_callable,
    check_choice,
    check_count,
    check_flag,
    check_memory,
    check_optional,
    check_seconds,
    check_seed,
    names_of,
    names_of_inits,
    refuse_unknown,
)
from xpool.errors import OptionError

if TYPE_CHECKING:
    from xpool._engine.ledger import WorkerEnd

P = ParamSpec("P")

FOR_WORKERS = ("is_recursive", "is_daemon", "is_copy_tensor", "share_method", "output")
"""The options that workers get in their configuration, under these names."""

REFUSED_BY_THREADS = {
    "context": "threads have no start method",
    "seed": "all threads share the random generators of this process",
    "output": "all threads share the stdout and stderr of this process",
    "on_worker_end": "no thread can be killed, so the exit() of its context does this",
    "worker_memory": "all threads share the memory of this process",
    "memory_high": "it holds back tasks for other processes",
    "hosts": "threads run on this host",
}

REFUSED_OVER_HOSTS = {
    "processes": "per_host= says how many workers each host has",
    "context": "workers on other hosts start through xpool's fork server",
    "is_copy_tensor": "hosts do not share memory",
    "on_worker_end": "a host replaces its workers without asking the program",
}


class PoolOptions:
    """The checked arguments of the constructors of `Pool` and `ThreadPool`; `Pool` explains them.

    An option is declared here: in the signature, in one line that checks it, and in the tables
    above if workers get it or a kind of pool refuses it.
    `BasePool` checks the first five and ``name``.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[object] = (),
        maxtasksperchild: int | None = None,
        context: BaseContext | str | None = None,
        *,
        is_recursive: bool = False,
        is_daemon: bool = True,
        is_copy_tensor: bool = True,
        share_method: str | None = None,
        memory_limit: int | str | None = None,
        seed: int | None = None,
        task_timeout: float | None = None,
        initializer_timeout: float | None = None,
        restart_budget: int | None = None,
        output: str | None = None,
        on_worker_end: Callable[[WorkerEnd], object] | None = None,
        worker_memory: int | str | None = None,
        memory_high: float | None = None,
        hosts: Any = None,
        name: str | None = None,
    ) -> None:
        __tracebackhide__ = True
        self.processes, self.initializer, self.initargs = processes, initializer, initargs
        self.maxtasksperchild, self.context, self.name = maxtasksperchild, context, name
        self.is_recursive = check_flag("is_recursive", is_recursive)
        self.is_daemon = check_flag("is_daemon", is_daemon)
        self.is_copy_tensor = check_flag("is_copy_tensor", is_copy_tensor)
        self.share_method = check_choice("share_method", share_method, "cpu", "cuda", "xla", None)
        self.memory_limit = check_optional(check_bytes, "memory_limit", memory_limit, least=0)
        self.seed = check_seed("seed", seed)
        self.task_timeout = check_seconds("task_timeout", task_timeout)
        self.initializer_timeout = check_seconds("initializer_timeout", initializer_timeout)
        self.restart_budget = check_optional(check_count, "restart_budget", restart_budget)
        self.output = check_choice("output", output, "prefix", "files", None)
        if on_worker_end is not None:
            check_callable("on_worker_end", on_worker_end)
        self.on_worker_end = on_worker_end
        self.worker_memory, self.memory_high = check_memory(worker_memory, memory_high)
        self.hosts = hosts

    @classmethod
    def of(cls, pool: object, args: tuple[Any, ...], keywords: dict[str, Any]) -> PoolOptions:
        """Return the options with which the constructor of ``pool`` is called."""
        __tracebackhide__ = True
        known = names_of(cls.__init__.__code__)
        unknown = [name for name in keywords if name not in known]
        if unknown:
            refuse_unknown(type(pool).__name__, names_of_inits(pool), unknown)
        return cls(*args, **keywords)

    def refuse(self, reasons: dict[str, str], instead: str = "") -> None:
        """Raise `OptionError` if an option is given for which there is a reason against it."""
        defaults = PoolOptions.__init__.__kwdefaults__ or {}
        for name, reason in reasons.items():
            value = getattr(self, name)
            if value is not defaults.get(name):
                raise OptionError(f"{name}={value!r}: {reason}; leave it out{instead}")


def takes(
    options: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of these options: for type checkers and for `help`."""

    def with_signature(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        init.__wrapped__ = options.__init__  # type: ignore[attr-defined]
        return init

    return with_signature
