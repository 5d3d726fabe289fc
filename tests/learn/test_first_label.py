"""Before the first label nothing is known of numbers: a prediction of 0 says nothing, and no metric counts it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learn.late_label_support import Trained, in_two_runs, timed
from learn.online_support import Record, delayed, trained

from streamiter import Flow
from streamiter.learn import ADWIN, AdaptiveLinearModel, PageHinkley, compare_online, train_online

ROWS = 600
X = np.random.default_rng(1).normal(size=ROWS)
LABELS = 10_000.0 + 2.0 * X + np.random.default_rng(2).normal(size=ROWS)
AT_ONCE: list[Record] = [{"id": n, "x": x, "label": label} for n, (x, label) in enumerate(zip(X, LABELS, strict=True))]
LATE = delayed(["x"], "label")


def events(delay: int, labels: Any = LABELS) -> list[Record]:
    """Return a question each second, and its answer so many seconds and a half later."""
    asked: list[Record] = [{"id": n, "at": 1_000 * n, "x": x} for n, x in enumerate(X.tolist())]
    known = enumerate(np.asarray(labels).tolist())
    answers: list[Record] = [{"id": n, "at": 1_000 * (n + delay) + 500, "label": label} for n, label in known]
    return sorted([*asked, *answers], key=lambda event: event["at"])


@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("delay", [0, 200])
def test_numbers_that_are_asked_before_the_first_label_are_not_validated(delay: int, shapes: bool) -> None:
    """Labels of 10,000 ± 3 had a squared error of 5,025,156, beside 4.5 of the mean, for a whole window."""
    found = Trained(LATE, lambda flow: timed(flow.from_items(events(delay), parallelism=1)), shapes=shapes)
    assert found.metrics["count"] == found.metrics["window_count"] == ROWS - delay - 1
    assert found.metrics["squared_error"] < 6.0
    assert found.metrics["window_squared_error"] < 6.0
    assert found.questions.tolist() == [2 * n - delay if n > delay else n for n in range(delay + 1, ROWS)]
    assert found.version_metrics["unpredicted_rows"] == delay + 1
    assert found.version_metrics["loss"] < 3.0


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"mode": "synchronous"}, {"loss": "absolute"}])
def test_of_labels_at_once_only_the_first_row_is_left_out(options: Any) -> None:
    """The first row alone was the whole squared error of a window of 10,000."""
    result = trained(AT_ONCE, label="label", features=["x"], **options)
    assert result.metrics["count"] == ROWS - 1
    assert result.metrics["squared_error"] < 6.0
    assert result.models[-1].metrics["unpredicted_rows"] == 1


def test_rows_of_weight_0_are_no_first_labels() -> None:
    """The model was there after a first label of weight 0, and predicted 0 for the next row."""
    rows = [row | {"weight": float(row["id"] >= 5)} for row in AT_ONCE]
    result = trained(rows, label="label", features=["x"], weight="weight")
    assert (result.metrics["count"], result.models[-1].metrics["unpredicted_rows"]) == (ROWS - 6, 6)
    assert result.metrics["squared_error"] < 6.0


def test_a_model_that_starts_from_a_version_predicts_from_the_first_row_on() -> None:
    """The version knows the numbers, so its first prediction is as good as all others."""
    first = trained(AT_ONCE, label="label", features=["x"]).models[-1].parameters
    result = trained(AT_ONCE, label="label", features=["x"], initial=[first])
    assert (result.metrics["count"], result.models[-1].metrics["unpredicted_rows"]) == (ROWS, 0)


def test_probabilities_before_the_first_label_are_validated() -> None:
    """A probability of ½ says that nothing is known, and its loss is log 2."""
    found = Trained(LATE, lambda flow: timed(flow.from_items(events(200, LABELS > 10_000.0), parallelism=1)))
    assert found.metrics["count"] == ROWS
    assert "unpredicted_rows" not in found.version_metrics


def test_the_mean_of_answers_before_the_first_label_is_validated() -> None:
    """With "end" answers come before anything is learned; their mean is a prediction."""
    late = delayed(["x"], "label", schedule="end", within_s=300.0)
    found = Trained(late, lambda flow: timed(flow.from_items(events(200), parallelism=1)))
    assert found.metrics["count"] == ROWS - 201
    assert found.metrics["squared_error"] < 6.0
    assert found.version_metrics["unpredicted_rows"] == 201


@pytest.mark.parametrize("detector", [ADWIN(), PageHinkley()])
def test_a_first_label_is_no_drift(detector: Any) -> None:
    """The errors of 200 zeros were followed by a hundredth of them: the next rise of the loss was hidden."""
    given = events(200)
    flow = Flow("f")
    training = train_online(timed(flow.from_items(given, parallelism=1)), labels=LATE, drift=detector)
    drifts, models = training.drifts.collect(), training.models.collect()
    flow.run()
    assert not drifts.items
    assert models.items[-1].metrics["rows_since_drift"] == ROWS - 201


async def test_rows_that_are_left_out_are_counted_across_a_restart(tmp_path: Path) -> None:
    """Questions of before the restart are answered after it: they were asked without any label, too."""
    given, cut = events(200), 150
    models, _, metrics = await in_two_runs(given, cut, (LATE, LATE), tmp_path)
    assert metrics[-1]["count"] == ROWS - 201
    assert models[-1].metrics["unpredicted_rows"] == 201


@pytest.mark.parametrize("late", [False, True])
def test_learners_are_compared_on_rows_that_all_of_them_have_predicted(late: bool) -> None:
    """A row of before the first label would be the whole loss of each learner, and hide which one is better."""
    flow = Flow("f")
    stream = timed(flow.from_items(events(100), parallelism=1)) if late else flow.from_items(AT_ONCE)
    shared: Any = {"labels": LATE} if late else {"label": "label", "features": ["x"]}
    learners: Any = {"linear": {"shapes": False}, "all": {}}
    reports = compare_online(stream, learners, report_every=ROWS, **shared).metrics.collect()
    flow.run()
    for metrics in reports.items[-1]["learners"].values():
        assert metrics["count"] == ROWS - (101 if late else 1)
        assert metrics["squared_error"] < 6.0


def test_a_model_alone_predicts_0_before_the_first_label() -> None:
    """A loop of a user adds up errors, and one NaN would make their sum NaN."""
    model = AdaptiveLinearModel(task="regression")
    predictions = model.learn_each([{"x": 1.0}] * 3, [5.0, 5.0, 5.0], [0.0, 1.0, 1.0])
    assert predictions.tolist() == pytest.approx([0.0, 0.0, 5.0])
