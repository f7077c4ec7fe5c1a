"""The test tools of xpool, which can also test other pools: see ``docs/testing.md``.

Names are imported when they are first used.  Only the state machine needs hypothesis, and only the
fixture needs pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpool.testing._conformance import check_channel as check_channel
    from xpool.testing._conformance import check_hooks as check_hooks
    from xpool.testing._leaks import LeakError as LeakError
    from xpool.testing._leaks import no_leaks as no_leaks
    from xpool.testing._pool_machine import PoolStateMachine as PoolStateMachine
    from xpool.testing._test_tasks import Gate as Gate
    from xpool.testing._test_tasks import Mailbox as Mailbox
    from xpool.testing._test_tasks import sabotage as sabotage

_homes = {
    "_conformance": "check_channel check_hooks",
    "_leaks": "LeakError no_leaks",
    "_pool_machine": "PoolStateMachine",
    "_test_tasks": "Gate Mailbox sabotage",
}
_where = {name: module for module, names in _homes.items() for name in names.split()}

__all__ = [*_where]


def __getattr__(name: str) -> Any:
    if name not in _where:
        raise AttributeError(f"module 'xpool.testing' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"xpool.testing.{_where[name]}")
    except ModuleNotFoundError as exc:
        if exc.name != "hypothesis":
            raise
        raise ImportError(
            f"xpool.testing.{name} needs hypothesis, which is not installed: pip install hypothesis"
        ) from exc
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
