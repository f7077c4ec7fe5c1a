"""`Pool`: worker processes; any idle worker takes the next task."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import queue
import reprlib
import threading
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

from xpool._calls.keywords import names_of_inits, refuse_unknown
from xpool._calls.options import (
    TaskOptions,
    check_bytes,
    check_count,
    check_memory,
    check_output,
    check_seconds,
    check_seed,
    check_share_method,
    default_processes,
    label,
)
from xpool._calls.results import Job
from xpool._calls.streams import Stream
from xpool._engine.jobs.scheduler import CALLS, TaskRange
from xpool._engine.launch import ForkServer, Launcher, StandIns, import_for_arrays
from xpool._pools.all_workers import AllWorkers, limit_of
from xpool._pools.base import at_exit
from xpool._pools.hooks import Result, Task
from xpool._pools.input_reader import FlowControl, Runs
from xpool._pools.start_methods import find_launcher, only_by_inheritance
from xpool._pools.task_stream import TaskStream
from xpool._python.interrupt import by_handler, shielded
from xpool._python.server_process import occupy_streams
from xpool._wire.wire import Mode
from xpool._worker.callables import Retried, applied
from xpool._worker.main_module import imported_by_worker
from xpool.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Never

    from xpool._memory.arena import Arena
    from xpool._pickling.policy import Layout
    from xpool._pools.orders import WorkerSpec

__all__ = ["Pool", "describe", "limit_of"]


class Pool(AllWorkers):
    """A pool of worker processes, with the verbs of `multiprocessing.pool.Pool`.

    Args:
        processes, initializer, initargs, maxtasksperchild: as in `BasePool`.
        context: how workers start.  None: on Linux, xpool's own fork server, elsewhere "spawn".
            "forkserver" (the same server), "spawn", "fork", or a context of `multiprocessing`.
        is_recursive: pickle the globals of functions that must go by value as dill's ``recurse``.
        is_daemon: False lets workers have children of `multiprocessing`, such as those of a
            DataLoader; tasks may make pools of xpool's in any case.
        is_copy_tensor: True: what arrives is the receiver's own.  False: the storages of tensors
            move to shared memory, and both sides see each other's writes.
        share_method: when ``is_copy_tensor`` is False, the kind of device ("cpu", "cuda" or "xla")
            whose tensors are shared, while others are copied; None: all are shared, those on
            devices by `TensorHandle`.
        memory_limit: bytes of shared memory past which this pool sends large values through the
            pipe, counted for the whole program; None: half of what was available when the first
            pool was made; 0: always through the pipe.
        seed: each worker's `random`, numpy and torch generators get seeds of their own, derived
            from this number when it is given, else from the system's entropy.
        task_timeout: seconds for the calls of verbs that are given no ``timeout=``; None: any time.
        initializer_timeout: seconds that a worker may take until it is ready, from its first line,
            imports and initializer included; None: any time.
        restart_budget: how many workers may die in a minute without any task being finished; with
            the next death the pool stops (`PoolBroken`).  None: 100, or 4 for each worker.
        output: "prefix" puts ``[worker 3]`` before each line that a task prints.
        worker_memory: bytes of memory that a worker may have to itself, as a number or as text
            ("2GB", in powers of 1024; ``memory_limit`` too).  One that has more is ended
            within a fifth of a second or so and replaced; its task fails with a `WorkerDied` that
            says so, or is run again with ``retries=``.
        memory_high: a number from 0 to 1.  While a larger part of the machine's memory, or of the
            cgroup's, is in use, no worker gets a new task, but for one where none has any.
        hosts: where the workers are, as `xpool.ray.hosts` says; None: on this machine.  With it,
            leave ``processes`` and ``context`` out (docs/hosts.md).
        name: of the pool, its threads and its workers; made up by default.

    Raises:
        TypeError, OptionError (a `ValueError`): an argument makes no sense.
        OSError: the system refuses descriptors or processes.
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
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_unknown(type(self).__name__, names_of_inits(self), unknown)
        check_share_method(share_method)
        check_seed(seed)
        check_output(output)
        self._output = output
        self._memory = check_memory(worker_memory, memory_high)
        module = imported_by_worker()
        if module is not None:
            raise OptionError(
                f"this pool is made while a worker imports {module}, which it needs for a task, so "
                "each worker would make one; make it in a function, or behind "
                'if __name__ == "__main__":'
            )
        occupy_streams()
        self._recurse = is_recursive
        self._daemon = is_daemon
        self._copy_tensor = is_copy_tensor
        self._share_method = share_method
        if memory_limit is not None:
            memory_limit = check_bytes("memory_limit", memory_limit, least=0)
        self._wanted_limit = memory_limit
        self._files = []
        # Guards the size, and the order of what runs in all workers.
        self._order = threading.RLock()
        self._task_timeout = check_seconds("task_timeout", task_timeout)
        self._initializer_timeout = check_seconds("initializer_timeout", initializer_timeout)
        if restart_budget is not None:
            check_count("restart_budget", restart_budget)
        self._restart_budget = restart_budget
        self._seeded = seed is not None
        self._seed = os.urandom(16) if seed is None else str(seed).encode()
        # Shortcuts are for those who have not put their own hook in the way.
        self._direct = type(self).pool_inqueue_put is Pool.pool_inqueue_put
        self._hosts = hosts
        if hosts is not None:
            _check_over_hosts(hosts, processes, context, is_copy_tensor)
            self._nodes = hosts.find()
            processes = sum(node.workers for node in self._nodes)
        super().__init__(processes, initializer, initargs, maxtasksperchild, context, name=name)

    _keeps_terms = True
    _seeds_items = True
    _has_peers = False  # its workers can send messages to each other

    # -- hooks -----------------------------------------------------------------------------------

    def _may_stand_in(self) -> bool:
        """Whether a worker may end unseen before its first task, and torch be imported in it.

        Not where it would be seen: the initializer would run again, another seed would be used, its
        memory be counted; nor where its process is somebody's: the owner of a context, a peer.
        """
        owned = self._has_peers or self._gives_context
        counted = self.initializer is not None or self._seeded or self._memory[0] is not None
        return not (owned or counted)

    def _start_server(self) -> Launcher:
        """Start the fork server, and import meanwhile what else a pool is put together from."""
        launcher = find_launcher(self.context, self._may_stand_in())
        if isinstance(launcher, (ForkServer, StandIns)):
            launcher.start()
        # Not before: while the server imports what a worker needs, the program imports the rest;
        # and without a collection of garbage, which takes 150 ms where torch has many objects.
        collects = gc.isenabled()
        gc.disable()
        try:
            from xpool._pools import assembly

            import_for_arrays()
        finally:
            if collects:
                gc.enable()
        token = os.urandom(8).hex()
        arena, limit, layout = assembly.find_arena(
            self._copy_tensor, self._share_method, self._wanted_limit, token
        )
        self._pack_by(token, layout, arena, limit)
        assembly.pools[token] = self
        return launcher

    def _pack_by(
        self, token: str, layout: Layout, arena: Arena | None = None, limit: int = 0
    ) -> None:
        """Pickle messages by this layout, of an arena by up to ``limit`` bytes."""
        from xpool._pools import assembly

        self._token, self._arena, self._memory_limit = token, arena, limit
        self._packer = assembly.Packer(self._recurse, layout)

    def _worker_spec(self, initializer: bytes | None) -> WorkerSpec:
        """Return what the workers are told to be, by the options of the pool."""
        from xpool._pools import assembly

        contexts = self._worker_contexts()
        every = contexts or [None] * self._size
        return assembly.WorkerSpec(
            pool=self.name,
            initializer=initializer,
            contexts=None
            if contexts is None
            else [
                self._packer.pack_option(f"worker_contexts[{i}]", context)
                for i, context in enumerate(contexts)
            ],
            binds=[dict(getattr(context, "env", None) or {}) for context in every],
            cpus=[tuple(getattr(context, "cpus", None) or ()) for context in contexts or ()],
            daemon=self._daemon,
            recurse=self._recurse,
            seed=self._seed,
            copy_tensor=self._copy_tensor,
            share_method=self._share_method,
            token=self._token,
            peers=self._size if self._has_peers else 0,
            output=self._output,
            threads=max(1, default_processes() // self._size),
        )

    @shielded
    def setup_queues(self) -> None:
        """Make the engine: it has a private channel to each worker."""
        if self._hosts is not None:
            self._engine = self._backend = self._hosts.make_engine(self, self._nodes)
            return
        launcher = self._start_server()
        from xpool._pools import assembly

        blob, inherited = None, None
        try:
            blob = self._packer.pack_option(
                "initializer or initargs", (self.initializer, self.initargs)
            )
        except Exception as exc:  # of any object's own __reduce__
            if not launcher.inherits:
                if not only_by_inheritance(exc):
                    raise
                # Locks and queues of multiprocessing: its own contexts can pass them on.
                method = self.context if isinstance(self.context, str) else None
                launcher = find_launcher(multiprocessing.get_context(method))
            inherited = self.initializer, self.initargs
            if not launcher.forks:  # the globals that it uses go with it
                blob = self._packer.pack_option("initializer", self.initializer)
        if not launcher.bare and multiprocessing.current_process().daemon:
            raise OptionError(
                "a pool in a worker of a pool, whose workers multiprocessing would start: daemonic "
                "processes are not allowed to have children; give is_daemon=False to the outer "
                "pool, or to this one neither a context nor what only a context can pass on"
            )
        spec = self._worker_spec(blob)
        orders = assembly.Orders(spec, launcher, self._arena, self._memory_limit)
        engine = assembly.Engine(
            self._size,
            assembly.Recipe(launcher, orders, self.name, self._daemon, inherited),
            arena=self._arena,
            lifetime=self.maxtasksperchild,
            describe=functools.partial(describe, self._jobs),
            restart_budget=self._restart_budget or max(100, 4 * self._size),
            initializer_timeout=self._initializer_timeout,
            processes=self._processes(),
            together=self._is_group(),
            peers=self._has_peers,
            relay=assembly.Relay(self.name),
            worker_memory=self._memory[0],
            memory_high=self._memory[1],
        )
        self._engine = self._backend = engine

    def pool_inqueue_put(self, obj: Task | None) -> None:
        """Pickle a task and give it to an idle worker, or queue it; None: let all workers end."""
        if obj is None:
            self._engine.retire_all()
            return
        number, chunk, func, args, kwds = obj
        job = self._jobs.get(number)
        # None: it was cancelled, or failed, meanwhile.
        if job is not None:
            self._engine.submit(self._call_range(job, chunk, (func, args, kwds), job.terms))

    def pool_outqueue_get(self, timeout: float) -> Result:
        """Return the next result; the value is still pickled, a `Parcel`."""
        results = self._engine.results
        try:
            return results.popleft()
        except IndexError:
            pass  # looked at by trying: a caller that receives for itself pops here as well
        if timeout > 0:
            self._engine.wait(timeout)
            if results:
                return results.popleft()
        raise queue.Empty

    @shielded
    def repopulate_pool(self) -> None:
        """Start the workers that are missing."""
        self._engine.start_missing()

    def maintain_pool(self) -> bool:
        """Nothing is left to do: the engine replaces a worker the moment it sees its death."""
        return False

    def terminate_workers(self) -> None:
        """Ask the workers to stop, and kill those that have not a moment later."""
        self._engine.terminate(self._ends_at_once)

    def join_workers(self) -> None:
        """Wait until all processes have ended and been put away."""
        while not self._engine.ended:
            self._engine.wait()

    @shielded
    def _resize(self, size: int) -> None:
        with self._order:  # what is to run in all workers is submitted to all there are
            if self._group is not None:
                raise OptionError("a pool with a create_group cannot be resized")
            self._engine.resize(size)
            self._size = size

    # -- shortcuts ---------------------------------------------------------------------------------

    def _check_call(self, func: Any, callback: Any, error_callback: Any) -> None:
        if not callable(func) or callback is not None or error_callback is not None:
            super()._check_call(func, callback, error_callback)
        inner = func.func if isinstance(func, functools.partial) else func
        if getattr(getattr(inner, "__code__", None), "co_flags", 0) & _IS_ASYNC:
            raise TypeError(
                f"{label(inner)} is a coroutine function, and a coroutine cannot leave the worker; "
                f"send a function that runs it, with asyncio.run({label(inner)[:-1]}...))"
            )

    def _submit_call(
        self,
        job: Job,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwds: dict[str, Any],
        terms: TaskOptions,
    ) -> None:
        if not self._direct:
            super()._submit_call(job, func, args, kwds, terms)
            return
        job.is_call = True
        if terms.retry_on:
            func = Retried(func, terms.retry_on)
        retries, limit = terms.retries, None if terms.timeout is None else limit_of(terms)
        payload, worker = self._packer.pack_task((func, args, kwds), retries > 0, terms.worker)
        leased = type(payload) is not bytes  # it holds blocks, or is large
        if leased:
            self._engine.sent(payload)
        if terms.waits or worker is not None:
            task_range = TaskRange(CALLS, 0, job.number, (payload,), retries, worker, limit)
            del payload  # it holds what was lent for this call, and so does the range
            if terms.waits:
                self._engine.call(task_range)
                if self._engine.results:
                    self._pump()
            else:
                self._engine.submit(task_range)
        else:
            self._engine.submit_call(job.number, payload, retries, limit)

    def _submit_each(
        self,
        job: Job,
        func: Callable[..., Any],
        starred: bool,
        chunked: bool,
        chunks: Iterable[Any],
        terms: TaskOptions,
    ) -> None:
        if not self._direct:
            super()._submit_each(job, func, starred, chunked, chunks, terms)
            return
        job.func, owner = self._learn(func, starred, chunked, terms)
        begin = TaskRange(job.number, job.func, 0, (), terms.retries, None, limit_of(terms))
        task_ranges = [begin]
        failed = []
        for i, chunk in enumerate(chunks):
            try:
                payload, worker = self._packer.pack_task(chunk, terms.retries > 0, owner)
            except Exception as error:
                if by_handler(error):
                    raise
                # It fails alone; what comes after it is a task range of its own.
                failed.append((i, error))
                task_ranges.append(begin.beside(i + 1))
                continue
            self._engine.sent(payload)
            if worker is None:
                task_ranges[-1].items.append(payload)
            else:
                task_ranges += begin.beside(i, (payload,), worker), begin.beside(i + 1)
        for task_range in task_ranges:
            if task_range.items:
                self._submit_range(task_range)
        for i, exc in failed:
            self._deliver(job.number, i, False, exc)

    def _submit_only(
        self,
        job: Job,
        func: Callable[..., Any],
        starred: bool,
        chunked: bool,
        chunk: Any,
        terms: TaskOptions,
    ) -> None:
        plain = terms.timeout is None and not terms.retries and not terms.retry_on
        if not (plain and self._direct) or self._gives_context or self._has_peers:
            super()._submit_only(job, func, starred, chunked, chunk, terms)
        else:
            call, before = applied(func, starred, chunked)
            self._submit_call(job, call, (*before, chunk), {}, terms)

    def _call_range(
        self, job: Job, index: int, call: tuple[Any, ...], terms: TaskOptions
    ) -> TaskRange:
        if terms.retry_on:
            call = (Retried(call[0], terms.retry_on), *call[1:])
        payload, worker = self._packer.pack_task(call, terms.retries > 0, terms.worker)
        self._engine.sent(payload)
        return TaskRange(job.number, 0, index, (payload,), terms.retries, worker, limit_of(terms))

    def _learn(
        self, func: Callable[..., Any], starred: bool, chunked: bool, terms: TaskOptions
    ) -> tuple[int, int | None]:
        """Have the engine keep a function for the workers, or for one, if it holds handles."""
        if terms.retry_on:
            func = Retried(func, terms.retry_on)
        payload, owner = self._packer.pack_task(func, True, None)
        return self._engine.learn(_MODES[starred, chunked], payload), owner

    def _beside_bar(self, func: Callable[..., Any]) -> Callable[..., Any]:
        from xpool._worker.line_streams import Clearing  # only here: few programs have a terminal

        return Clearing(func)

    def _submit_range(self, task_range: TaskRange) -> None:
        self._engine.submit(task_range)

    def _open_stream(
        self,
        job: Job,
        func: Callable[..., Any],
        starred: bool,
        chunked: bool,
        flow: FlowControl,
        terms: TaskOptions,
    ) -> Callable[[int, Any], int]:
        if not self._direct:
            return super()._open_stream(job, func, starred, chunked, flow, terms)
        job.func, owner = self._learn(func, starred, chunked, terms)
        stream = TaskStream(self._engine, self._packer, job, flow, terms, owner)
        if owner is None:
            assert isinstance(job, Stream)
            job.runs = Runs(self._packer.pack_atoms, stream.put_run)
        return stream.put

    def _withdraw(self, job: Job) -> None:
        self._engine.withdraw(*_place(job))

    @shielded
    def _runs(self, job: Job) -> bool:
        return self._engine.runs(*_place(job))

    def _forget(self, job: Job) -> None:
        if job.func:
            self._engine.forget(job.func)
        super()._forget(job)

    def _release_workers(self) -> None:
        self.pool_inqueue_put(None)

    # -- looking at it -----------------------------------------------------------------------------

    @shielded
    def statistics(self) -> dict[str, Any]:
        """Return counts, by name.

        ======================  ==========================================================
        ``state``               "RUN", "CLOSE" or "TERMINATE"
        ``workers``             number of workers that the pool keeps
        ``ready``               workers that take tasks now
        ``submitted``           tasks submitted so far
        ``succeeded, failed``   tasks answered by a value, and by an error
        ``jobs``                calls of verbs that are not answered
        ``waiting, running``    tasks that no worker has begun, and that workers run
        ``deaths``              workers that have died
        ``pids``                each worker's process id; None where it has no process
        ``hosts``               of a pool over hosts: the counts of each host, by its name
        ======================  ==========================================================
        """
        return {**super().statistics(), **self._engine.statistics()}

    def __repr__(self) -> str:
        s = self.statistics()
        where = f"{len(s['hosts'])} hosts, " if "hosts" in s else ""
        return (
            f"<{type(self).__name__} {self.name} {s['state']}, {where}{s['ready']} of "
            f"{s['workers']} workers ready, {s['waiting']} tasks waiting, {s['running']} running, "
            f"{s['succeeded']} succeeded, {s['failed']} failed>"
        )


# inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR: to import that takes 10 ms.
_IS_ASYNC = 0x80 | 0x200

_MODES = {
    (False, False): Mode.EACH,
    (False, True): Mode.CHUNK,
    (True, False): Mode.STAR,
    (True, True): Mode.STARCHUNK,
}


def _check_over_hosts(hosts: Any, processes: Any, context: Any, copies: bool) -> None:
    if not hasattr(hosts, "find"):
        raise OptionError(f"hosts must be made by xpool.ray.hosts(), not {reprlib.repr(hosts)}")
    for name, is_given, why in (
        ("processes", processes is not None, "per_host= says how many workers each host has"),
        (
            "context",
            context is not None,
            "workers on other hosts start through xpool's fork server",
        ),
        ("is_copy_tensor=False", not copies, "hosts do not share memory"),
    ):
        if is_given:
            raise OptionError(f"{name} is not for a pool over hosts: {why}; leave it out")


def _place(job: Job) -> tuple[int, int | None]:
    """Return what the engine knows a job by, and which item of that it is; None: all of them."""
    return (CALLS, job.number) if job.is_call else (job.number, None)


def describe(jobs: dict[int, Job], number: int, index: int) -> str:
    """Say which task of a pool's jobs one is, for people."""
    job = jobs.get(number)
    return f"task {index}" if job is None else job.describe(index)


at_exit.append(ForkServer.stop_all)
