"""`EngineSubmitter` gives the tasks of a verb to an engine in ranges; `Packer` pickles them."""

from __future__ import annotations

import functools
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any

from xpool._calls.options import label
from xpool._calls.results import Job
from xpool._calls.streams import IMapIterator, Stream
from xpool._engine.jobs.ranges import CALLS, TaskRange
from xpool._memory.anonymous_files import File
from xpool._memory.arena import Arena
from xpool._memory.holds import Block
from xpool._memory.system import available_memory
from xpool._pickling import SETTINGS, Brought, Key
from xpool._pickling.by_value.broadcast import Broadcast, publish
from xpool._pickling.by_value.sent import Book
from xpool._pickling.diagnose import at, say_where
from xpool._pickling.frame import BY_PIPE, Layout, Leased, share
from xpool._pickling.pickler import encode_atoms
from xpool._pickling.reducers import FOR_SUBCLASSES, LAZY, Context
from xpool._pools.hooks import Hooks, Result
from xpool._pools.input_reader import FlowControl, Runs
from xpool._pools.job_table import JobTable
from xpool._pools.submitters import (
    CALL,
    CO_ASYNC,
    FUNCTION,
    ITEM,
    HookSubmitter,
    Put,
    Work,
)
from xpool._python.interrupt import deliver, interruptible, pass_on, pending, shielded
from xpool._worker.callables import OF_MAPS, TaskFunction, task_function
from xpool.errors import OptionError, PoolClosed, TaskNotPicklable
from xpool.pickle import encode

if TYPE_CHECKING:
    from typing_extensions import Never

    from xpool._engine.protocols import EngineProtocol

Payload = bytes | memoryview
Told = frozenset[tuple[str, str]]


def _place(task: Any, role: str, path: str) -> str:
    """Return words for the place of an object in a task."""
    if role == ITEM:
        return f" in an item, at {path.lstrip('.')}" if path else " as an item"
    if role == FUNCTION:
        return _in_function(task, path)
    function, args, _ = task
    match = re.fullmatch(_IN_CALL, path, re.DOTALL)
    if match is None:
        return at(path)
    root, key, rest = match.groups()
    of_map = function in OF_MAPS
    if of_map:
        function = args[0]
    if root == "0" or (of_map and key == "0"):
        return _in_function(function, rest)
    if of_map:
        return _place(task, ITEM, rest)
    if type(function) is TaskFunction:
        function = function.func
    place = f"argument {key} of {label(function)}"
    return f" at {rest.lstrip('.')} in {place}" if rest else f" as {place}"


_IN_CALL = r"\[([012])\](?:\[(.*?)\])?(.*)"


def _in_function(function: Any, path: str) -> str:
    if type(function) is TaskFunction:
        function, path = function.func, path.removeprefix(".func")
    name = label(function)
    if not path:
        return ""  # the function itself, or something that it uses by name
    if path[0] not in ".[":
        path = f".{path}"
    # The name is in the path to a variable or a default of the function itself.
    known = path.startswith(f".{getattr(function, '__name__', '')}'s ")
    return f" at {path[1:]}" if known else f" at {name.removesuffix('()')}{path}"


_START = "initializer or initargs"


def _place_in_start(start: tuple[Any, Any], path: str) -> str:
    """Return words for a place in the initializer or its arguments."""
    if path.startswith("[0]"):
        return _in_function(start[0], path[3:])
    return at(f"initargs{path[3:]}" if path.startswith("[1]") else path)


