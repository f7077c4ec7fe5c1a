"""Opens the store through which ranks find each other, and exchanges their names."""

from __future__ import annotations

import concurrent.futures
import fcntl
import numbers
import os
import socket
import sys
import threading
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from xpool._python.starting import PromptThread
from xpool.distributed._current import GroupTimeout, PeerLost, connection_lost, first_line
from xpool.errors import OptionError

MOST_SECONDS = 2_000_000
"""The longest timeout, 23 days, because torch stores some of them as 32 bits of milliseconds."""

_FORMS = "tcp://host:port, file:///path/of/a/new/file, or env:// with what torchrun sets."

_FAREWELL_SECONDS = 5  # how long a rank waits until the others have read the names


def place(rank: int, world_size: int) -> tuple[int, int]:
    """Check rank and world size; take them from torchrun's environment variables if they are -1."""
    found = []
    for name, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise OptionError(f"{name} must be a whole number, not {value!r}")
        variable = name.upper()
        text = os.environ.get(variable, "")
        if value == -1 and not text.isdigit():
            raise OptionError(
                f"{name} is not given, and the environment variable {variable} that torchrun sets "
                f"is {text!r}: give {name}=."
            )
        found.append(int(text) if value == -1 else value)
    rank, world_size = found
    if world_size < 1 or not 0 <= rank < world_size:
        raise OptionError(
            f"rank {rank} is invalid in a world of {world_size}: ranks count from 0 to "
            "world_size - 1."
        )
    return rank, world_size


def default_address() -> str:
    """Return torchrun's address if its variables are set, else a port of this machine."""
    return "env://" if os.environ.get("MASTER_ADDR") else "tcp://localhost:9100"


def beside(address: str) -> str:
    """Return the address of RPC's own store, which lies beside the store at ``address``."""
    # Two stores at one TCP address share a server.  Two stores in one file are removed together.
    return f"{address}.rpc" if urlparse(address).scheme == "file" else address


def check_seconds(name: str, value: Any) -> float:
    """Return a timeout in seconds, above 0 and at most `MOST_SECONDS`."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (number and 0 < value <= MOST_SECONDS):  # refuses NaN, too
        raise OptionError(
            f"{name} must be a number of seconds above 0 and at most {MOST_SECONDS}, not {value!r}"
        )
    return float(value)


def check_timeout(name: str, value: Any) -> float:
    """As `check_seconds`, for a remote call: allow 0 (no timeout) and -1 (the world's), too."""
    return float(value) if value in (0, -1) else check_seconds(name, value)


def check_address(name: str, address: Any) -> None:
    """Check an address, or None.  If torch cannot open the file of a store, it waits for minutes
    and holds the interpreter's lock meanwhile."""
    if address is not None and not isinstance(address, str):
        raise OptionError(f"{name} must be text, not {address!r}: give {_FORMS}")
    if address is None or (url := urlparse(address)).scheme != "file":
        return
    path, folder = url.path, os.path.dirname(url.path)
    if url.netloc or not os.path.isabs(path):
        problem = "is not an absolute path"
    elif not os.path.isdir(folder):
        problem = f"is in no folder: there is no {folder}"
    elif os.path.isdir(path):
        problem = "is a folder"
    elif not os.access(path if os.path.exists(path) else folder, os.R_OK | os.W_OK):
        problem = "cannot be written by this process"
    elif not _is_store(path):
        problem = "is there already, and is no store of torch's"
    else:
        return
    raise OptionError(f"{address!r} is not a valid address: it {problem}. Give {_FORMS}")


def _is_store(path: str) -> bool:
    """Whether a file is missing or empty, or has the format of torch's `FileStore`.

    In this format each text follows its length in 4 bytes, and the first text is "refcount" or a
    key, which begins with "/".  torch reads past the end of other files for ever.
    """
    try:
        with open(path, "rb") as file:
            try:
                # torch locks the file while it writes.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True  # another rank is writing
            size, begin, head = os.fstat(file.fileno()).st_size, 0, b""
            while begin < size:
                file.seek(begin)
                length = int.from_bytes(file.read(4), sys.byteorder)
                head = head or file.read(8)
                begin += 4 + length
    except FileNotFoundError:
        return True
    return not size or (begin == size and (head[:1] == b"/" or head == b"refcount"))


def open_store(address: str, rank: int, world_size: int, timeout: float) -> Any:
    """Open the store at an address, within ``timeout`` seconds.

    Raises:
        GroupTimeout: the store did not answer in time.
        PeerLost: the store was closed while this process connected to it.
        OptionError: there can be no store at this address.
    """
    limit = timedelta(seconds=timeout)
    opening = _Opening(address, rank, world_size, limit)
    try:
        store = opening.result(timeout)
    except GroupTimeout:
        raise
    except dist.DistError as exc:
        taken = "EADDRINUSE" in str(exc) or "address already in use" in str(exc).lower()
        if taken and rank == 0:
            raise OptionError(
                f"Rank 0 cannot listen at {address}: another process has that port. Give all ranks "
                "another one, or end what uses it."
            ) from None
        if connection_lost(exc):
            raise _store_lost(address, exc) from exc
        raise opening.timed_out(first_line(exc)) from None
    except (RuntimeError, ValueError) as exc:
        raise OptionError(
            f"{address!r} is not a valid address: {first_line(exc)}. Give {_FORMS}"
        ) from None
    store.set_timeout(limit)
    return store


class _Opening:
    """Opens a store in a thread, because torch exceeds its timeout if a server accepts the
    connection and never answers, or if a host name has no address."""

    def __init__(self, address: str, rank: int, world_size: int, limit: timedelta) -> None:
        self._address, self._rank, self._world_size, self._limit = address, rank, world_size, limit
        self._unknown: str | None = None  # why the host name has no address yet
        self._over = threading.Event()  # set when the caller has given up
        self._outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        PromptThread(target=self._run, name="xpool-open-store", daemon=True).start()

    def result(self, timeout: float) -> Any:
        """Return the store.  Raises the errors of `_open`, or `GroupTimeout`."""
        if not concurrent.futures.wait([self._outcome], timeout).done:
            self._over.set()
            raise self.timed_out("no answer")
        return self._outcome.result()

    def timed_out(self, story: str) -> GroupTimeout:
        seconds = round(self._limit.total_seconds(), 1)
        if self._unknown is not None:
            text = f"{self._unknown}. See that the name is right and known here."
        elif self._rank == 0:
            text = f"{story}. Rank 0 opens it: see that the address is one of this machine's."
        else:
            text = (
                f"{story}. Rank 0 opens it: see that rank 0 runs, and that its port is free and "
                "the same in all ranks."
            )
        return GroupTimeout(
            f"Rank {self._rank} found no store at {self._address} within {seconds:g} s: {text}"
        )

    def _run(self) -> None:
        try:
            self._outcome.set_result(self._open())
        except BaseException as exc:
            self._outcome.set_exception(exc)

    def _open(self) -> Any:
        place = _host_and_port(self._address)
        if place is None:
            address, rank, size = self._address, self._rank, self._world_size
            return next(dist.rendezvous(address, rank, size, timeout=self._limit))[0]
        host, port = place
        self._await_name(host)
        # As torch's own handler, but without its wait for all ranks: its error names no rank.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        options = {"use_libuv": False} if os.environ.get("USE_LIBUV") == "0" else {}
        store = dist.TCPStore(
            host,
            port,
            self._world_size,
            self._rank == 0 and not agent,
            self._limit,
            wait_for_workers=False,
            multi_tenant=True,
            **options,
        )
        # torchrun's store outlives the ranks, which torchrun may start again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        is_env = urlparse(self._address).scheme == "env"
        return dist.PrefixStore(f"attempt {attempt}", store) if is_env else store

    def _await_name(self, host: str) -> None:
        """Wait until a host name has an address: a service's name may get its address late."""
        while not self._over.is_set():
            try:
                socket.getaddrinfo(host, None)
                self._unknown = None
                return
            except OSError as exc:
                self._unknown = f"{host!r} has no address ({exc.strerror})"
            self._over.wait(0.2)
        raise self.timed_out("no answer")


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Return host and port of ``tcp://`` and ``env://`` addresses, or None for other ones."""
    url = urlparse(address)
    if url.query or url.scheme not in ("tcp", "env"):
        return None
    if url.scheme == "tcp":
        host, port = url.hostname, url.port  # raises if the port is out of range
        if not host or port is None:
            raise ValueError("the host or the port is missing")
        return host, port
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"the environment variable {name} is not set")
    port = int(os.environ["MASTER_PORT"])
    if not 0 <= port < 2**16:
        raise ValueError(f"MASTER_PORT={port} is not a port")
    return os.environ["MASTER_ADDR"], port


