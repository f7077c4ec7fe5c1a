"""Measure what the pool costs when two XLA workers evaluate a model.

    PJRT_DEVICE=CPU python -m bench.devices          (in the environment of `make test-xla`)

Each worker evaluates a small model on its own batch, in two ways that take turns.  ``alone``: one
task runs the whole loop in each worker, so the pool does nothing meanwhile.  ``pool``: each batch
is an `apply_async`.

Then a tensor makes round trips to one worker, which computes ``x + 1``.  The tensor is copied, or
it stays on the device and a handle is sent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from xpool import CtxPool
from xpool.devices import DeviceContext, devices

_models: dict[int, Any] = {}


def evaluate(context: DeviceContext, size: int) -> float:
    """Evaluate one batch: a forward pass of a model on the device."""
    import torch

    if size not in _models:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 10)]
        model = torch.nn.Sequential(*layers).to(context.device)
        _models[size] = model, torch.rand(256, size, device=context.device)
    model, batch = _models[size]
    with torch.no_grad():
        return float(model(batch).sum().item())


def evaluate_many(context: DeviceContext, size: int, count: int) -> float:
    """Return the seconds that ``count`` batches take in the worker."""
    begin = time.perf_counter()
    for _ in range(count):
        evaluate(context, size)
    return time.perf_counter() - begin


def echo(context: DeviceContext, tensor: Any) -> Any:
    return tensor.to(context.device) + 1


def ordinal(context: DeviceContext, *_: Any) -> int:
    return context.ordinal


def compare(pool: CtxPool, size: int, tasks: int, rounds: int) -> None:
    """Print the rate with a task for each batch, as a share of the workers' rate alone."""
    pool.run_all(evaluate_many, size, 5)  # both workers compile the model
    alone, pooled = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        pool.run_all(evaluate_many, size, tasks // 2)
        alone.append(tasks / (time.perf_counter() - begin))
        begin = time.perf_counter()
        pending = [pool.apply_async(evaluate, (size,)) for _ in range(tasks)]
        for result in pending:
            result.get()
        pooled.append(tasks / (time.perf_counter() - begin))
    one, two = statistics.median(alone), statistics.median(pooled)
    ratio = statistics.median(b / a for a, b in zip(alone, pooled))
    print(f"alone {one:,.0f} tasks/s, pool {two:,.0f} tasks/s, pool/alone {ratio:.3f}")


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def trips(copies: CtxPool, handles: CtxPool, rounds: int) -> None:
    """Print the milliseconds of a round trip without a tensor, with a copy, and with a handle."""
    import torch

    for name, count in (("1 KiB", 256), ("4 MiB", 1 << 20), ("64 MiB", 16 << 20)):
        tensor = torch.rand(count)
        handle = handles.apply(echo, (tensor,))
        ways: dict[str, Callable[[], object]] = {
            "no tensor": lambda: copies.apply(ordinal),
            "copy": lambda t=tensor: copies.apply(echo, (t,)),
            "handle": lambda h=handle: handles.apply(echo, (h,)),
            "handle alone": lambda h=handle: handles.apply(ordinal, (h,)),
            "cpu()": handle.cpu,
        }
        for run in ways.values():
            run()
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, run in ways.items():
                taken[way].append(seconds(run))
        medians = ", ".join(f"{way} {statistics.median(t) * 1e3:.2f}" for way, t in taken.items())
        print(f"round trip of {name}, ms: {medians}")

    many, short = 200, torch.rand(256)
    handle = handles.apply(echo, (short,))
    for name, pool, item in (("copies", copies, short), ("handles", handles, handle)):
        rate = many / seconds(lambda p=pool, x=item: list(p.imap(echo, [x] * many)))  # type: ignore[misc]
        print(f"imap of {name}: {rate:,.0f} tensors/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="width of the model")
    parser.add_argument("--tasks", type=int, default=200, help="batches for both workers together")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with CtxPool(worker_contexts=devices("xla", 2)) as pool:
        compare(pool, args.size, args.tasks, args.rounds)
    with (
        CtxPool(worker_contexts=devices("xla", 1)) as copies,
        CtxPool(worker_contexts=devices("xla", 1), is_copy_tensor=False) as handles,
    ):
        trips(copies, handles, args.rounds)
    assert "torch_xla" not in sys.modules, "the parent must not import torch_xla"


if __name__ == "__main__":
    main()
