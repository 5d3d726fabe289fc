"""MapBatch and FilterBatch call functions of whole batches, and check the results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operators.operator_harness import Driven, frozen

from streamiter.errors import RejectRecords
from streamiter.operators import FilterBatch, Identity, MapBatch
from streamiter.values.records import Columns

COLUMNS = Columns({"x": np.arange(4), "y": np.array(["a", "b", "c", "d"])})


@pytest.mark.parametrize("result", [[1, 2], np.zeros((3, 2)), COLUMNS, []])
def test_map_batch_emits_the_result_of_the_function(result: Any) -> None:
    """The result may have any length and type, and must not be copied."""
    driven = Driven(MapBatch(lambda batch: result)).feed([1])
    assert all(batch is result for batch in driven.batches)
    assert len(driven.batches) == (1 if len(result) else 0)


@pytest.mark.parametrize("operator", [MapBatch, FilterBatch])
def test_the_function_may_refuse_records(operator: Any) -> None:
    """The engine reads the indices and calls again with the other records, so no record may be emitted before."""

    def refuse(batch: Any) -> Any:
        raise RejectRecords([1], "bad")

    driven = Driven(operator(refuse))
    with pytest.raises(RejectRecords):
        driven.feed([1, 2])
    assert driven.batches == []


@pytest.mark.parametrize("operator", [MapBatch, FilterBatch])
def test_the_function_is_never_given_an_empty_batch(operator: Any) -> None:
    """A batch whose records were all refused is empty, and np.stack([]) is an error."""

    def unprepared(batch: Any) -> Any:
        raise AssertionError

    assert Driven(operator(unprepared)).feed([], np.zeros(0), COLUMNS[0:0]).batches == []


@pytest.mark.parametrize("batch", [[5, 6, 7, 8], np.arange(4), COLUMNS])
@pytest.mark.parametrize("as_mask", [list, np.array])
def test_filter_batch_keeps_the_kind(batch: Any, as_mask: Any) -> None:
    """The batch must stay a list, an array or columns."""
    driven = Driven(FilterBatch(lambda batch: as_mask([True, False, False, True])))
    expected = [batch[0], batch[3]] if isinstance(batch, list) else batch[np.array([0, 3])]
    assert frozen(driven.feed(batch).batches) == frozen([expected])


def test_filter_batch_passes_on_the_same_batch_when_all_is_kept() -> None:
    """A copy of an unchanged batch costs more than the mask."""
    assert Driven(FilterBatch(lambda batch: batch["x"] >= 0)).feed(COLUMNS).batches[0] is COLUMNS


def test_identity_passes_on_the_same_batches() -> None:
    """A step that only names or repartitions a stream uses the identity, so it must not copy."""
    array = np.arange(3)
    driven = Driven(Identity()).feed(array, [1])
    assert driven.batches[0] is array
    assert driven.batches[1] == [1]
