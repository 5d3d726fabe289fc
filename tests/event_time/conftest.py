"""The backends of the states of windows and joins."""

from collections.abc import Iterator
from typing import Any

import pytest
from event_time.pure_runs import PLAIN
from operators.operator_harness import ManualClock

from streamiter import RocksState
from streamiter.engine.states import due_rows, list_rows, rocks_state
from streamiter.operators.keyed_state import KeyedStates


@pytest.fixture(scope="session")
def states_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedStates]:
    """Return states on disk; they are opened once for all tests."""
    job = RocksState(tmp_path_factory.mktemp("states"), memory_bytes=16 << 20)._of_job("tests", PLAIN)
    yield job.of_subtask("windows", clock=ManualClock())
    job.close()


@pytest.fixture(params=["memory", "rocks"])
def backend(request: Any, monkeypatch: pytest.MonkeyPatch) -> KeyedStates | None:
    """Return states on disk, few of which are in memory at a time; None: no backend, pure states only."""
    if request.param == "memory":
        return None
    monkeypatch.setattr(rocks_state, "_KEYS_AT_ONCE", 3)
    monkeypatch.setattr(due_rows, "_AHEAD", 2)
    for name, value in {"_ENTRIES_IN_ONE_ROW": 1, "_CHANGES_MAX": 2, "_BYTES_MAX": 3_000}.items():
        monkeypatch.setattr(list_rows, name, value)
    states: KeyedStates = request.getfixturevalue("states_on_disk")
    states.keys_at_once = 3
    return states
