"""What a worker does: take tasks, run them, answer each.

Nothing here is shared with another process but the pipes and the outbox, each with one writer; so
a worker that is killed between any two instructions leaves nothing locked.
"""

from __future__ import annotations

import functools
import os
import select
import sys
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

from xpool._memory.arena import IDLE, Arena, Block
from xpool._pickling.by_value import registry
from xpool._pickling.by_value.broadcast import Objects
from xpool._pickling.by_value.exceptions import encode_exception
from xpool._pickling.by_value.globals_received import listening
from xpool._pickling.by_value.main import mark_worker
from xpool._pickling.policy import BY_PIPE, Layout, share
from xpool._python import error_imports
from xpool._python.exits import flush
from xpool._python.import_hooks import when_imported
from xpool._wire.outbox import Outbox
from xpool._wire.pipes import BlockingFrameReader, write_all
from xpool._wire.spin import Spin
from xpool._wire.wire import (
    BODY_AGAIN,
    BODY_ERROR,
    STOP,
    TASKS,
    TIMED,
    TO_WORKER,
    Mode,
)
from xpool._worker import main_module
from xpool._worker.callables import Exact, Prefixed, Retried, Ticking, each, one, star, star_each
from xpool._worker.context import WorkerInfo, enter
from xpool._worker.failures import refusal, refused, traceback_of
from xpool._worker.protocol import Inbox, Replies
from xpool._worker.provisional import stand_in
from xpool._worker.relay import open_relay
from xpool._worker.seeds import Seeds
from xpool._worker.stopping import listen
from xpool.errors import OptionError, TaskStopped
from xpool.pickle import LATE, decode, encode, load_late

if TYPE_CHECKING:
    from xpool._pickling.tensors.handles import Keeper
    from xpool._worker.peers import Peers

__all__ = ["Member", "become", "run"]

_Answer = tuple["bytes | memoryview", int, Any]
"""What is sent of a task's value, `BODY_ERROR` or 0, and the value itself."""

_NONE = encode(None)  # what most functions return that are called for their effect
_STOPPED = _NONE  # nobody opens it: the parent has an answer of its own


