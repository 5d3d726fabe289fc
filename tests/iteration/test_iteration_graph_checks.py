"""Errors of wrong unbounded iterations, with their messages."""

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
    IterationListener,
    Operator,
    OutputTag,
    Stream,
    connect,
    epochs_every,
    iterate_unbounded_streams,
)
from streamiter.errors import GraphError, JobFailed
from streamiter.runtime.feedback import FeedbackLimits
from streamiter.topics import MemoryBroker

Body = Callable[[list[Stream], list[Stream]], Any]


def untouched(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    return IterationBodyResult(variables, variables)


async def later(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    return untouched(variables, data)


def refused(message: str) -> Any:
    return pytest.raises(GraphError, match=re.escape(message))


def iterate(flow: Flow, body: Body, *, data: Any = (), initial: Any = None, **config: Any) -> Any:
    variables = [flow.from_items([])] if initial is None else initial
    return iterate_unbounded_streams(variables, data, body, IterationConfig(**config) if config else None)


# -- input streams ---------------------------------------------------------------------------------------


def test_a_loop_without_variables_is_refused() -> None:
    """A loop without a head could never end."""
    with refused("iteration: expected at least one initial variable stream, given none"):
        iterate(Flow("loop"), untouched, initial=[])


def test_endless_initial_variables_are_refused() -> None:
    """Epoch 0 never completed, so no callback was ever called."""
    flow = Flow("loop")
    endless = flow.from_source(Endless(), name="clicks")
    with refused(
        "iteration: expected bounded initial variable streams, given stream 1 ('clicks'), which never ends; "
        "pass endless input as a data stream"
    ):
        iterate(flow, untouched, initial=[flow.from_items([]), endless])


def test_initial_variables_with_epochs_of_their_own_are_refused() -> None:
    """Stamps of initial variables, which have epoch 0, were reported as epochs of feedback."""
    flow = Flow("loop")
    stamped = epochs_every(flow.from_items([1, 2, 3]), records=1, name="stamps")
    with refused("iteration: expected initial variable streams without epochs, given stream 0 ('stamps')"):
        iterate(flow, untouched, initial=[stamped])


@pytest.mark.parametrize("given", [5, None, "model"])
def test_what_is_no_stream_is_refused_with_its_place(given: object) -> None:
    """An AttributeError inside the engine did not name the wrong argument."""
    flow = Flow("loop")
    with refused(f"iteration: expected initial variable stream 1 to be a Stream, given {given!r}"):
        iterate(flow, untouched, initial=[flow.from_items([]), given])
    with refused(f"iteration: expected data stream 0 to be a Stream, given {given!r}"):
        iterate(flow, untouched, data=[given])


def test_a_stream_instead_of_a_list_of_streams_is_refused() -> None:
    """The error for forgotten brackets, the most frequent mistake, did not name the brackets."""
    flow = Flow("loop")
    one = flow.from_items([], name="one")
    with refused("iteration: expected a list of initial variable streams, given Stream('one', parallelism 1)"):
        iterate(flow, untouched, initial=one)
    with refused("iteration: expected a list of data streams, given Stream('one', parallelism 1)"):
        iterate(flow, untouched, data=one)
    with refused("iteration: expected a list of feedback streams, given Stream("):
        iterate(flow, lambda variables, data: IterationBodyResult(variables[0], []))  # type: ignore[arg-type]
    with refused("iteration: expected a list (or dict) of output streams, given Stream("):
        iterate(flow, lambda variables, data: IterationBodyResult(variables, variables[0]))


def test_streams_of_two_flows_are_refused() -> None:
    """The steps of the other flow never ran."""
    flow, other = Flow("loop"), Flow("other")
    elsewhere = other.from_items([], name="elsewhere")
    with refused(
        "iteration: expected streams of one flow, given data stream 0 ('elsewhere') of flow 'other' and flow "
        "'loop'; make all of them with methods of one flow"
    ):
        iterate(flow, untouched, data=[elsewhere])
    with refused("iteration: expected streams of one flow, given initial variable stream 1 ('elsewhere')"):
        iterate(flow, untouched, initial=[flow.from_items([]), elsewhere])


def test_a_config_of_another_kind_is_refused() -> None:
    """A number instead of the config failed inside the engine."""
    flow = Flow("loop")
    with refused("iteration: expected config to be an IterationConfig, given 3"):
        iterate_unbounded_streams([flow.from_items([])], [], untouched, 3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "iteration: expected the body to be a function, given None; write def body(variables, data)"),
        (later, "iteration: expected the body to be a plain function, since it only builds the graph, given a "),
    ],
)
def test_a_body_that_cannot_be_called_is_refused(body: Any, message: str) -> None:
    """A coroutine is no IterationBodyResult, and Python only warned that it was never awaited."""
    with refused(message):
        iterate(Flow("loop"), body)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: IterationConfig(feedback_limits=1000),  # type: ignore[arg-type]
            "IterationConfig: expected feedback_limits to be FeedbackLimits, given 1000",
        ),
        (
            lambda: FeedbackLimits(memory_bytes=-1),
            "FeedbackLimits: expected memory_bytes of at least 0, given -1; use a whole number of bytes",
        ),
        (
            lambda: FeedbackLimits(disk_bytes=1e9),  # type: ignore[arg-type]
            "FeedbackLimits: expected disk_bytes of at least 0, given 1000000000.0; use a whole number of bytes",
        ),
    ],
)
def test_bad_limits_of_feedback_are_refused(make: Callable[[], Any], message: str) -> None:
    """Wrong limits were found at the start of the job, with the name of a channel."""
    with refused(message):
        make()


