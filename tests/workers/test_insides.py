"""The private parts of CPython that `xpool._python` uses exist in this Python."""

import importlib
import sys
import threading

import pytest
from support import scripts

from xpool._python import import_hooks
from xpool._python.hidden import is_free_threaded
from xpool._worker.callables import _Generator
from xpool._worker.worker_threads import raise_in_thread, withdraw

pytestmark = pytest.mark.xpool_only


class Broken(Exception):
    """The exception raised in another thread."""


@pytest.mark.pure
def test_an_error_is_raised_in_another_thread():
    """`raise_in_thread` raises when the thread next runs Python code."""
    gate, begun, seen = threading.Lock(), threading.Event(), []
    gate.acquire()

    def run():
        try:
            begun.set()
            with gate:
                pass
            seen.append("no error")
        except Broken:
            seen.append("an error")

    thread = threading.Thread(target=run, daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the other thread does not run before the call
    try:
        thread.start()
        begun.wait()
        raise_in_thread(thread.ident, Broken)
    finally:
        sys.setswitchinterval(interval)
        gate.release()
    thread.join()
    assert seen == ["an error"]


@pytest.mark.pure
def test_a_generator_of_which_the_constructor_was_stopped():
    """Its end shows no error: a task can be stopped at each bytecode."""
    _Generator.__new__(_Generator).__del__()


@pytest.mark.pure
def test_calls_can_be_profiled_after_an_error_is_withdrawn():
    """`withdraw` leaves no flag set that would stop a profiled call."""
    names = []
    withdraw()
    sys.setprofile(lambda frame, event, arg: names.append(frame.f_code.co_name))
    try:
        is_free_threaded()
    finally:
        sys.setprofile(None)
    assert "is_free_threaded" in names


PROMPT = """
import os
import sys
import threading
import warnings
from xpool._python.starting import PromptThread

def begun_at(switch_interval):
    sys.setswitchinterval(switch_interval)
    gate, seen = threading.Lock(), []
    gate.acquire()
    thread = PromptThread(target=lambda: (seen.append(threading.current_thread()), gate.acquire()))
    try:
        thread.join()
    except RuntimeError as exc:
        assert "before it is started" in str(exc)
    else:
        raise AssertionError("a thread that was not started was joined")
    assert not thread.is_alive()
    thread.start()
    return gate, seen, thread

# It runs when this thread waits. Until then, it is alive, and a fork does no harm.
gate, seen, thread = begun_at(1000)
early = [*seen], thread.ident, thread.is_alive(), thread in threading.enumerate()
warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside a thread
pid = os.fork()
if pid == 0:
    there = True
    try:
        there = thread in threading.enumerate() or thread.is_alive()
    finally:
        os._exit(there)
assert early == ([], None, True, True)
assert os.waitpid(pid, 0)[1] == 0
gate.release()
thread.join()
assert seen == [thread] and thread.ident is not None and not thread.is_alive()

# `join` waits for a thread that has not run, too, but not for longer than its timeout.
for timeout in -1, 0, 0.001:
    gate, seen, thread = begun_at(1000)
    thread.join(timeout)
    assert thread.is_alive()
    gate.release()
    thread.join(3600)
    assert seen == [thread] and not thread.is_alive()
"""


@pytest.mark.starts
@pytest.mark.skipif(is_free_threaded(), reason="the thread runs while this one starts it")
def test_a_prompt_thread_has_not_run_when_it_is_started():
    """Although `PromptThread.start` does not wait, the thread is alive and can be joined."""
    scripts.run_ok(["-"], PROMPT)


MODULE = """""
import sys
from xpool._python.import_hooks import is_initializing

during = is_initializing(globals())
frame, files = sys._getframe(), []
while frame:
    files.append(frame.f_code.co_filename)
    frame = frame.f_back
"""


@pytest.mark.pure
def test_is_initializing(tmp_path, monkeypatch):
    """`is_initializing` is true during an import, and `IMPORTER` is a file on its stack."""
    (tmp_path / "half_made.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("half_made")
    assert module.during
    assert not import_hooks.is_initializing(vars(module))
    assert import_hooks.IMPORTER in module.files


PREPARES = """
import multiprocessing
from xpool._python.import_hooks import child_prepares

print(child_prepares(), flush=True)

def tell():
    print(child_prepares(), flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
"""


def test_child_prepares(tmp_path):
    """`child_prepares` is true while a child imports the main module, but not in its function."""
    output = scripts.program(tmp_path, PREPARES)
    assert output.split() == ["False", "True", "False"]
