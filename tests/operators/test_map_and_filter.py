"""Map and Filter call a function for each record, and name the record if the function fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operators.operator_harness import KINDS, Driven, as_kind, frozen, number_in

from streamiter.errors import RejectRecords
from streamiter.operators import Filter, Map
from streamiter.operators.output import RecordFailure
from streamiter.values.records import Columns


def inverse(record: Any) -> float:
    number = int(number_in(record))
    if number == 3:
        raise RejectRecords([0], "three")
    return 6 / number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", [Map, Filter])
@pytest.mark.parametrize("numbers", [[2, 1, 0, 6], [0, 1], [1, 0], [0]])
def test_a_failure_names_the_record(kind: str, operator: Any, numbers: list[int]) -> None:
    """An error that names only the batch leaves thousands of suspects."""
    batch = as_kind(kind, numbers)
    with pytest.raises(RecordFailure) as failure:
        Driven(operator(inverse)).feed(batch)
    assert failure.value.step == "the step"
    assert frozen(failure.value.record) == frozen(batch[numbers.index(0)])
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("operator", "expected"), [(Map, [3.0, 6.0]), (Filter, [2, 1])])
def test_refused_records_become_dead_letters_and_the_others_continue(
    kind: str, operator: Any, expected: list[float]
) -> None:
    """One bad record must not remove the rest of its batch."""
    driven = Driven(operator(inverse), policy="dead_letter").feed(as_kind(kind, [0, 2, 3, 1]))
    assert [number_in(record) for record in driven.records] == expected
    assert [(number_in(letter.record), letter.error) for letter in driven.dead_letters] == [
        (0, "ZeroDivisionError: division by zero"),
        (3, "three"),
    ]
    assert driven.out.rejected == 2


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("operator", [Map, Filter])
def test_the_function_is_called_once_for_each_record(operator: Any, policy: str) -> None:
    """A second call after a failure would count a record twice in a function that counts."""
    calls: list[int] = []

    def counted(record: int) -> float:
        calls.append(record)
        return 1 / record if policy == "skip" else 1

    Driven(operator(counted), policy=policy).feed([2, 0, 1], [0, 5])
    assert calls == [2, 0, 1, 0, 5]


@pytest.mark.parametrize("operator", [Map, Filter])
def test_a_function_that_raises_stop_iteration_fails_the_step(operator: Any) -> None:
    """StopIteration ended a loop silently, and the later records were lost."""
    empty: Any = iter(())
    with pytest.raises(RecordFailure) as failure:
        Driven(operator(lambda record: next(empty))).feed([1, 2])
    assert failure.value.record == 1


def test_filter_keeps_arrays_and_columns() -> None:
    """A vectorised step after a filter would fall back to single records."""
    array = np.array([1, 2, 3], dtype=np.int16)
    columns = Columns({"x": array, "name": np.array(["a", "b", "c"])})
    driven = Driven(Filter(lambda record: number_in(record) != 2)).feed(array, columns)
    expected = [array[[0, 2]], Columns({"x": array[[0, 2]], "name": np.array(["a", "c"])})]
    assert frozen(driven.batches) == frozen(expected)


def test_filter_passes_on_the_same_array_when_all_records_are_kept() -> None:
    """A copy of an unchanged batch costs as much as the predicate."""
    array = np.arange(4)
    assert Driven(Filter(lambda record: True)).feed(array).batches[0] is array


def test_filter_names_the_record_whose_verdict_has_no_truth() -> None:
    """In numpy the truth of an array of two numbers is an error, raised after the predicate has returned."""
    with pytest.raises(RecordFailure) as failure:
        Driven(Filter(lambda record: np.array([True, record > 0]))).feed([7, 8])
    assert failure.value.record == 7
    skipping = Driven(Filter(lambda record: np.ones(record)), policy="skip").feed([1, 2])
    assert (skipping.records, skipping.out.rejected) == ([1], 1)


def test_sequences_whose_iterators_know_no_length_are_searched_as_well() -> None:
    """Such iterators have the length hint 0, which looked like the end of the batch."""

    class Countdown:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return (2, 0, 1)[index]

        def __iter__(self) -> Any:
            yield from (2, 0, 1)

    with pytest.raises(RecordFailure) as failure:
        Driven(Map(inverse)).feed(Countdown())  # type: ignore[arg-type]
    assert failure.value.record == 0
