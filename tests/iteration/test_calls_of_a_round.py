"""The cost of a round of a loop, in calls of functions: a number that no load of the machine changes."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from streamiter import Flow, IterationBodyResult, Stream, iterate_bounded_streams_until_termination
from streamiter.iteration import terminate_after

ROUNDS, FIRST, LAST = 120, 40, 100


class CallsBetweenRounds:
    """Counts the calls of functions of streamiter from one round to another."""

    def __init__(self) -> None:
        self.calls = self._rounds = 0

    def __call__(self, number: int) -> bool:
        """Count a round, if this record is 0; return whether another one follows."""
        self._rounds += not number
        if number == 0 and self._rounds == FIRST:
            sys.setprofile(self._profile)
        elif number == 0 and self._rounds == LAST:
            sys.setprofile(None)
        return self._rounds < ROUNDS

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("streamiter."):
            self.calls += 1


def calls_of_a_round(parallelism: int, way: str, *, maps: int = 0) -> float:
    """Return the calls in a round for each subtask, of a body with a filter and this many maps before it."""
    counted = CallsBetweenRounds()
    flow = Flow("rounds", parallelism=parallelism)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        variable = variables[0].rebalance() if way == "repartitioned" else variables[0]
        for _ in range(maps):
            variable = variable.map(lambda number: number)
        if way == "criteria":
            fed_back = variable.filter(lambda number: counted(number) or True)
            return IterationBodyResult([fed_back], [fed_back], terminate_after(fed_back, rounds=ROUNDS))
        fed_back = variable.filter(counted)
        return IterationBodyResult([fed_back], [])

    numbers = flow.from_items(range(parallelism))
    iterate_bounded_streams_until_termination([numbers], [], body)
    try:
        flow.run()
    finally:
        sys.setprofile(None)
    return counted.calls / (LAST - FIRST) / parallelism


@pytest.mark.parametrize(
    ("parallelism", "way", "at_most"),
    [(1, "", 31), (2, "", 32), (1, "criteria", 59), (2, "criteria", 84), (2, "repartitioned", 99)],
)
def test_a_round_of_one_record_takes_few_calls(parallelism: int, way: str, at_most: int) -> None:
    """Each change of the engine added some calls to each round, and none of them showed in a time."""
    assert 0 < calls_of_a_round(parallelism, way) <= at_most


@pytest.mark.parametrize("way", ["", "criteria"])
def test_a_further_step_adds_one_call_to_a_round(way: str) -> None:
    """A round was said to take 35 calls, but not how many are for each step: only the border of the loop is dear."""
    assert calls_of_a_round(1, way, maps=4) == calls_of_a_round(1, way) + 4
