"""The loop of a worker: it takes tasks, runs them, and answers each.

The loop shares only pipes and the outbox with other processes, each with one writer.  So a worker
that is killed between any two instructions leaves no lock held.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import select
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xpool import errors
from xpool._memory.arena import IDLE_SECONDS, Arena
from xpool._memory.holds import Block
from xpool._pickling.by_value import received, registry, settings, standard
from xpool._pickling.by_value.broadcast import Objects
from xpool._pickling.by_value.exceptions import add_note, encode_exception
from xpool._pickling.by_value.main import install_main, mark_worker
from xpool._pickling.diagnose import at
from xpool._pickling.frame import BY_PIPE, Layout, share
from xpool._python import at_fork, failures
from xpool._python.exits import flush
from xpool._python.failures import safe_repr, without_places
from xpool._python.import_hooks import when_imported
from xpool._wire.outbox import Outbox
from xpool._wire.wire import (
    BODY_AGAIN,
    BODY_ERROR,
    STOP,
    TASKS,
    TIMED,
    TO_WORKER,
    BlockingFrameReader,
    Refusal,
    Spin,
    write_all,
)
from xpool._worker import callables
from xpool._worker.callables import (
    OF_MAPS,
    TaskFunction,
    bound,
    each,
    has_state,
    note_context,
    star_each,
    task_function,
    with_context,
)
from xpool._worker.protocol import Inbox, Replies
from xpool._worker.seeds import Seeds
from xpool._worker.stopping import listen
from xpool._worker.worker_context import WorkerInfo, current_worker, enter, exit_code
from xpool._worker.worker_relay import open_relay
from xpool.errors import OptionError, TaskNotPicklable, TaskStopped
from xpool.pickle import LATE, decode, encode, load_late

if TYPE_CHECKING:
    from xpool._pickling.tensors.device_memory import Keeper
    from xpool._worker.peers import Peers

_Answer = tuple["bytes | memoryview", int, Any]
"""The pickled value of a task, its error bits (`BODY_ERROR`, `BODY_AGAIN`), and the value."""

_NONE = encode(None)  # pickled once, since many functions return None
_STOPPED = _NONE  # never unpickled: the parent has its own answer for a stopped task


def run(
    config: dict[str, Any],
    channel: list[int],
    inherited: tuple[Any, tuple[Any, ...]] | None,
    thread: Any = None,
) -> int:
    """Serve until told to stop; return the exit code.

    ``channel`` are the descriptors that `entry` lists, including the lifeline.  ``thread`` is
    the `WorkerThread`, if the worker is one of several threads of its process.
    """
    tasks, answers, lifeline, outbox, *others = channel
    box = Outbox(outbox)
    replies = Replies(box, functools.partial(write_all, answers), time.perf_counter)
    at_fork.at_fork(in_child=replies.fall_silent)
    # Done before the program's code runs, so that the parent can ask a hanging initializer for its
    # stack, and limit its time by the clock in the outbox (`_engine/monitor`).
    if thread is None:
        listen(box, outbox, _Worker._run.__code__)
    else:
        thread.begins(box, outbox)
    box.tick()
    _prepare()
    try:
        if thread is None:
            become(config, lifeline)
        # The order is that of the table in `entry`: control, logs, arena.
        control = others.pop(0) if config["peers"] else -1
        open_relay(others.pop(0), config, box)
        shared = _join(others, config)
        worker = _Worker(config, BlockingFrameReader(tasks), replies, shared, control, inherited)
    except BaseException as exc:
        if replies.silent:
            raise  # in a child that the initializer has forked
        if isinstance(exc, SystemExit):
            exc = RuntimeError(f"the initializer called sys.exit({exc.code!r})")
        replies.refuse(refusal(exc))
        return 1
    # The start, which has its own time limit, ends here; `ready` lets the parent send tasks.
    box.rest()
    if thread is not None:
        thread.wait_for_all()
    replies.ready(shared is not None)
    code = 0
    try:
        worker.serve(thread)
        if thread is not None:
            thread.stopped = True
    except (EOFError, BrokenPipeError):
        pass  # the parent has ended
    except SystemExit as exc:
        # Send the answers of earlier tasks in the outbox: only the task that exits is lost.
        replies.ring()
        if exc.code is not None and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)
        code = exit_code(exc)
    return code


def _check_addresses() -> None:
    """Raise an error if the initializer has set a limit that the worker already exceeds.

    It could hardly do anything: each import, file or answer may need new addresses.
    """
    limits: Any = sys.modules.get("resource")  # code that sets a limit has imported it
    if limits is None or sys.platform != "linux":
        return
    limit = limits.getrlimit(limits.RLIMIT_AS)[0]
    if limit == limits.RLIM_INFINITY:
        return
    file = os.open("/proc/self/statm", os.O_RDONLY)  # `open` needs more memory
    pages = int(os.read(file, 32).partition(b" ")[0])
    os.close(file)
    if pages * os.sysconf("SC_PAGE_SIZE") > limit:
        raise OptionError(
            f"RLIMIT_AS is {limit} in this worker, which has more addresses already: a pool's "
            "shared memory has terabytes of addresses, which take no memory. To limit a worker's "
            f"memory, use Pool(worker_memory={limit})"
        )


def _prepare() -> None:
    """Prepare for tasks that fail, and for objects of modules that a task imports."""
    failures.prepare(keep_path=True)
    for name in LATE:
        when_imported(name, load_late)


class _Worker:
    def __init__(
        self,
        config: dict[str, Any],
        source: BlockingFrameReader,
        replies: Replies,
        arena: Arena | None,
        control: int,
        inherited: tuple[Any, tuple[Any, ...]] | None,
    ) -> None:
        self._arena = arena
        self._replies = replies
        self._keeper: Keeper | None = None
        self._layout = self._make_layout(config)
        # Made before anything is unpickled: messages and globals may refer to broadcast objects.
        self._objects = Objects(arena, config["token"])
        self._peers: Peers | None = None
        if control >= 0 and arena is not None:
            from xpool._worker.peers import Peers  # imported here because few pools have peers

            # Handles are for the parent only; between peers, device tensors are copied.
            layout = self._layout._replace(keep=None)
            self._peers = Peers(config["index"], config["peers"], control, layout)
        self._waits_for_others = False  # whether the last `_release` found memory that others hold
        self._tidy_at = 0.0  # when to look next for memory that was unused for long
        self._source = source
        self._poller = select.poll()
        self._poller.register(source.fd, select.POLLIN)
        self._spin: Spin | None = None
        self._likely = False  # whether the next task probably arrives at once
        self._gpu_lost = False  # whether CUDA fails from now on in this process
        self._inbox = Inbox(replies, lambda *new: (_Closed(*new), new[1]), _WITHDRAWN)
        self._recurse: bool = config["is_recursive"]
        self._prefix: tuple[Any, ...] = ()
        context = None
        if config["context"] is not None:
            context = decode(config["context"])
            self._prefix = (context,)
        host = config["host"]
        # Done before the context and the initializer run, which may call `current_worker`.
        enter(WorkerInfo(config["index"], config["pool"], context, self._peers, host))
        _use_threads(config["threads"], config["forked"])
        _renew_autograd()
        if callable(begin := getattr(context, "enter", None)):
            begin()
        # Called by `exits.run`, after what the initializer and tasks register.
        if callable(end := getattr(context, "exit", None)):
            atexit.register(end)
            at_fork.at_fork(in_child=functools.partial(atexit.unregister, end))
        # Unpickle it even if it is inherited: the message brings the globals of `__main__` too.
        sent: Any = None if config["initializer"] is None else decode(config["initializer"])
        initializer, initargs = sent
        if inherited is not None:  # `multiprocessing` has sent the arguments
            named = initargs  # those that are globals of the program
            if config["forked"] and 0 not in named:
                initializer = inherited[0]
            initargs = [named.get(n, one) for n, one in enumerate(inherited[1], 1)]
        if settings.ignores:
            settings.imports_done()
        if initializer is not None:
            names = getattr(getattr(initializer, "__code__", None), "co_names", ())
            if "resource" in sys.modules or "resource" in names:
                failures.ready()  # while there are addresses, if the initializer limits them
            initializer(*initargs)
        _check_addresses()

    def _make_layout(self, config: dict[str, Any]) -> Layout:
        arena, replies = self._arena, self._replies
        if arena is None:
            return BY_PIPE

        def lease(nbytes: int) -> Block | None:
            replies.forget_adopted()  # this may free the last answer's block, for use here
            try:
                return arena.lease(nbytes)
            except OSError:
                return None  # a task has closed the descriptor: values go through the pipe

        if config["is_copy_tensor"]:
            return Layout(lessor=lease)
        # Imported here because few pools share tensors.
        from xpool._pickling.tensors import device_memory, mapped

        mapped.keeps_opened = True
        self._keeper = device_memory.Keeper(arena, config["token"], config["index"], os.getpid())
        layout = Layout(lessor=lease, keep=self._keeper.reduce)
        return share(layout, arena, config["share_method"])

    def serve(self, thread: Any) -> None:
        read = self._source.read
        run: Callable[..., Any] = self._run
        timed: Callable[..., Any] = self._timed
        if thread is None:
            self._spin = Spin()
        else:  # no polling: it would take the interpreter from the other threads
            run, timed = thread.stoppable(run), thread.stoppable(timed)
        self._source.before_waiting = self._before_waiting
        while True:
            kind, count, size = TO_WORKER.unpack(read(TO_WORKER.size))
            if kind == TASKS:
                self._tasks(count, read(size), run)
                flush()  # needed if the parent took back the last items of the frame
            elif kind == TIMED:
                self._tasks(count, read(size), timed)
                flush()
            elif kind == STOP:
                return
            else:
                self._inbox.take(kind, read(size))

    def _open(self, closed: _Closed) -> Any:
        """Unpickle a function, in its first task.

        A function that has a state is unpickled again for each task, as in `multiprocessing`.  So
        is one whose unpickling has raised: perhaps only memory or a descriptor was missing.
        """
        with received.listening() as states:
            try:
                func = decode(closed.payload)
                stays = not has_state(func)
            # `TaskStopped` is no `Exception`, and ends this task, too.
            except Exception as exc:
                func, stays = _Unavailable(exc), False
        settings.imports_done()
        if self._prefix:
            func = bound(func, *self._prefix)
        if states:
            func = task_function(func, states=states)
        if stays:
            self._inbox.functions[closed.number] = func, closed.mode
        return func

    def _before_waiting(self) -> None:
        """Release blocks that the parent holds and memory long unused, until a frame arrives."""
        arena, poll = self._arena, self._poller.poll
        if arena is not None and arena.busy and (now := time.monotonic()) >= self._tidy_at:
            self._tidy_at = now + IDLE_SECONDS  # also in a busy worker
            self._release()
            arena.trim()
        if self._likely and self._spin is not None and self._spin.look(poll):
            return
        # In share mode, the worker may also keep mapped files that belong to no block.
        if arena is None or not (arena.busy or self._keeper is not None):
            return
        # No event reports that the parent or a peer releases memory: poll, less and less often.
        seconds = 0.1
        while not poll(seconds * 1000):
            kept = self._release(everything=True)
            if not (arena.trim() or self._replies.kept or self._waits_for_others or kept):
                return
            # Device memory is scarce: while handles keep tensors, check more often.
            seconds = min(2 * seconds, IDLE_SECONDS if kept else 60.0)

    def _release(self, everything: bool = False) -> bool:
        """Release memory that nothing uses any more; return whether handles keep tensors."""
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
            self._release()  # the task may need that memory
        self._likely = False
        for entry, task, last in self._inbox.items(count, body):
            if entry is not None:
                func, mode = entry
            else:
                func, mode = None, None
                # A caller that makes single calls may make another one soon.  In a stream, the
                # parent needs the processor more.
                self._likely = count == 1
            # Set for the `del` below, in case the task is interrupted in `run`.
            value = None
            try:
                payload, error, value = run(func, mode, task)
            except TaskStopped:  # raised after the end of the task, while `run` made its answer
                payload, error = _STOPPED, BODY_ERROR
                replies.box.rest()
            if last:
                flush()  # the pool may be terminated as soon as all tasks are answered
            replies.answer(payload, error, last)
            if error and self._gpu_lost:
                raise SystemExit(1)
            del value  # after the answer: freeing a large tensor takes as long as sending it

    def _timed(self, func: Any, mode: int | None, payload: bytes | memoryview) -> _Answer:
        """Run a task as `_run` does, with a clock that the parent sees, restarted for each item."""
        box = self._replies.box
        box.tick()
        try:
            return self._run(func, mode, payload, box.tick)
        finally:
            box.rest()

    def _run(
        self,
        func: Any,
        mode: int | None,
        payload: bytes | memoryview,
        tick: Callable[[], object] | None = None,
    ) -> _Answer:
        record = None
        task: Any = _UNLOADED
        try:
            if type(func) is _Closed:
                func = self._open(func)
            if tick is not None and mode is not None and OF_MAPS[mode] in (each, star_each):
                func = task_function(func, tick=tick)
            if type(func) is TaskFunction:
                record = func
                for state, buffers in record.states:
                    received.prepare(state, *buffers)
                func = record.called
            task = decode(payload)
            if settings.ignores:
                settings.imports_done()
            if mode is not None:
                value = OF_MAPS[mode](func, task)
            else:
                func, args, kwds = task
                if type(func) is TaskFunction:
                    record, func = func, func.called
                if self._prefix:
                    func, args = with_context(self._prefix[0], func, args)
                value = func(*args, **kwds)
            if self._keeper is not None:
                self._keeper.synchronize()
        except SystemExit as exc:
            # It ends the worker, with the exit code that `run` returns.
            if task is not _UNLOADED or failures.imported_module(exc) is None:
                raise
            story = f"sys.exit({exc.code!r}) was called while the task was unpickled"
            return self._failed(ImportError(story).with_traceback(exc.__traceback__), record, True)
        except BaseException as exc:
            loading = task is _UNLOADED and type(func) is not _Unavailable
            return self._failed(exc, record, loading)
        del task
        if value is None:
            return _NONE, 0, None
        try:
            data = encode(value, recurse=self._recurse, home=True, layout=self._layout)
        except SystemExit:
            raise
        except BaseException as exc:
            self._gpu_lost = has_lost_gpu(exc)
            return refused(exc, value), BODY_ERROR, None
        return data, 0, value

    def _failed(self, exc: BaseException, record: TaskFunction | None, loading: bool) -> _Answer:
        """Return the answer of a task that has raised; ``loading``: while it was unpickled.

        Not in `_run`: its frame is in the traceback, and must not refer to the error.
        """
        if self._replies.silent:  # the task has forked this process, which ends as a program does
            sys.excepthook(type(exc), exc, exc.__traceback__)
            raise SystemExit(1)
        if loading:
            failures.note_loading(exc)
        if self._prefix:
            note_context(exc)
        self._gpu_lost = has_lost_gpu(exc)
        error = BODY_ERROR
        if record is not None and isinstance(exc, record.retry_on):
            error |= BODY_AGAIN
        return encode_exception(exc, traceback_of(exc)), error, None


_UNLOADED = object()
"""Takes the place of a task that is not unpickled yet."""


class _Closed:
    """A function that no task has called yet: still pickled."""

    __slots__ = ("mode", "number", "payload")

    def __init__(self, number: int, mode: int, payload: bytes) -> None:
        self.number, self.mode, self.payload = number, mode, payload


class _Unavailable:
    """Replaces a function that could not be unpickled here: its tasks raise the reason."""

    __slots__ = ("_exc",)

    def __init__(self, exc: Exception) -> None:
        self._exc = exc

    def __call__(self, *args: Any) -> Any:
        # Remove its old traceback, which would grow each time it is raised.
        raise self._exc.with_traceback(None)


_WITHDRAWN = _Unavailable(LookupError("the job of this task has failed in the meantime")), 0


def _join(arena: list[int], config: dict[str, Any]) -> Arena | None:
    """Map the arena; None: it cannot be mapped, and all values travel through the pipe."""
    why = "more than 479 processes map it"
    if arena:
        try:
            # Another worker of this process may have mapped it.
            there = Arena._known.get(config["arena"][0])
            if there is not None:
                os.close(arena[0])
                return there
            return Arena.join(arena[0], config["arena"])
        # ValueError: another worker has written over its tables.
        except (OSError, ValueError) as exc:
            os.close(arena[0])
            why = str(exc)
    if config["arena"] is not None and not config["is_copy_tensor"]:
        raise OptionError(
            f"is_copy_tensor=False: this worker cannot map the shared memory: {why}; use fewer "
            "workers, or leave out is_copy_tensor=False"
        )
    return None


def become(config: dict[str, Any], lifeline: int) -> None:
    """Set this process's name, key and ``__main__`` (as `multiprocessing` does), and its seeds."""
    if multiprocessing.parent_process() is None:
        # The fork server made this process, so multiprocessing does not know it yet.
        process = multiprocessing.current_process()
        process.name = config["name"]
        process._identity = (config["index"] + 1,)  # recipes read it
        process.authkey = config["authkey"]
        process.daemon = config["is_daemon"]
        # Programs call parent_process() to see whether they are the main process.  There is no
        # documented way to set it.  The lifeline becomes readable when the parent has ended.
        parent = getattr(multiprocessing.process, "_ParentProcess", None)
        if parent is not None:
            vars(multiprocessing.process)["_parent_process"] = parent(*config["parent"], lifeline)
    if not config["forked"]:
        install_main(config["package"])
    seeds = Seeds(config["seed"])
    standard.seed_of = seeds.number
    received.after_calls[:] = [seeds.sow_again]
    received.keep_environment.update(config["bind"])
    settings.begin_worker(config["settings"])
    # Called after `install`, since it records the globals of the current `__main__`.
    mark_worker(forked=config["forked"])
    if config["forked"]:
        registry.disown()


