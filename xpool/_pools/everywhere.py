"""`everywhere`: a call for its effect, in the program and in every worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from xpool._pickling import reducers
from xpool._pickling.by_value.registered_calls import look_at_script, register_call
from xpool._pickling.by_value.script_top import top_of_main

F = TypeVar("F", bound=Callable[..., Any])


def everywhere(func: F, /, *args: Any, **kwds: Any) -> F:
    """Call a function now, and in every worker before its first task.

    Use it for calls whose effect a task needs: to register a format, a plug-in or an environment,
    or to configure a package.  Nothing of a script runs in a worker, so a worker would not have it.

        >>> import mimetypes, xpool
        >>> xpool.everywhere(mimetypes.add_type, "text/x-log", ".log")
        <function add_type at 0x...>

    It is also a decorator of a function without parameters: ``@xpool.everywhere``.

    Args:
        func: the function.  It and its arguments are pickled as those of a task.  Its result is not
            used.
        args, kwds: its arguments.

    Returns:
        ``func``, so that a decorated function keeps its name.

    Raises:
        TypeError: ``func`` is not callable.
        Exception: what ``func`` raises here; workers then do not call it.  If it raises in a
            worker, the task that came with it fails with that exception.
    """
    if not callable(func):
        raise TypeError(f"everywhere takes a function and its arguments, not {func!r}")
    func(*args, **kwds)
    look_at_script(top_of_main().calls)  # calls that the script has made before this one
    reducers.everyone.add(register_call(func, args, kwds))
    return func
