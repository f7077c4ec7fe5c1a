"""Mistakes that type checkers find. Checked, not run: see `test_typing`.

If a checker no longer reports a line, it reports the line's comment as unused.
"""

from __future__ import annotations

from xpool import CtxPool, Executor, Pool


def name(number: int) -> str:
    return str(number)


def on_device(device: bytes, number: int) -> float:
    return float(number)


def mistakes(pool: Pool, contexts: CtxPool[bytes], executor: Executor) -> None:
    pool.map(name, ["a"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pool.map(name, [1], retires=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    pool.map_async(name, [1], journal="a")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    pool.apply(name, (1,), retires=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    pool.map(name, [1], on_error="keep")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    pool.apply(name, (1,), {}, 3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    pool.run_all(name, "a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pool.map(on_device, [1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    contexts.apply(name, (1,))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    contexts.map(name, [1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    executor.submit(name, "a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    number: int = pool.apply(name, (1,))  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(number, on_device)
