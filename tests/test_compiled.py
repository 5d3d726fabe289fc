"""Functions are compiled where Numba is installed, also where the compiled code cannot be stored."""

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S

from streamiter.values.helpers.compiled import (
    beside_event_loop,
    compiled,
    compiled_code_begins,
    is_compiling,
    pointer_function,
)


def twice(number: float) -> float:
    return 2 * number


def test_functions_are_compiled_where_no_directory_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job in a container without a writable directory failed when the compiled code was needed."""
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert compiled(twice)(1.5) == 3.0


_CALLED = """
from streamiter.values.helpers.compiled import compiled
FACTOR = {factor}

@compiled
def times(number, again):
    if number < 0.0:
        raise ValueError("below zero")
    return FACTOR * number if again == 1 else FACTOR * times(number, again - 1)
"""

_CALLING = """
from streamiter.values.helpers.compiled import compiled
from called import times

@compiled
def cubes(numbers):
    total = 0.0
    for place in range(len(numbers)):
        total += times(numbers[place], 1) + times(numbers[place], 2)
    return total
"""

_CALLS = """
import sys
import threading
from numpy import array
from streamiter.values.helpers import numba_code
numba_code.LOADED_AT_ONCE = eval(sys.argv[1], vars(numba_code))
from calling import cubes
try:
    cubes(array([-1.0]))
except ValueError as error:
    assert str(error) == "below zero"
else:
    raise AssertionError("expected the error of the called function")
print(cubes(array([1.0, 2.0])), sum(cubes.stats.cache_hits.values()), "numba.np.arraymath" in sys.modules)
"""

Calls = Callable[..., list[str]]


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    """Return a function that calls a compiled function in a new process, with stored code and a called function."""
    if not is_compiling():
        pytest.skip("Numba is not here")
    (tmp_path / "calling.py").write_text(_CALLING)

    def run(factor: float = 2.0, versions: str = "LOADED_AT_ONCE") -> list[str]:
        (tmp_path / "called.py").write_text(_CALLED.format(factor=factor))
        paths = [str(tmp_path), *sys.path]
        ended = subprocess.run(
            [sys.executable, "-B", "-c", _CALLS, versions],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NUMBA_CACHE_DIR": str(tmp_path / "stored")},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return ended.stdout.split()

    return run


def test_stored_code_is_loaded_unless_a_function_that_it_calls_has_changed(calls: Calls, tmp_path: Path) -> None:
    """The first row of a job was learned a second after its start, and Numba imported SciPy in a part of that time.

    After an upgrade the stored code of the old version ran, if only the file of a called function had changed. Code
    that needs a part of Numba would end the process; of a new version it is not known which parts are there.
    """
    assert calls() == ["18.0", "0", "True"], "compiled"
    assert len(list((tmp_path / "stored").rglob("*.nbc"))) == 1, "a called function has no file of its own"
    changed: Any = {"factor": 3.0, "versions": "((0, 1),)"}
    assert calls(**changed) == ["36.0", "0", "True"], "compiled again, by another version of Numba"
    assert calls(**changed) == ["36.0", "1", "True"], "loaded, when all parts of Numba were imported"
    assert calls() == ["18.0", "1", "False"], "loaded, or this version of Numba is not in LOADED_AT_ONCE"


def test_a_pointer_to_a_matrix_goes_through_its_numbers_and_not_through_gaps() -> None:
    """The numbers of other columns would be read, without an error, where a caller gives a part of a matrix."""
    pointer_to, matrix = pointer_function(), np.arange(6.0).reshape(3, 2)

    @compiled
    def fourth(numbers: Any) -> float:
        return float(pointer_to(numbers)[3])

    assert fourth(matrix) == 3.0
    if is_compiling():
        with pytest.raises(Exception, match="pointer_to"):
            fourth(np.arange(12.0).reshape(3, 4)[:, ::2])


def test_code_that_was_stored_with_names_that_are_gone_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A class of an argument had moved to another module: after an upgrade in place, no job could learn."""
    config = pytest.importorskip("numba.core.config")
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "stored"))
    assert compiled(twice)(1.5) == 3.0
    [index] = (tmp_path / "stored").rglob("*.nbi")
    with index.open("rb") as file:
        version = pickle.load(file)
    index.write_bytes(pickle.dumps(version) + b"cmoved_away\nFeatureArrays\n.")
    assert compiled(twice)(1.5) == 3.0
    loaded: Any = compiled(twice)
    assert (loaded(1.5), sum(loaded.stats.cache_hits.values())) == (3.0, 1)


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


async def test_a_thread_comes_to_its_compiled_code_before_the_event_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows were learned, and JSON was scanned, after the other work of the event loop, and not beside it."""
    monkeypatch.setattr(sys, "getswitchinterval", lambda: PATIENCE_S)
    happened, goes_on = list[str](), threading.Event()

    def work() -> str:
        happened.append("prepared")
        compiled_code_begins()
        assert goes_on.wait(PATIENCE_S)
        return "done"

    async def others() -> None:
        happened.append("others")
        goes_on.set()

    done, _ = await asyncio.gather(beside_event_loop(work), others())
    assert done == "done"
    assert happened == ["prepared", "others"]
    with pytest.raises(ZeroDivisionError):
        await beside_event_loop(lambda: 1 // 0)
