"""Functions are compiled where Numba is installed, also where the compiled code cannot be stored."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.waiting import PATIENCE_S

from streamiter.values.helpers.compiled import compiled


def twice(number: float) -> float:
    return 2 * number


def test_functions_are_compiled_where_no_directory_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job in a container without a writable directory failed when the compiled code was needed."""
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert compiled(twice)(1.5) == 3.0


_THREADS_IMPORT_NUMBA = """
import sys, threading
sys.setswitchinterval(1e-5)
from streamiter.values.helpers.compiled import compiled, pointer_function, saying_that_it_compiles

def say():
    with saying_that_it_compiles("nothing"):
        pass

def attempt(call):
    together.wait()
    try:
        call()
    except Exception as error:
        print(repr(error))

calls = [lambda: compiled(attempt), pointer_function, say]
together = threading.Barrier(len(calls))
threads = [threading.Thread(target=attempt, args=(call,)) for call in calls]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_compile_at_the_same_time() -> None:
    """A service failed at its start, because its reader and its learner imported Numba in two threads at once."""
    for _ in range(3):  # About one run of three failed.
        ended = subprocess.run(
            [sys.executable, "-c", _THREADS_IMPORT_NUMBA],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        assert ended.stdout == ""