def _use_threads(n: int, forked: bool) -> None:
    """Set the number of threads to this worker's share of the cores, unless the user has set it.

    A fork of the program gets 1 thread.  If the program has used OpenMP's threads, a computation
    with more would wait for ever for threads that the fork does not have.
    """
    torch = sys.modules.get("torch")
    if torch is not None and forked:
        torch.set_num_threads(1)
    elif torch is not None and n and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(n)
    if n:
        # This is for torch, or another library with OpenMP, that is imported later.
        os.environ.setdefault("OMP_NUM_THREADS", str(n))


def _renew_autograd() -> None:
    """Make torch renew its autograd engine, which it must do after a fork, in a single thread.

    Otherwise torch does it, without a lock, in the first operation that records a gradient.  If two
    threads begin such operations at once, one destroys the engine in which the other runs.  With
    devices the damage is permanent: a hang, or the error
    "0 <= device.index() && device.index() < ...device_ready_queues_.size()".
    """
    autograd = sys.modules.get("torch.autograd")
    if autograd is not None:
        autograd._is_checkpoint_valid()  # gets the engine, and starts none of its threads


# -- messages about failed tasks, and about a failed start -----------------------------------------

_OWN_FILES = (
    __file__,
    callables.__file__,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "_loader_worker.py"),
)


