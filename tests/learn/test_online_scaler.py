"""The online standard scaler is compared with numpy, gives one model per window, restores, and skips bad rows."""

from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import SMALL, cut_items, run

from streamiter import Flow
from streamiter.errors import GraphError, JobFailed, ModelError
from streamiter.learn import BadRows, StandardScaler, online_standard_scaler, scaled
from streamiter.models import ModelSnapshot


def models_of(rows: Any, *, seed: int | None = None, **options: Any) -> list[ModelSnapshot]:
    flow = Flow("scale")
    stream = flow.from_items(rows) if seed is None else cut_items(flow, rows, seed=seed)
    models = online_standard_scaler(stream, **options).collect()
    if seed is None:
        flow.run()
    else:
        run(flow, seed=seed, limits=SMALL)
    return models.items


@pytest.mark.parametrize("offset", [0.0, 1e9])
@pytest.mark.parametrize("window", [1, 7, 100])
def test_each_window_has_a_model_of_all_rows_so_far(window: int, offset: float) -> None:
    """A variance from the sum of squares loses all its digits if the mean is large."""
    rows = np.random.default_rng(0).normal(size=(250, 3)) * [1.0, 1e-3, 50.0] + offset
    models = models_of(rows, window=window)
    ends = [*range(window, 250, window), 250]
    assert [model.records for model in models] == ends
    for end, model in zip(ends, models, strict=True):
        assert model.parameters["mean"] == pytest.approx(rows[:end].mean(axis=0), rel=1e-13, abs=1e-13)
        deviation = rows[:end].std(axis=0, ddof=1) if end > 1 else np.zeros(3)
        assert model.parameters["deviation"] == pytest.approx(deviation, rel=1e-4 if offset else 1e-12)


def test_where_batches_are_cut_changes_nothing() -> None:
    rows = np.random.default_rng(0).normal(size=(60, 2)).tolist()
    expected = [model.parameters["deviation"].tobytes() for model in models_of(rows, window=8)]
    for seed in range(4):
        models = models_of(rows, seed=seed, window=8)
        assert [model.parameters["deviation"].tobytes() for model in models] == expected


def test_scaled_rows_have_mean_0_and_deviation_1_and_constants_are_0() -> None:
    """A constant feature has the deviation 0, and a division by 0 would put NaN in every row."""
    rows = np.column_stack([np.random.default_rng(0).normal(5.0, 3.0, size=100), np.full(100, 7.0)])
    scaler = StandardScaler()
    scaler.learn(rows)
    result = scaled(scaler.parameters(), rows)
    assert result[:, 0].mean() == pytest.approx(0.0, abs=1e-12)
    assert result[:, 0].std(ddof=1) == pytest.approx(1.0)
    assert not result[:, 1].any()
    assert scaled(scaler.parameters(), rows[3]).tolist() == result[3].tolist()


def test_records_that_are_no_rows_are_skipped_and_the_others_count() -> None:
    rows: list[Any] = [[1.0, 1.0], "x", [3.0, float("inf")], [3.0, 3.0], [1.0], [5.0, 5.0]]
    models = models_of(rows, window=4, on_error="skip")
    assert [(model.records, model.parameters["mean"].tolist()) for model in models] == [
        (2, [2.0, 2.0]),
        (3, [3.0, 3.0]),
    ]
    with pytest.raises(JobFailed, match="expected rows as numbers"):
        models_of(rows, window=4)


def test_invalid_rows_are_refused_and_change_nothing() -> None:
    scaler = StandardScaler()
    with pytest.raises(ModelError, match="given one without any rows"):
        scaler.parameters()
    scaler.learn([[1.0, 2.0]])
    before = str(scaler.state())
    for bad, error in [([[1.0, np.nan]], BadRows), ([[1.0]], ModelError)]:
        with pytest.raises(error):
            scaler.learn(bad)
    scaler.learn(np.zeros((0, 2)))
    assert str(scaler.state()) == before
    with pytest.raises(GraphError, match="expected a stream of rows, given 7"):
        online_standard_scaler(7)  # type: ignore[arg-type]
