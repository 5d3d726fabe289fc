"""A table of features admits, expires and evicts as a dict in plain Python does, with the same bits after a restart."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from learn.feature_histories import (
    EARLY,
    SQUARES,
    WEIGHTS,
    WIDTH,
    History,
    ModelOfTable,
    history,
    learn,
    state_bytes,
    touch,
)
from support.examples import random_examples

from streamiter.errors import ConfigurationError, ModelError, OtherModel
from streamiter.parameter_server.storage.feature_table import FeatureTable, rows_for, size_of_features
from streamiter.values.helpers.compiled import is_compiling


def touch_all(table: FeatureTable, keys: Iterable[int], times: Iterable[int]) -> list[int]:
    """Touch these keys at these times; return their entries."""
    touched: list[int] = table.touch(list(keys), list(times), SQUARES)[0].tolist()
    return touched


def new_table(admit: int = 1, expire_ms: int = 0, capacity: int = 100) -> FeatureTable:
    return FeatureTable(WIDTH, weights=WEIGHTS, admit=admit, expire_ms=expire_ms, capacity=capacity)


@random_examples(history)
def test_a_table_is_a_dict_in_the_order_of_last_occurrences(given: History) -> None:
    """A key was lost after another one had left, since a search ended at the place that had become empty."""
    table, model = given.settings.table(), ModelOfTable(given.settings)
    for number, (key, now_ms) in enumerate(zip(given.keys, given.times, strict=True)):
        assert table.find(given.keys, [now_ms] * len(given.keys)).astype(bool).tolist() == [
            model.finds(each, now_ms) for each in given.keys
        ]
        learn(table, given, number, number + 1)
        feature = model.touch(key, now_ms)
        for numbers in (feature.weights, feature.row or []):
            numbers[:] = [each + number for each in numbers]
        if feature.row is None:
            feature.early = [each + number % 40 for each in feature.early]
        assert table.counts() == model.counts()
    features = list(model.features.values())
    state, admitted = table.state(), [feature for feature in features if feature.row is not None]
    assert state["keys"].tolist() == list(model.features)
    assert state["times"].tolist() == [feature.last_ms for feature in features]
    assert state["counts"].tolist() == [feature.count for feature in features]
    assert state["weights"].tolist() == [feature.weights for feature in features]
    assert state["is admitted"].tolist() == [feature.row is not None for feature in features]
    assert state["rows"].tolist() == [feature.row for feature in admitted]
    assert state["early"].tolist() == [feature.early for feature in features if feature.row is None]
    keys, row_of, weights, rows, early = table.entries()
    assert keys.tolist() == sorted(model.features)
    for key, own, row in zip(keys.tolist(), weights.tolist(), row_of.tolist(), strict=True):
        feature = model.features[key]
        assert own == feature.weights[:WEIGHTS]
        assert (feature.row and feature.row[:WIDTH]) == (rows[row - 1].tolist() if row else None)
    assert len(rows) == len(admitted)
    assert early.tolist() == [
        [0] * EARLY if row else model.features[key].early
        for key, row in zip(keys.tolist(), row_of.tolist(), strict=True)
    ]


@random_examples(history)
def test_neither_the_cut_of_batches_nor_restarts_change_a_bit(given: History) -> None:
    """After a restart other entries were taken first, and another feature was the oldest one."""
    whole, cut = given.settings.table(), given.settings.table()
    learn(whole, given, 0, len(given.keys))
    first = 0
    for stop in [*given.cuts, len(given.keys)]:
        learn(cut, given, first, stop)
        state, cut, first = cut.state(), given.settings.table(), stop
        cut.restore(state)
    assert state_bytes(cut) == state_bytes(whole)


@random_examples(history)
def test_many_keys_at_once_are_one_after_the_other(given: History) -> None:
    """Keys of one mini-batch were looked up before any of them was added, and a key twice took two entries."""
    one_by_one, at_once = given.settings.table(), given.settings.table()
    found = [touch(one_by_one, key, now_ms) for key, now_ms in zip(given.keys, given.times, strict=True)]
    assert touch_all(at_once, given.keys, given.times) == found
    assert state_bytes(at_once) == state_bytes(one_by_one)


@random_examples(history)
def test_a_table_of_another_capacity_takes_the_newest_features(given: History) -> None:
    """A table with less memory refused the checkpoint, or kept the features that no row had had for a month."""
    table = given.settings.table()
    learn(table, given, 0, len(given.keys))
    state, counts = table.state(), table.counts()
    larger, fewer, without_rows = (given.settings.table(*room) for room in ((20, 20), (2, 2), (9, 1)))
    larger.restore(state)
    assert state_bytes(larger) == state_bytes(table)
    fewer.restore(state)
    assert fewer.state()["keys"].tolist() == state["keys"][-2:].tolist()
    assert fewer.counts().evicted == counts.evicted + max(0, counts.features - 2)
    without_rows.restore(state)
    admitted = np.flatnonzero(state["is admitted"])
    left = admitted[-2] + 1 if len(admitted) > 1 else 0
    assert without_rows.state()["keys"].tolist() == state["keys"][left:].tolist()
    for smaller in (fewer, without_rows):
        grown = given.settings.table(20, 20)
        grown.restore(smaller.state())
        assert state_bytes(grown) == state_bytes(smaller)


def test_the_functions_are_compiled_once() -> None:
    """Lists, read-only arrays and arrays of 32 bits each compiled the functions again, for seconds."""
    if not is_compiling():
        pytest.skip("Numba is not here")
    table = new_table()
    keys = np.arange(6, dtype=np.int32)[::2]
    keys.flags.writeable = False
    table.touch(keys, np.zeros(3, np.int16), 0.25)
    table.touch([1], [2], 1)
    table.find(range(3), keys)
    for function in (table.steps.touch_features, table.steps.find_features):
        assert len(function.signatures) == 1  # type: ignore[attr-defined]


def test_counts_do_not_overflow() -> None:
    """The occurrence 2**31 of a frequent feature made its count negative."""
    table = new_table()
    touch(table, 5, 0)
    table.restore(table.state() | {"counts": [2**31 - 1]})
    touch(table, 5, 0)
    assert table.state()["counts"].tolist() == [2**31 - 1]


@random_examples(
    lambda random: (random.randint(1, 40), random.randint(0, 4), random.randint(1, 9), int(10 ** random.uniform(1, 7)))
)
def test_a_table_of_so_many_bytes_has_as_many_features_as_fit(given: tuple[int, int, int, int]) -> None:
    """Where the index is twice as large from one feature on, the table took a third more than it was given."""
    width, weights, admit, size_bytes = given
    early = width * (admit > 1)
    if size_bytes < size_of_features(width, weights, 1, 1, early):
        with pytest.raises(ConfigurationError, match="expected memory for at least one feature"):
            FeatureTable.of_bytes(width, weights=weights, admit=admit, size_bytes=size_bytes, early=early)
        return
    table = FeatureTable.of_bytes(width, weights=weights, admit=admit, size_bytes=size_bytes, early=early)
    more = table.capacity + 1
    assert table.size_bytes() <= size_bytes < size_of_features(width, weights, more, rows_for(more, admit), early)
    assert sum(array.nbytes for array in table.arrays[:-2]) == table.size_bytes()


def test_errors_say_what_to_do() -> None:
    """The state of another model was taken, and rows were cut."""
    table = new_table(capacity=3)
    touch_all(table, [1, 2], [0, 0])
    state, before = table.state(), state_bytes(table)
    for other in ({"weights": state["rows"]}, {"rows": state["weights"]}):
        with pytest.raises(
            OtherModel, match=r"bytes, \(\(2,\), \(4,\), \(0,\)\), given .*; make the table with the same"
        ):
            table.restore(state | other)
    for damaged in (
        {"keys": [1]},
        {"keys": [1, 1]},
        {"times": [0]},
        {"counts": [0, 1]},
        {"is admitted": [True, False]},
        {"weights": state["weights"][1:]},
        {"rows": state["rows"][1:]},
        {"early": np.zeros((1, 0), np.int8)},
    ):
        with pytest.raises(ModelError, match="the state is damaged, use another one"):
            table.restore(state | damaged)
        assert state_bytes(table) == before
    for name, wrong in {"width": 0, "weights": -1, "admit": 0, "capacity": 0, "rows": 4, "expire_ms": -1}.items():
        settings = {"width": 2, "weights": 1, "admit": 1, "capacity": 3, name: wrong}
        with pytest.raises(ConfigurationError, match=f"FeatureTable.{name}=.: expected a whole number"):
            FeatureTable(**settings)


def test_a_large_table_takes_the_memory_of_its_features() -> None:
    """A model with room for two gigabytes took them with its first row, or an eighth of them with some thousand."""
    touch(new_table(), 1, 1)  # It loads compiled code.
    before = _resident_bytes()
    table = FeatureTable(16, weights=2, admit=3, capacity=2**23)
    keys = np.random.default_rng(1).integers(0, 2**62, 10_000)
    table.touch(keys, np.zeros(len(keys)), 0.25)
    assert table.size_bytes() > 800 << 20
    # The process may take some megabytes for itself meanwhile.
    assert _resident_bytes() - before < 64 << 20


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
