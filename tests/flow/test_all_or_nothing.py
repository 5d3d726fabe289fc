"""A call that is refused or fails leaves the flow unchanged, so the next ``run`` is not affected."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from iteration.iteration_support import run
from support.waiting import PATIENCE_S

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    OperatorLifeCycle,
    Stream,
    connect,
    epochs_every,
    feedback_through,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.errors import GraphError, StreamiterError
from streamiter.iteration import all_reduce, map_with, terminate_after
from streamiter.learn import (
    Examples,
    LogisticRegression,
    apriori,
    k_means,
    k_means_on_parameter_server,
    online_k_means,
    online_standard_scaler,
    train_offline,
    train_on_parameter_server,
    train_online,
)
from streamiter.networks import LabelledRows, Network, train_network, train_network_online
from streamiter.parameter_server import BSP, ParameterServer
from streamiter.topics import MemoryBroker
from streamiter.topics.formats import Typed

Iterate = Callable[..., Any]
Build = Callable[[Flow], object]

ITERATE = [iterate_bounded_streams_until_termination, iterate_unbounded_streams]


def counting(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    """Count to 3."""
    counted = variables[0].map(lambda n: n + 1)
    return IterationBodyResult([counted.filter(lambda n: n < 3)], [counted])


def state_of(flow: Flow) -> tuple[object, ...]:
    """Return everything that a flow knows of its steps."""
    steps = [(step.name, step.where, tuple(edge.upstream.name for edge in step.inputs)) for step in flow.steps]
    return steps, flow.draw(), dict(flow.graph.published_models), flow.graph.loop, repr(flow)


def refused_as_if_never_called(flow: Flow, build: Callable[[], object], error: type[BaseException]) -> None:
    before = state_of(flow)
    with pytest.raises(error):
        build()
    assert state_of(flow) == before


# -- bodies ------------------------------------------------------------------------------------------------


def returns_nothing(variables: list[Stream], data: list[Stream]) -> Any:
    counting(variables, data)


def feeds_back_too_much(variables: list[Stream], data: list[Stream]) -> Any:
    return IterationBodyResult([*variables, counting(variables, data).output_streams[0]], [])


def divides(variables: list[Stream], data: list[Stream]) -> Any:
    counting(variables, data)
    return 1 / 0


def is_interrupted(variables: list[Stream], data: list[Stream]) -> Any:
    counting(variables, data)
    raise KeyboardInterrupt


def exits(variables: list[Stream], data: list[Stream]) -> Any:
    raise SystemExit


def leaves_letters_then_divides(variables: list[Stream], data: list[Stream]) -> Any:
    variables[0].map(lambda n: n, dead_letter=MemoryBroker().topic("letters"))
    return 1 / 0


def gives_a_sink(variables: list[Stream], data: list[Stream]) -> Any:
    variables[0].map(lambda n: n).collect()


def names_a_step_twice(variables: list[Stream], data: list[Stream]) -> Any:
    return IterationBodyResult([variables[0].map(lambda n: n, name="x").map(lambda n: n, name="x")], [])


def yields(variables: list[Stream], data: list[Stream]) -> Any:
    yield counting(variables, data)


async def _later(variables: list[Stream], data: list[Stream]) -> Any:
    return counting(variables, data)


def asks_another(variables: list[Stream], data: list[Stream]) -> Any:
    later = _later(variables, data)
    later.close()
    return later


BODIES: list[tuple[Any, type[BaseException]]] = [
    (returns_nothing, GraphError),
    (feeds_back_too_much, GraphError),
    (divides, ZeroDivisionError),
    (is_interrupted, KeyboardInterrupt),
    (exits, SystemExit),
    (leaves_letters_then_divides, ZeroDivisionError),
    (gives_a_sink, GraphError),
    (names_a_step_twice, GraphError),
    (yields, GraphError),
    (asks_another, GraphError),
]


@pytest.mark.parametrize("iterate", ITERATE)
@pytest.mark.parametrize(("body", "error"), BODIES, ids=[body.__name__ for body, _ in BODIES])
def test_a_body_that_fails_leaves_no_loop_behind(iterate: Iterate, body: Any, error: type[BaseException]) -> None:
    """A user of a notebook corrected a body and ran the cell again, and ``run()`` hung without a message.

    The heads of the first loop waited for feedback, and no step could give it.
    """
    flow = Flow("notebook")
    start, numbers = flow.from_items([0]), flow.from_items([1, 2])
    refused_as_if_never_called(flow, lambda: iterate([start], [numbers], body), error)
    [counted] = iterate([start], [numbers], counting)
    collected = counted.collect()
    statistics = run(flow)
    assert collected.items == [1, 2, 3]
    assert len(statistics.loops) == 1


@pytest.mark.parametrize("life_cycle", [OperatorLifeCycle.ALL_ROUND, OperatorLifeCycle.PER_ROUND], ids=["all", "each"])
def test_a_loop_that_fails_after_its_body_leaves_nothing_behind(life_cycle: OperatorLifeCycle) -> None:
    """A topic was refused after the heads of the loop were closed and before its criteria, and the heads stayed."""
    flow, loop = Flow("notebook"), MemoryBroker().topic("loop")
    asyncio.run(loop.create())

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        streams = [stream.filter(lambda n: n < 3) for stream in variables]
        return IterationBodyResult([feedback_through(stream, loop) for stream in streams], streams)

    starts = [flow.from_items([0]), flow.from_items([0])]
    config = IterationConfig(operator_life_cycle=life_cycle)
    refused_as_if_never_called(
        flow, lambda: iterate_bounded_streams_until_termination(starts, [], body, config), GraphError
    )
    run(flow)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_outer_body_may_continue_after_a_part_of_it_fails(error: type[BaseException]) -> None:
    """A part that resets its state in each round was taken for the rest of the body, and its steps had no reader."""
    flow = Flow("notebook")

    def part(streams: list[Stream]) -> list[Stream]:
        streams[0].reduce_all(lambda a, b: a + b, dead_letter=MemoryBroker().topic("letters"))
        raise error

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        refused_as_if_never_called(flow, lambda: for_each_round([variables[0]], part), error)
        refused_as_if_never_called(
            flow, lambda: iterate_bounded_streams_until_termination([variables[0]], [], counting), GraphError
        )
        return counting(variables, data)

    [counted] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    collected = counted.collect()
    run(flow)
    assert collected.items == [1, 2, 3]


def test_a_stream_of_a_removed_step_is_refused() -> None:
    """A step waited for ever for a stream of a removed step, which no task runs."""
    flow = Flow("notebook")
    kept: list[Stream] = []

    def part(streams: list[Stream]) -> list[Stream]:
        kept.append(streams[0].map(lambda n: n, name="lost"))
        raise ZeroDivisionError

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        with pytest.raises(ZeroDivisionError):
            for_each_round(variables, part)
        message = (
            r"expected a step of flow 'notebook', given 'lost', which was taken out again when the call that added it "
            r"failed; make the stream again \(at test_all_or_nothing.py:\d+\)$"
        )
        with pytest.raises(GraphError, match=message):
            kept[0].map(lambda n: n)
        with pytest.raises(GraphError, match=message):
            connect(left=variables[0], right=kept[0]).process(Both)
        with pytest.raises(GraphError, match=message):
            for_each_round(kept, lambda streams: streams)
        return IterationBodyResult([kept[0]], [])

    with pytest.raises(GraphError, match="given 'lost', which was taken out again"):
        iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)


class Both(Operator):
    def process_left(self, record: Any, out: Any) -> None: ...

    process_right = process_left


# -- run and start inside ----------------------------------------------------------------------------------


def in_a_thread(call: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def target() -> None:
        try:
            call()
        except GraphError as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(PATIENCE_S)
    [error] = errors
    raise error


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (lambda flow: flow.run(), "run"),
        (lambda flow: asyncio.run(flow.start()), "start"),
        (lambda flow: in_a_thread(flow.run), "run"),
    ],
    ids=["run", "start", "run elsewhere"],
)
def test_a_flow_is_not_run_while_a_body_is_built(call: Callable[[Flow], object], method: str) -> None:
    """A loop was started before it was closed, and never ended."""
    flow = Flow("notebook")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        call(flow)
        return counting(variables, data)

    start = flow.from_items([0])
    with pytest.raises(GraphError) as caught:
        iterate_bounded_streams_until_termination([start], [], body)
    assert caught.value.args[0] == (
        f"flow 'notebook': {method}() expected a flow whose iterations are built, given one inside the body of an "
        f"iteration, which only builds the graph; call {method}() behind the iteration"
    )


def test_a_body_that_ignores_the_error_of_run_makes_a_complete_loop() -> None:
    """A refused call in a body harmed the loop that was being built."""
    flow = Flow("notebook")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        with pytest.raises(GraphError):
            flow.run()
        return counting(variables, data)

    [counted] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    collected = counted.collect()
    run(flow)
    assert collected.items == [1, 2, 3]


# -- calls that add several steps ----------------------------------------------------------------------------

BOOKS = MemoryBroker().topic("books")
TOPIC: Any = "no topic"


def extracted(batch: Any) -> Examples:
    return Examples(np.array(batch), np.zeros(len(batch)))


def model() -> LogisticRegression:
    return LogisticRegression(2)


NETWORK = Network.from_json(
    {
        "data": {"format": "dense", "indexrange": 2},
        "default_optimizer": "Adam",
        "layers": [
            {"name": "score", "type": "simpleinputlayer", "outputdim": 1, "transfunc": "identity"},
            {"name": "loss", "type": "simplelosslayer", "inputlayer": "score", "lossfunc": "logloss"},
        ],
    }
)
ROWS = LabelledRows(np.eye(2), np.array([1.0, -1.0]))


def taken(stream: Stream, name: str) -> Stream:
    """Add a step with a name that a training gives to one of its last steps, and return the stream."""
    stream.map(lambda x: x, name=name)
    return stream


def with_a_taken_name(train: Callable[[Stream], object], name: str) -> Callable[[Stream], Callable[[], object]]:
    return lambda stream: lambda: train(taken(stream, name))


# Each training is refused by one of its last steps, because another step has the name; its first steps are added.
TRAININGS: dict[str, tuple[str, Callable[[Stream], object]]] = {
    "train_online": (
        "t: validate",
        lambda rows: train_online(rows, model, mode="synchronous", extract=extracted, name="t"),
    ),
    "train_online, asynchronous": (
        "t: parameters",
        lambda rows: train_online(rows, model, mode="asynchronous", extract=extracted, name="t"),
    ),
    "train_offline": ("t: rounds", lambda rows: train_offline(rows, model, extract=extracted, rounds=2, name="t")),
    "train_on_parameter_server": (
        "t: versions",
        lambda rows: train_on_parameter_server(
            rows, ParameterServer(), features=2, consistency=BSP(), epochs=2, extract=extracted, name="t"
        ),
    ),
    "k_means": ("t: model", lambda rows: k_means(rows, clusters=2, rounds=2, name="t")),
    "k_means_on_parameter_server": (
        "t: versions",
        lambda rows: k_means_on_parameter_server(
            rows, ParameterServer(), initial=np.eye(2), consistency=BSP(), name="t"
        ),
    ),
    "online_k_means": ("t: centroids", lambda rows: online_k_means(rows, clusters=2, name="t")),
    "online_standard_scaler": ("t: scale", lambda rows: online_standard_scaler(rows, name="t")),
    "apriori": ("t: choose item sets", lambda rows: apriori(rows, minimum_support=0.5, name="t")),
    "train_network": (
        "t: judge",
        lambda rows: train_network(
            rows.flow, ROWS, NETWORK, ParameterServer(), consistency=BSP(), validation=ROWS, name="t"
        ),
    ),
    "train_network_online": (
        "t: versions",
        lambda rows: train_network_online(
            rows, NETWORK, ParameterServer(), consistency=BSP(), extract=extracted, name="t"
        ),
    ),
}


@pytest.mark.parametrize(("name", "train"), TRAININGS.values(), ids=TRAININGS)
def test_a_training_that_is_refused_in_the_middle_leaves_no_step_behind(
    name: str, train: Callable[[Stream], object]
) -> None:
    """The training was called again with a corrected argument, and failed because the names were taken."""
    flow = Flow("notebook")
    rows = flow.from_items(np.eye(2))
    rows.map(lambda row: row, name=name)
    refused_as_if_never_called(flow, lambda: train(rows), GraphError)


def test_a_server_is_free_again_after_its_training_was_refused() -> None:
    """The second training was refused, because a step of the refused first one still used the server."""
    flow, server = Flow("notebook"), ParameterServer()
    rows = flow.from_items(np.eye(2))

    def train(**options: Any) -> Any:
        return train_on_parameter_server(
            rows, server, features=2, consistency=BSP(), batch=2, extract=extracted, **options
        )

    rows.map(lambda row: row, name="t: versions")
    with pytest.raises(GraphError, match="'t: versions'"):
        train(name="t")
    models = train(name="u").models.collect()
    run(flow)
    assert len(models.items) == 1


@pytest.mark.parametrize(
    "helper",
    [
        lambda stream: all_reduce(stream, name="taken"),
        lambda stream: terminate_after(stream, rounds=2, name="taken"),
        lambda stream: map_with(stream, stream, lambda value, batch: batch, name="taken"),
        lambda stream: stream.map(lambda x: x, name="taken", dead_letter=BOOKS),
    ],
    ids=["all_reduce", "terminate_after", "map_with", "map"],
)
def test_a_helper_of_a_body_that_is_refused_leaves_no_step_in_it(helper: Callable[[Stream], object]) -> None:
    """The first half of ``all_reduce`` counted the records of each epoch for a second half that did not exist."""
    flow = Flow("notebook")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        variables[0].map(lambda n: n, name="taken")
        refused_as_if_never_called(flow, lambda: helper(variables[0]), GraphError)
        return counting(variables, data)

    [counted] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    collected = counted.collect()
    run(flow)
    assert collected.items == [1, 2, 3]


def test_a_publisher_that_is_refused_has_not_published_its_model() -> None:
    """A publisher was refused and corrected, and the second call failed because the model had a publisher."""
    flow, models = Flow("notebook"), MemoryBroker().topic("models")
    asyncio.run(models.create())
    snapshots = flow.from_items([np.zeros(2)], name="taken")
    refused_as_if_never_called(flow, lambda: snapshots.publish_model(models, model="ctr", name="taken"), GraphError)
    snapshots.publish_model(models, model="ctr")
    run(flow)


def test_a_refused_source_leaves_its_struct_to_the_next() -> None:
    """A notebook defined a class again, and its records could not be stored, because the flow still had the first
    class.
    """
    flow, clicks = Flow("notebook"), MemoryBroker().topic("clicks")
    asyncio.run(clicks.create())

    def struct() -> type[msgspec.Struct]:
        return msgspec.defstruct("Click", [("user", str)])

    with pytest.raises(GraphError):
        flow.source(clicks, decode=Typed(struct()), parallelism=0)
    with pytest.raises(GraphError):
        flow.from_items([1]).sink(clicks, encode=Typed(struct()), parallelism=0)
    second = struct()
    flow.source(clicks, decode=Typed(second), stop="latest", name="clicks")
    flow.plain_data.encode(second("ann"))


def test_a_name_of_a_refused_step_is_free() -> None:
    """A refused step kept its number, so a user's own name looked like a number that an edit may change.

    A checkpoint of that step was refused.
    """
    flow = Flow("notebook")
    items = flow.from_items([1])
    items.map(lambda x: x, name="process")
    with pytest.raises(GraphError, match="parameter_server"):
        items.process(Passing, name=None, parameter_server=3)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="parameter_server"):
        items.process(lambda: Passing(), parameter_server=3)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="parallelism"):
        flow.from_items([1], parallelism=0)
    items.map(lambda x: x, name="process-2")
    flow.from_items([1], name="items-2")
    assert {step.name for step in flow.steps if step.has_lasting_name} == {"process", "process-2", "items-2"}


class Passing(Operator):
    def process(self, record: Any, out: Any) -> None:
        out.emit(record)


@pytest.mark.parametrize("error", [StreamiterError, KeyboardInterrupt])
def test_the_steps_of_a_failed_call_are_removed_with_any_error(error: type[BaseException]) -> None:
    """An outer call failed, and the steps of its successful inner calls stayed in the flow."""
    flow = Flow("notebook")
    items = flow.from_items([1])

    def add() -> None:
        with flow.graph.all_or_nothing():
            epochs_every(items, records=1)
            with flow.graph.all_or_nothing():
                items.map(lambda x: x)
            iterate_bounded_streams_until_termination([items], [replayed(items)], counting)
            raise error

    refused_as_if_never_called(flow, add, error)
    assert items.map(lambda x: x).name == "map"
