"""The placement of a flow: plain data, the same for all processes, and the errors of flows that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from runtime.joined_jobs import joined_jobs

from streamiter import Flow, IterationBodyResult, Operator, iterate_bounded_streams_until_termination, replayed
from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import GraphError
from streamiter.operators import Output
from streamiter.runtime.placement import PlacedEdge, PlacedStep, Placement, StepDescription, Traits
from streamiter.runtime.plan import first_process
from streamiter.topics import MemoryBroker


class Pass(Operator):
    def process(self, record: Any, out: Output) -> None:
        out.emit(record)


class Awaited(Operator):
    runs_in_thread, epochs_in_order = 0, np.False_  # type: ignore[assignment]

    async def process(self, record: Any, out: Output) -> None:
        out.emit(record)


def looped(parallelism: int = 2) -> Flow:
    flow = Flow("loops", parallelism=parallelism)

    def body(variables: Any, data: Any) -> IterationBodyResult:
        rounds = variables[0].map(lambda n: n + 1).filter(lambda n: n < 3)
        return IterationBodyResult([rounds, variables[1].filter(lambda n: n > 9)], [rounds], rounds)

    starts = [flow.from_items([0], parallelism=1), flow.from_items([0])]
    data = [replayed(flow.from_items([10, 20])), flow.from_items([30], name="plain")]
    [out] = iterate_bounded_streams_until_termination(starts, data, body)
    out.collect()
    return flow


def placed(flow: Flow, processes: int = 1) -> Placement:
    return first_process(flow.name, flow.steps, processes).placement


def test_a_placement_is_the_same_after_its_way_to_another_process() -> None:
    """The other processes planned with a placement that had lost a number on its way."""
    flow = looped()
    flow.from_items([1]).process(Awaited)
    placement = placed(flow)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(placement), type=Placement) == placement
    plain = PlainData([Placement, PlacedStep, PlacedEdge, StepDescription, Traits])
    assert plain.decode(plain.encode(placement)) == placement


def test_subtasks_are_dealt_out_so_that_chains_stay_inside() -> None:
    """Records of a forward edge went through a socket."""
    flow = Flow("f", parallelism=4)
    numbers = flow.from_items([1], name="in").map(str, name="map")
    numbers.process(Awaited, name="awaited")
    numbers.sink(MemoryBroker().topic("out"), name="transactional")
    numbers.collect(parallelism=4, name="collected")
    numbers.map(str, name="single", parallelism=1)
    steps = {step.description.name: step for step in placed(flow, 3).steps}
    spread = (0, 1, 2, 0)
    assert {name: step.processes for name, step in steps.items()} == {
        "in": spread,
        "map": spread,
        "awaited": spread,
        "transactional": (0, 0, 0, 0),
        "collected": (0, 0, 0, 0),
        "single": (0,),
    }
    assert {name: step.chained_to for name, step in steps.items() if step.chained_to} == {"map": "in"}
    alone = {step.description.name: step.chained_to for step in placed(flow).steps}
    assert alone["collected"] == "map"


def test_each_channel_has_a_number_of_its_own() -> None:
    """Two channels shared a number, and the records of one arrived at the reader of the other."""
    flow = Flow("f", parallelism=3)
    numbers = flow.from_items([1], name="in")
    other = numbers.rebalance().process(Awaited, parallelism=2)
    numbers.union(other.rebalance(), numbers).process(Awaited).process(Awaited)
    pairs = [
        edge.number(source, target)
        for step in placed(flow).steps
        for edge in step.edges
        for source in range(3)
        for target in range(step.description.parallelism)
    ]
    numbered = [number for number in pairs if number is not None]
    assert len(set(numbered)) >= 3 * 2 + 2 * 3 + 3 * 3


def test_each_member_of_a_loop_has_a_number_of_its_own() -> None:
    """Two heads had one number, so an epoch was complete although one of them had not received it."""
    flow = looped(parallelism=3)
    first = {step.description.name: step.first_member for step in placed(flow).steps}
    [loop] = {step.loop for step in flow.steps if step.loop is not None}
    members = [(step.name, first[step.name], step.parallelism) for step in loop.members]
    heads = [("variable 0", 0, 1), ("variable 1", 1, 3), ("termination criteria", 4, 1)]
    assert members == [*heads, ("data 0", 5, 3), ("data 1", 8, 3)]


def small(change: str = "") -> Flow:
    flow = Flow("small" if change != "flow" else "other", parallelism=3 if change == "parallelism" else 2)
    numbers = flow.from_items([1], name="in")
    between = numbers if change == "partitioning" else numbers.rebalance()
    step = between.process(Pass if change == "factory" else Awaited, name="b" if change == "name" else "a")
    if change != "fewer":
        step.process(lambda: Awaited(), name="last")
    if change == "more":
        step.process(Awaited, name="further")
    return flow


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("flow", "flow 'other': expected flow 'small' as in process 0, given another flow; start all processes"),
        ("parallelism", r"step 'in': expected parallelism 2 as in process 0, given 3; .* \(at test_plac.*:\d+\)$"),
        ("name", "flow 'small': expected step 'a' as in process 0, given step 'b'"),
        ("partitioning", r"step 'a': expected inputs \(\"input from 'in' by Rebalance\",\) .*'in' by Forward"),
        ("factory", "step 'a': expected factory 'Awaited' as in process 0, given 'Pass'"),
        ("fewer", "flow 'small': expected step 'last' as in process 0, given none"),
        ("more", "flow 'small': expected no further step as in process 0, given step 'further'"),
    ],
)
def test_a_flow_that_differs_is_refused_with_its_first_step(change: str, message: str) -> None:
    """Another version of the program ran in the second process, and records went to the wrong steps."""
    placement, other = placed(small()), small(change)
    placement.check("small", small().steps)
    with pytest.raises(GraphError, match=message):
        joined_jobs([small(), other])
    assert placement.fingerprint == placed(small()).fingerprint != placed(other).fingerprint


def test_a_factory_that_makes_another_operator_in_another_process_is_refused() -> None:
    """A class that depended on the machine made a chain of one process meet a channel of the other."""

    def build(kind: type[Operator]) -> Flow:
        flow = Flow("f", parallelism=2)
        flow.from_items([1], name="in").process(lambda: kind(), name="step")
        return flow

    message = "step 'step': expected an operator with awaited=True as in process 0, given Pass with False; start all"
    with pytest.raises(GraphError, match=message):
        joined_jobs([build(Awaited), build(Pass)])


def too_many() -> Flow:
    flow = Flow("f", parallelism=2)
    flow.from_items([1]).collect(parallelism=3)
    return flow


@pytest.mark.parametrize(
    ("build", "processes", "message"),
    [
        (too_many, 3, "flow 'f': expected at most 2 processes, .* given 3; raise the parallelism, or use fewer"),
        (looped, 2, r"step '.*': expected a flow without iterations and parameter servers in 2 processes, given an it"),
    ],
)
def test_flows_that_cannot_be_divided_are_refused(build: Callable[[], Flow], processes: int, message: str) -> None:
    """A process without a subtask, or with half of a loop, waited for ever."""
    with pytest.raises(GraphError, match=message):
        first_process("f", build().steps, processes)
