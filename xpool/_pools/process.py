"""Pools of processes: `Pool`, where any idle worker takes the next task, and `P2PPool`."""

from __future__ import annotations

import functools
import multiprocessing
import os
import reprlib
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, TypeVar, cast

from xpool._calls.options import check_context
from xpool._calls.results import Job
from xpool._engine.jobs.ranges import WHOLE
from xpool._engine.launch import (
    ForkServer,
    Launcher,
    ProcessLauncher,
    import_for_arrays,
    wanted_modules,
)
from xpool._memory.system import default_processes
from xpool._pools.base import BasePool, at_exit
from xpool._pools.hooks import Result, Task, next_result
from xpool._pools.job_table import CAUSED, HOOKED
from xpool._pools.pool_options import FOR_WORKERS, REFUSED_OVER_HOSTS, PoolOptions, takes
from xpool._pools.submitters import HookSubmitter
from xpool._python.interrupt import shielded
from xpool._python.starting import interpreter, occupy_streams
from xpool._python.uncollected import uncollected
from xpool._worker.worker_context import imported_by_worker
from xpool.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    from xpool._engine.protocols import EngineProtocol
    from xpool._pickling.frame import Layout
    from xpool._pools import assembly
    from xpool._pools.all_workers import AllWorkers
    from xpool._pools.assembly import WorkerSpec
    from xpool._pools.engine_submitter import EngineSubmitter, Packer
    from xpool._pools.worker_group import WorkerGroup

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")


def _import_parts() -> None:
    """Import the other parts of a pool: after the start of its fork server, which imports, too."""
    global assembly
    from xpool._pools import assembly


