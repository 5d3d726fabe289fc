"""Collect keeps results in memory, each once, even if a job starts again."""

from __future__ import annotations

import numpy as np
import pytest
from operators.operator_harness import Driven

from streamiter.errors import GraphError
from streamiter.operators import Collect, Collected
from streamiter.values.records import Columns


def test_items_are_refused_before_the_run_and_then_hold_the_records() -> None:
    """Batches of every type must be collected record by record."""
    collected = Collected()
    assert repr(collected) == "Collected(0 items)"
    with pytest.raises(GraphError, match=r"expected .items after the flow has started"):
        _ = collected.items
    Driven(Collect(collected)).feed([1], np.array([2]), Columns({"x": [3]}))
    assert collected.items == list(collected) == [1, 2, {"x": 3}]
    assert repr(collected) == "Collected(3 items)"


def test_a_second_run_starts_again() -> None:
    """A second run of a flow returned every result twice."""
    collected = Collected()
    Driven(Collect(collected)).feed([1, 2])
    Driven(Collect(collected)).feed([3])
    assert collected.items == [3]


def test_a_restored_run_continues_with_the_items_of_its_checkpoint() -> None:
    """Items after the checkpoint are emitted again, so the items of the failed run must be removed."""
    collected = Collected()
    first = Driven(Collect(collected)).feed([1, 2])
    snapshot = first.operator.snapshot()
    first.feed([3])
    second = Driven(Collect(collected))
    second.operator.restore(snapshot)
    second.feed([3, 4])
    assert collected.items == [1, 2, 3, 4]


def test_subtasks_share_the_result_and_keep_states_of_their_own() -> None:
    """With one list for all subtasks, each of two subtasks would restore the items of both."""
    collected = Collected()
    subtasks = [Driven(Collect(collected), subtask=index, parallelism=2) for index in (0, 1)]
    subtasks[1].feed(["b"])
    subtasks[0].feed(["a"])
    assert collected.items == ["a", "b"]
    snapshots = [subtask.operator.snapshot() for subtask in subtasks]
    for index in (0, 1):
        Driven(Collect(collected), subtask=index, parallelism=2).operator.restore(snapshots[index])
    assert collected.items == ["a", "b"]
    Driven(Collect(collected), subtask=0, parallelism=1).feed(["c"])
    assert collected.items == ["c"]


def test_the_list_given_out_is_the_callers_own() -> None:
    """A caller who sorts the list in place must not change the next checkpoint."""
    collected = Collected()
    driven = Driven(Collect(collected)).feed([2, 1])
    collected.items.sort()
    assert driven.operator.snapshot() == {"items": [2, 1]}
