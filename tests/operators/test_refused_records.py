"""Each operator with a function of the user names a record that fails, and continues as if it were not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from operators.operator_harness import Driven

from streamiter.operators import FlatMap, Join, KeyedReduce, Operator, ReduceAll, Sort, StatefulMap
from streamiter.operators.output import RecordFailure
from streamiter.values.subtasks import check_keys


def halting(record: int) -> Iterator[int]:
    yield record
    if record == 0:
        raise ValueError("zero")
    yield record


def keyed(key_of: Callable[[int], Any]) -> list[Callable[[], Operator]]:
    return [
        lambda: KeyedReduce(key_of, lambda total, record: total + 6 // record, check_keys=check_keys),
        lambda: StatefulMap(key_of, lambda total, record: ((total or 0) + 6 // record,) * 2, check_keys=check_keys),
        lambda: KeyedReduce(key_of, lambda total, record: total + 6 // record),  # the dictionary checks the keys
    ]


NUMBERS = [
    # The function, its iterable or its result may be the cause of the failure.
    lambda: FlatMap(halting),
    lambda: FlatMap(lambda record: [6 // record]),
    lambda: FlatMap(lambda record: (record,) if record else None),  # type: ignore[arg-type,return-value]
    lambda: ReduceAll(lambda total, record: total + 6 // record),
    *keyed(lambda record: "all"),
    *keyed(lambda record: 1 // record),
    # A float key may be rounded differently later, and then no longer finds its state.
    *keyed(lambda record: record or 0.5)[:2],
    *keyed(lambda record: [] if record == 0 else 0),
]
FIELDS: list[tuple[Callable[[], Operator], dict[str, Any], str]] = [
    (lambda: Sort("x"), {"y": 2}, "input"),
    *((lambda: Join("x"), bad, side) for bad in ({"y": 1}, {"x": [1]}) for side in ("left", "right")),
]
CASES: list[tuple[Callable[[], Operator], list[Any], int, str]] = [
    *((make, [6, 3, 0, 2], 2, "input") for make in NUMBERS),
    *((make, [{"x": 2}, bad, {"x": 1}], 1, side) for make, bad, side in FIELDS),
]


@pytest.mark.parametrize(("make", "records", "place", "side"), CASES)
def test_a_record_that_is_refused_is_named_and_leaves_nothing(
    make: Callable[[], Operator], records: list[Any], place: int, side: str
) -> None:
    """After a dead letter, half of the record's items were emitted, or the sum of its key had changed."""

    def fed(given: list[Any], policy: str = "fail") -> Driven:
        driven = Driven(make(), policy=policy)
        if side == "input":
            return driven.feed(given).finish()
        other = "right" if side == "left" else "left"
        return driven.feed(given, to=side).feed([{"x": 1}, {"x": 2}], to=other).finish()

    with pytest.raises(RecordFailure) as failure:
        fed(records)
    assert failure.value.record == records[place]
    driven = fed(records, "dead_letter")
    assert driven.records == fed(records[:place] + records[place + 1 :]).records
    assert [letter.record for letter in driven.dead_letters] == [records[place]]
    assert fed(records, "skip").out.rejected == 1
