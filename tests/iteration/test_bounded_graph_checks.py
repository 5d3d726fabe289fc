"""Errors of wrong bounded iterations, with their full messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from iteration.iteration_support import Endless, run

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    OperatorLifeCycle,
    OutputTag,
    Stream,
    connect,
    epochs_every,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.errors import GraphError, JobFailed
from streamiter.iteration import terminate_after
from streamiter.topics import MemoryBroker

Build = Callable[[Flow], object]


def untouched(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    return IterationBodyResult(variables, variables)


async def later(streams: list[Stream]) -> list[Stream]:
    return streams


def bounded(flow: Flow, body: Any = untouched, data: Any = (), **config: Any) -> Any:
    variables = [flow.from_items([0], name="start")]
    settings = IterationConfig(**config) if config else None
    return iterate_bounded_streams_until_termination(variables, data, body, settings)


def unbounded(flow: Flow, body: Any = untouched, data: Any = (), **config: Any) -> Any:
    return iterate_unbounded_streams([flow.from_items([0])], data, body, IterationConfig(**config))


def clicks(flow: Flow) -> Stream:
    return flow.from_source(Endless(), name="clicks")


def stamped(flow: Flow) -> Stream:
    return epochs_every(flow.from_items([1]), records=1, name="stamps")


def in_body(build: Callable[[list[Stream]], Any]) -> Build:
    """Return a function that calls ``build`` in the body of a loop, which feeds its variable back unchanged."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        build(variables)
        return IterationBodyResult(variables, [])

    return lambda flow: bounded(flow, body)


def result(make: Callable[[Flow, list[Stream]], IterationBodyResult[Any]]) -> Build:
    return lambda flow: bounded(flow, lambda variables, data: make(flow, variables))


def mapped(stream: Stream, name: str) -> Stream:
    return stream.map(lambda x: x, name=name)


class Both(Operator):
    def process_left(self, record: Any, out: Any) -> None:
        out.emit(record)

    process_right = process_left


def uses_outside_stream(streams: list[Stream]) -> object:
    outside = mapped(streams[0], "outside")
    return for_each_round(streams, lambda given: [connect(left=given[0], right=outside).process(Both, name="both")])


def gives_back_outside_stream(streams: list[Stream]) -> object:
    outside = mapped(streams[0], "outside")
    return for_each_round(streams, lambda given: [outside])


def uses_leaked_stream(streams: list[Stream]) -> object:
    leaked: list[Stream] = []

    def sub_body(given: list[Stream]) -> list[Stream]:
        leaked.append(mapped(given[0], "inner"))
        return given

    for_each_round(streams, sub_body)
    return mapped(leaked[0], "after")


def uses_side_output_of_given_back_stream(streams: list[Stream]) -> object:
    [inner] = for_each_round(streams, lambda given: [mapped(given[0], "inner")])
    return mapped(inner.side_output(OutputTag("side")), "after")


def first_of(flow: Flow) -> Stream:
    """Return the stream of the first step of a flow."""
    return Stream(flow, flow.steps[0])


