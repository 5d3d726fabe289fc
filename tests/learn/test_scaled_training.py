"""A scaler in front of a linear model of your own: learned online, published and served with the weights."""

from typing import Any

import numpy as np
import pytest
from learn.frozen_states import frozen
from learn.online_support import Result

from streamiter import Columns, Flow
from streamiter.errors import JobFailed
from streamiter.learn import SGD, DelayedLabels, Examples, LogisticRegression, SparseRows, StandardScaler, train_online
from streamiter.models import LinearPredictor

DRAW = np.random.default_rng(2)
X = DRAW.normal(size=(3_000, 3)) * [1e-3, 40.0, 1.0] + [0.0, 5e4, 7.0]
Y = (X - X.mean(axis=0)) / X.std(axis=0) @ [1.0, -2.0, 0.5] + 0.3 * DRAW.normal(size=3_000) > 0


def model() -> LogisticRegression:
    return LogisticRegression(3, optimizer=SGD(0.3))


def dense(rows: Any) -> Examples:
    return Examples(rows["x"], rows["y"])


def sparse(rows: Any) -> Examples:
    return Examples(SparseRows.from_dense(rows["x"]), rows["y"])


def trained(records: Any = None, make: Any = model, **options: Any) -> Result:
    flow = Flow("f")
    given = Columns({"x": X, "y": Y}) if records is None else records
    stream = flow.from_items(given, parallelism=1)
    options = {"scaler": StandardScaler(), "extract": dense, "mini_batch": 50} | options
    result = Result(train_online(stream, make, **options))
    flow.run()
    return result


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_columns_of_any_scale_are_learned_and_served(mode: Any) -> None:
    """The column of 50,000 made each step far too large, and the served copy knew nothing of the scaler."""
    result = trained(mode=mode, report_every=1_000)
    assert result.metrics["accuracy"] > 0.88
    parameters = result.models[-1].parameters
    assert parameters["mean"] == pytest.approx(X.mean(axis=0), rel=1e-9)
    assert parameters["deviation"] == pytest.approx(X.std(axis=0, ddof=1), rel=1e-9)
    predict = LinearPredictor(parameters)
    assert np.mean((predict(X) > 0.5) == Y) > 0.9
    assert predict(X[0]) == predict(X[:1])[0] == predict(SparseRows.from_dense(X[:1]))[0]
    with pytest.raises((JobFailed, AssertionError)):
        assert trained(mode=mode, scaler=None, report_every=1_000).metrics["accuracy"] > 0.88


@pytest.mark.parametrize("extract", [dense, sparse])
def test_training_in_step_equals_a_plain_loop(extract: Any) -> None:
    """A row was scaled with statistics that it was a part of, so the published model predicted other numbers."""
    made = model()
    made.scale(StandardScaler().moments)
    losses = []
    for start in range(0, 3_000, 50):
        x, y = X[start : start + 50], Y[start : start + 50]
        predictions = LinearPredictor(made.parameters())(x)
        assert made.predict(x) == pytest.approx(predictions, rel=1e-14)
        losses.append(np.mean((made.predict(x) - y) ** 2))
        made.apply(made.gradient(x, y))
    result = trained(mode="synchronous", extract=extract)
    assert frozen(result.models[-1].parameters) == frozen(made.parameters(state=False))
    assert result.metrics["squared_error"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_workers_share_the_statistics() -> None:
    """Each worker scaled with its own rows only, and the owner averaged steps in different units."""
    result = trained(mode="synchronous", workers=3, mini_batch=20)
    assert result.models[-1].parameters["mean"] == pytest.approx(X.mean(axis=0), rel=1e-12)
    assert result.models[-1].parameters["deviation"] == pytest.approx(X.std(axis=0, ddof=1), rel=1e-9)
    assert result.metrics["accuracy"] > 0.8


def test_late_labels_are_scaled_as_their_questions() -> None:
    """The gradient of an answer was that of features that were not scaled."""
    questions = [{"id": n, "x": x} for n, x in enumerate(X.tolist())]
    answers = [{"id": n, "y": bool(y)} for n, y in enumerate(Y)]
    labels = DelayedLabels(
        key_of=lambda event: event["id"],
        is_answer=lambda event: "y" in event,
        features=lambda asked: SparseRows.from_dense([event["x"] for event in asked]),
        target_of=lambda answer: float(answer["y"]),
    )
    events: list[Any] = [event for both in zip(questions, answers, strict=True) for event in both]
    result = trained(events, extract=None, labels=labels)
    assert result.metrics["accuracy"] > 0.88


def test_rows_of_weight_0_leave_the_statistics_as_they_are() -> None:
    """A row of 1e9 that was given the weight 0 made all other rows equal."""
    counts = np.arange(3_000) % 3 > 0
    junk = np.where(counts[:, None], X, 1e9)

    def weighted(rows: Any) -> Examples:
        return Examples(rows["x"], rows["y"], rows["weight"])

    def parameters(x: Any, y: Any, weight: Any, mini_batch: int) -> Any:
        records = Columns({"x": x, "y": y, "weight": weight})
        options = {"extract": weighted, "mode": "synchronous", "mini_batch": mini_batch}
        return trained(records, **options).models[-1].parameters

    found = parameters(junk, Y, counts * 1.0, 30)
    expected = parameters(X[counts], Y[counts], np.ones(counts.sum()), 20)
    for name in ("mean", "squares", "weights", "intercept"):
        assert found[name] == pytest.approx(expected[name], rel=1e-12)


def test_a_constant_column_has_no_influence() -> None:
    """Rounding gave a column of 0.1 a deviation of 1e-17, and its first other value ended the job."""
    records = Columns({"x": np.column_stack([X, np.full(len(X), 0.1)]), "y": Y})
    parameters = trained(records, lambda: LogisticRegression(4, optimizer=SGD(0.3))).models[-1].parameters
    assert parameters["deviation"][3] == parameters["weights"][3] == 0.0
    predict = LinearPredictor(parameters)
    assert predict(np.append(X[0], 0.1)) == predict(np.append(X[0], 7.0))


def test_a_start_keeps_weights_and_statistics() -> None:
    """After a restart features were 0 until the scaler had learned them again."""
    first = trained(mode="synchronous").models[-1].parameters
    started = model()
    started.scale(StandardScaler().moments)
    started.start_from(first)
    assert started.predict(X) == pytest.approx(LinearPredictor(first)(X), rel=1e-12)
    before = started.predict(X)
    started.apply(started.gradient(X[:50], Y[:50]))
    assert started.predict(X) == pytest.approx(before, abs=0.1)
    scaler = StandardScaler()
    scaler.learn(X)
    assert (
        trained(scaler=scaler, mode="synchronous").metrics["accuracy"] > trained(mode="synchronous").metrics["accuracy"]
    )
