"""One pass over a dataset: requests batches from the workers and returns them to the program.

If they are to be pinned, threads copy them into pinned memory, from which a device reads without
the processor.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils.data import dataloader
from torch.utils.data._utils.pin_memory import pin_memory

from xpool import pickle
from xpool._python.interrupt import by_handler, deliver, interruptible, pending, shielded
from xpool._python.starting import PromptThread
from xpool._python.waiters import LOST_SIGNAL, Flag
from xpool.data._loader_worker import (
    Base,
    EpochSpec,
    Generators,
    Made,
    WorkerCopy,
    is_pipe,
    is_stateful,
)
from xpool.data._report import Times
from xpool.data._sampling import EpochProgress, Preview, Request, Sampling, label
from xpool.data._workers import Inline, Processes, Threads, end_later, joined_at_exit


class Before(NamedTuple):
    """The values with which a new (not resumed) epoch begins."""

    generators: dict[str, Any] | None  # the generators' states; None: do not set them
    seed: int | None  # the seed drawn for an earlier epoch of the same workers
    turn: int  # number of epochs whose seeds come from `seed`
    bases: list[Base] | None  # the workers' states at the end of the last epoch


class PendingBatch(NamedTuple):
    """A batch that was requested and is not returned yet."""

    result: Any
    request: Request | None  # None: the dataset has no indices
    part: int | None  # None: any worker makes it
    place: int  # the batch's number within its part


class Epoch(Iterator[Any]):
    """The iterator of a `DataLoader`.

    ``is_only``: whether the workers serve only this epoch and end with it.  ``resume`` is the
    progress from which this epoch goes on; None: the epoch is new.
    """

    def __init__(
        self, loader: Any, workers: Inline | Processes | Threads, is_only: bool, number: int,
        before: Before, resume: EpochProgress | None,
    ) -> None:  # fmt: skip
        self._loader, self._workers = loader, workers
        # Set first, because `__del__` calls it if anything below fails.
        self._clean = workers.end if is_only else end_later(None)
        self._pending: deque[PendingBatch] = deque()
        # The batch that `__next__` returns next.  It stays if a signal handler raises.
        self._taken: PendingBatch | None = None
        self._request: Request | None = None  # drawn, but not submitted yet
        self._is_cut = False  # whether an error has ended the sampler's iteration
        self._pins, self._pin_thread = loader.pin_memory and can_pin(), None
        if self._pins and not isinstance(workers, Inline):
            self._pin_thread = PinThread()
        self._is_only, self._ended, self._has_begun_next = is_only, False, False
        self.times = Times(workers.size)
        if loader._auto is not None:
            loader._auto.begin(workers.size if is_only or number == 1 else 0)
        self._has_parts = loader._has_parts
        self._asks_state = self._has_parts and is_stateful(loader.dataset)
        self._sampling = None if loader._iterable else Sampling(
            loader._index_sampler, loader.snapshot_every_n_steps
        )  # fmt: skip
        count = max(1, loader.num_workers) if self._has_parts else 0
        self._known: dict[int, Request] = {}  # the requests of the batches in `progress.beyond`
        generators = Generators(loader)
        if isinstance(workers, Inline) and self._has_parts:
            # Loading may set the program's generators, so it comes before this epoch's draws.
            for base in before.bases or () if resume is None else resume.bases:
                workers.made.load(
                    {} if base.state is None else pickle.loads(base.state), base.end is not None
                )
        with generators.as_in(before.generators if resume is None else resume.generators):
            if resume is None:
                self.progress = EpochProgress(generators.states(), count)
                self.progress.bases = before.bases or self.progress.bases
            else:
                self.progress = resume
            self._draw(before, resume is not None)
            self._ahead = _untaken(self._sampling, self.progress.beyond, self._known)
            # Draw the first request here, because the generators have the right states now.
            first = list(itertools.islice(self._ahead, 1))
            self._ahead = itertools.chain(first, self._ahead)
        progress = self.progress
        self._spec = EpochSpec(
            number, _seed_of_turn(progress.seed, progress.turn), progress.shared_seed
        )
        self._places = list(progress.parts)
        self._since: list[deque[tuple[int, Any]]] = [deque() for _ in range(count)]
        self._cycle = progress.next_part
        self._begin_parts(resume is not None)
        self._ended = 0 < count == len(progress.ended)
        self._submit_next()

    # -- the beginning -----------------------------------------------------------------------------

    def _draw(self, before: Before, resumed: bool) -> None:
        """Draw the seeds and begin the sampler, in the same order and as often as torch."""
        loader, progress = self._loader, self.progress
        if not resumed:
            keeps_seed = loader.persistent_workers and before.turn
            progress.turn = before.turn + 1 if keeps_seed else 1
            progress.had_workers = loader.num_workers > 0
        # A resumed epoch repeats the draws of the loader that began it.
        is_new, had_workers = progress.turn == 1, progress.had_workers
        seed, shared = before.seed, None
        if is_new:
            shared = self._draw_shared_seed()
            if self._sampling is not None:
                self._sampling.begin()
            drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            seed = int(drawn.item())
        if had_workers:
            again = self._draw_shared_seed()
            # Torch draws twice for new workers, and uses the first number.
            shared = shared if is_new else again
        if not resumed:
            assert seed is not None
            progress.seed, progress.shared_seed = seed, shared
        if self._sampling is None:
            return
        if progress.sampler is None and (had_workers or not is_new):
            self._sampling.begin()
        if resumed:
            self._sampling.go_on(progress.taken, progress.digest, progress.drawn, progress.sampler)
        if progress.sampler is None:
            progress.sampler = self._sampling.states()

    def _draw_shared_seed(self) -> int | None:
        if not is_pipe(self._loader.dataset) or not self._loader._iterable:
            return None
        group = None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            group = torch.distributed.new_group(backend="gloo")
        return int(dataloader._share_dist_seed(self._loader.generator, group))

    def _begin_parts(self, resumed: bool) -> None:
        """Move each worker to its part of the dataset, and get its state.  Raises their errors."""
        progress = self.progress
        if isinstance(self._workers, Inline) and self._has_parts:
            if not progress.ended:
                self._workers.made.begin(self._spec, 0, progress.bases[0])
            progress.ask = self._workers.made.state
        elif self._asks_state:
            begun = [
                self._workers.make(
                    f"the dataset of worker {part}", WorkerCopy.begin, self._spec, part,
                    progress.bases[part], shard=part,
                )
                for part in range(len(progress.parts))
                if part not in progress.ended
            ]  # fmt: skip
            states = [result.get() for result in begun]
            if not resumed:
                progress.bases = [Base(0, state) for state in states]

    # -- requests ----------------------------------------------------------------------------------

    def _submit(self) -> None:
        loader = self._loader
        if not (loader._iterable or self._is_cut or self._request):
            self._request = self._draw_request()
        request = self._request
        if not (loader._iterable or request):
            if not self._is_cut:
                self._begin_next()
            return
        if self._has_parts:
            part = self._next_part()
            if part is not None:
                self._submit_to(part, request)
                self._request = None
            return
        assert request is not None
        preview = loader._preview
        result = None if preview is None else preview.take(self._spec, request)
        if result is None:
            result = self._workers.make(
                label(request), WorkerCopy.make, self._spec, request.number, request.indices
            )
        self._append(PendingBatch(result, request, None, 0))
        self._request = None

    @interruptible
    def _draw_request(self) -> Request | None:
        """Return the next request of the sampler, which may be the program's; None: no more."""
        if pending:
            deliver()
        self._is_cut = True
        request = next(self._ahead, None)
        self._is_cut = False
        return request

    @shielded
    def _submit_next(self) -> None:
        """Request as many batches as may be ahead: usually one, in place of a taken one."""
        before = -1  # when all batches have been requested, `_submit` adds none
        while before < len(self._pending) < self._ahead_at_most():
            before = len(self._pending)
            self._submit()

    def _adapt(self, size: int) -> None:
        """Have this number of workers from now on."""
        workers = self._workers
        if size == workers.size or isinstance(workers, Inline):
            return
        try:
            workers.resize(size)
        except (OSError, RuntimeError):  # the system refuses a process or a thread
            self._loader._auto.refused(workers.size)
        self.times.workers = workers.size

    def _begin_next(self) -> None:
        """Request a batch of the next epoch.  All batches of this one have been requested."""
        loader, progress = self._loader, self.progress
        if not loader._previews or self._is_only:
            return
        if not self._has_begun_next:
            self._has_begun_next = True
            if loader._preview is not None:
                loader._preview.drop()
            seed = _seed_of_turn(progress.seed, progress.turn + 1)
            spec = self._spec._replace(number=loader._number + 1, seed=seed)
            loader._preview = Preview(loader, self._workers, spec, self._ahead_at_most())
        loader._preview.begin_one()

    def _submit_to(self, part: int, request: Request | None) -> None:
        progress, place = self.progress, self._places[part]
        base, requests = progress.bases[part], None
        interval = self._loader.snapshot_every_n_steps
        if request is not None:
            # Without a state, a batch with indices does not depend on earlier batches.
            interval = int(self._asks_state)
            requests = [*self._since[part], (request.number, request.indices)]
            if not self._asks_state:
                base = base._replace(place=place)
        if isinstance(self._workers, Inline):
            # The dataset is in this process, so its state can be read when it is needed.
            interval, requests = 0, requests and requests[-1:]
            base = Base(place if requests else 0)
        name = f"batch {place} of worker {part}" if request is None else label(request)
        result = self._workers.make(
            name, WorkerCopy.make_next, self._spec, part, base, place, progress.parts[part],
            requests, interval, shard=part,
        )  # fmt: skip
        self._append(PendingBatch(result, request, part, place))
        # Last, since a signal handler may raise while the request is pickled.
        self._places[part] += 1
        self._cycle = (part + 1) % len(progress.parts)
        if requests is not None and self._asks_state:
            self._since[part].append(requests[-1])

    def _append(self, item: PendingBatch) -> None:
        if self._pin_thread is not None:
            item = item._replace(result=self._pin_thread.pin(item.result))
        self._pending.append(item)

    def _next_part(self) -> int | None:
        """Return the part of the next request, or None if all have ended or enough requests."""
        progress, count = self.progress, len(self.progress.parts)
        at_most = 0
        if not self._loader.in_order and len(progress.ended) < count:
            at_most = self._ahead_at_most() // (count - len(progress.ended))
        for i in range(count):
            part = (self._cycle + i) % count
            if part not in progress.ended and (
                not at_most or sum(item.part == part for item in self._pending) < at_most
            ):
                return part
        return None

    def _ahead_at_most(self) -> int:
        """Return how many batches may be requested ahead: as many as in torch's loader."""
        return (self._loader.prefetch_factor or 2) * self._workers.size

    # -- batches -----------------------------------------------------------------------------------

    def __next__(self) -> Any:
        self._check_current()
        is_inline = isinstance(self._workers, Inline)
        asked, ahead = time.perf_counter(), 0
        if not is_inline:
            ahead = sum(item.result.ready() for item in self._pending)
        while True:
            if self._taken is None:
                if is_inline and not self._ended:
                    self._submit()  # the batch is made by `get` below
                elif not self._pending:
                    self._submit_next()  # a signal handler may have prevented it
                if not self._pending:
                    break
                self._take(self._ready_place())
            assert self._taken is not None
            item = self._taken
            try:
                answer = item.result.get()
                if self._pins and self._pin_thread is None and not answer.ended:
                    answer = answer._replace(batch=pin_memory(answer.batch))
            except Exception as exc:
                if not by_handler(exc):
                    self._count(item, None)
                raise
            finally:
                item = item._replace(result=None)  # the traceback of an error keeps this frame
            if answer.ended:
                self._count(item, answer)
                continue
            used, waited = self.times.took(asked, ahead, answer.seconds, answer.collating)
            if self._loader._auto is not None:
                self._adapt(self._loader._auto.took(used, waited, answer.seconds))
            self._count(item, answer)
            if self._loader._iterable:
                self._check_length()
            return answer.batch
        if self._is_cut:
            raise RuntimeError(
                "an error, or a signal handler, has ended the sampler's iteration, so this epoch "
                "has no more batches; it can go on after load_state_dict(state_dict())"
            )
        self.progress.is_over = True
        self._end()
        raise StopIteration

    @shielded
    def _take(self, place: int) -> None:
        """Take a batch out of `_pending`, and request another one in its place."""
        self._taken = self._pending[place]
        del self._pending[place]
        # Requested before this one is unpickled, so that no worker is idle meanwhile.
        if not isinstance(self._workers, Inline):
            self._submit_next()

    def _check_current(self) -> None:
        if self._has_parts and self._spec.number != self._loader._number and not self._is_only:
            raise RuntimeError(
                "a newer iteration over this DataLoader uses the same workers "
                "(persistent_workers=True), and each worker has one place in its dataset; finish "
                "one iteration before the next"
            )

    def _ready_place(self) -> int:
        """Wait for the next batch.  Return its index in `_pending`.

        Without ``in_order``, this may be any batch, but batches of one part keep their order: a
        state has one place for each part, and a dead worker's batch is made after later ones.
        """
        timeout = self._loader.timeout or None
        if self._loader.in_order or self._loader.num_workers == 0:
            self._pending[0].result.wait(timeout)
            if self._pending[0].result.ready():
                return 0
        else:
            until = None if timeout is None else time.monotonic() + timeout
            while until is None or time.monotonic() < until:
                bell = threading.Semaphore(0)
                with ExitStack() as listening:
                    for item in self._pending:
                        listening.enter_context(item.result._waiters.listening(bell))
                    waiting: set[int | None] = set()  # parts
                    for place, item in enumerate(self._pending):
                        if item.part not in waiting and item.result.ready():
                            return place
                        if item.part is not None:
                            waiting.add(item.part)
                    left = LOST_SIGNAL if until is None else until - time.monotonic()
                    bell.acquire(timeout=max(0, min(left, LOST_SIGNAL)))
        raise RuntimeError(
            f"DataLoader timed out after {timeout} seconds; `python -m xpool stacks {os.getpid()}` "
            "says where each worker is"
        )

    @shielded
    def _count(self, item: PendingBatch, answer: Made | None) -> None:
        """Record in the progress that a batch, or an error in its place, was taken."""
        progress, part = self.progress, item.part
        self._taken = None
        progress.yielded += answer is not None and not answer.ended
        if part is not None:
            state = None if answer is None else answer.state
            if answer is not None and (answer.ended or answer.is_last):
                if part not in progress.ended:  # only the first of these answers has the state
                    progress.ended.add(part)
                    end = item.place + answer.is_last
                    progress.bases[part] = Base(end, state, end)
                self._ended = len(progress.ended) == len(progress.parts)
                if answer.ended:
                    return
            elif state is not None:
                for _ in range(item.place + 1 - progress.bases[part].place):
                    if self._since[part]:
                        self._since[part].popleft()
                progress.bases[part] = Base(item.place + 1, state)
            progress.parts[part] = item.place + 1
            progress.next_part = (part + 1) % len(progress.parts)
        if item.request is not None:
            progress.beyond.add(item.request.number)
            self._known[item.request.number] = item.request
            while progress.taken in progress.beyond:
                progress.beyond.remove(progress.taken)
                request = self._known.pop(progress.taken)
                progress.taken += 1
                progress.digest = request.digest
                if request.state is not None:
                    progress.sampler, progress.drawn = request.state, progress.taken

    def _check_length(self) -> None:
        said = self._loader._IterableDataset_len_called
        if said is None or self.progress.yielded <= said:
            return
        text = (
            f"Length of IterableDataset {self._loader.dataset} was reported to be {said} (when "
            f"accessing len(dataloader)), but {self.progress.yielded} samples have been fetched. "
        )
        if self._loader.num_workers:
            text += (
                "For multiprocessing data-loading, this comes of a dataset that yields all it has "
                "in each worker: have its __iter__ yield that worker's part, by "
                "torch.utils.data.get_worker_info()."
            )
        warnings.warn(text, stacklevel=3)

    def __len__(self) -> int:
        return len(self._loader._index_sampler)

    def __getstate__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} cannot be pickled")

    def _end(self) -> None:
        self._clean([item.result for item in self._pending])
        if self._pin_thread is not None:
            self._pin_thread.end()

    def __del__(self) -> None:
        # If the epoch is dropped before its end, this cancels the requested batches.
        if hasattr(self, "_pin_thread"):
            self._end()


