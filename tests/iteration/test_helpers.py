"""The helpers for algorithms in iterations: errors of wrong use, and results with uneven epochs."""

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import SMALL, cut_items, run

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationListener,
    Operator,
    Stream,
    iterate_bounded_streams_until_termination,
    replayed,
)
from streamiter.errors import GraphError, JobFailed
from streamiter.iteration import all_reduce, last_round, map_with, terminate_after


class Forgetful(Operator):
    """Has a callback, but is not a listener."""

    def process(self, record: int, out: Any) -> None:
        out.emit(record)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        out.emit(epoch_watermark)


def test_an_operator_with_callbacks_that_is_no_listener_is_refused() -> None:
    """The callback was silently never called; a class is now refused at once, the result of a factory at the start."""
    message = (
        "step 'train': on_epoch_watermark_incremented expected an IterationListener, given Forgetful, which is "
        "none, so it is never called; write class Forgetful(Operator, IterationListener)"
    )
    with pytest.raises(GraphError, match=re.escape(message)):
        training(Forgetful)
    flow = training(lambda: Forgetful())
    with pytest.raises(GraphError, match=re.escape(message)):
        run(flow)


def training(factory: Any) -> Flow:
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0].process(factory, name="train")], [])

    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    return flow


@pytest.mark.parametrize("bases", [(Operator, IterationListener), (Operator,)])
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("on_epoch_watermark_increment", "on_epoch_watermark_incremented"),
        ("on_epoch_watermark", "on_epoch_watermark_incremented"),
        ("on_iteration_end", "on_iteration_terminated"),
        ("on_iteration_termination", "on_iteration_terminated"),
    ],
)
def test_a_misspelt_callback_is_refused(bases: tuple[type, ...], written: str, meant: str) -> None:
    """A misspelt callback was silently never called."""

    def pass_on(self: Operator, record: int, out: Any) -> None:
        out.emit(record)

    misspelt = type("Trainer", bases, {"process": pass_on, written: lambda self, *arguments: None})
    message = (
        "step 'train': expected the callbacks of Trainer to be those of an IterationListener, given "
        f"{written}, which is never called; write {meant}"
    )
    with pytest.raises(GraphError, match="^" + re.escape(message)):
        training(misspelt)
    flow = training(lambda: misspelt())
    with pytest.raises(GraphError, match="^" + re.escape(message)):
        run(flow)


def test_attributes_that_only_resemble_callbacks_are_accepted() -> None:
    """A setting, or a method with the same words in another order, was refused as a misspelt callback."""

    class Counting(Operator, IterationListener):
        on_epoch_name = "round"

        def process(self, record: int, out: Any) -> None:
            self.one_epoch_more()
            out.emit(record)

        def one_epoch_more(self) -> None:
            self.epochs = getattr(self, "epochs", 0) + 1

        def on_iteration_terminated(self, context: Any, out: Any) -> None:
            out.emit((self.on_epoch_name, self.epochs))

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0].filter(lambda _: False)], [variables[0].process(Counting)])

    flow = Flow("loop")
    [counted] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    collected = counted.collect()
    run(flow)
    assert collected.items == [0, ("round", 1)]


@pytest.mark.parametrize("given", [None, 3.0, "text"])
def test_a_function_of_map_with_that_returns_no_batch_is_refused(given: object) -> None:
    """The error said only that an object of type NoneType has no len."""

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mapped = map_with(data[0], variables[0], lambda value, batch: given)  # type: ignore[arg-type, return-value]
        return IterationBodyResult([variables[0]], [mapped], terminate_after(mapped, rounds=2))

    flow = Flow("loop")
    data = [replayed(flow.from_items([1]))]
    iterate_bounded_streams_until_termination([flow.from_items([0])], data, body)
    with pytest.raises(JobFailed, match=r"map_with\(data, variable, f\): expected the function to return a list"):
        run(flow)


