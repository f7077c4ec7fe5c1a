"""Keeps the garbage collector from new modules, whose objects live as long as the program."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

_PYTHONS = 1000
"""More objects than Python itself has frozen: 375 in 3.12, none in others."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Do without garbage collections in a block that imports modules: they would find nothing.

    After imports, all objects belong to the oldest generation.  Otherwise the next collection would
    visit all new ones.  With the objects of torch, it would take 150 ms.
    """
    collects, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if collects:
            try:
                # If the program has frozen objects, they stay frozen.
                if len(sys.modules) > modules and gc.get_freeze_count() < _PYTHONS:
                    gc.freeze()
                    gc.unfreeze()
            finally:
                gc.enable()
