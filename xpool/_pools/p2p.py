"""`P2PPool`: a task is bound to one worker when it is submitted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from xpool._calls.options import CallOptions, check_count, takes_keywords
from xpool._calls.results import AsyncResult
from xpool._pools.engine_submitter import EngineSubmitter, PeerSubmitter
from xpool._pools.process import Pool
from xpool._pools.verbs import options_of, submit_call
from xpool.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class P2PPool(Pool):
    """A pool that binds each task to a worker when it is submitted.

    That is the worker with the least to do, or the one that the caller names: ``worker=i`` of
    `apply` and `apply_async`, from 0 to ``size() - 1``.  If the worker dies, its tasks wait for its
    replacement.

    Its workers can send messages to each other: ``current_worker().send(peer, obj)`` and
    ``recv(peer)``, see `WorkerInfo` and docs/peers.md.
    """

    _fixed_size = "its callers and its workers name workers by their numbers"
    _has_peers = sys.platform == "linux"
    _calls_go_to: int | None = -1

    @takes_keywords(CallOptions)
    def apply(
        self,
        func: Callable[..., T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        *,
        worker: int | None = None,
        **keywords: Unpack[CallOptions],
    ) -> T:
        """As `BasePool.apply`, on the worker with index ``worker`` if it is given."""
        options = options_of(self, CallOptions, keywords, True, self._bind(worker))
        value: T = submit_call(self, func, args, kwds, options).get()
        return value

    @takes_keywords(CallOptions)
    def apply_async(
        self,
        func: Callable[..., T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callable[[T], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        worker: int | None = None,
        **keywords: Unpack[CallOptions],
    ) -> AsyncResult[T]:
        """As `BasePool.apply_async`, on the worker with index ``worker`` if it is given.

        Raises:
            OptionError (a `ValueError`): there is no such worker.
        """
        options = options_of(self, CallOptions, keywords, False, self._bind(worker))
        return submit_call(self, func, args, kwds, options, callback, error_callback)

    def _bind(self, worker: int | None) -> int | None:
        if worker is None:
            return self._calls_go_to
        if check_count("worker", worker, least=0) >= self._size:
            raise OptionError(
                f"worker must be from 0 to {self._size - 1} in this pool, not {worker}"
            )
        return worker

    def _make_submitter(self) -> EngineSubmitter:
        return PeerSubmitter(self, self._jobs, self._engine, self._packer)