@pytest.mark.parametrize("seed", range(10))
def test_helpers_work_together_with_a_subtask_without_data(seed: int) -> None:
    """A subtask without records blocked the others, or its missing result counted in the sum."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = map_with(data[0], variables[0], lambda value, batch: [value + record for record in batch])
        total = all_reduce(raised)
        following = map_with(total, variables[0], lambda value, totals: [totals[0] % 97], parallelism=1)
        return IterationBodyResult([following], [last_round(following), total], terminate_after(following, rounds=5))

    data = cut_items(flow, [1, 2], seed=seed, parallelism=3)
    last, totals = iterate_bounded_streams_until_termination([flow.from_items([1])], [replayed(data)], body)
    seen, sums = last.collect(), totals.collect()
    run(flow, seed=seed, limits=SMALL)
    value, expected = 1, []
    for _ in range(5):
        expected.append(2 * value + 3)
        value = expected[-1] % 97
    assert sums.items == expected
    assert seen.items == [value]


@pytest.mark.parametrize(("tolerance", "rounds"), [(10.0, 3), (5.0, 4), (-1.0, 6), (None, 6)])
def test_losses_of_a_round_are_summed_before_they_are_compared(tolerance: float | None, rounds: int) -> None:
    """The first of several small losses was below the tolerance, and ended the loop."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        halved = variables[0].map(lambda x: x / 2)
        return IterationBodyResult([halved], [halved], terminate_after(halved, rounds=6, tolerance=tolerance))

    losses = flow.from_items([40.0, 40.0], parallelism=2)
    [halved] = iterate_bounded_streams_until_termination([losses], [], body)
    collected = halved.collect()
    run(flow)
    assert len(collected.items) == 2 * (rounds + 1)


def _halvings_of(losses: list[Any] | np.ndarray[Any, Any], tolerance: float = 1.0) -> list[Any]:
    """Return the output of a loop that halves each loss until the sum of the losses is within the tolerance."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        halved = variables[0].map(lambda loss: loss if isinstance(loss, (str, dict)) else loss / 2)
        return IterationBodyResult([halved], [halved], terminate_after(halved, rounds=6, tolerance=tolerance))

    [halved] = iterate_bounded_streams_until_termination([flow.from_items(losses)], [], body)
    collected = halved.collect()
    run(flow)
    return collected.items


@pytest.mark.parametrize(
    "loss",
    [8, 8.0, np.float32(8.0), np.int64(8), np.array(8.0), np.array([8.0]), np.array([[8.0]]), Fraction(8)],
    ids=repr,
)
def test_any_single_number_is_a_loss(loss: Any) -> None:
    """An array of one number, which is deprecated as a number, failed with numpy's warning."""
    halved = _halvings_of([loss])
    assert [float(np.asarray(each).item()) for each in halved] == [4.0, 2.0, 1.0, 0.5]


@pytest.mark.parametrize(
    "record", ["0.5", {"loss": 0.5}, np.array([0.5, 0.25]), np.array([]), 0.5j, np.complex128(0.5j)], ids=repr
)
def test_losses_that_are_no_numbers_are_refused(record: Any) -> None:
    """The error said only that float() takes a string or a number, at a step that the user had not written."""
    with pytest.raises(JobFailed) as failed:
        _halvings_of([record])
    message = r"terminate_after\(stream, …\): tolerance expected records that are numbers, given .*; write "
    assert re.search(message + re.escape("terminate_after(stream.map(f), …)"), str(failed.value))


def test_without_a_tolerance_records_need_not_be_numbers() -> None:
    """A stream of texts was refused although, without a tolerance, any stream counts rounds."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0]], [variables[0]], terminate_after(variables[0], rounds=2))

    [texts] = iterate_bounded_streams_until_termination([flow.from_items(["text"])], [], body)
    collected = texts.collect()
    run(flow)
    assert collected.items == ["text"] * 3
