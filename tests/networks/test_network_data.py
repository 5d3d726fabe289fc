"""Rows for networks are read from files, their labels are translated, and epochs are made of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks.training_support import rows

from streamiter import topic
from streamiter.errors import JobFailed, ModelError
from streamiter.networks.configuration import DataSettings
from streamiter.networks.data import (
    LabelledRows,
    TrainingSteps,
    from_record,
    part,
    prepared,
    read_rows,
    to_record,
    translated_labels,
)
from streamiter.values.sparse_rows import SparseRows


def file_with(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def dense(data: LabelledRows) -> Any:
    return data.rows.to_dense() if isinstance(data.rows, SparseRows) else data.rows


@pytest.mark.parametrize(
    ("name", "form", "lines"),
    [
        ("a.libsvm", "dummy", ["1 1:1 3:1", "-1 2:1"]),
        ("a.dummy", "libsvm", ["1 0 2", "-1 1"]),
        ("a.data", "libsvm", ["1 1:1 3:1", "-1 2:1"]),
        ("a.data", "dummy", ["1 0 2", "-1 1"]),
        ("a.data", "dense", ["1 1 0 1", "-1,0,1,0"]),
    ],
)
def test_the_format_of_a_file_follows_its_name_or_the_configuration(
    tmp_path: Path, name: str, form: Any, lines: list[str]
) -> None:
    """a9a has a training file in libsvm format and a test file in dummy format, with one configuration."""
    path = file_with(tmp_path, name, *lines)
    ending = form if name == "a.data" else name[2:]
    for source in (path, str(path), topic(f"file:{path}", format="txt" if ending == "dense" else ending)):
        data = read_rows(source, DataSettings(format=form), owner="test")
        assert dense(data).tolist() == [[1, 0, 1], [0, 1, 0]]
        assert data.labels.tolist() == [1, -1]


def test_invalid_rows_and_features_beyond_the_range_are_named(tmp_path: Path) -> None:
    """The wrong line is one of millions, so the error must name it."""
    with pytest.raises(JobFailed, match=r"value 1 .*expected a label and 2 numbers, given 1 number"):
        read_rows(file_with(tmp_path, "a.txt", "1 2 3", "1 2"), DataSettings(format="dense"), owner="test")
    for number in ("1_0", "１２", "1\0"):
        bad = file_with(tmp_path, "n.txt", "1 2 3", f"1 2 {number}")
        with pytest.raises(JobFailed, match=r"value 1 .*expected a label and numbers, given"):
            read_rows(bad, DataSettings(format="dense"), owner="test")
    with pytest.raises(ModelError, match="test: expected features from 0 to 2, given 7 in row 1; raise indexrange"):
        read_rows(file_with(tmp_path, "b.dummy", "1 2", "1 1 7"), DataSettings(index_range=3), owner="test")
    with pytest.raises(ModelError, match=r"test: expected rows in .*, given none; look at the file"):
        read_rows(file_with(tmp_path, "c.dummy"), DataSettings(), owner="test")


@pytest.mark.parametrize(
    ("way", "given", "expected"),
    [
        ("NoTrans", [0, 5], [0, 5]),
        ("PosNegTrans", [0, 1, -1, 3], [-1, 1, -1, 1]),
        ("ZeroOneTrans", [0, 1, -1, 3], [0, 1, 0, 1]),
        ("AddOneTrans", [0, 1], [1, 2]),
        ("SubOneTrans", [1, 2], [0, 1]),
    ],
)
def test_labels_are_translated(way: Any, given: list[float], expected: list[float]) -> None:
    """Classes from 1 on are invalid for softmax, and 0 and 1 for the log loss."""
    assert translated_labels(np.array(given, dtype=float), way).tolist() == expected


@pytest.mark.parametrize("way", ["PosNegTrans", "ZeroOneTrans"])
def test_a_label_that_is_missing_stays_missing(way: Any) -> None:
    """NaN is not above 0, so a missing label was learned as the other class."""
    assert np.isnan(translated_labels(np.array([np.nan, 1.0]), way)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("ratio", "held_out"), [(0.0, []), (0.5, [0, 2, 4, 6]), (0.3, [0, 4]), (0.05, [0]), (1e-320, [0])]
)
def test_every_nth_row_is_for_validation(ratio: float, held_out: list[int]) -> None:
    """The distance is ⌈1/ratio⌉: results are comparable only if the same rows are used for validation."""
    parted = part(LabelledRows(np.zeros((8, 1)), np.arange(8.0)), validate_ratio=ratio)
    assert parted.validation.labels.tolist() == held_out
    assert parted.training.labels.tolist() == [row for row in range(8) if row not in held_out]


def labels_of(steps: TrainingSteps, step: int, workers: int) -> list[float]:
    parts = [steps.mini_batch(step, worker) for worker in range(workers)]
    return [label for each in parts if each is not None for label in each.labels.tolist()]


def numbered(count: int) -> LabelledRows:
    return LabelledRows(np.zeros((count, 2)), np.arange(float(count)))


@given(
    count=st.integers(1, 60),
    updates=st.integers(1, 12),
    workers=st.integers(1, 5),
    shuffles=st.booleans(),
    seed=st.integers(0, 9),
)
def test_an_epoch_has_each_row_once_in_steps_of_one_size(
    count: int, updates: int, workers: int, shuffles: bool, seed: int
) -> None:
    """Rows that are dropped at the end of every epoch are never learned from."""
    made = TrainingSteps(
        numbered(count), updates=updates, workers=workers, settings=DataSettings(use_shuffle=shuffles), seed=seed
    )
    batch = -(-count // updates)
    epochs = [
        [labels_of(made, epoch * made.per_epoch + step, workers) for step in range(made.per_epoch)]
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert sorted(label for step in epoch for label in step) == list(range(count))
        assert [len(step) for step in epoch[:-1]] == [batch] * (made.per_epoch - 1)
    assert made.per_epoch <= updates
    if not shuffles:
        assert [sorted(step) for step in epochs[0]] == [
            list(range(first, min(first + batch, count))) for first in range(0, count, batch)
        ]
    elif count > 8:
        assert epochs[0] != epochs[1]


def test_sampled_steps_have_a_share_of_all_rows_each() -> None:
    """Spark on Angel samples mini-batches in this way, and the published DeepFM is configured for it."""
    made = TrainingSteps(numbered(100), updates=4, settings=DataSettings(sample_ratio=0.3), seed=1)
    steps = [labels_of(made, step, 1) for step in range(8)]
    assert made.per_epoch == 4
    assert all(len(set(step)) == 30 for step in steps)
    assert len({tuple(step) for step in steps}) == 8
    again = TrainingSteps(numbered(100), updates=4, workers=3, settings=DataSettings(sample_ratio=0.3), seed=1)
    assert [sorted(labels_of(again, step, 3)) for step in reversed(range(8))] == steps[::-1]


@pytest.mark.parametrize(
    ("ratio", "positive", "negative"), [(1.0, 20, 20), (0.5, 20, 40), (0.1, 8, 80), (1e-320, 1, 80)]
)
def test_kinds_are_drawn_in_the_configured_ratio(ratio: float, positive: int, negative: int) -> None:
    """With one click in a thousand rows, a network learns to predict no clicks."""
    data = LabelledRows(np.zeros((100, 2)), np.where(np.arange(100) % 5 == 0, 1.0, -1.0))
    made = TrainingSteps(data, updates=1, settings=DataSettings(pos_neg_ratio=ratio), seed=1)
    labels = labels_of(made, 0, 1)
    assert (labels.count(1.0), labels.count(-1.0)) == (positive, negative)
    one_kind = LabelledRows(np.zeros((3, 2)), np.ones(3))
    with pytest.raises(ModelError, match=r"rows of both kinds for posnegratio 1, given 3 with a label above 0"):
        TrainingSteps(one_kind, updates=1, settings=DataSettings(pos_neg_ratio=1.0))


def test_a_mini_batch_is_plain_data_and_back() -> None:
    """A mini-batch is stored in channels, and in checkpoints of channels."""
    made = prepared(rows(5), rows_in_step=9)
    again = from_record(to_record(made))
    assert again.rows == made.rows
    assert (again.indices == made.indices).all()  # type: ignore[union-attr]
    assert (again.labels.tolist(), again.rows_in_step) == (made.labels.tolist(), 9)
