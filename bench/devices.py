"""Evaluation on two XLA workers: what the pool costs beside the same work without it.

    PJRT_DEVICE=CPU python -m bench.devices          (in the environment of `make test-xla`)

Each worker evaluates a small model on batches that it has.  ``alone``: one task runs the whole loop
in each worker, so that the pool does nothing meanwhile.  ``pool``: each batch is an `apply_async`.
The same processes, interleaved, medians; and the round trips of an XLA tensor of 1 KiB and 4 MiB,
staged through host memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from xpool import CtxPool
from xpool.devices import DeviceContext, devices

_models: dict[int, Any] = {}


def evaluate(context: DeviceContext, size: int) -> float:
    """One batch of the work: a forward pass of a model that lives on the device."""
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
    """Seconds for ``count`` batches, here in the worker."""
    begin = time.perf_counter()
    for _ in range(count):
        evaluate(context, size)
    return time.perf_counter() - begin


def echo(context: DeviceContext, tensor: Any) -> Any:
    """Take a tensor to the device, and send one that is there back."""
    return tensor.to(context.device) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="width of the model")
    parser.add_argument("--tasks", type=int, default=200, help="batches for both workers together")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    contexts = devices("xla", 2)
    with CtxPool(worker_contexts=contexts) as pool:
        pool.starmap(evaluate_many, [(args.size, 5)] * 8, 1)  # both have compiled
        alone, pooled = [], []
        for _ in range(args.rounds):
            half = args.tasks // 2
            begin = time.perf_counter()
            pool.starmap(evaluate_many, [(args.size, half)] * 2, 1)
            alone.append(args.tasks / (time.perf_counter() - begin))
            begin = time.perf_counter()
            pending = [pool.apply_async(evaluate, (args.size,)) for _ in range(args.tasks)]
            for result in pending:
                result.get()
            pooled.append(args.tasks / (time.perf_counter() - begin))
        one, two = statistics.median(alone), statistics.median(pooled)
        ratio = statistics.median(b / a for a, b in zip(alone, pooled))
        print(f"alone {one:,.0f} tasks/s, pool {two:,.0f} tasks/s, pool/alone {ratio:.3f}")

        import torch

        for name, count in (("1 KiB", 256), ("4 MiB", 1 << 20)):
            tensor = torch.rand(count)
            pool.apply(echo, (tensor,))
            times = []
            for _ in range(50):
                begin = time.perf_counter()
                pool.apply(echo, (tensor,))
                times.append(time.perf_counter() - begin)
            print(f"round trip of {name}: {statistics.median(times) * 1e3:.2f} ms")
    assert "torch_xla" not in sys.modules, "the parent has no XLA runtime"


if __name__ == "__main__":
    main()