@pytest.mark.parametrize("ahead", [-1, True, 1.5, "0"])
def test_a_bad_max_epochs_ahead_is_refused(ahead: Any) -> None:
    """A limit of 1.5 epochs was compared deep in the engine."""
    with refused(f"IterationConfig: expected max_epochs_ahead None or a number of at least 0, given {ahead!r}"):
        IterationConfig(max_epochs_ahead=ahead)


def test_a_number_of_epochs_ahead_needs_data_with_epochs() -> None:
    """Endless data without epochs never completes an epoch, so the feedback was held forever."""
    flow = Flow("loop")
    endless = flow.from_source(Endless(), name="clicks")
    with refused(
        "iteration: max_epochs_ahead=0 expected data with epochs, given data stream 1 ('clicks'), which is endless "
        "and has no epochs; stamp it with epochs_every(stream, records=…)"
    ):
        iterate(flow, untouched, data=[flow.from_items([]), endless], max_epochs_ahead=0)
    iterate(flow, untouched, data=[epochs_every(endless, records=5)], max_epochs_ahead=0)
    iterate(flow, untouched, data=[endless], max_epochs_ahead=None)


def test_data_with_and_without_epochs_is_refused() -> None:
    """All records of the stream entered in epoch 0, and the lost stamps were not reported."""
    flow = Flow("loop")
    endless = flow.from_source(Endless(), name="clicks")
    both = epochs_every(endless, records=5).union(endless)
    with refused(
        "iteration: expected all records of data stream 0 ('epochs_every ∪ clicks') to have epochs, or none, given a "
        "union of both; stamp the union: epochs_every(first.union(second), …)"
    ):
        iterate(flow, untouched, data=[both], max_epochs_ahead=None)


# -- the result of the body ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2])
def test_as_many_feedback_streams_as_variables(count: int) -> None:
    """A variable without feedback kept the loop open forever."""
    with refused(f"iteration: expected as many feedback streams as variable streams (1), given {count}"):
        iterate(Flow("loop"), lambda variables, data: IterationBodyResult(variables * count, []))


@pytest.mark.parametrize(("initial", "feedback"), [(2, 1), (1, 3)])
def test_feedback_has_the_parallelism_of_its_variable(initial: int, feedback: int) -> None:
    """Feedback of another parallelism has no head for each subtask: feedback i returns to head i."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        fed = variables[0].map(lambda x: x, parallelism=feedback, name="step")
        return IterationBodyResult([fed], [])

    with refused(
        f"iteration: expected feedback stream 0 ('step') to have the parallelism {initial} of its initial "
        f"variable stream ('start'), given {feedback}; set parallelism={initial} on its last step, "
        f"or parallelism={feedback} on 'start'"
    ):
        iterate(flow, body, initial=[flow.from_items([], parallelism=initial, name="start")])


def test_feedback_that_is_repartitioned_may_have_any_parallelism() -> None:
    """Repartitioned feedback was refused, although a head takes the channels of all steps that feed back."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        stepped = variables[0].rebalance().map(lambda x: x + 1, parallelism=3)
        return IterationBodyResult([stepped.filter(lambda x: x < 5).rebalance()], [stepped])

    [steps] = iterate(flow, body, initial=[flow.from_items([0, 0], parallelism=2)])
    seen = steps.collect()
    run(flow)
    assert sorted(seen.items) == sorted(2 * [1, 2, 3, 4, 5])


