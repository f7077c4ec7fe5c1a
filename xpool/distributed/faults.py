"""What torch's errors mean: they are plain `RuntimeError`, most of them, and their text tells."""

from __future__ import annotations

from torch.distributed import DistNetworkError


def connection_lost(exc: BaseException) -> bool:
    """Whether a connection to another process has ended.

    gloo and TensorPipe name a file of theirs in a folder ``transport``; a store at a TCP address
    has a class for it.
    """
    network = isinstance(exc, DistNetworkError) and not timed_out(exc)
    return network or "transport" in str(exc) or "tensorpipe" in str(exc)


def timed_out(exc: BaseException) -> bool:
    """Whether something took too long."""
    # Without the first letter, which torch writes in either case.
    text = str(exc)
    return "imed out" in text or "imeout" in text


def first_line(exc: BaseException) -> str:
    """What torch says, without the stack of its C++ side."""
    return str(exc).strip().partition("\n")[0].rstrip(". ")
