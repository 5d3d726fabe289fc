"""The placement of a flow: plain data, the same for all processes, and the errors of flows that differ."""

from functools import partial
from typing import Any

import msgspec
import numpy as np

from streamiter import (
    Flow,
    IterationBodyResult,
    Operator,
    OutputTag,
    connect,
    feedback_through,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.engine.plan.placement import PlacedEdge, PlacedStep, Placement, StepDescription, Traits
from streamiter.engine.plan.plan import first_process
from streamiter.operators import Output
from streamiter.operators.operator import EngineOperator
from streamiter.parameter_server import ParameterServer
from streamiter.topics import MemoryBroker
from streamiter.values.plain_data import PlainData


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


def looped_through_topic() -> Flow:
    flow = Flow("loops", parallelism=2)
    through = MemoryBroker().topic("loop")
    iterate_unbounded_streams(
        [flow.from_items([0])],
        [],
        lambda variables, _: IterationBodyResult([feedback_through(variables[0], through)], []),
    )
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
    numbers = flow.from_items([1], name="in").map(str)
    other = numbers.rebalance().process(Awaited, parallelism=2)
    numbers.union(other.rebalance(), numbers).process(Awaited).process(Awaited)
    steps = {step.name: step for step in flow.steps}
    numbered = [
        edge.number(source, target)
        for step in placed(flow).steps
        for edge, read in zip(step.edges, steps[step.description.name].inputs, strict=not step.chained_to)
        for source in range(read.upstream.parallelism)
        for target in range(step.description.parallelism)
    ]
    assert [number for number in numbered if number is not None] == list(range(3 * 2 + 3 + 2 * 3 + 3 + 3))


def test_each_member_of_a_loop_has_a_number_of_its_own() -> None:
    """Two heads had one number, so an epoch was complete although one of them had not received it."""
    flow = looped(parallelism=3)
    first = {step.description.name: step.first_member for step in placed(flow).steps}
    [loop] = {step.loop for step in flow.steps if step.loop is not None}
    assert first["map"] == 0
    members = [(step.name, first[step.name], step.parallelism) for step in loop.members]
    heads = [("variable 0", 0, 1), ("variable 1", 1, 3), ("termination criteria", 4, 1)]
    assert members == [*heads, ("data 0", 5, 3), ("data 1", 8, 3)]


class Both(Operator):
    def process_left(self, record: Any, out: Output) -> None:
        out.emit(record)

    process_right = process_left


def test_a_step_of_a_loop_reads_mini_batches_one_at_a_time_beside_its_model() -> None:
    """Of several mini-batches in one transport batch, the later ones were learned with an old model."""
    flow = Flow("f")
    numbers = flow.from_items([1], name="numbers")
    before = numbers.batch(2, name="before")

    def body(variables: Any, data: Any) -> IterationBodyResult:
        [model] = variables
        batched = data[0].batch(2, name="batched")
        for name, right in (
            ("direct", batched),
            ("behind a step", batched.map(list, name="list")),
            ("with records", batched.union(model)),
            ("records", data[0]),
            ("from outside", data[1]),
            ("behind a step outside", data[2]),
            ("behind two inputs", connect(left=model, right=batched).process(Both, name="first")),
        ):
            connect(left=model, right=right).process(Both, name=name)
        batched.process(Pass, name="alone")
        return IterationBodyResult([batched.map(len, name="back")], [])

    data = [replayed(stream) for stream in (numbers, before, before.map(list, name="outside"))]
    iterate_bounded_streams_until_termination([numbers], data, body)
    connect(left=numbers, right=before).process(Both, name="no loop")
    steps = {step.description.name: [edge.one_at_a_time for edge in step.edges] for step in placed(flow).steps}
    assert {name: steps[name] for name in steps if len(steps[name]) > 1} == {
        "variable 0": [False, False],
        "direct": [False, True],
        "behind a step": [False, True],
        "with records": [False, True, False],
        "records": [False, False],
        "from outside": [False, True],
        "behind a step outside": [False, False],
        "behind two inputs": [False, False],
        "first": [False, True],
        "no loop": [False, False],
    }
    assert not any(steps["alone"])


def test_the_traits_of_a_step_are_those_of_its_operators() -> None:
    """A trait was read from another attribute, and records of later epochs came too early."""
    nothing = dict.fromkeys(Traits.__struct_fields__, False)
    traits = {step.description.name: msgspec.structs.asdict(step.traits) for step in placed(looped()).steps}
    head = {"boundary": True, "chooses_inputs": True}
    assert traits["variable 0"] == traits["data 0"] == traits["termination criteria"] == {**nothing, **head}
    for name, kind in {
        "in_thread": {"runs_in_thread": 1, "awaited": True},
        "epochs_in_order": {"epochs_in_order": 1},
        "any_order": {"any_order": np.True_},
        "stateless": {"is_stateless": True},
        "chooses_inputs": {"wanted_inputs": lambda self: None},
    }.items():
        flow = Flow("f")
        flow.from_items([1]).process(
            type("Made", (Pass, EngineOperator) if name == "stateless" else (Pass,), kind), name="step"
        )
        follows = {"awaited": name == "in_thread", "emits_at_once": name == "stateless"}
        assert msgspec.structs.asdict(placed(flow).steps[-1].traits) == {**nothing, name: True, **follows}
    keyed = Flow("f")
    keyed.from_items([1]).key_by(int).process(EitherWay, name="step")
    assert not placed(keyed).steps[-1].traits.awaited


class EitherWay(Pass):
    """Handles single records at once, and awaits whole batches; with keys it gets single records."""

    async def process_batch(self, batch: Any, out: Output) -> None:
        raise AssertionError


def test_each_epoch_in_order_for_operators_of_one_round() -> None:
    """Operators of a round received records of the next round."""
    flow = Flow("f")

    def body(variables: Any, data: Any) -> IterationBodyResult:
        [total] = for_each_round(
            [data[0]], lambda streams: [streams[0].map(float, name="map").reduce_all(max, name="max")]
        )
        return IterationBodyResult([variables[0].filter(lambda n: n > 3)], [total])

    iterate_bounded_streams_until_termination([flow.from_items([1])], [replayed(flow.from_items([1]))], body)
    traits = {step.description.name: step.traits for step in placed(flow).steps}
    assert [(traits[name].per_round, traits[name].epochs_in_order) for name in ("map", "max")] == [
        (False, False),
        (True, True),
    ]


def small(change: str = "", kind: type[Operator] = Awaited) -> Flow:
    flow = Flow("small" if change != "flow" else "other", parallelism=3 if change == "parallelism" else 2)
    numbers = flow.from_items([1], name="in")
    between = numbers if change == "partitioning" else numbers.rebalance()
    step = between.process(Pass if change == "factory" else Awaited, name="b" if change == "name" else "a")
    if change != "fewer":
        step.process(lambda: kind(), name="last")
    if change == "more":
        step.process(Awaited, name="further")
    return flow


def test_flows_that_differ_have_other_fingerprints() -> None:
    """Another version of the program ran in the second process, and records went to the wrong steps."""
    placed(small()).check("small", small().steps)
    changes = ("flow", "parallelism", "name", "partitioning", "factory", "fewer", "more")
    assert len({placed(small(change)).fingerprint for change in ("", *changes)}) == 1 + len(changes)


def test_the_fingerprint_is_of_these_properties() -> None:
    """A process with another side output, or another loop, was taken for the same flow."""
    flow = looped()
    split = flow.from_items([1], name="split")
    split.side_output(OutputTag("odd")).map(str, name="side")
    described = {step.description.name: step.description for step in placed(flow).steps}
    assert described["side"].inputs == ("input from 'split' side 'odd' by Forward",)
    assert described["variable 0"] == StepDescription(
        "variable 0",
        1,
        factory="IterationBuilder._add_head.<locals>.<lambda>",
        source="",
        loop="bounded loop 0",
        inputs=("initial from 'items' by Forward", "feedback from 'filter' by Forward fed back"),
    )
    assert described["split"] == StepDescription(
        "split", 2, factory="Identity", source="Flow.from_items.<locals>.<lambda>", loop="", inputs=()
    )
    endless = Flow("endless")
    endless.from_items([1]).process(partial(Pass), name="step")
    iterate_unbounded_streams([endless.from_items([1])], [], lambda variables, _: IterationBodyResult(variables, []))
    assert {step.description.loop for step in placed(endless).steps} == {"", "unbounded loop 0"}
    assert placed(endless).steps[1].description.factory == "partial"


def served() -> Flow:
    flow = Flow("f", parallelism=2)
    flow.from_items([1]).process(Pass, parameter_server=ParameterServer(), name="served").collect()
    return flow


def test_a_step_with_a_parameter_server_begins_a_task() -> None:
    """A worker that stopped at a clock stopped the source in its task, too."""
    assert [step.chained_to for step in placed(served()).steps] == [None, None, None]


def too_many() -> Flow:
    flow = Flow("f", parallelism=2)
    flow.from_items([1]).collect(parallelism=3)
    return flow
