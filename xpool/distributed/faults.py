"""Tells errors of torch apart by their texts: most are plain `RuntimeError`."""

from __future__ import annotations

from torch.distributed import DistNetworkError


def connection_lost(exc: BaseException) -> bool:
    """Whether a connection to another process has ended.

    Texts of gloo and TensorPipe name a source file in a folder ``transport``.  A store at a TCP
    address raises a class of its own.
    """
    network = isinstance(exc, DistNetworkError) and not timed_out(exc)
    return network or "transport" in str(exc) or "tensorpipe" in str(exc)


def timed_out(exc: BaseException) -> bool:
    # The first letter is left out, since torch writes it in either case.
    text = str(exc)
    return "imed out" in text or "imeout" in text


def first_line(exc: BaseException) -> str:
    """Return torch's text without the stack of its C++ side."""
    return str(exc).strip().partition("\n")[0].rstrip(". ")