def refusal(reason: BaseException) -> Refusal:
    """Return the reason why this worker cannot start.  Call it while the exception is handled.

    The worker makes the text, since this runs code of the exception's class; the parent runs none.
    """
    pickled = encode_exception(reason, _text_of(reason, reason.__traceback__))
    try:
        line = f"{type(reason).__name__}: {reason}"
    except Exception as exc:
        line = f"{type(reason).__name__}, whose text cannot be made ({type(exc).__name__})"
    return Refusal(line, pickled)


_ADVICE = (
    ("generator object", "Return list(...) of it, or use imap(..., yields=True)."),
    ("TextIOWrapper object", "Return the file's path."),
    ("BufferedReader object", "Return the file's path."),
    ("BufferedWriter object", "Return the file's path."),
    ("tensor", "Return x.detach()."),
)
"""What to return in place of some objects."""


def refused(exc: BaseException, value: Any) -> bytes | memoryview:
    """Return the message that a result cannot be sent, and release the result."""
    traceback = failures.ready()
    reason = exc.__cause__ if isinstance(exc, TaskNotPicklable) else None
    failure = errors.ResultNotPicklable(reason or exc, safe_repr(value, 500))
    if isinstance(exc, TaskNotPicklable) and exc.parts is not None:
        what, path, why, _ = exc.parts
        failure.why = f"{what}{at(path)}: {why}"
        failure.advice = next((a for kind, a in _ADVICE if f" {kind} " in what), failure.advice)
    elif isinstance(exc, TaskNotPicklable) and reason is None:  # its text says what to do
        failure.why, failure.advice = str(exc).rstrip("."), ""
    payload = encode_exception(failure, traceback_of(exc))
    # The frames hold each other and the objects that they pickled, such as tensors on a device.
    raised, seen = list[BaseException | None]([exc]), set[int]()
    while raised:
        one = raised.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            raised += [one.__cause__, one.__context__]
    return payload