def _untaken(
    sampling: Sampling | None, beyond: set[int], known: dict[int, Request]
) -> Iterator[Request]:
    """Yield the requests of batches that were not taken before; put the others into ``known``."""
    # A method's iterator would keep the epoch alive, which must end when it is dropped.
    if sampling is None:
        return
    # All of `beyond` must be known before a batch is counted.
    untaken = []
    for request in sampling if beyond else ():
        if request.number in beyond:
            known[request.number] = request
        else:
            untaken.append(request)
        if len(known) == len(beyond):
            break
    yield from untaken
    yield from sampling


def _seed_of_turn(seed: int, turn: int) -> int:
    """Return the seed of epoch ``turn`` (from 1) of persistent workers, for which one is drawn."""
    # All bits change with the turn, because torch's generator uses only 32 of them.
    return seed if turn == 1 else random.Random(f"{seed} {turn}").getrandbits(63)


def can_pin() -> bool:
    """Whether this machine has a device for which memory can be pinned."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return bool(torch.cuda.is_available())
    return bool(accelerator.is_available()) and accelerator.current_accelerator().type != "mps"


def warn_of_pinning(device: str) -> None:
    """Warn if ``pin_memory=True`` or the device has no effect."""
    if device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device={device!r}.",
            stacklevel=4,
        )
    if not can_pin():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned "
            "memory won't be used.",
            stacklevel=4,
        )


class PinThread:
    """A thread that receives the batches of one epoch and copies them into pinned memory.

    It takes each batch as soon as a worker has made it, in any order.
    """

    def __init__(self) -> None:
        self._made: queue.SimpleQueue[PinnedResult | None] = queue.SimpleQueue()
        devices = torch.get_device_module() if hasattr(torch, "get_device_module") else torch.cuda
        self._thread = PromptThread(
            target=_pin_all, args=(self._made, devices, devices.current_device()),
            name="xpool-DataLoader-pin", daemon=True,
        )  # fmt: skip
        self._thread.start()
        joined_at_exit.add(self)

    def pin(self, result: Any) -> PinnedResult:
        return PinnedResult(result, self._made)

    def end(self) -> None:
        """End the thread when it has copied the batches that it has received."""
        self._made.put(None)

    def join(self) -> None:
        self.end()
        self._thread.join()


def _pin_all(made: queue.SimpleQueue[PinnedResult | None], devices: Any, device: Any) -> None:
    torch.set_num_threads(1)  # only for this thread, whose copies must not use all processors
    devices.set_device(device)
    for result in iter(made.get, None):
        result.pin()
        del result


class PinnedResult(Flag):
    """The result of making a batch, ready when the batch is in pinned memory."""

    ready = Flag.is_set

    def __init__(self, result: Any, made: queue.SimpleQueue[PinnedResult | None]) -> None:
        super().__init__()
        self._result, self._made = result, made
        self._answer: Any = None
        self._error: BaseException | None = None
        # Registered before the check, so that a wake between the two is not lost.
        result._waiters.append(self)
        if result.ready():
            self.release()

    def release(self) -> None:
        """Give the batch to the thread.  Called when a worker has made it, perhaps twice."""
        self._made.put(self)

    def pin(self) -> None:
        if self.ready():
            return
        try:
            answer = self._result.get()
            self._answer = answer._replace(batch=pin_memory(answer.batch))
        except BaseException as error:  # `get` raises it
            self._error = error
        self._result = None
        self.set()

    def get(self) -> Any:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._answer

    def cancel(self) -> bool:
        result = self._result  # read once: the thread sets it to None
        return result is not None and bool(result.cancel())
