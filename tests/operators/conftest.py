"""The backends of keyed states: the tests with ``make_states`` run over all of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operators.keyed_snapshots import PLAIN, MakeStates, keyed_state
from operators.operator_harness import ManualClock

from streamiter import RocksState
from streamiter.operators.keyed_state import KeyedStates


@pytest.fixture(params=["memory", "rocks"])
def make_states(request: Any, tmp_path: Path) -> Iterator[MakeStates]:
    """Return a maker of the states of one subtask, in memory or on disk."""
    if request.param == "memory":
        yield keyed_state
        return
    job = RocksState(tmp_path, memory_bytes=16 << 20)._of_job("tests", PLAIN)

    def make(clock: ManualClock, time_to_live_s: float | None = None) -> KeyedStates:
        return job.of_subtask("count", clock=clock, time_to_live_s=time_to_live_s)

    yield make
    job.close()
    assert list(tmp_path.glob("tests/run-*")) == []