def traceback_of(exc: BaseException) -> str:
    """Return the traceback as text, without the worker's own frames at its beginning."""
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in _OWN_FILES:
        tb = tb.tb_next
    return without_places(_text_of(exc, tb))


def _text_of(exc: BaseException, tb: TracebackType | None) -> str:
    """Return the traceback from ``tb`` on as text."""
    traceback = failures.ready()
    if isinstance(exc, ModuleNotFoundError):
        _say_where(exc)
    try:
        return "".join(traceback.format_exception(type(exc), exc, tb))
    except Exception:  # the exception's own `__bool__` or `__getattribute__` can raise any error
        lines = traceback.format_tb(tb)
        return "".join(("Traceback (most recent call last):\n", *lines, type(exc).__name__, "\n"))


def _say_where(exc: ModuleNotFoundError) -> None:
    """On a host other than the program's, add a note that names the host and a remedy."""
    try:
        host = current_worker().host
    except RuntimeError:  # the worker has not begun
        return
    if host:
        add_note(
            exc,
            f"On host {host}: the program's folder and path are not sent to hosts; install the "
            "module there, for example by runtime_env= of xpool.ray.hosts().",
        )


def has_lost_gpu(exc: BaseException) -> bool:
    """Whether a task's error has ended CUDA in this process, so that all later tasks would fail.

    A kernel's failed assertion or wrong address does so; a lack of memory does not.
    """
    raised = [one for one in (exc, exc.__cause__) if isinstance(one, RuntimeError)]
    if not any("CUDA error" in safe_repr(one, 500) for one in raised):
        return False
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return False
    try:
        cuda.synchronize()
    except RuntimeError:
        return True
    return False
