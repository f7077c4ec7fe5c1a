"""Distinguishes torch's errors by their texts, because most are plain `RuntimeError`."""

from __future__ import annotations

from torch.distributed import DistNetworkError


def connection_lost(exc: BaseException) -> bool:
    """Whether a connection to another process has ended.

    The texts of gloo and TensorPipe contain the path of a source file in a folder ``transport``.
    A store at a TCP address raises `DistNetworkError`.
    """
    network = isinstance(exc, DistNetworkError) and not timed_out(exc)
    return network or "transport" in str(exc) or "tensorpipe" in str(exc)


def timed_out(exc: BaseException) -> bool:
    # The first letter is left out: torch writes "Timed out" and "timed out".
    text = str(exc)
    return "imed out" in text or "imeout" in text


def first_line(exc: BaseException) -> str:
    """Return torch's text without the C++ stack trace."""
    return str(exc).strip().partition("\n")[0].rstrip(". ")
