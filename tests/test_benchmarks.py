"""A benchmark has figures only of flows that have handled all records."""

import os
import signal

import pytest

from benchmarks.measuring import run_to_end
from streamiter import Flow


def test_a_signal_that_stops_a_flow_ends_the_benchmark():
    """A time limit of the shell stopped the flow of a join, whose result was then taken for one with lost pairs."""
    flow = Flow("join")

    def stop_at(number: int) -> int:
        if number == 5000:
            os.kill(os.getpid(), signal.SIGTERM)
        return number

    numbers = flow.from_items(range(1_000_000)).map(stop_at).collect()
    with pytest.raises(SystemExit, match="flow 'join': expected it to run to its end, given a signal that stopped it"):
        run_to_end(flow)
    assert len(numbers.items) < 1_000_000


def test_a_flow_that_ends_by_itself_gives_its_statistics():
    flow = Flow("numbers")
    flow.from_items(range(10)).collect()
    assert run_to_end(flow).state == "finished"