def test_each_part_of_a_union_that_is_fed_back_has_the_parallelism_of_its_variable() -> None:
    """The widest part of a union hid the other parts, which were silently rebalanced."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        narrow = variables[0].map(lambda x: x, parallelism=1, name="narrow")
        return IterationBodyResult([variables[0].map(lambda x: x, name="wide").union(narrow)], [])

    with refused("iteration: expected feedback stream 0 ('wide ∪ narrow') to have the parallelism 2"):
        iterate(flow, body, initial=[flow.from_items([], parallelism=2)])


def test_termination_criteria_are_refused() -> None:
    """Termination criteria, which end bounded iterations only, were ignored."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [], variables[0].map(lambda x: x, name="enough"))

    with refused(
        "iteration: expected no termination criteria in an unbounded iteration, given 'enough'; "
        "it ends when its inputs end"
    ):
        iterate(Flow("loop"), body)


@pytest.mark.parametrize("result", [None, [], ([], [])])
def test_a_body_that_returns_something_else_is_refused(result: Any) -> None:
    """The error for a body without its return statement did not name the missing result."""
    with refused(f"iteration: expected the body to return an IterationBodyResult, given {result!r}"):
        iterate(Flow("loop"), lambda variables, data: result)


def test_feedback_and_outputs_from_outside_are_refused() -> None:
    """A stream from outside has neither the epochs nor the end of the loop, and stalled it."""
    flow = Flow("loop")
    outside = flow.from_items([1], name="outside")
    with refused(
        "iteration: expected feedback stream 0 to come from inside the body, given 'outside' from outside; "
        "pass it as a data stream"
    ):
        iterate(flow, lambda variables, data: IterationBodyResult([outside], []))
    with refused("iteration: expected output stream 1 to come from inside the body, given 'outside'"):
        iterate(flow, lambda variables, data: IterationBodyResult(variables, [variables[0], outside]))
    with refused("iteration: expected output stream 0 to come from inside the body"):
        iterate(flow, lambda variables, data: IterationBodyResult(variables, {"all": outside}))
    with refused("iteration: expected feedback stream 0 to come from inside the body"):
        iterate(flow, lambda variables, data: IterationBodyResult([variables[0].union(outside)], []))


def test_what_is_no_stream_is_refused_as_feedback_and_output() -> None:
    """An operator class in the place of a stream failed inside the engine."""
    with refused("iteration: expected feedback stream 0 to be a Stream, given 7"):
        iterate(Flow("loop"), lambda variables, data: IterationBodyResult([7], []))  # type: ignore[list-item]
    with refused("iteration: expected output stream 0 to be a Stream, given 8"):
        iterate(Flow("loop"), lambda variables, data: IterationBodyResult(variables, [8]))


def test_arguments_count_as_inside() -> None:
    """A body that feeds a variable back unchanged, or outputs its data unchanged, was refused."""
    flow = Flow("loop")
    [numbers] = iterate(
        flow, lambda variables, data: IterationBodyResult(variables, data), data=[flow.from_items([1, 2, 3])]
    )
    seen = numbers.collect()
    run(flow)
    assert seen.items == [1, 2, 3]


# -- inside and outside of the body ----------------------------------------------------------------------


class Both(Operator):
    def process_left(self, record: Any, out: Any) -> None:
        out.emit(record)

    process_right = process_left


def test_a_stream_from_outside_is_refused_inside_the_body() -> None:
    """A stream from outside has no epochs, so it held the watermarks of the body back forever."""
    flow = Flow("loop")
    outside = flow.from_items([1], name="outside")
    message = (
        "step 'both': expected streams that come in through the body's arguments, given 'outside' from "
        "outside; pass it as a data stream"
    )

    def connected(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = connect(left=variables[0], right=outside).process(Both, name="both")
        return IterationBodyResult([both], [])

    def mapped(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([outside.map(lambda x: x, name="both")], [])

    def united(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0].union(outside).map(lambda x: x, name="both")], [])

    with refused(message):
        iterate(flow, connected)
    with refused(message):
        iterate(flow, mapped)
    with refused("step 'both': expected streams that come in through the body's arguments"):
        iterate(flow, united)


def leaked(flow: Flow) -> Stream:
    leaks: list[Stream] = []

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        leaks.append(variables[0].map(lambda x: x, name="inner"))
        return IterationBodyResult(variables, [])

    iterate(flow, body)
    return leaks[0]


