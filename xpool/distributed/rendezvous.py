"""Ranks meet at a store, and learn each other's names before anything else is set up."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from xpool.distributed.errors import GroupTimeout, PeerLost
from xpool.distributed.faults import connection_lost, first_line
from xpool.errors import OptionError

__all__ = [
    "beside",
    "default_address",
    "exchange_names",
    "open_store",
    "place",
]

_FAREWELL = 5  # seconds that a rank which gives up leaves the others to learn why


def place(rank: int, world_size: int) -> tuple[int, int]:
    """Complete rank and world size from the environment that torchrun sets; check both."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise OptionError(f"{name} must be a whole number, not {value!r}")
    found = []
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        text = os.environ.get(name, "")
        if value == -1 and not text.isdigit():
            raise OptionError(
                f"{name.lower()} is not given, and the environment variable {name} that "
                f"torchrun sets is {text!r}: give {name.lower()}=."
            )
        found.append(int(text) if value == -1 else value)
    rank, world_size = found
    if world_size < 1 or not 0 <= rank < world_size:
        raise OptionError(
            f"rank {rank} of world_size {world_size} makes no sense: ranks count from 0 to "
            "world_size - 1."
        )
    return rank, world_size


def default_address() -> str:
    """Where ranks meet that were not told: as torchrun says, else at a port of this machine."""
    return "env://" if os.environ.get("MASTER_ADDR") else "tcp://localhost:9100"


def beside(address: str) -> str:
    """Where else the same ranks meet: RPC has a store of its own."""
    # Several stores at one TCP address share a server; at one file they would share its end.
    return f"{address}.rpc" if urlparse(address).scheme == "file" else address


def open_store(address: str, rank: int, world_size: int, timeout: float) -> Any:
    """Open the store at an address.

    Raises:
        GroupTimeout: nobody answers.
        PeerLost: it was there, and is gone.
        OptionError: this is no address of a store.
    """
    limit = timedelta(seconds=timeout)
    try:
        store, _, _ = next(dist.rendezvous(address, rank, world_size, timeout=limit))
    except dist.DistError as exc:
        if connection_lost(exc):
            raise _store_lost(address, exc) from exc
        raise GroupTimeout(
            f"Rank {rank} found no store at {address} within {timeout:g} s: {first_line(exc)}. "
            "Rank 0 opens it: see that rank 0 runs, and that its port is free and the same "
            "in all ranks."
        ) from None
    except (RuntimeError, ValueError) as exc:
        raise OptionError(
            f"{address!r} is no place to meet: {first_line(exc)}. Give tcp://host:port, "
            "file:///path/of/a/new/file, or env:// with what torchrun sets."
        ) from None
    store.set_timeout(limit)
    return store


def _store_lost(address: str, exc: Exception) -> PeerLost:
    return PeerLost(
        f"The store at {address} is gone, and with it rank 0, which kept it: {first_line(exc)}."
    )


def exchange_names(
    store: Any, address: str, name: str, rank: int, world_size: int, timeout: float
) -> list[str]:
    """Leave this rank's name in the store and return those of all, by rank.

    Raises:
        OptionError: a rank or a name is taken twice.
        GroupTimeout: ranks did not come within the timeout; the message names them.
        PeerLost: the store is gone, and with it rank 0.
    """
    try:
        return _exchange(dist.PrefixStore("names", store), address, name, rank, world_size, timeout)
    except dist.DistNetworkError as exc:
        raise _store_lost(address, exc) from exc


def _exchange(
    store: Any, address: str, name: str, rank: int, world_size: int, timeout: float
) -> list[str]:
    # Adding is atomic in the store: of two processes with one rank, one sees a 2.
    if store.add(f"claims/{rank}", 1) > 1:
        raise OptionError(
            f"Rank {rank} at {address} is taken already: give each process a rank of its own, "
            "and each world an address of its own (a file that an earlier world left is used up)."
        )
    store.set(str(rank), name)
    keys = [str(other) for other in range(world_size)]
    end = time.monotonic() + timeout
    for key in keys:
        # The time is for all ranks together.  Not 0, which torch's stores take for no limit.
        left = timedelta(seconds=max(0.001, end - time.monotonic()))
        try:
            store.wait([key], left)
        except RuntimeError:  # which of them it is, varies with the kind of store
            there = [key for key in keys if store.check([key])]
            missing = ", ".join(key for key in keys if key not in there)
            came = ", ".join(f"{key} ({store.get(key).decode()})" for key in there)
            raise GroupTimeout(
                f"Of {world_size} ranks, rank {missing} did not join at {address} within "
                f"{timeout:g} s. Those that came: {came}. See whether the others run, and have "
                "the same address and world_size."
            ) from None
    names = [store.get(key).decode() for key in keys]
    twice = next((one for one in names if names.count(one) > 1), None)
    if twice is None:
        return names
    # Rank 0, whose store it may be, must not be gone before all have read the names.
    if store.add("read", 1) == world_size:
        store.set("all have read", "")
    try:
        store.wait(["all have read"], timedelta(seconds=_FAREWELL))
    except RuntimeError:
        pass  # the error below is what there is to say in any case
    ranks = " and ".join(str(rank) for rank, one in enumerate(names) if one == twice)
    raise OptionError(
        f"Ranks {ranks} are both named {twice!r}: give each process a name of its own. "
        f"Names: {', '.join(names)}."
    )
