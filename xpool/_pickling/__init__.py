"""Converts objects to messages and back, and decides where large buffers go.

Programs and workers use it.  It runs users' code (`__reduce__`), so the engine's thread never calls
it, and no caller holds a lock.  `by_value` and `tensors` register the reducers of their kinds of
objects through `xpool.pickle`.  It imports `xpool._memory` and lower layers.
"""

Key = tuple[str, str]
"""A module's name, and a global's name or the path of a class's attribute (``Config.rate``)."""


class Brought(frozenset[Key]):
    """Given to a pickler as the globals that the receiver has: none.  ``keys`` gets those that the
    message brings."""

    keys: frozenset[Key] = frozenset()