def test_a_stream_of_the_body_is_refused_outside() -> None:
    """A stream of the body was used outside, where its epochs and its end have no meaning."""
    flow = Flow("loop")
    inner = leaked(flow)
    with refused(
        "step 'after': expected a stream from outside the iteration, given 'inner' of its body; return it in "
        "output_streams and use the streams that the iteration returns"
    ):
        inner.map(lambda x: x, name="after")
    with refused("expected a stream from outside the iteration"):
        inner.side_output(OutputTag("side")).map(lambda x: x)
    with refused("expected a stream from outside the iteration"):
        flow.from_items([]).union(inner).map(lambda x: x)
    with refused("step 'collect': expected no collect inside an iteration body"):
        inner.collect()


def test_a_stream_of_one_body_is_refused_as_argument_of_another_iteration() -> None:
    """The check of steps did not see a stream that goes into the border of another iteration."""
    flow = Flow("loop")
    inner = leaked(flow)
    with refused("iteration: expected data streams from outside iterations, given stream 0 ('inner') of the body"):
        iterate(flow, untouched, data=[inner])
    with refused("iteration: expected initial variable streams from outside iterations, given stream 0 ('inner')"):
        iterate(flow, untouched, initial=[inner])
    with refused("epochs_every: expected a stream outside an iteration body, given 'inner' inside"):
        epochs_every(inner, records=1)


def test_sources_and_sinks_are_refused_inside_the_body() -> None:
    """The body is called once, to build: a source inside never received epochs, and a sink was never committed."""
    topic = MemoryBroker().topic("results")
    makers: list[tuple[Callable[[Flow, Stream], object], str]] = [
        (lambda flow, stream: flow.from_items([1]), "step 'items': expected no sources inside an iteration body"),
        (lambda flow, stream: flow.from_source(Endless()), "expected no sources inside an iteration body"),
        (lambda flow, stream: flow.source(topic), "expected no sources inside an iteration body"),
        (lambda flow, stream: stream.collect(), "step 'collect': expected no collect inside an iteration body"),
        (lambda flow, stream: stream.sink(topic), "expected no sink inside an iteration body, given one; return"),
        (lambda flow, stream: stream.publish_model(topic, model="m"), "expected no publish_model inside"),
        (lambda flow, stream: epochs_every(stream, records=2), "epochs_every: expected a stream outside"),
    ]
    for make, message in makers:
        flow = Flow("loop")

        def body(
            variables: list[Stream],
            data: list[Stream],
            make: Callable[[Flow, Stream], object] = make,
            flow: Flow = flow,
        ) -> IterationBodyResult:
            make(flow, variables[0])
            return IterationBodyResult(variables, [])

        with refused(message):
            iterate(flow, body)