CASES: list[tuple[str, Build, str]] = [
    (
        "endless data",
        lambda flow: bounded(flow, data=[flow.from_items([1]), clicks(flow)]),
        "iteration: expected bounded data streams in a bounded iteration, given stream 1 ('clicks'), which never "
        'ends; read the topic with stop="latest", or use iterate_unbounded_streams',
    ),
    (
        "stamped data",
        lambda flow: bounded(flow, data=[stamped(flow)]),
        "iteration: expected data streams without epochs in a bounded iteration, given stream 0 ('stamps') of "
        "epochs_every; leave epochs_every out, or use iterate_unbounded_streams",
    ),
    (
        "data of which a part is stamped",
        lambda flow: bounded(flow, data=[stamped(flow).union(flow.from_items([1], name="plain"))]),
        "iteration: expected data streams without epochs in a bounded iteration, given stream 0 ('stamps ∪ plain') "
        "of epochs_every; leave epochs_every out, or use iterate_unbounded_streams",
    ),
    (
        "stamping inside",
        in_body(lambda variables: epochs_every(variables[0], records=1)),
        "epochs_every: expected a stream outside an iteration body, given 'variable 0' inside",
    ),
    (
        "a replayed stream that never ends",
        lambda flow: replayed(clicks(flow)),
        "replayed: expected a bounded stream, given 'clicks', which never ends; read the topic with "
        'stop="latest", or pass it to an unbounded iteration without replayed(…)',
    ),
    (
        "a replayed stream that is stamped",
        lambda flow: replayed(stamped(flow)),
        "replayed: expected a stream without epochs, given 'stamps' of epochs_every; leave epochs_every out: replayed "
        "data has the epochs of the iteration",
    ),
    (
        "replayed without a stream",
        lambda flow: replayed([1, 2]),  # type: ignore[arg-type]
        "replayed: expected a stream, given [1, 2]; write replayed(stream)",
    ),
    (
        "replayed twice",
        lambda flow: replayed(replayed(flow.from_items([1], name="rows"))),  # type: ignore[arg-type]
        "replayed: expected a stream, given replayed('rows'); write replayed(stream)",
    ),
    (
        "a method of what is replayed",
        lambda flow: replayed(flow.from_items([1], name="rows")).map(lambda x: x),  # type: ignore[attr-defined]
        "replayed: expected replayed('rows') to be one of the data_streams of a bounded iteration, given .map of it; "
        "use .map of the stream first, then replayed(…)",
    ),
    (
        "a replayed variable",
        lambda flow: iterate_bounded_streams_until_termination(
            [replayed(flow.from_items([1], name="rows"))],  # type: ignore[list-item]
            [],
            untouched,
        ),
        "iteration: expected initial variable stream 0 to be a Stream, given replayed('rows'); only data streams are "
        "replayed",
    ),
    (
        "replayed data in an unbounded iteration",
        lambda flow: unbounded(flow, data=[replayed(flow.from_items([1], name="rows"))]),
        "iteration: expected no replayed data in an unbounded iteration, given data stream 0 ('rows'); use "
        "iterate_bounded_streams_until_termination, or leave replayed out",
    ),
    (
        "per round in an unbounded iteration",
        lambda flow: unbounded(flow, operator_life_cycle=OperatorLifeCycle.PER_ROUND),
        "iteration: expected operator_life_cycle=OperatorLifeCycle.ALL_ROUND in an unbounded iteration, given "
        "OperatorLifeCycle.PER_ROUND; use iterate_bounded_streams_until_termination",
    ),
    (
        "a life cycle that is none",
        lambda flow: IterationConfig(operator_life_cycle="per round"),  # type: ignore[arg-type]
        "IterationConfig: expected operator_life_cycle to be an OperatorLifeCycle, given 'per round'; write "
        "OperatorLifeCycle.ALL_ROUND or OperatorLifeCycle.PER_ROUND",
    ),
    (
        "memory below nothing",
        lambda flow: IterationConfig(replay_memory_bytes=-1),
        "IterationConfig: expected replay_memory_bytes of at least 0, given -1; use a whole number of bytes",
    ),
    (
        "memory that is no number of bytes",
        lambda flow: IterationConfig(replay_memory_bytes=1e6),  # type: ignore[arg-type]
        "IterationConfig: expected replay_memory_bytes of at least 0, given 1000000.0; use a whole number of bytes",
    ),
    (
        "no variable",
        lambda flow: iterate_bounded_streams_until_termination([], [], untouched),
        "iteration: expected at least one initial variable stream, given none; a loop needs a stream to feed back: "
        "pass flow.from_items([]) if it has no initial value",
    ),
    (
        "endless variables",
        lambda flow: iterate_bounded_streams_until_termination([clicks(flow)], [], untouched),
        "iteration: expected bounded initial variable streams, given stream 0 ('clicks'), which never ends; pass "
        "endless input as a data stream",
    ),
    (
        "stamped variables",
        lambda flow: iterate_bounded_streams_until_termination([stamped(flow)], [], untouched),
        "iteration: expected initial variable streams without epochs, given stream 0 ('stamps') of epochs_every; "
        "stamp data streams only: initial variables have epoch 0",
    ),
    (
        "less feedback than variables",
        result(lambda flow, variables: IterationBodyResult([], variables)),
        "iteration: expected as many feedback streams as variable streams (1), given 0; return one for each, in the "
        "same order",
    ),
    (
        "feedback of another parallelism",
        result(
            lambda flow, variables: IterationBodyResult([variables[0].map(lambda x: x, name="wide", parallelism=3)], [])
        ),
        "iteration: expected feedback stream 0 ('wide') to have the parallelism 1 of its initial variable stream "
        "('start'), given 3; set parallelism=1 on its last step, or parallelism=3 on 'start'",
    ),
    (
        "feedback from outside",
        result(lambda flow, variables: IterationBodyResult([first_of(flow)], [])),
        "iteration: expected feedback stream 0 to come from inside the body, given 'start' from outside; pass it as a "
        "data stream",
    ),
    (
        "an output from outside",
        result(lambda flow, variables: IterationBodyResult(variables, {"all": first_of(flow)})),
        "iteration: expected output stream 0 to come from inside the body, given 'start' from outside; pass it as a "
        "data stream",
    ),
    (
        "a stream from outside used inside",
        result(lambda flow, variables: IterationBodyResult([mapped(first_of(flow), "step")], [])),
        "step 'step': expected streams that come in through the body's arguments, given 'start' from outside; pass it "
        "as a data stream",
    ),
    (
        "a body that gives nothing",
        lambda flow: bounded(flow, lambda variables, data: None),
        "iteration: expected the body to return an IterationBodyResult, given None; write return "
        "IterationBodyResult([feedback], [output])",
    ),
    (
        "criteria from outside",
        result(lambda flow, variables: IterationBodyResult(variables, [], first_of(flow))),
        "iteration: expected termination_criteria to come from inside the body, given 'start' from outside; pass it "
        "as a data stream",
    ),
    (
        "criteria that are no stream",
        result(lambda flow, variables: IterationBodyResult(variables, [], 20)),  # type: ignore[arg-type]
        "iteration: expected termination_criteria to be a Stream, given 20; return a stream of the body",
    ),
    (
        "a bounded iteration inside another",
        result(
            lambda flow, variables: IterationBodyResult(
                variables, iterate_bounded_streams_until_termination(variables, [], untouched)
            )
        ),
        "iteration: expected no iteration inside the body of another, given one; use the outputs of the first as "
        "inputs of the second",
    ),
    (
        "no streams for a round",
        in_body(lambda variables: for_each_round([], lambda streams: streams)),
        "for_each_round: expected at least one stream, given none; write for_each_round([stream], …)",
    ),
    (
        "one stream instead of a list",
        in_body(lambda variables: for_each_round(variables[0], lambda streams: streams)),  # type: ignore[arg-type]
        "for_each_round: expected a list of streams, given Stream('variable 0', parallelism 1); write [stream]",
    ),
    (
        "a sub-body that gives one stream",
        in_body(lambda variables: for_each_round(variables, lambda streams: streams[0])),  # type: ignore[arg-type,return-value]
        "for_each_round: expected the sub-body to return a list of streams, given Stream('variable 0', parallelism 1); "
        "write [stream]",
    ),
    (
        "a sub-body that gives nothing",
        in_body(lambda variables: for_each_round(variables, lambda streams: None)),  # type: ignore[arg-type,return-value]
        "for_each_round: expected the sub-body to return a list of streams, given None; write [stream]",
    ),
    (
        "a sub-body that is none",
        in_body(lambda variables: for_each_round(variables, 5)),  # type: ignore[arg-type]
        "for_each_round: expected the sub-body to be a plain function, given 5; write def sub_body(streams) that "
        "returns a list of streams",
    ),
    (
        "a sub-body that is a coroutine function",
        in_body(lambda variables: for_each_round(variables, later)),  # type: ignore[arg-type]
        "for_each_round: expected the sub-body to be a plain function, given a coroutine function; write def "
        "sub_body(streams) that returns a list of streams",
    ),
    (
        "rounds outside a body",
        lambda flow: for_each_round([flow.from_items([1], name="rows")], lambda streams: streams),
        "for_each_round: expected to be called in the body of an iteration, given 'rows' outside; outside an "
        "iteration a step has only one round",
    ),
    (
        "rounds in an unbounded iteration",
        lambda flow: unbounded(
            flow, lambda variables, data: IterationBodyResult(for_each_round(variables, lambda streams: streams), [])
        ),
        "for_each_round: expected the body of a bounded iteration, given an unbounded one, whose operators live until "
        "it ends; keep a state for each epoch in an IterationListener",
    ),
    (
        "rounds of rounds",
        in_body(
            lambda variables: for_each_round(variables, lambda streams: for_each_round(streams, lambda inner: inner))
        ),
        "for_each_round: expected no for_each_round inside another, given one; leave the inner one out",
    ),
    (
        "a stream that comes in past the argument",
        in_body(uses_outside_stream),
        "step 'both': for_each_round expected streams that come in through its sub-body's argument, given 'outside' "
        "from outside; add it to the list: for_each_round([…, stream], sub_body)",
    ),
    (
        "a stream that is given back past the argument",
        in_body(gives_back_outside_stream),
        "step 'for_each_round': for_each_round expected streams that come in through its sub-body's argument, given "
        "'outside' from outside; add it to the list: for_each_round([…, stream], sub_body)",
    ),
    (
        "a stream that goes out without being given back",
        in_body(uses_leaked_stream),
        "step 'after': expected a stream from outside for_each_round, given 'inner' of its sub-body; return it from "
        "the sub-body and use the streams that for_each_round returns",
    ),
    (
        "a side output that was not given back",
        in_body(uses_side_output_of_given_back_stream),
        "step 'after': expected a stream from outside for_each_round, given 'inner' of its sub-body; return it from "
        "the sub-body and use the streams that for_each_round returns",
    ),
]