class Packer:
    """Pickles the messages of the pool that ``token`` identifies.

    With an arena, the messages take at most ``memory_limit`` bytes of it.
    """

    def __init__(
        self,
        recurse: bool,
        token: str,
        layout: Layout,
        arena: Arena | None = None,
        memory_limit: int = 0,
    ) -> None:
        self.recurse, self.token, self.layout = recurse, token, layout
        self.arena, self.memory_limit = arena, memory_limit

    @interruptible
    def pack_task(
        self, task: Any, kept: bool, worker: int | None, told: Told = frozenset(), role: str = CALL
    ) -> tuple[Payload, int | None]:
        """Pickle a task for a worker (None: any, -1: the least loaded); return message and worker.

        ``kept``: the message may be sent more than once.  ``told``: the globals of the program that
        came with the task's function.  ``role``: what the task is, for errors.
        A task with handles to tensors on devices goes to their worker; if there are several, to the
        one with most of their bytes.  Tensors of other workers are copied.
        """
        if pending:
            deliver()
        layout = self.layout._replace(kept=True) if kept else self.layout
        try:
            payload = encode(task, recurse=self.recurse, layout=layout, told=told)
            # Handles to tensors on devices are blocks, so a message without blocks has no handles.
            if type(payload) is not Leased:
                return payload, worker
            owners = payload.owners
            if not owners:
                return payload, worker
            if worker is None or worker < 0:
                worker = min(owners, key=lambda i: (-owners[i], i))
            if owners.keys() - {worker}:
                # Pickle it again for the worker that was chosen.
                layout = self.layout._replace(target=worker, kept=kept)
                payload = encode(task, recurse=self.recurse, layout=layout, told=told)
            return payload, worker
        except Exception as exc:  # also one that the code of an object has raised
            say_where(exc, functools.partial(_place, task, role))
            raise

    @interruptible
    def pack_option(self, name: str, obj: Any, told: Told = SETTINGS, later: bool = False) -> bytes:
        """Pickle an object that every worker, including replacements, gets at its start.

        ``later``: workers open the message at any time, so it must not set globals that they have.
        """
        if pending:
            deliver()
        layout = self.layout._replace(kept=True)  # all workers copy from one block
        if later:
            layout = layout._replace(book=None)
        try:
            payload = encode(obj, recurse=self.recurse, layout=layout, told=told)
        except Exception as exc:
            if name == _START:
                say_where(exc, functools.partial(_place_in_start, obj))
            if isinstance(exc, TaskNotPicklable):
                raise TaskNotPicklable(f"{name}: {exc}") from exc
            raise
        return payload if isinstance(payload, bytes) else bytes(payload)

    def pack_start(self, start: tuple[Any, ...]) -> bytes:
        """Pickle an initializer and its arguments."""
        return self.pack_option(_START, (start[0], start[1:]))

    def refer(self, start: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return an initializer and its arguments, with references to globals of the program."""
        if start[0] is None:
            return start
        late = import_module("xpool._pickling.by_value.by_global")  # few pools need it
        referred: tuple[Any, ...] = late.referred(start, self.layout.arena is not None)
        return referred

    def pack_context(self, name: str, context: Any) -> bytes:
        """Pickle the context of a worker, which all its tasks use."""
        told = Brought(SETTINGS)  # which workers get at their start
        packed = self.pack_option(name, context, told)
        if self.layout.book is not None:
            self.layout.book.of_contexts |= told.names
        return packed


def _publish(
    token: str,
    lessor: Callable[[int], Block | None] | None,
    write: Callable[[Layout], Payload],
    what: str,
) -> Broadcast:
    """Store a message for all workers: in a block, or else in an anonymous file."""
    if lessor is not None:
        try:
            return publish(write, token, lessor, what)
        except TaskNotPicklable:
            pass  # the arena has no memory left
    message = write(BY_PIPE)
    return Broadcast(token, File(message), len(message), None, what)


def find_arena(
    copy_tensor: bool, method: str | None, limit: int | None, token: str
) -> tuple[Arena | None, int, Layout]:
    """Return the arena of a pool, the bytes that it may use, and the layout of its messages."""
    arena = Arena.own()
    if arena is None:
        if not copy_tensor:
            raise OptionError(
                "is_copy_tensor=False: this process cannot have memory that it shares with workers "
                "(this needs Linux, and no limit on addresses, ulimit -v); leave it out"
            )
        publisher = functools.partial(_publish, token, None)
        return None, 0, BY_PIPE._replace(book=Book(), publisher=publisher)
    if limit is None:
        limit = arena.limit
    lessor = functools.partial(arena.lease, limit=limit)
    publisher = functools.partial(_publish, token, lessor if limit else None)
    layout = Layout(lessor=lessor, pool=token, book=Book(), publisher=publisher)
    if not copy_tensor:
        layout = share(layout, arena, method)._replace(gpus=method in (None, "cuda"))
    return arena, limit, layout


RECEIVE_MILLISECONDS = 5.0
"""How long a caller waits in `receive`.  Signal handlers are deferred meanwhile, and a call that
another thread cancels has its result that much later."""


LEAST_AHEAD = 64 << 20
"""The caller of a `map` pickles so many bytes of tasks before workers have answered some, or a
quarter of the available memory if that is more.  `map_async`, whose caller goes on, pickles all."""

POLL_SECONDS = 0.005


class EngineSubmitter(HookSubmitter):
    """Pickles tasks and gives them to an engine.

    ``worker``: that of a task without handles to tensors; None: any, -1: the one with the least to
    do when it is submitted.
    """

    def __init__(
        self,
        pool: Hooks,
        jobs: JobTable,
        engine: EngineProtocol,
        packer: Packer,
        worker: int | None = None,
    ) -> None:
        super().__init__(pool, jobs)
        self.engine, self.packer, self.worker = engine, packer, worker
        self.take: Callable[[deque[Result]], object] = jobs.take
        """A caller that waits in `call` receives answers, and passes them to this function."""

    def name_of(self, func: Any) -> str:
        name = super().name_of(func)
        inner = func.func if isinstance(func, functools.partial) else func
        if getattr(getattr(inner, "__code__", None), "co_flags", 0) & CO_ASYNC:
            raise TypeError(
                f"{label(inner)} is a coroutine function, and a coroutine cannot leave the worker; "
                f"send a function that runs it, with asyncio.run({label(inner)[:-1]}...))"
            )
        return name

    def call(self, job: Job, func: Any, args: tuple[Any, ...], kwds: dict[str, Any]) -> None:
        """Submit the one task of a job; if its caller waits, receive the answer here."""
        options, engine = job.options, self.engine
        job.is_call = True
        if options.retry_on:
            func = task_function(func, retry_on=options.retry_on)
        terms = options.terms
        keep = terms.retries > 0
        payload, worker = self.packer.pack_task((func, args, kwds), keep, options.worker)
        if type(payload) is not bytes:  # the payload holds blocks, or is large
            engine.sent(payload)
        if not options.waits and worker is None:
            engine.submit_call(job.number, payload, terms)
            return
        if not options.waits:
            engine.submit(TaskRange(CALLS, 0, job.number, (payload,), worker, terms))
            return
        try:
            to = engine.put_direct(job.number, payload, worker, terms)
            if to is not None:
                engine.await_answer(to, job.number)
        finally:  # also if a signal handler has raised: there may be answers to others
            self.take(engine.results)

    @shielded
    def receive(self, job: Job, timeout: float | None) -> None:
        """Receive the answer of a call in this thread, if it comes soon."""
        engine, most = self.engine, RECEIVE_MILLISECONDS
        if timeout is not None:
            most = min(most, timeout * 1000)
        raised = None
        try:
            if most > 0:
                raised = engine.receive_call(job.number, most)
            self.take(engine.results)
        except BaseException as exc:  # such as a full stack: see `give_up`
            self.jobs.bookkeeping_error = exc
            self.jobs.wake()
            raise
        if raised is not None:
            raise raised

    def map(self, job: Job, work: Work, chunks: Iterable[Any]) -> None:
        """Submit a range of tasks, one for each chunk; a tuple of one chunk is a call."""
        one = self.worker is None and type(chunks) is tuple and len(chunks) == 1
        if one and job.options.plain:
            self.call(job, work.call, (work.func, *chunks), {})
            return
        begin, owner, told = self.learn(job, work)
        if owner is None and isinstance(chunks, Sequence):
            payloads = encode_atoms(chunks)
            if payloads is not None:
                begin.items.extend(payloads)
                self.engine.submit(begin)
                return
        task_ranges = [begin]
        failed = []
        large, most = 0, LEAST_AHEAD if job.options.waits else math.inf
        for i, chunk in enumerate(chunks):
            try:
                payload, worker = self.packer.pack_task(
                    chunk, job.options.terms.retries > 0, owner, told, ITEM
                )
            except Exception as error:
                pass_on(error)
                # Only this task fails.  The tasks after it are another range.
                failed.append((i, error))
                task_ranges.append(begin.beside(i + 1))
                continue
            if type(payload) is not bytes:
                large += self.engine.sent(payload)
            if worker is None:
                task_ranges[-1].items.append(payload)
            else:
                task_ranges += begin.beside(i, (payload,), worker), begin.beside(i + 1)
            if large > most:
                most = max(LEAST_AHEAD, available_memory() // 4) if most == LEAST_AHEAD else most
                if self._is_far_ahead(job, i + 1, large, most):
                    self._submit(job, task_ranges, failed)
                    task_ranges, failed = [begin.beside(i + 1)], []
                    self._await_workers(job, i + 1, large, most)
                    if job.settled:
                        return  # the pool has failed
        self._submit(job, task_ranges, failed)

    def _submit(
        self, job: Job, task_ranges: list[TaskRange], failed: list[tuple[int, Exception]]
    ) -> None:
        for task_range in task_ranges:
            if task_range.items:
                self.engine.submit(task_range)
        for i, exc in failed:
            self.jobs.deliver(job.number, i, False, exc)

    def _is_far_ahead(self, job: Any, tasks: int, nbytes: int, most: float) -> bool:
        """Whether the unanswered of the first tasks of a map take more memory than ``most``.

        ``nbytes``: that of all of them.  Each worker may have a task, and another one.
        """
        left: int = job.unanswered(tasks)
        pool: Any = self._pool()  # not None, because the caller of the verb holds it
        workers: int = pool.size()
        return left > 2 * workers and nbytes / tasks * left > most

    @interruptible
    def _await_workers(self, job: Any, tasks: int, nbytes: int, most: float) -> None:
        if pending:
            deliver()
        while not job.settled and self._is_far_ahead(job, tasks, nbytes, most):
            job.wait(POLL_SECONDS)

    def stream(self, job: Stream, work: Work, flow: FlowControl) -> tuple[Put, Runs | None]:
        begin, owner, told = self.learn(job, work)
        jobs = self.jobs.unanswered
        stream = TaskStream(self.engine, self.packer, begin, told, flow, owner, jobs)
        runs = Runs(encode_atoms, stream.put_run) if owner is None else None
        return stream.put, runs

    def learn(self, job: Job, work: Work) -> tuple[TaskRange, int | None, frozenset[Key]]:
        """Have the engine keep the job's function for the workers, until the job is answered.

        Returns three values: an empty range for its tasks; the worker that has the tensors to which
        the function has handles (the tasks are bound to it), or None; and the globals of the
        program that come with the function.
        """
        func, options = work.func, job.options
        if options.retry_on:
            func = task_function(func, retry_on=options.retry_on)
        brought = Brought()
        payload, owner = self.packer.pack_task(func, True, self.worker, brought, FUNCTION)
        number = self.engine.learn(work.mode, payload)
        job.drop_function = functools.partial(self.engine.forget, number)
        return TaskRange(job.number, number, 0, (), None, options.terms), owner, brought.keys

    def put_task(self, job: Job, index: int, call: tuple[Any, ...]) -> None:
        """Submit one task, as the hook `pool_inqueue_put` gets it."""
        options = job.options
        if options.retry_on:
            call = (task_function(call[0], retry_on=options.retry_on), *call[1:])
        payload, worker = self.packer.pack_task(call, options.terms.retries > 0, options.worker)
        self.engine.sent(payload)
        self.engine.submit(TaskRange(job.number, 0, index, (payload,), worker, options.terms))

    def on_all(self, job: Job, call: tuple[Any, ...], size: int) -> None:
        # Pickle it once, and mark it as kept: each worker copies what lies in blocks.
        payload, owner = self.packer.pack_task(call, True, None)
        payloads = [payload] * size
        if owner is not None:  # handles to tensors of single workers: the others get copies
            payloads = [self.packer.pack_task(call, True, w)[0] for w in range(size)]
        for payload in payloads:
            self.engine.sent(payload)
        terms = job.options.terms
        self.engine.submit(
            *(TaskRange(job.number, 0, w, (its,), w, terms) for w, its in enumerate(payloads))
        )

    def withdraw(self, job: Job) -> None:
        """Drop the waiting tasks of a job, and stop the running ones."""
        self.engine.withdraw(*_number_of(job))

    @shielded
    def runs(self, job: Job) -> bool:
        return self.engine.runs(*_number_of(job))


class TaskStream:
    """Pickles the tasks of one `imap` and appends them to a range.

    ``task_range``: of its job, still empty.  ``told``: the globals that came with the function.
    ``owner``: the worker to which all tasks are bound; -1: each to the worker with the least to do;
    None: to the owner of its tensors, or to none.  ``jobs``: by number, those without an answer.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        packer: Packer,
        task_range: TaskRange,
        told: frozenset[Key],
        flow: FlowControl,
        owner: int | None,
        jobs: Mapping[int, Job],
    ) -> None:
        # Do not store the pool, which the input reader must not hold.
        self._engine = engine
        self._task_range = task_range
        task_range.flow = flow
        task_range.may_run, flow.resume = flow.may_run, engine.resume
        self._next = 0
        self._packer, self._told = packer, told
        self._kept = task_range.terms.retries > 0
        self._owner = owner
        self._jobs = jobs

    def put(self, index: int, task: Any) -> int:
        """Pickle and submit a task; return its size in bytes."""
        payload, worker = self._packer.pack_task(task, self._kept, self._owner, self._told, ITEM)
        if worker is not None:
            self._engine.submit(self._task_range.beside(index, (payload,), worker))
            self._drop_if_ended()
            return self._engine.sent(payload)
        self._append(index, (payload,))
        return self._engine.sent(payload)

    def put_run(self, index: int, payloads: list[bytes]) -> int:
        """Submit several tasks that are pickled; return their size in bytes."""
        self._append(index, payloads)
        return sum(map(len, payloads))

    def _append(self, index: int, payloads: Sequence[Payload]) -> None:
        """Append items to the range, from ``index`` on."""
        if index != self._next:
            # A range has no gaps, and the item in between could not be sent: begin another range.
            self._task_range = self._task_range.beside(index)
        self._next = index + len(payloads)
        task_range = self._task_range
        task_range.items.extend(payloads)
        # This reads the marks after appending; the engine reads the items after it has marked a
        # worker as idle, or the range as not queued.  So one of them sees the other's change.
        if not task_range.queued or self._engine.idle:
            self._engine.feed(task_range)
            self._drop_if_ended()

    def _drop_if_ended(self) -> None:
        """Drop what was just queued if the job was cancelled while an item was drawn."""
        number = self._task_range.job
        if number not in self._jobs:
            self._engine.withdraw(number)


