"""What iterations accept, and what is left after an error; ``refusals.txt`` has what they refuse."""

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
    Stream,
    connect,
    epochs_every,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
)
from streamiter.errors import GraphError, JobFailed

Body = Callable[[list[Stream], list[Stream]], Any]


def untouched(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    return IterationBodyResult(variables, variables)


def iterate(flow: Flow, body: Body, *, data: Any = (), initial: Any = None, **config: Any) -> Any:
    variables = [flow.from_items([])] if initial is None else initial
    return iterate_unbounded_streams(variables, data, body, IterationConfig(**config) if config else None)


class Listening(Operator, IterationListener):
    def process(self, record: Any, out: Any) -> None:
        out.emit(record)

    process_left = process_right = process

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        out.emit(f"epoch {epoch_watermark}")


def test_a_number_of_epochs_ahead_needs_data_with_epochs() -> None:
    """Data with epochs, or feedback that waits for none, was refused together with endless data without epochs."""
    flow = Flow("loop")
    endless = flow.from_source(Endless(), name="clicks")
    iterate(flow, untouched, data=[epochs_every(endless, records=5)], max_epochs_ahead=0)
    iterate(flow, untouched, data=[endless], max_epochs_ahead=None)


def test_epochs_in_order_is_accepted_where_data_completes_epochs() -> None:
    """Stamped data was refused together with endless data, whose records after epoch 0 were set aside forever."""

    class InOrder(Listening):
        epochs_in_order = True

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        both = connect(left=variables[0], right=data[0]).process(InOrder, name="in order")
        return IterationBodyResult([both.filter(lambda x: False)], [])

    flow = Flow("stamped")
    iterate(flow, body, data=[epochs_every(flow.from_items([1, 2]), records=1)])
    run(flow)


def test_a_refused_body_leaves_the_flow_usable() -> None:
    """The mark 'inside a body' stayed set after an error, and every later step was refused."""
    flow = Flow("loop")
    with pytest.raises(ZeroDivisionError):
        iterate(flow, lambda variables, data: 1 / 0)
    seen = flow.from_items([1]).map(lambda x: x + 1).collect()
    assert flow.graph.loop is None
    flow.run()
    assert seen.items == [2]


def test_a_refused_part_leaves_the_body_usable() -> None:
    """After the error, new steps still counted as steps of the round."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        with pytest.raises(ZeroDivisionError):
            for_each_round(variables, lambda streams: 1 / 0)  # type: ignore[arg-type,return-value]
        raised = variables[0].map(lambda x: x + 1)
        return IterationBodyResult([raised.filter(lambda x: x < 3)], [raised])

    flow = Flow("loop")
    [numbers] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    seen = numbers.collect()
    run(flow)
    assert seen.items == [1, 2, 3]


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
    with pytest.raises(GraphError, match="given AtTimes outside"):
        run(flow)


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