@pytest.mark.parametrize(("build", "message"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_wrong_use_is_refused_with_the_full_message(build: Build, message: str) -> None:
    """The first error message is the only help that a user has at that moment."""
    with pytest.raises(GraphError, match="^" + re.escape(message)):
        build(Flow("loop"))


def test_sources_and_sinks_are_refused_in_a_part_of_each_round() -> None:
    """Sources and sinks were accepted in a part of a body, which is inside the body, too."""
    topic = MemoryBroker().topic("results")
    for make, message in (
        (lambda streams: [streams[0].flow.from_items([1])], "expected no sources inside an iteration body"),
        (lambda streams: streams[0].sink(topic), "expected no sink inside an iteration body"),
        (lambda streams: streams[0].collect(), "expected no collect inside an iteration body"),
    ):
        build = in_body(lambda variables, make=make: for_each_round(variables, make))  # type: ignore[misc]
        with pytest.raises(GraphError, match=re.escape(message)):
            build(Flow("loop"))


def test_a_refused_part_leaves_the_body_usable() -> None:
    """After the error, new steps still counted as steps of the round."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        with pytest.raises(ZeroDivisionError):
            for_each_round(variables, lambda streams: 1 / 0)  # type: ignore[arg-type,return-value]
        raised = variables[0].map(lambda x: x + 1)
        return IterationBodyResult([raised.filter(lambda x: x < 3)], [raised])

    flow = Flow("loop")
    [numbers] = bounded(flow, body)
    seen = numbers.collect()
    run(flow)
    assert seen.items == [1, 2, 3]


def test_any_limit_of_epochs_ahead_is_allowed() -> None:
    """A limit of epochs ahead was refused, although bounded data completes epoch 0 at its end."""
    for ahead in (0, 1, None):
        flow = Flow("loop")
        [output] = bounded(
            flow,
            lambda variables, data: IterationBodyResult([variables[0].filter(lambda x: False)], [variables[0]]),
            data=[flow.from_items([1])],
            max_epochs_ahead=ahead,
        )
        seen = output.collect()
        run(flow)
        assert seen.items == [0]


@pytest.mark.parametrize("again", ["the same", "raises", "no operator"])
def test_a_factory_that_fails_in_a_later_round_is_an_error_of_its_step(again: str) -> None:
    """The error was reported as a bug in the engine, without the name of the step."""
    made: list[Operator] = []

    class Step(Operator):
        def process(self, record: int, out: Any) -> None:
            out.emit(record + 1)

    def make() -> Any:
        if len(made) < 2:
            made.append(Step())
            return made[-1]
        if again == "raises":
            raise ValueError("no more")
        return made[-1] if again == "the same" else 5

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [raised] = for_each_round(variables, lambda streams: [streams[0].process(make, name="step")])
        return IterationBodyResult([raised], [])

    flow = Flow("loop")
    bounded(flow, body)
    expected = {
        "the same": "step 'step': expected its factory to make a new operator for each round, given the same again; "
        "make it inside the factory",
        "raises": "step 'step': expected its factory to work without arguments, given ValueError: no more",
        "no operator": "step 'step': expected its factory to give an Operator, given int; derive it from "
        "streamiter.Operator",
    }
    with pytest.raises(JobFailed, match=r"^flow 'loop', step 'step'.*" + re.escape(expected[again])):
        run(flow)


# -- what a body is ------------------------------------------------------------------------------------------


def test_a_generator_function_is_no_body() -> None:
    """A generator function builds nothing when it is called, and the error did not name the ``yield``."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> Any:
        yield IterationBodyResult(variables, [])

    with pytest.raises(GraphError, match="given a generator function; write return instead of yield"):
        bounded(flow, body)


def test_a_body_with_other_parameters_is_refused_with_the_right_ones() -> None:
    """The error for wrong parameters of a body did not name the right ones, such as ``def body(variables, data)``."""
    flow = Flow("loop")
    with pytest.raises(GraphError) as caught:
        bounded(flow, lambda variables: IterationBodyResult(variables, []))
    assert caught.value.args[0] == (
        "iteration: expected the body to take two arguments, variables and data, given <lambda>(variables): too many "
        "positional arguments; write def body(variables, data)"
    )

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(for_each_round(variables, lambda variables, data: variables), [])

    with pytest.raises(GraphError) as caught:
        bounded(Flow("rounds"), body)
    assert caught.value.args[0] == (
        "for_each_round: expected the sub-body to take one argument, the list of streams, given <lambda>(variables, "
        "data): missing a required argument: 'data'; write def sub_body(streams)"
    )


def test_the_error_for_no_rounds_names_the_solution() -> None:
    """The message named the mistake, but not the solution."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [], terminate_after(variables[0], rounds=0))

    with pytest.raises(GraphError) as caught:
        bounded(flow, body)
    assert caught.value.args[0] == (
        "terminate_after(rounds=): expected a whole number of at least 1, given 0; epoch 0 never ends an iteration: "
        "write rounds=1 for a single round"
    )