class Pool(BasePool):
    """Worker processes, with the methods of `multiprocessing.pool.Pool`::

        with Pool(4) as pool:
            results = pool.map(func, items)

    * To run tasks: `apply`, `map`, `starmap`, `imap`, `imap_unordered`, those with ``_async``,
      `submit`, and `run_all` for a call in each worker.  ``help(Pool.map)`` describes one.
    * To observe it: `report`, `stacks`, `statistics`, `trace`, `watch`.
    * To end it: `close` or `terminate`, then `join`.  The end of ``with`` terminates it.

    Args:
        processes: number of workers; None: one for each core.
        initializer, initargs: called in each worker before its first task.
        maxtasksperchild: tasks after which a worker is replaced; a chunk is one.
        context: how workers start: "forkserver" (None: the same, on Linux), "spawn", "fork", or a
            context of `multiprocessing`.
        is_recursive: pickle the globals of functions as dill's ``recurse``.
        is_daemon: False: workers may have children of `multiprocessing`.
        is_copy_tensor: False: both sides see each other's writes to tensors.
        share_method: with ``is_copy_tensor=False``, share only tensors on this device: "cpu",
            "cuda" or "xla".
        memory_limit: bytes of shared memory; what does not fit goes through pipes.
        seed: from which the workers' random generators are seeded.
        task_timeout: seconds for each call without ``timeout=``.
        initializer_timeout: seconds for a worker's start, with its initializer.
        restart_budget: how many workers may die in a minute in which no task finishes.
        output: "prefix": ``[worker 3]`` before printed lines; "files": each task prints into a
            file in ``output_folder``.
        on_worker_end: called with a `WorkerEnd` for each worker that ended, before its replacement
            starts.
        worker_memory: bytes ("2GB"); workers with more are replaced.
        memory_high: from 0 to 1; tasks wait while a larger part of the memory is in use.
        hosts: the hosts of workers on other machines: ``xpool.ray.hosts()``.
        name: of the pool and its workers.

    Raises:
        TypeError: an argument has a wrong type.
        OptionError (a `ValueError`): an argument has a wrong value.
        OSError: the system refuses descriptors or processes.
    """

    output_folder: str | None = None
    """With ``output="files"``: the folder of the tasks' output; else None."""

    _engine: EngineProtocol
    _packer: Packer
    _tasks: EngineSubmitter
    _all: AllWorkers
    _stops_tasks = _seeds_items = True
    _has_peers = False  # whether workers can send messages to each other
    # The workers, by index, of each process with several; and whether all start and end together.
    _processes: Sequence[list[int]] = ()
    _is_group = False

    @takes(PoolOptions)
    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._options = options = PoolOptions.of(self, args, keywords)
        module = imported_by_worker()
        if module is not None:
            raise OptionError(
                f"this pool is made while a worker imports {module} for a task, so each worker "
                "would make such a pool; make it in a function, or behind "
                'if __name__ == "__main__":'
            )
        occupy_streams()
        processes, hosts = options.processes, options.hosts
        if hosts is not None:
            if not hasattr(hosts, "make_engine"):
                raise OptionError(
                    f"hosts must be made by xpool.ray.hosts(), not {reprlib.repr(hosts)}"
                )
            options.refuse(REFUSED_OVER_HOSTS)
            self._fixed_size = "its hosts decide how many workers it has; add or remove a host"
            self._nodes = hosts.find()
            processes = sum(node.workers for node in self._nodes)
        self._task_timeout = options.task_timeout
        super().__init__(
            processes, options.initializer, options.initargs, options.maxtasksperchild,
            options.context, name=options.name,
        )  # fmt: skip

    # -- hooks -----------------------------------------------------------------------------------

    def _start_server(self) -> Launcher:
        """Start the fork server; while it imports, import the other parts of a pool."""
        launcher = _find_launcher(self.context)
        if isinstance(launcher, ForkServer):
            launcher.start()
        # After the server has started, so that both import at the same time.
        with uncollected():
            _import_parts()
            import_for_arrays()
        options, token = self._options, os.urandom(8).hex()
        arena, limit, layout = assembly.find_arena(
            options.is_copy_tensor, options.share_method, options.memory_limit, token
        )
        self._packer = assembly.Packer(options.is_recursive, token, layout, arena, limit)
        assembly.pools[token] = self
        return launcher

    def _pack_by(self, layout: Layout) -> Packer:
        """Have messages pickled by this layout, all through pipes; return the packer."""
        token = os.urandom(8).hex()
        self._packer = assembly.Packer(self._options.is_recursive, token, layout)
        return self._packer

    def _worker_spec(self, initializer: bytes | None) -> WorkerSpec:
        """Return the part of the workers' configuration that all share."""
        options, contexts = self._options, self._contexts or []
        packed = [
            self._packer.pack_context(f"worker_contexts[{i}]", context)
            for i, context in enumerate(contexts)
        ]
        return assembly.WorkerSpec(
            pool=self.name,
            initializer=initializer,
            contexts=packed or None,
            binds=[dict(getattr(context, "env", None) or {}) for context in contexts],
            cpus=[tuple(getattr(context, "cpus", None) or ()) for context in contexts],
            options={name: getattr(options, name) for name in FOR_WORKERS},
            seed=os.urandom(16) if options.seed is None else str(options.seed).encode(),
            token=self._packer.token,
            peers=self._size if self._has_peers else 0,
            threads=max(1, default_processes() // self._size),
        )

    @shielded
    def setup_queues(self) -> None:
        """Make the engine: it has a private channel to each worker."""
        if type(self).worker is not Pool.worker:
            raise TypeError(
                f"{type(self).__name__} overrides worker(), which the processes of a Pool do not "
                "call; override it in a subclass of BasePool or ThreadPool, or wrap the function"
            )
        hosts = self._options.hosts
        if self._options.output == "files":
            from xpool._worker.task_output import TaskFiles

            self._files = TaskFiles(self.name)
            self.output_folder = self._files.folder
        if hosts is not None:
            _import_parts()
            self._engine = hosts.make_engine(self, self._nodes)
        else:
            self._engine = self._make_engine(self._start_server())
        self._backend = self._engine
        self._tasks = self._submitter = assembly.EngineSubmitter(
            self, self._jobs, self._engine, self._packer, self._calls_go_to
        )
        self._jobs.hooked = ""
        if type(self).pool_inqueue_put is not Pool.pool_inqueue_put:
            self._submitter = HookSubmitter(self, self._jobs, self._tasks)
            self._jobs.hooked = CAUSED
        if type(self).pool_outqueue_get is Pool.pool_outqueue_get:
            self._jobs.results = self._engine.results
        else:
            self._jobs.hooked = HOOKED
            # Also the answers that callers receive go to the hook, in the engine's thread.
            wake = self._jobs.wake
            self._tasks.take = lambda results: results and wake()
        self._all = assembly.AllWorkers(
            self._tasks, self._life, self._size, self._task_timeout, hosts, self._files
        )

    def _make_engine(self, launcher: Launcher) -> EngineProtocol:
        options = self._options
        inherited, whole = None, (self.initializer, *self.initargs)
        referred = self._packer.refer(whole)
        try:
            blob = self._packer.pack_start(referred)
        except Exception as exc:  # of any object's own __reduce__
            if not launcher.inherits:
                if not _only_by_inheritance(exc):
                    raise
                method = self.context if isinstance(self.context, str) else None
                launcher = _find_inheriting_launcher(method)
            inherited = self.initializer, self.initargs
            # Send the globals that the initializer uses: tasks must not set them again.
            named = {n: one for n, one in enumerate(referred) if one is not whole[n]}
            blob = self._packer.pack_option("initializer", (referred[0], named))
        if launcher.inherits and multiprocessing.current_process().daemon:
            raise OptionError(
                "multiprocessing would start the workers of this pool, which is made in a worker "
                "of another pool: daemonic processes are not allowed to have children; give "
                "is_daemon=False to the outer pool, or give this one no context and no objects "
                "that only a context can pass on"
            )
        on_end = None
        if options.on_worker_end is not None:
            on_end = self._jobs.callbacks.for_ends(options.on_worker_end, self._contexts or ())
        spec = self._worker_spec(blob)
        arena = self._packer.arena
        config = assembly.worker_config(spec, launcher, arena, self._packer.memory_limit)
        return assembly.Engine(
            self._size,
            assembly.Recipe(
                launcher,
                config,
                self.name,
                options.is_daemon,
                inherited,
                arena,
                assembly.Relay(self.name),
                self._has_peers,
            ),
            functools.partial(describe, self._jobs.unanswered),
            assembly.engine_options(options, self._size)._replace(
                processes=self._processes, together=self._is_group, on_end=on_end
            ),
        )

    def pool_inqueue_put(self, obj: Task | None) -> None:
        """Pickle a task and give it to an idle worker, or queue it; None: let all workers end."""
        if obj is None:
            self._engine.retire_all()
            return
        number, chunk, func, args, kwds = obj
        job = self._jobs.unanswered.get(number)
        # None: the job was cancelled, or has failed, meanwhile.
        if job is not None:
            self._tasks.put_task(job, chunk, (func, args, kwds))

    def pool_outqueue_get(self, timeout: float) -> Result:
        """Return the next result; the value is still pickled, a `PickledResult`."""
        return next_result(self._engine.results, self._engine.wait, timeout)

    @shielded
    def repopulate_pool(self) -> None:
        """Start the workers that are missing."""
        self._engine.start_missing()

    def maintain_pool(self) -> bool:
        """Do nothing: the engine replaces a dead worker at once."""
        return False

    def terminate_workers(self) -> None:
        """Ask the workers to stop; the engine kills those that have not stopped a moment later."""
        self._engine.terminate(self._ends_at_once)

    def join_workers(self) -> None:
        """Wait until all processes have ended."""
        while not self._engine.ended:
            self._engine.wait()

    @shielded
    def _resize(self, size: int) -> None:
        self._all.resize(size)
        self._size = size

    def _release_workers(self) -> None:
        self.pool_inqueue_put(None)

    # -- all workers at once -----------------------------------------------------------------------

    def run_all(
        self, func: Callable[[Unpack[Ts]], T], *args: Unpack[Ts], timeout: float | None = None
    ) -> list[T]:
        """Call ``func(*args)`` once in each worker; return the results, by index of the worker.

        A busy worker makes the call after the tasks that it holds.  All workers make the calls of
        several threads in the same order, so the functions may wait for each other.  Each worker
        gets its own copies of the arguments; a `broadcast` object is the worker's one copy.

        If one call fails, the others are stopped, as by `AsyncResult.cancel`.  When they have left
        the function, the exception is raised here; its ``__cause__`` names the worker.  A worker
        that dies in the call fails it, and is replaced.  If another worker's failure has caused a
        `PeerLost`, that failure is raised instead.  If the group of `create_group` is broken, a new
        one is made before the call.

        Args:
            timeout: seconds that each call may run in its worker; None: the pool's
                ``task_timeout``.

        Raises:
            Exception: what ``func`` raised.
            WorkerDied, TaskTimeout: with the ``worker`` that died or took too long.
            TaskNotPicklable: ``func``, an argument or a result cannot be sent.
            PoolClosed: the pool takes no more work.
        """
        return self._all.run(func, args, timeout)

    def create_group(self, backend: str = "gloo", *, timeout: float = 60) -> WorkerGroup:
        """Make the workers one world of `torch.distributed`, in which functions of `run_all`
        communicate; see `WorkerGroup`.  A pool has one group: a second call replaces it.

        Args:
            backend: ``"gloo"`` on any workers; ``"nccl"`` on those of ``devices("cuda")``;
                ``"xla"`` on those of one replica group.
            timeout: seconds for making it, and for each collective operation.

        Raises:
            OptionError: there is no such backend, or it does not fit these workers.
            WorkerDied, xpool.distributed.GroupTimeout: as `WorkerGroup.rebuild`.
            PoolClosed: the pool takes no more work.
        """
        from xpool._pools.worker_group import WorkerGroup

        self._life.check_running()
        contexts, shared = self._contexts or [], bool(self._processes)
        return self._all.create_group(WorkerGroup(self._all, contexts, shared, backend, timeout))

    def broadcast(self, obj: T) -> T:
        """Pickle an object once for all workers; return a reference, to be given to tasks.

        For type checkers, the reference is the object that tasks get.

        A task gets the object if the reference is an argument, is inside of one, or is in its
        function's closure.  Each worker unpickles the object when a task first uses it there, and
        keeps it while the reference lives, so all its tasks get the same object.  A worker that
        replaces another unpickles it again.  The memory of its tensors and arrays is shared by all
        workers of this machine.  A worker that writes to it gets its own copy of the pages, which
        no other process sees.

        Raises:
            TaskNotPicklable: the object cannot be pickled, or there is no memory for it.
            PoolClosed: the pool takes no more work.
        """
        reference: Any = self._all.broadcast(obj)
        return reference  # type: ignore[no-any-return]

    # -- observing ---------------------------------------------------------------------------------

    @shielded
    def statistics(self) -> dict[str, Any]:
        """Return counts, by name.

        ======================  ==========================================================
        ``state``               "RUN", "CLOSE" or "TERMINATE"
        ``workers``             number of workers that the pool keeps
        ``ready``               workers that take tasks now
        ``submitted``           tasks submitted so far
        ``succeeded, failed``   tasks answered by a value, and by an error
        ``jobs``                unanswered calls of verbs
        ``waiting, running``    tasks that no worker has begun, and tasks that run
        ``deaths``              workers that have died
        ``pids``                each worker's process id; None: it has no process
        ``hosts``               in a pool over hosts: the counts of each host, by its name
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


def describe(jobs: dict[int, Job], number: int, index: int) -> str:
    """Return the text that names a task in messages."""
    job = jobs.get(number)
    if index == WHOLE:
        return "" if job is None else job.label
    return f"task {index}" if job is None else job.describe(index)


def _find_launcher(context: BaseContext | str | None) -> Launcher:
    """Return the launcher for the workers of a pool with this ``context=``."""
    if hasattr(context, "launch"):  # a launcher of a loader
        return cast(Launcher, context)
    if context is None or context == "forkserver":
        if sys.platform != "linux":
            return ProcessLauncher(multiprocessing.get_context("spawn"))
        return ForkServer.get(wanted_modules())
    check_context("context", context)
    if isinstance(context, str):
        context = multiprocessing.get_context(context)
    if context.get_start_method() == "fork":
        if (runtime := _running_runtime()) is not None:
            raise OptionError(
                f"workers cannot be forks: this process has started the {runtime} runtime, which "
                "does not survive a fork; leave context= out, or use 'spawn', and make the locks "
                "and queues in initargs= by multiprocessing.get_context('spawn')"
            )
        return ProcessLauncher(context)
    interpreter(freeze_support=True)
    return ProcessLauncher(context)


def _find_inheriting_launcher(method: str | None) -> Launcher:
    """Return the launcher of a pool whose workers inherit locks and queues of `multiprocessing`.

    Without a ``method``, it is that of `multiprocessing`, but a fork instead of its fork server,
    the default since Python 3.14, which would run the script.
    """
    context = multiprocessing.get_context(method)
    is_default = method is None and context.get_start_method() == "forkserver"
    if is_default and _running_runtime() is None:
        context = multiprocessing.get_context("fork")
    return _find_launcher(context)


def _running_runtime() -> str | None:
    if "torch" not in sys.modules:
        return None  # all such runtimes are torch's
    from xpool.devices._host import running_runtime  # only here: most programs never need it

    return running_runtime()


def _only_by_inheritance(exc: BaseException) -> bool:
    """Whether pickling failed because multiprocessing can send the object only to a new process."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, RuntimeError) and "inheritance" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


at_exit.append(ForkServer.stop_all)


class P2PPool(Pool):
    """A pool that binds each task to a worker when it is submitted.

    This worker is the one with the least to do, or the one that the caller names: ``worker=i`` of
    `apply` and `apply_async`, from 0 to ``size() - 1``.  If the worker dies, its tasks wait for its
    replacement.

    Its workers can send messages to each other: ``current_worker().send(peer, obj)`` and
    ``recv(peer)``, see `WorkerInfo` and docs/peers.md.
    """

    _fixed_size = "its callers and its workers name workers by their numbers"
    _has_peers = sys.platform == "linux"
    _calls_go_to: int | None = -1