class Member(Protocol):
    """What a worker does with others that are threads of the same process (`several`)."""

    def begins(self, box: Outbox, fd: int) -> None:
        """It has its outbox: instead of `listen`, which is for the main thread."""

    def wait_for_all(self) -> None:
        """It could serve; return when all can."""

    def stoppable(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs a task as ``run``, and lets the main thread break it off."""

    def told_to_stop(self) -> None:
        """Its parent wants nothing more of it."""


def run(
    orders: dict[str, Any],
    channel: list[int],
    inherited: tuple[Any, tuple[Any, ...]] | None,
    member: Member | None = None,
    missing: Collection[str] = (),
) -> int:
    """Serve until told to stop; return the exit code.

    ``channel``: the descriptors, as `entry` lists them, the lifeline among them.  ``member``: the
    process has other workers too, and is none of its own.  ``missing``: modules that this worker
    does not have yet, as a stand-in.
    """
    tasks, answers, lifeline, outbox, *others = channel
    box = Outbox(outbox)
    replies = Replies(box, functools.partial(write_all, answers), time.perf_counter)
    # Before the program's code: an initializer that hangs can be asked where it is, and its time is
    # limited by the clock in the box (`_engine/start_limit`).
    if member is None:
        listen(box, outbox, _Worker._run.__code__)
    else:
        member.begins(box, outbox)
    box.tick()
    _prepare()
    try:
        if member is None:
            become(orders, lifeline)
        # In the order of the table in `entry`: control, logs, arena.
        control = others.pop(0) if orders["peers"] else -1
        open_relay(others.pop(0), orders, box.count_dropped)
        shared = _join(others, orders)
        worker = _Worker(orders, BlockingFrameReader(tasks), replies, shared, control, inherited)
    except SystemExit as exc:
        replies.refuse(refusal(RuntimeError(f"the initializer called sys.exit({exc.code!r})")))
        return 1
    except BaseException as exc:
        replies.refuse(refusal(exc))
        return 1
    # The start has a limit of its own, and ends here; `ready` lets tasks come.
    box.rest()
    if missing:
        runs = _Worker._run.__code__, _Worker._timed.__code__
        stand_in(missing, box, runs, (decode.__code__, _Worker._open.__code__))
    if member is not None:
        member.wait_for_all()
    replies.ready(shared is not None)
    code = 0
    try:
        worker.serve(member)
        if member is not None:
            member.told_to_stop()
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone: nobody is left to tell
    except SystemExit as exc:
        # The outbox may have answers of earlier tasks: only the one that called `sys.exit` is lost.
        replies.ring()
        code = _exit_code(exc)
    return code


def _prepare() -> None:
    """Be ready for tasks that fail, and for objects of modules that a task imports."""
    error_imports.prepare(keep_path=True)
    for name in LATE:
        when_imported(name, load_late)


def _exit_code(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    # As CPython does (handle_system_exit in Python/pythonrun.c); wait(2) tells 8 bits of it.
    if isinstance(exc.code, int):
        return exc.code & 0xFF
    print(exc.code, file=sys.stderr)
    return 1


class _Worker:
    def __init__(
        self,
        orders: dict[str, Any],
        source: BlockingFrameReader,
        replies: Replies,
        arena: Arena | None,
        control: int,
        inherited: tuple[Any, tuple[Any, ...]] | None,
    ) -> None:
        self._arena = arena
        self._replies = replies
        self._keeper: Keeper | None = None
        self._layout = self._make_layout(orders)
        # Before anything is unpickled: what arrives, globals too, may refer to what was broadcast.
        self._objects = Objects(arena, orders["token"])
        self._peers: Peers | None = None
        if control >= 0 and arena is not None:
            from xpool._worker.peers import Peers  # only here: few pools have them

            # Handles are for the parent; between peers, tensors of devices are copied.
            layout = self._layout._replace(keep=None)
            self._peers = Peers(orders["index"], orders["peers"], control, layout)
        self._waits_for_others = False  # for the end of holds, by what `_release` found last
        self._tidy_at = 0.0  # when to look for memory that was unused for long
        self._source = source
        self._poller = select.poll()
        self._poller.register(source.fd, select.POLLIN)
        self._spin: Spin | None = None
        self._likely = False  # that the next task comes at once
        self._inbox = Inbox(replies, _Closed.entry, _WITHDRAWN)
        self._recurse: bool = orders["recurse"]
        self._prefix: tuple[Any, ...] = ()
        context = None
        if orders["context"] is not None:
            context = decode(orders["context"])
            self._prefix = (context,)
        host = orders["host"]
        # Before the context and the initializer, which may ask for `current_worker`.
        enter(WorkerInfo(orders["index"], orders["pool"], context, self._peers, host))
        _use_threads(orders["threads"], orders["forked"])
        _renew_autograd()
        if callable(begin := getattr(context, "enter", None)):
            begin()
        # Opened also where it is inherited: the globals of `__main__` that it uses come with it.
        sent = None if orders["initializer"] is None else decode(orders["initializer"])
        if inherited is None:
            inherited = sent
        assert inherited is not None
        initializer, initargs = inherited
        if initializer is not None:
            initializer(*initargs)

    def _make_layout(self, orders: dict[str, Any]) -> Layout:
        arena, replies = self._arena, self._replies
        if arena is None:
            return BY_PIPE

        def lease(nbytes: int) -> Block | None:
            replies.forget_adopted()  # the block of the last answer may be free for this one
            try:
                return arena.lease(nbytes)
            except OSError:
                return None  # a task has closed its descriptor: values go by the pipe

        if orders["copy_tensor"]:
            return Layout(lessor=lease)
        from xpool._pickling.tensors.handles import Keeper  # only here: few pools share tensors

        self._keeper = Keeper(arena, orders["token"], orders["index"], os.getpid())
        layout = Layout(lessor=lease, keep=self._keeper.reduce)
        return share(layout, arena, orders["share_method"])

    def serve(self, member: Member | None) -> None:
        read = self._source.read
        run: Callable[..., Any] = self._run
        timed: Callable[..., Any] = self._timed
        if member is None:
            self._spin = Spin()
        else:  # who looks takes the interpreter from the other members
            run, timed = member.stoppable(run), member.stoppable(timed)
        self._source.before_waiting = self._before_waiting
        while True:
            kind, count, size = TO_WORKER.unpack(read(TO_WORKER.size))
            if kind == TASKS:
                self._tasks(count, read(size), run)
                flush()  # where the last were taken back
            elif kind == TIMED:
                self._tasks(count, read(size), timed)
                flush()
            elif kind == STOP:
                return
            else:
                self._inbox.take(kind, read(size))

    def _open(self, closed: _Closed) -> Any:
        """Unpickle a function, in its first task; one that cannot be had fails its tasks."""
        with listening() as heard:
            try:
                func = decode(closed.payload)
            # Not `TaskStopped`: that is about this task, and the next one opens the function.
            except Exception as exc:
                func = _Unavailable(exc)
            entries = heard()
        # `Retried` stays outermost, since `_run` looks for it there.
        if self._prefix or entries:
            inner = func.func if type(func) is Retried else func
            if entries:
                inner = Exact(inner, entries)
            if self._prefix:
                inner = Prefixed(inner, self._prefix)
            func = Retried(inner, func.on) if type(func) is Retried else inner
        self._inbox.functions[closed.number] = func, closed.mode
        return func

    def _before_waiting(self) -> None:
        """Let go of what the parent holds, and of memory unused for long, until something comes."""
        arena, poll = self._arena, self._poller.poll
        if arena is not None and arena.busy and (now := time.monotonic()) >= self._tidy_at:
            self._tidy_at = now + IDLE  # also where there is always something to do
            self._release()
            arena.trim()
        if self._likely and self._spin is not None and self._spin.look(poll):
            return
        if arena is None or not arena.busy:
            return
        # No event tells when the parent or a peer lets go: it is looked for, ever less often.
        seconds = 0.1
        while not poll(seconds * 1000):
            kept = self._release(everything=True)
            if not (arena.trim() or self._replies.kept or self._waits_for_others or kept):
                return
            # The memory of a device is scarce: whether a handle has gone is looked at more often.
            seconds = min(2 * seconds, IDLE if kept else 60.0)

    def _release(self, everything: bool = False) -> bool:
        """Let go of what nobody needs any more; return whether tensors are kept for handles."""
        self._replies.forget_adopted()
        self._waits_for_others = self._objects.collect()
        if self._peers is not None:
            self._waits_for_others |= self._peers.acknowledge()
        mapped = sys.modules.get("xpool._pickling.tensors.mapped")
        if mapped is not None:
            self._waits_for_others |= mapped.collect()
        return self._keeper is not None and self._keeper.collect(everything)

    def _tasks(self, count: int, body: bytes | memoryview, run: Callable[..., Any]) -> None:
        replies = self._replies
        if self._keeper is not None:
            self._release()  # before the task, which may need that memory
        self._likely = False
        for entry, task, last in self._inbox.items(count, body):
            if entry is not None:
                func, mode = entry
            else:
                func, mode = None, Mode.CALL
                # Who makes one call may make another.  In a stream, the parent needs the processor
                # more.
                self._likely = count == 1
            # Here, since a task that is broken off in `run` leaves none for the `del` below.
            value = None
            try:
                payload, error, value = run(func, mode, task)
            except TaskStopped:  # it came when the task was over, and was being answered
                payload, error = _STOPPED, BODY_ERROR
                replies.box.rest()
            if last:
                flush()  # the pool may be terminated as soon as all are answered
            replies.answer(payload, error, last)
            del value  # not before: to free a large tensor takes as long as to send it

    def _timed(self, func: Any, mode: int, payload: bytes | memoryview) -> _Answer:
        """As `_run`, and let the parent see since when: of each item, in a chunk."""
        box = self._replies.box
        box.tick()
        try:
            if type(func) is _Closed:
                func = self._open(func)
            if mode in (Mode.CHUNK, Mode.STARCHUNK):
                ticking = Ticking(func.func if type(func) is Retried else func, box)
                func = Retried(ticking, func.on) if type(func) is Retried else ticking
            return self._run(func, mode, payload)
        finally:
            box.rest()

    def _run(self, func: Any, mode: int, payload: bytes | memoryview) -> _Answer:
        try:
            if type(func) is _Closed:
                func = self._open(func)
            task = decode(payload)
            if mode == Mode.EACH:
                value = one(func, task)
            elif mode == Mode.CALL:
                func, args, kwds = task
                value = func(*self._prefix, *args, **kwds)
            elif mode == Mode.CHUNK:
                value = each(func, task)
            elif mode == Mode.STAR:
                value = star(func, task)
            else:
                value = star_each(func, task)
            if self._keeper is not None:
                self._keeper.synchronize()
        # It ends the worker, with the code that `run` makes of it.
        except SystemExit:
            raise
        except BaseException as exc:
            error = BODY_ERROR
            if type(func) is Retried and isinstance(exc, func.on):
                error |= BODY_AGAIN
            return encode_exception(exc, traceback_of(exc)), error, None
        del task
        if value is None:
            return _NONE, 0, None
        try:
            data = encode(value, recurse=self._recurse, main_globals=False, layout=self._layout)
        except SystemExit:
            raise
        except BaseException as exc:
            return refused(exc, value), BODY_ERROR, None
        return data, 0, value


class _Closed:
    """A function that no task has called yet: still pickled."""

    __slots__ = ("mode", "number", "payload")

    def __init__(self, number: int, mode: int, payload: bytes) -> None:
        self.number, self.mode, self.payload = number, mode, payload

    @classmethod
    def entry(cls, number: int, mode: int, payload: bytes) -> tuple[_Closed, int]:
        """Return what the inbox keeps of a function."""
        return cls(number, mode, payload), mode


class _Unavailable:
    """Stands for a function that could not be unpickled here: its tasks fail with the reason."""

    __slots__ = ("_exc",)

    def __init__(self, exc: Exception) -> None:
        self._exc = exc

    def __call__(self, *args: Any) -> Any:
        # Anew each time: raised as it is, it would carry the traceback of every time before.
        raise self._exc.with_traceback(None)


_WITHDRAWN = _Unavailable(LookupError("the job of this task has failed meanwhile")), Mode.EACH


def _join(arena: list[int], orders: dict[str, Any]) -> Arena | None:
    """Map the arena; where that cannot be, values come and go through the pipe."""
    why = "more than 479 processes have it"
    if arena:
        try:
            # Another worker of this process may have it.
            there = Arena._known.get(orders["arena"][0])
            if there is not None:
                os.close(arena[0])
                return there
            return Arena.join(arena[0], orders["arena"])
        # ValueError: another worker has written over its tables.
        except (OSError, ValueError) as exc:
            os.close(arena[0])
            why = str(exc)
    if orders["arena"] is not None and not orders["copy_tensor"]:
        raise OptionError(
            f"is_copy_tensor=False: this worker cannot have the memory that is shared: {why}; use "
            "fewer workers, or leave it out"
        )
    return None


def become(orders: dict[str, Any], lifeline: int) -> None:
    """Be the process that `multiprocessing` would have made: name, key, ``__main__``; and seeds."""
    if orders["bare"]:
        # Made by the fork server: not yet a process as multiprocessing knows it.
        import multiprocessing

        process = multiprocessing.current_process()
        process.name = orders["name"]
        process.authkey = orders["authkey"]
        process.daemon = orders["daemon"]
        # No documented way leads there, and programs ask parent_process() whether they are the main
        # process.  The lifeline becomes readable when the parent has ended.
        parent = getattr(multiprocessing.process, "_ParentProcess", None)
        if parent is not None:
            vars(multiprocessing.process)["_parent_process"] = parent(*orders["parent"], lifeline)
        main_module.install(orders["main"], orders["units"], orders["package"])
    Seeds(orders["seed"])
    # After `install`: it notes the globals of the `__main__` that is there.
    mark_worker(orders["main"] is not None, forked=orders["forked"])
    if orders["forked"]:
        registry.disown()


def _use_threads(n: int, forked: bool) -> None:
    """Take this worker's share of the cores; a number that the user set wins.

    In a fork of a program that has computed with OpenMP's threads, a computation with more than one
    waits for the others for ever.
    """
    torch = sys.modules.get("torch")
    if torch is not None and forked:
        torch.set_num_threads(1)
    elif torch is not None and n and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(n)
    if n:
        # For a torch, or another library with OpenMP, that is imported later.
        os.environ.setdefault("OMP_NUM_THREADS", str(n))


def _renew_autograd() -> None:
    """Have torch renew its engine of autograd, as it must after a fork, while this is one thread.

    It does so, without a lock, in the first operation that records a gradient.  Of two threads that
    begin at once, one would destroy the engine in which the other runs, for good where there are
    devices: "0 <= device.index() && device.index() < ...device_ready_queues_.size()", or a hang.
    """
    autograd = sys.modules.get("torch.autograd")
    if autograd is not None:
        autograd._is_checkpoint_valid()  # asks the engine; starts none of its threads