def _number_of(job: Job) -> tuple[int, int | None]:
    """Return the engine's job number of a job, and its item there; None: all items."""
    return (CALLS, job.number) if job.is_call else (job.number, None)


# -- pools and results in an object that a task uses -----------------------------------------------


class _Elsewhere:
    """A pool, a result of one or an executor that an object has brought to another process.

    A task may use the rest of the object.  As in a fork, this has no workers, so its methods raise
    `PoolClosed`.  Only those that end a pool do nothing, because finalizers call them.
    """

    _kind: type
    _why: str

    def __repr__(self) -> str:
        return f"<{self._kind.__name__}: {self._why}>"

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_ELSEWHERE or name.startswith("__"):
            return object.__getattribute__(self, name)
        if callable(getattr(self._kind, name, None)):
            return MethodType(_refuse, self)
        return _refuse(self)

    def _end(self, *args: Any, **kwds: Any) -> None: ...

    close = terminate = join = shutdown = __del__ = _end


_OF_ELSEWHERE = {"_kind", "_why", "close", "terminate", "join", "shutdown"}


def _refuse(self: _Elsewhere, *args: Any, **kwds: Any) -> Never:
    raise PoolClosed(self._why)


def _reduce(pickler: Context, obj: Any) -> Any:
    """Pickle such an object if it is in another object; refuse a global itself."""
    if pickler.group is None or id(obj) in pickler.group.own:
        return NotImplemented
    if isinstance(obj, _Elsewhere):
        return _elsewhere, (obj._kind, obj._why)
    if issubclass(type(obj), (Job, IMapIterator)):
        why = f"the result of {obj.label} belongs to the program; send what get() returns"
    else:
        name = obj.name if issubclass(type(obj), Hooks) else f"the {type(obj).__name__}"
        why = f"{name} belongs to the program; a task that needs workers makes a pool itself"
    return _elsewhere, (type(obj), why)


def _elsewhere(kind: type, why: str) -> Any:
    copy_of: Any = type(kind.__name__, (_Elsewhere, kind), {"__module__": kind.__module__})
    found: Any = object.__new__(copy_of)
    found._kind, found._why = kind, why
    return found


def _register(module: str, name: str) -> None:
    FOR_SUBCLASSES[getattr(import_module(module), name)] = _reduce


for _owned in (Hooks, Job, IMapIterator):
    FOR_SUBCLASSES[_owned] = _reduce
for _of in (("concurrent.futures._base", "Executor"), ("multiprocessing.pool", "Pool")):
    LAZY[_of[0]] = functools.partial(_register, *_of)
