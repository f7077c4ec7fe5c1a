"""`PoolOptions`: the arguments of the constructors of `Pool` and `ThreadPool`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any, Concatenate, ParamSpec

from xpool._calls.keywords import names_of, names_of_inits, refuse_unknown
from xpool._calls.options import (
    check_bytes,
    check_choice,
    check_count,
    check_flag,
    check_memory,
    check_seconds,
    check_seed,
)
from xpool.errors import OptionError

P = ParamSpec("P")


class PoolOptions:
    """The checked arguments of the constructors of `Pool` and `ThreadPool`; `Pool` explains them.

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
        worker_memory: int | str | None = None,
        memory_high: float | None = None,
        hosts: Any = None,
        name: str | None = None,
    ) -> None:
        check_choice("share_method", share_method, "cpu", "cuda", "xla", None)
        check_seed(seed)
        check_choice("output", output, "prefix", "files", None)
        if memory_limit is not None:
            memory_limit = check_bytes("memory_limit", memory_limit, least=0)
        if restart_budget is not None:
            check_count("restart_budget", restart_budget)
        self.processes, self.initializer, self.initargs = processes, initializer, initargs
        self.maxtasksperchild, self.context, self.name = maxtasksperchild, context, name
        self.is_recursive = check_flag("is_recursive", is_recursive)
        self.is_daemon = check_flag("is_daemon", is_daemon)
        self.is_copy_tensor = check_flag("is_copy_tensor", is_copy_tensor)
        self.share_method = share_method
        self.memory_limit, self.seed, self.output, self.hosts = memory_limit, seed, output, hosts
        self.task_timeout = check_seconds("task_timeout", task_timeout)
        self.initializer_timeout = check_seconds("initializer_timeout", initializer_timeout)
        self.restart_budget = restart_budget
        self.worker_memory, self.memory_high = check_memory(worker_memory, memory_high)

    @classmethod
    def of(cls, pool: object, args: tuple[Any, ...], keywords: dict[str, Any]) -> PoolOptions:
        """Return the options with which the constructor of ``pool`` is called."""
        known = names_of(cls.__init__.__code__)
        unknown = [name for name in keywords if name not in known]
        if unknown:
            refuse_unknown(type(pool).__name__, names_of_inits(pool), unknown)
        return cls(*args, **keywords)

    def deaths_a_minute(self, workers: int) -> int:
        """Return how many workers may die in a minute without any task being finished."""
        return self.restart_budget or max(100, 4 * workers)

    def refuse(self, **reasons: str) -> None:
        """Raise `OptionError` if an option is given that this pool cannot have, with the reason."""
        for name, reason in reasons.items():
            value = getattr(self, name)
            if value is not None:
                raise OptionError(f"{name}={value!r}: {reason}; leave it out, or use xpool.Pool")


def takes(
    options: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of these options: for type checkers and for `help`."""

    def with_signature(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        init.__wrapped__ = options.__init__  # type: ignore[attr-defined]
        return init

    return with_signature
