"""The outcome of each fault, by the stage at which it occurs.

`test_matrix` checks each cell. `python tests/faults/matrix.py` prints the tables of
``docs/reliability.md``.
"""

from __future__ import annotations

WAYS = ("raise", "sys.exit", "os._exit", "SIGSEGV", "SIGKILL", "SIGSTOP", "hang")

DIED = {
    "os._exit": "WorkerDied (exit code 4)",
    "SIGSEGV": "WorkerDied (SIGSEGV)",
    "SIGKILL": "WorkerDied (SIGKILL)",
}
EXITED = {"sys.exit": "WorkerDied (exit code 3)", **DIED}
LATE = {"SIGSTOP": "TaskTimeout", "hang": "TaskTimeout"}
ENDS = dict.fromkeys(DIED, "program ends")
GOES_ON = {"SIGSTOP": "goes on"}
NO_START = dict.fromkeys(WAYS, "WorkerStartFailed")
REPLACED = dict.fromkeys(WAYS, "replaced")

PROCESSES: dict[str, dict[str, str]] = {
    "task pickle": {
        "raise": "its error", "sys.exit": "SystemExit", **ENDS, **GOES_ON, "hang": "waits",
    },
    "task unpickle": {"raise": "its error", **EXITED, **LATE},
    "initializer": NO_START,
    "run": {"raise": "its error", **EXITED, **LATE},
    "result pickle": {"raise": "ResultNotPicklable", **EXITED, **LATE},
    "garbage collection": {"raise": "answered", "sys.exit": "answered", **DIED, **LATE},
    "result half copied to shared memory": {"raise": "ResultNotPicklable", **EXITED, **LATE},
    "result in shared memory half announced": {
        "raise": "WorkerDied (exit code 1)", **EXITED, **LATE,
    },
    "large result half written to the pipe": {
        "raise": "WorkerDied (exit code 1)", **EXITED, **LATE,
    },
    "result unpickle": {
        "raise": "its error", "sys.exit": "SystemExit", **ENDS, **GOES_ON, "hang": "waits",
    },
    "callback": {
        "raise": "answered", "sys.exit": "answered", **ENDS, **GOES_ON, "hang": "waits",
    },
    "idle": REPLACED,
}  # fmt: skip
"""Pools of processes."""

THREADS: dict[str, dict[str, str]] = {
    "initializer": {
        "raise": "WorkerStartFailed", "sys.exit": "WorkerStartFailed", **ENDS, **GOES_ON,
        "hang": "WorkerStartFailed",
    },
    "run": {
        "raise": "its error", "sys.exit": "WorkerDied (exit code 3)", **ENDS, **GOES_ON,
        "hang": "TaskTimeout",
    },
    "garbage collection": {
        "raise": "answered", "sys.exit": "answered", **ENDS, **GOES_ON, "hang": "TaskTimeout",
    },
    "callback": PROCESSES["callback"],
}  # fmt: skip
"""Pools of threads."""

MISCHIEF = ("garbage", "empty", "closed", "truncated", "replayed")

_NOWAY = {"garbage": "-", "empty": "-", "truncated": "-", "replayed": "-"}
_CUT = {"truncated": "its error"}
_ANSWERED = dict.fromkeys(MISCHIEF, "answered")

HOSTILE: dict[str, dict[str, str]] = {
    "tasks": {**_NOWAY, "closed": "answered"},
    "answers": {
        "garbage": "InternalError", "empty": "answered", "closed": "WorkerDied (exit code 1)",
        "truncated": "TaskTimeout", "replayed": "InternalError",
    },
    "lifeline": {**_NOWAY, "closed": "answered"},
    "page": {
        "garbage": "InternalError", "empty": "InternalError", "closed": "answered",
        "truncated": "its error", "replayed": "InternalError",
    },
    "log records": _ANSWERED,
    "status": {
        "garbage": "InternalError", "empty": "InternalError", "closed": "answered",
        "truncated": "InternalError", "replayed": "InternalError",
    },
    "arena": {**_ANSWERED, **_CUT},
    "control": {**_ANSWERED, "garbage": "InternalError", "truncated": "InternalError"},
}  # fmt: skip
"""Outcomes of tasks that misuse a descriptor of their worker."""

IN_THE_CALLER = ("task pickle", "result unpickle", "callback")
"""Stages that run in the program's own process, in every pool."""

NO_SENSE = {
    "task pickle, task unpickle, result pickle, result unpickle, large results": (
        "threads pass objects by reference: nothing is pickled or copied"
    ),
    "idle": "an idle thread waits in a queue and runs no code of the program",
}
"""Stages that do not exist in a thread pool, and the reason."""

MEANING = {
    "its error": "`get()` raises the exception of that stage",
    "SystemExit": (
        "it is raised by the verb, or by `get()`, like any other exception; the job fails, "
        "or a later `get()` tries again"
    ),
    "answered": "Python reports the exception on stderr; the result is not affected",
    "WorkerDied": "with this exit code or signal; `retries=` runs the task again",
    "TaskTimeout": (
        "after `timeout=`, the task is asked to stop, then its worker is killed; without "
        "`timeout=`, the caller waits as long as the fault lasts"
    ),
    "WorkerStartFailed": (
        "after a few attempts, the pool stops, and all waiting calls raise this; for stopped and "
        "hanging starts, `initializer_timeout=` is needed. A single failed start has no effect"
    ),
    "ResultNotPicklable": "its cause is the exception of that stage",
    "program ends": "the fault is in the program's own process; its workers end within a second",
    "goes on": "the whole program is stopped; after SIGCONT, all tasks are answered",
    "waits": "only that call, or callback, waits; all other tasks are answered, and the pool ends",
    "replaced": (
        "no task is lost. Stopped and hanging workers are replaced when they hold tasks with "
        "`timeout=` and begin none of them for that time"
    ),
}


def table(title: str, rows: dict[str, dict[str, str]], ways: tuple[str, ...] = WAYS) -> list[str]:
    """Return one table as Markdown."""
    lines = [f"| {title} | " + " | ".join(f"`{way}`" for way in ways) + " |"]
    lines.append("|---" * (len(ways) + 1) + "|")
    for stage, cells in rows.items():
        lines.append(f"| {stage} | " + " | ".join(cells[way] for way in ways) + " |")
    return lines


def document() -> str:
    """Return the tables and explanations of ``docs/reliability.md``."""
    lines = table("processes", PROCESSES)
    lines += ["", *table("threads", THREADS), "", "Threads do not have these stages:", ""]
    lines += [f"* {stage}: {why}." for stage, why in NO_SENSE.items()]
    lines += ["", "The outcomes:", ""]
    lines += [f"* **{word}**: {meaning}." for word, meaning in MEANING.items()]
    return "\n".join(lines) + "\n"


def hostile_document() -> str:
    """Return the table of ``docs/security.md``."""
    return "\n".join(table("descriptor", HOSTILE, MISCHIEF)) + "\n"


if __name__ == "__main__":
    print(document())
    print(hostile_document(), end="")
