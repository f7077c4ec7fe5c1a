"""Converts objects to messages and back, and decides where large buffers go.

Programs and workers use this package.  It runs users' code (`__reduce__`), so the engine's thread
never calls it, and no caller holds a lock.  `by_value` and `tensors` register the reducers of their
kinds of objects through `xpool.pickle`.  This package imports `xpool._memory` and lower layers.
"""

Key = tuple[str, str]
"""A module's name, and a global's name or the path of a class's attribute (``Config.rate``)."""


SETTINGS: frozenset[Key] = frozenset({("", "")})
"""Stands for the settings of the process, and what the program has assigned to installed modules.
A receiver that has been told these gets them only with globals."""


class Brought(frozenset[Key]):
    """Tells a pickler that the receiver has no globals of the program.  The pickler sets ``keys``:
    the globals that the message brings, and ``names``: those of them that the object itself uses.
    """

    keys: frozenset[Key] = frozenset()
    names: frozenset[Key] = frozenset()


HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it, or could have