def _store_lost(address: str, exc: Exception) -> PeerLost:
    return PeerLost(
        f"The store at {address} is gone, and with it rank 0, which kept it: {first_line(exc)}."
    )


def exchange_names(
    store: Any, address: str, name: str, rank: int, world_size: int, timeout: float
) -> list[str]:
    """Put this rank's name into the store; return the names of all ranks, in the ranks' order.

    Raises:
        OptionError: a rank or a name is used twice.
        GroupTimeout: some ranks did not join within ``timeout`` seconds; the text names them.
        PeerLost: the connection to the store is lost, so rank 0 is lost.
    """
    try:
        return _exchange(dist.PrefixStore("names", store), address, name, rank, world_size, timeout)
    except dist.DistNetworkError as exc:
        raise _store_lost(address, exc) from exc


def _exchange(
    store: Any, address: str, name: str, rank: int, world_size: int, timeout: float
) -> list[str]:
    # `add` is atomic: if two processes have the same rank, one of them gets 2.
    if store.add(f"claims/{rank}", 1) > 1:
        raise OptionError(
            f"Rank {rank} at {address} is taken already: give each process a rank of its own, "
            "and each world an address of its own (the file of an earlier world cannot be used "
            "again)."
        )
    store.set(str(rank), name)
    keys = [str(other) for other in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=max(0.001, timeout)))  # for torch, 0 means no timeout
    except dist.DistNetworkError as exc:
        raise PeerLost(f"{_store_lost(address, exc)} It may have given up on a rank.") from exc
    except RuntimeError:  # the error's class depends on the kind of store
        there = [key for key in keys if store.check([key])]
        missing = ", ".join(key for key in keys if key not in there)
        came = ", ".join(f"{key} ({store.get(key).decode()})" for key in there)
        raise GroupTimeout(
            f"Of {world_size} ranks, rank {missing} did not join at {address} within {timeout:g} s."
            f" Those that joined: {came}. Check that the others run, and have the same address and "
            "world_size."
        ) from None
    names = [store.get(key).decode() for key in keys]
    twice = next((one for one in names if names.count(one) > 1), None)
    if twice is None:
        return names
    # Rank 0 may keep the store, so it must not leave before all have read the names.
    if store.add("read", 1) == world_size:
        store.set("all have read", "")
    try:
        store.wait(["all have read"], timedelta(seconds=_FAREWELL_SECONDS))
    except RuntimeError:
        pass  # the error below is raised in any case
    ranks = " and ".join(str(rank) for rank, one in enumerate(names) if one == twice)
    raise OptionError(
        f"Ranks {ranks} are both named {twice!r}: give each process a name of its own. "
        f"Names: {', '.join(names)}."
    )