def test_a_nested_iteration_is_refused() -> None:
    """The engine has no epochs inside epochs, so a nested iteration stalled."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, iterate(flow, untouched, initial=variables))

    with refused("iteration: expected no iteration inside the body of another, given one; use the outputs"):
        iterate(flow, body)


def test_a_refused_body_leaves_the_flow_usable() -> None:
    """The mark 'inside a body' stayed set after an error, and every later step was refused."""
    flow = Flow("loop")
    with pytest.raises(ZeroDivisionError):
        iterate(flow, lambda variables, data: 1 / 0)
    seen = flow.from_items([1]).map(lambda x: x + 1).collect()
    assert flow.graph.loop is None
    flow.run()
    assert seen.items == [2]


def test_epochs_in_order_is_refused_where_data_never_completes_an_epoch() -> None:
    """All records after epoch 0 were set aside forever."""

    class InOrder(Both):
        epochs_in_order = True

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = connect(left=variables[0], right=data[0]).process(factory, name="in order")
        return IterationBodyResult([both.filter(lambda x: False)], [])

    message = (
        r"step 'in order': epochs_in_order expected data with epochs, given endless data without epochs, which stays "
        r"in epoch 0 for ever; stamp it with epochs_every.* \(at test_iteration_graph_checks.py:\d+\)$"
    )
    flow, factory = Flow("loop"), lambda: InOrder()
    iterate(flow, body, data=[flow.from_source(Endless())])
    with pytest.raises(GraphError, match=message):
        run(flow)
    flow, factory = Flow("loop"), InOrder
    with pytest.raises(GraphError, match=message):
        iterate(flow, body, data=[flow.from_source(Endless())])
    flow = Flow("stamped")
    iterate(flow, body, data=[epochs_every(flow.from_items([1, 2]), records=1)])
    run(flow)


class Listening(Both, IterationListener):
    def process(self, record: Any, out: Any) -> None:
        out.emit(record)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        out.emit(f"epoch {epoch_watermark}")


def test_a_listener_outside_any_iteration_is_refused() -> None:
    """The callbacks of the listener were never called, so their records were never emitted."""
    message = (
        "step 'listen': expected an IterationListener in the body of an iteration, given Listening outside, where no "
        "epoch ends and no callback comes; add the step in the body, stamp the stream with epochs_every, or set "
        "needs_epochs = False in a class that also works without"
    )
    flow = Flow("outside")
    items = flow.from_items([1])
    with refused(message):
        items.process(Listening, name="listen")
    with refused(message):
        items.key_by(lambda x: x).process(Listening, name="listen")
    with refused(message):
        connect(left=items, right=items).process(Listening, name="listen")
    [numbers] = iterate(flow, untouched)
    with refused(message):
        numbers.process(Listening, name="listen")
    items.process(lambda: Listening(), name="listen")
    with refused(message):
        run(flow)


def test_a_listener_outside_has_callbacks_for_stamped_records() -> None:
    """A listener was refused after a stamper, where epochs end, or although its class also works without epochs."""

    class Either(Listening):
        needs_epochs = False

    class AtTimes(Listening):
        def __init__(self, needs_epochs: bool) -> None:
            self.needs_epochs = needs_epochs

    flow = Flow("outside")
    items = flow.from_items(["a", "b"])
    heard = epochs_every(items, records=1).process(Listening).collect()
    either = items.process(Either).process(lambda: AtTimes(False)).batch(2).collect()
    run(flow)
    assert heard.items == ["a", "epoch 0", "b", "epoch 1"]
    assert either.items == [["a", "b"]]
    items.process(lambda: AtTimes(True))
    with refused("given AtTimes outside"):
        run(flow)


@pytest.mark.parametrize("records", [0, -3, True, 2.0, "5"])
def test_groups_of_no_records_are_refused(records: Any) -> None:
    """A stamper with groups of no records never ended an epoch."""
    with refused(f"step 'epochs_every': expected records of at least 1, given {records!r}"):
        epochs_every(Flow("stamps").from_items([]), records=records)
    with refused("epochs_every: expected a stream, given 5"):
        epochs_every(5, records=1)  # type: ignore[arg-type]


# -- outputs ---------------------------------------------------------------------------------------------


def test_outputs_are_a_dict_if_the_body_returns_one() -> None:
    """Outputs with positions instead of names were mixed up."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
        raised = variables[0].map(lambda x: x + 1)
        outputs = {"raised": raised, "doubled": raised.map(lambda x: 2 * x)}
        return IterationBodyResult([raised.filter(lambda x: x < 3)], outputs)

    outputs = iterate(flow, body, initial=[flow.from_items([0])])
    assert list(outputs) == ["raised", "doubled"]
    raised, doubled = outputs["raised"].collect(), outputs["doubled"].collect()
    run(flow)
    assert (raised.items, doubled.items) == ([1, 2, 3], [2, 4, 6])


def test_one_stream_may_be_feedback_and_several_outputs() -> None:
    """One of several readers of a stream received no records."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        small = variables[0].map(lambda x: x + 1).filter(lambda x: x < 3)
        return IterationBodyResult([small], [small, small])

    first, second = (output.collect() for output in iterate(flow, body, initial=[flow.from_items([0])]))
    run(flow)
    assert first.items == second.items == [1, 2]


def test_an_error_in_the_body_names_the_step_and_the_users_line() -> None:
    """An error inside a loop did not name the step, as errors outside do."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        inverse = variables[0].map(lambda x: 1 / x, name="inverse")
        return IterationBodyResult([inverse], [])

    flow = Flow("loop")
    iterate(flow, body, initial=[flow.from_items([0])])
    with pytest.raises(JobFailed, match=r"step 'inverse' \(test_iteration_graph_checks.py:\d+\) on record 0"):
        run(flow)


def test_outputs_are_bounded_where_all_inputs_are() -> None:
    """A step after an endless loop waited for the loop's end."""
    flow = Flow("loop")
    endless = flow.from_source(Endless())
    [bounded] = iterate(flow, untouched, data=[flow.from_items([])])
    [unbounded] = iterate(flow, untouched, data=[endless])
    assert (bounded.is_bounded, unbounded.is_bounded) == (True, False)
