"""The adaptive linear model: the same result for any cut of a stream, any scale and any kind of record."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.examples import random_examples
from support.processes import LIMIT_S

from streamiter import Columns
from streamiter.errors import ConfigurationError, ModelError
from streamiter.learn import AdaptiveLinearModel, BadRows, SparseRows
from streamiter.learn.expert_weights import RowSteps
from streamiter.named_rows import ABSENT, FieldReader

BITS = 5
"""Few places, so that texts share places, too."""


# ---- any cut of a stream


class Stream(NamedTuple):
    """Records with labels (None: the row is only predicted), and where to cut them."""

    task: str
    records: list[dict[str, Any]]
    labels: list[Any]
    weights: list[float]
    cuts: list[int]
    crosses: list[tuple[str, str]]
    rates: list[float] | None


def a_value(random: Random, field: str) -> Any:
    if random.random() < 0.2:
        return random.choice([None, math.nan, math.inf, "Rome", 7, True, np.float32(2.5), [1]])
    return random.choice(["Rome", "Kyiv", "x"]) if field.startswith("t") else random.gauss(3, 50)


def a_stream(random: Random) -> Stream:
    task = random.choice(["binary", "classes", "regression"])
    count = random.randint(2, 10)
    records, labels = [], []
    for _ in range(count):
        fields = random.sample(["a", "b", "ab", "t", "tt"], random.randint(1, 5))
        records.append({field: a_value(random, field) for field in fields})
        good = {
            "binary": random.choice([0, 1, True]),
            "classes": random.choice(["x", "y", "z", np.str_("y")]),
            "regression": random.gauss(1_000, 5),
        }[task]
        labels.append(random.choice([good] * 9 + [None] * 4 + [math.nan, [2], 10**400]))
    weights = [random.choice([1.0, 1.0, 0.5, 3.0, 0.0, 1e31]) for _ in range(count)]
    cuts = [0, *sorted(random.sample(range(1, count), random.randrange(count))), count]
    crosses = random.choice([[], [("a", "b"), ("t", "tt")], [("t", "a"), ("b", "b"), ("ab", "tt")]])
    return Stream(task, records, labels, weights, cuts, crosses, random.choice([None, None, None, [0.5]]))


def new_model(stream: Stream) -> AdaptiveLinearModel:
    task: Any = "regression" if stream.task == "regression" else None
    return AdaptiveLinearModel(task=task, bits=BITS, crosses=stream.crosses, rates=stream.rates)


def learn(model: AdaptiveLinearModel, stream: Stream, start: int, stop: int) -> list[Any]:
    """Learn from some rows as one batch, without those that are refused; return the prediction for each row."""
    left = list(range(start, stop))
    while left:
        try:
            rows = model.rows([stream.records[row] for row in left])
            labels = [stream.labels[row] for row in left]
            learns = np.array([label is not None for label in labels])
            weights = np.array([stream.weights[row] for row in left])
            each = RowSteps.one_each(len(left), learns=True, weights=weights)
            found = model.step(rows, each._replace(learns=learns), labels)
        except BadRows as bad:
            left = [row for place, row in enumerate(left) if place not in bad.rows]
        else:
            known = dict(zip(left, found, strict=True))
            return [plain(known[row]) if row in known else "refused" for row in range(start, stop)]
    return ["refused"] * (stop - start)


def plain(prediction: Any) -> list[str]:
    """Return a prediction exactly, without the classes that were not known yet."""
    numbers = np.atleast_1d(prediction)
    if np.isnan(numbers).all():
        return ["no label yet"]
    return [float(number).hex() for number in [*(p for p in numbers[:-1] if p), numbers[-1]]]


def frozen(state: Any) -> Any:
    """Return a state as data that is equal if all bits are."""
    if isinstance(state, np.ndarray):
        return state.shape, str(state.dtype), state.tobytes()
    if isinstance(state, dict):
        return {name: frozen(value) for name, value in state.items()}
    return [frozen(value) for value in state] if isinstance(state, list) else state


def learned(model: AdaptiveLinearModel) -> Any:
    """Return the state, without the number of batches."""
    state: Any = frozen(model.state())
    return {name: value for name, value in state.items() if name != "version"}


@random_examples(a_stream, examples=2_000)
def test_no_cut_of_a_stream_changes_a_prediction_or_the_state(stream: Stream) -> None:
    """With other transport batches another model was published: sums were taken in another order, a field got its
    kind from a row that was refused, or a question before the first label counted in one batch and not in another.
    """
    single, cut = new_model(stream), new_model(stream)
    by_row = [learn(single, stream, row, row + 1)[0] for row in range(len(stream.records))]
    by_batch = [
        prediction
        for start, stop in zip(stream.cuts, stream.cuts[1:], strict=False)
        for prediction in learn(cut, stream, start, stop)
    ]
    assert by_batch == by_row
    assert learned(cut) == learned(single)


@random_examples(a_stream, examples=1_000)
def test_learning_resumes_at_any_row_after_a_restore(stream: Stream) -> None:
    """Train, stop, restore, train must equal training without a stop, to the bit, with weights, texts and classes."""
    through = new_model(stream)
    expected = [learn(through, stream, row, row + 1) for row in range(len(stream.records))]
    model, found = new_model(stream), []
    for row in range(len(stream.records)):
        state = copy.deepcopy(model.state())
        kept = frozen(state)
        found.append(learn(model, stream, row, row + 1))
        assert frozen(state) == kept, "a state must not change afterwards"
        restored = new_model(stream)
        restored.restore(state)
        assert learn(restored, stream, row, row + 1) == found[-1]
        model = restored
    assert found == expected
    assert frozen(model.state()) == frozen(through.state())


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf, 1.1e100, -1e300])
def test_a_missing_value_equals_the_row_that_omits_it(missing: float) -> None:
    """A missing value was the number 0, or moved the statistics of its column."""
    random = np.random.default_rng(4)
    dense = random.normal(size=(200, 5)) + 3
    is_there = random.random(dense.shape) < 0.7
    labels = (dense[:, 0] > 3).tolist()
    full = SparseRows.from_dense(np.where(is_there, dense, missing), keep_zeros=True)
    sparse = SparseRows.from_rows(
        [(np.flatnonzero(there), row[there]) for there, row in zip(is_there, dense, strict=True)], 5
    )
    models = [AdaptiveLinearModel(), AdaptiveLinearModel()]
    found = [model.learn_each(rows, labels) for model, rows in zip(models, (full, sparse), strict=True)]
    assert frozen(found[0]) == frozen(found[1])
    assert frozen(models[0].state()) == frozen(models[1].state())


# ---- any scale


def hyperplane(count: int, seed: int = 1) -> tuple[Any, Any]:
    """Return ten columns and labels of which a tenth is wrong."""
    random = np.random.default_rng(seed)
    x = random.random((count, 10))
    weights = random.random(10)
    labels = x @ weights > weights.sum() / 2
    return x, labels ^ (random.random(count) < 0.05)


def loss(x: Any, labels: Any, **options: Any) -> float:
    """Return the progressive loss: log loss, or the root of the mean squared error."""
    found = AdaptiveLinearModel(**options).learn_each(x, labels)
    if options.get("task") == "regression":
        return float(np.sqrt(np.mean((found - labels) ** 2)))
    chances = np.where(labels, found, 1 - found)
    return float(-np.log(np.maximum(chances, 1e-15)).mean())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "1000v + 50000": lambda v: 1000 * v + 50_000,
    "epoch seconds": lambda v: v + 1.7e9,
    "tiny": lambda v: v * 1e-12,
    "huge": lambda v: v * 1e50,
    "negative": lambda v: -v,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_scale_and_offset_of_columns_leave_the_loss_the_same(change: str, task: Any) -> None:
    """Epoch seconds as a feature silenced the column, or made the loss infinite; users had to scale columns first."""
    x, labels = hyperplane(5_000)
    if task == "regression":
        labels = x @ np.arange(10.0) + 1e6
    clean = loss(x, labels, task=task)
    assert loss(CHANGES[change](x), labels, task=task) == pytest.approx(clean, rel=1e-3)


def test_outliers_hardly_raise_the_loss() -> None:
    """One value in 10,000 that is a million times too large made all later values of its column zero."""
    x, labels = hyperplane(20_000)
    dirty = x.copy()
    dirty[np.random.default_rng(2).random(x.shape) < 1e-4] *= 1e6
    assert loss(dirty, labels) < 1.05 * loss(x, labels)


@pytest.mark.parametrize("row", [40, 2_000])
def test_one_wrong_label_leaves_the_model_as_it_is(row: int) -> None:
    """After one label that was a million times too large, the error of the next 10,000 rows was 40 times as large."""
    x, _ = hyperplane(6_000)
    labels = x @ np.arange(10.0) + np.random.default_rng(3).normal(size=6_000)
    errors = []
    for wrong in (1.0, 1e6):
        given = labels.copy()
        given[row] *= wrong
        found = AdaptiveLinearModel().learn_each(x, given)
        errors.append(float(np.sqrt(np.mean((found - labels)[3_000:] ** 2))))
    assert errors[1] < 1.05 * errors[0]


@pytest.mark.parametrize("factor", [100.0, 1e6])
def test_labels_that_grow_are_followed(factor: float) -> None:
    """Labels that were a million times larger were taken for wrong ones, and the model predicted the old ones."""
    x, _ = hyperplane(2_000)
    labels = (x @ np.arange(10.0)) * np.repeat([1.0, factor], 1_000)
    found = AdaptiveLinearModel().learn_each(x, labels)
    assert np.sqrt(np.mean((found - labels)[1_500:] ** 2)) < 0.5 * labels[1_500:].std()


def test_a_constant_column_changes_no_bit() -> None:
    """The deviation of a constant column is 0, or the rounding of its mean; a division by it gave large steps."""
    x, labels = hyperplane(500)
    constant = np.column_stack([np.full(500, 0.1), x, np.full(500, 1e9 + 0.1)])
    plain_model, model = AdaptiveLinearModel(), AdaptiveLinearModel()
    assert frozen(model.learn_each(constant, labels)) == frozen(plain_model.learn_each(x, labels))
    assert model.parameters()["weights"][[0, -1]].tolist() == [0.0, 0.0]


def test_rare_labels_need_no_resampling() -> None:
    """With one label in a thousand, a learner stayed far above the loss of the base rate."""
    random = np.random.default_rng(3)
    x = random.normal(size=(100_000, 10))
    score = x @ np.linspace(-1, 1, 10)
    labels = random.random(len(x)) < 1 / (1 + np.exp(8.2 - 1.2 * score))
    rate = labels.mean()
    assert 0.0005 < rate < 0.004
    assert loss(x, labels) < -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def test_a_weight_counts_as_rows_and_large_weights_leave_a_model() -> None:
    """With rows of weight 50,000 the statistics had one row, so all columns were constant and nothing was learned."""
    x, labels = hyperplane(5_000)
    for weight in (1e-3, 50_000.0, 1e9):
        found = AdaptiveLinearModel().learn_each(x, labels, np.full(len(x), weight))
        chances = np.where(labels, found, 1 - found)[1_000:]
        assert -np.log(np.maximum(chances, 1e-15)).mean() < 0.6, weight
    found = AdaptiveLinearModel().learn_each(x, labels, np.zeros(len(x)))
    assert found.tolist() == [0.5] * len(x)


# ---- what is published


def mixed_records(count: int, seed: int = 5) -> tuple[list[dict[str, Any]], Any]:
    random = np.random.default_rng(seed)
    towns = ["Rome", "Kyiv", "Oslo", None]
    records = [
        {"km": km if n % 7 else None, "town": towns[n % 4], "weather": "rain" if wet else "sun"}
        | ({"late": 1e6 * (km - 3)} if n > count // 2 else {})
        for n, (km, wet) in enumerate(
            zip(random.normal(3, 2, count).tolist(), (random.random(count) < 0.4).tolist(), strict=True)
        )
    ]
    score = np.array([(r["km"] or 3) * (2 if r["weather"] == "rain" else 1) for r in records])
    return records, score + random.normal(size=count)


TASKS: dict[str, Callable[[Any], Any]] = {
    "logit": lambda score: score > 4,
    "clipped": lambda score: 100 * score + 1e5,
    "softmax": lambda score: np.array(["low", "middle", "high"])[np.clip(score / 3, 0, 2).astype(int)],
}


def served(parameters: Any, records: Sequence[Any]) -> Any:
    """Predict with the published numbers, as they are documented."""
    rows = FieldReader(bits=parameters["bits"], refuse=BadRows).rows(list(records))
    weights, center, limit = (np.asarray(parameters[name]) for name in ("weights", "center", "limit"))
    columns = {field: number for number, field in enumerate(parameters["fields"])}
    columns |= {int(place): len(columns) + number for number, place in enumerate(parameters["places"])}
    scores = []
    for numbers, places in zip(rows.numbers, rows.places, strict=True):
        score = np.array(parameters["intercept"], dtype=np.float64)
        values = [*zip(rows.fields, numbers, strict=True), *((int(p), 1.0) for p in places if p != ABSENT)]
        for column, value in values:
            if column in columns and abs(value) <= 1e100:
                at = columns[column]
                score = score + weights[at] * np.clip(value - center[at], -limit[at], limit[at])
        scores.append(score)
    score = np.array(scores)
    if parameters["link"] == "clipped":
        return np.clip(score, parameters["lowest"], parameters["highest"])
    if parameters["link"] == "logit":
        return 1 / (1 + np.exp(-np.clip(score, -30, 30)))
    powers = np.exp(score - score.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("link", TASKS)
def test_the_published_linear_model_predicts_as_the_learner(link: str) -> None:
    """The learner was validated, and another model was served."""
    records, score = mixed_records(400)
    model = AdaptiveLinearModel()
    model.learn(records, TASKS[link](score))
    parameters = model.parameters()
    assert parameters["link"] == link
    unknown = [{"km": 4.0, "town": "a new one", "other": 3.0}, {}, {"km": 1e6}]
    asked = [*records, *unknown]
    assert model.predict(asked) == pytest.approx(served(parameters, asked), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("crosses", [[], [("km", "town"), ("km", "km")]], ids=str)
@pytest.mark.parametrize("link", TASKS)
def test_a_model_started_from_a_published_one_predicts_the_same_and_learns_on(link: str, crosses: Any) -> None:
    """After a restart without a checkpoint, training began at zero, or forgot the model within a few rows."""
    records, score = mixed_records(1_200)
    labels = TASKS[link](score)
    model = AdaptiveLinearModel(crosses=crosses)
    model.learn(records[:800], labels[:800])
    started = AdaptiveLinearModel(crosses=crosses)
    started.start_from(model.parameters())
    assert started.predict(records) == pytest.approx(model.predict(records), rel=1e-9, abs=1e-9)
    assert started.task == model.task
    assert started.classes == model.classes
    losses = []
    for learner in (model, started, AdaptiveLinearModel(crosses=crosses)):
        found = learner.learn_each(records[800:], labels[800:])
        if link == "softmax":
            names: Any = learner.classes
            chances = [row[names.index(label)] for row, label in zip(found, labels[800:], strict=True)]
            losses.append(-np.log(np.maximum(chances, 1e-6)).mean())
        elif link == "logit":
            losses.append(-np.log(np.maximum(np.where(labels[800:], found, 1 - found), 1e-15)).mean())
        else:
            losses.append(np.mean((found - labels[800:]) ** 2))
    assert losses[1] < 1.1 * losses[0]
    assert losses[1] < losses[2]


def test_a_start_from_sparse_rows_and_from_a_model_without_columns() -> None:
    """The parameters of a model without a single column could not be read."""
    x, labels = hyperplane(50)
    rows = SparseRows.from_dense(x)
    for given in (rows, [{}] * 50):
        model, started = AdaptiveLinearModel(), AdaptiveLinearModel()
        model.learn(given, labels)
        started.start_from(model.parameters())
        assert started.predict(given) == pytest.approx(model.predict(given), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("places", lambda places: places + 2**18, r"expected 'places' from 0 to 262143, given \d+ to \d+; give the"),
        ("places", lambda places: places - 2**18, r"expected 'places' from 0 to 262143, given -\d+ to -\d+; give the"),
        ("places", lambda places: places[::-1], r"expected 'places' in ascending order"),
        ("places", lambda places: places[1:], r"expected 'weights' as numbers of shape"),
        ("limit", lambda limit: limit[1:], r"expected 'limit' as numbers of shape \(5\), given shape \(4,\)"),
    ],
)
def test_a_start_from_parameters_that_no_model_has_published_is_refused(name: str, change: Any, message: str) -> None:
    """A place beyond the last was that of the intercept, and a negative one that of another text."""
    model = AdaptiveLinearModel()
    model.learn([{"km": 1.0, "town": town, "day": day} for town in "ab" for day in "cd"], [0, 1, 1, 0])
    given = model.parameters()
    with pytest.raises(ModelError, match=rf"^AdaptiveLinearModel\.start_from: {message}"):
        AdaptiveLinearModel().start_from(given | {name: change(given[name])})


# ---- kinds of records and labels, errors


def test_dicts_columns_tables_and_a_matrix_give_the_same_model() -> None:
    """A batch of dicts and a batch of columns of the same stream gave different models."""
    pandas, polars, pyarrow = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))
    x, labels = hyperplane(60)
    named = {"0": x[:, 0], "1": x[:, 1]}
    given: list[Any] = [
        x[:, :2],
        x[:, :2].tolist(),
        [dict(zip(named, row, strict=True)) for row in x[:, :2].tolist()],
        [dict(zip(["1", "0"], row[::-1], strict=True)) for row in x[:, :2].tolist()],
        Columns(named),
        pandas.DataFrame(named),
        polars.DataFrame(named),
        pyarrow.table(named),
    ]
    models = [AdaptiveLinearModel() for _ in given]
    found = [frozen(model.learn_each(rows, labels)) for model, rows in zip(models, given, strict=True)]
    assert found == [found[0]] * len(found)
    states = [frozen(model.state()) for model in models]
    assert states == [states[0]] * len(states)


def test_tables_have_the_fields_of_their_columns() -> None:
    """A table was read as a matrix: its columns had numbers for names, and a column of texts was refused."""
    pandas, polars, pyarrow = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))
    named = {"km": [1.0, 2.0, None], "town": ["Rome", None, "Oslo"]}
    records = [dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)]
    expected = AdaptiveLinearModel()
    expected.learn(records, [1, 0, 1])
    for table in (pandas.DataFrame(named), polars.DataFrame(named), pyarrow.table(named)):
        model = AdaptiveLinearModel()
        model.learn(table, [1, 0, 1])
        assert frozen(model.state()) == frozen(expected.state())
        assert model.predict(table).tolist() == expected.predict(records).tolist()
    assert expected.predict([]).shape == (0,)


@pytest.mark.parametrize(
    ("labels", "link", "classes"),
    [
        ([True, False], "logit", None),
        ([0, 1.0], "logit", None),
        (np.array([0, 1], dtype=np.uint8), "logit", None),
        (["a", np.str_("b")], "softmax", ["a", "b"]),
        ([0.5, 10**25], "clipped", None),
        ([np.float32(2), True], "clipped", None),
    ],
)
def test_the_first_label_says_what_is_predicted(labels: Any, link: str, classes: Any) -> None:
    """Labels 0 and 1 were numbers to predict, or an integer above 2**64 ended the job with a Python error."""
    model = AdaptiveLinearModel()
    model.learn([[1.0], [2.0]], labels)
    assert model.parameters()["link"] == link
    assert model.classes == classes


def test_classes_are_given_or_found() -> None:
    """Equal labels of numpy and Python were two classes; class 2 was refused, because class 0 had come first."""
    model = AdaptiveLinearModel(task="classification")
    labels = [0, np.int64(0), 0.0, np.float32(9.0), 9]
    found = model.learn_each([[0.0]] * 5, labels)
    assert model.classes == [0, 9]
    assert found.shape == (5, 3)
    assert found.sum(axis=1) == pytest.approx(np.ones(5))
    given = AdaptiveLinearModel(classes=["x", "y"])
    assert given.learn_each([[0.0]], ["y"]).tolist() == [[0.5, 0.5]]
    with pytest.raises(BadRows, match="expected a label that is one of the classes 'x', 'y', given 'z'") as caught:
        given.learn_each([[0.0]] * 3, ["x", "z", "y"])
    assert caught.value.rows == (1,)


def test_only_rows_of_too_many_classes_are_refused() -> None:
    """One class too many refused all rows of its batch, those of known classes too."""
    model = AdaptiveLinearModel(task="classification", bits=1)
    model.learn([{}] * 999, [f"class {n}" for n in range(999)])
    with pytest.raises(BadRows, match=r"one of at most 1000 classes, given 'two'; give task=\"regression\"") as caught:
        model.learn([{}] * 4, ["class 3", "one", "two", "class 4"])
    assert caught.value.rows == (2,)
    model.learn([{}] * 3, ["class 3", "one", "class 4"])
    assert model.classes is not None
    assert len(model.classes) == 1_000


@pytest.mark.parametrize(
    ("first", "records", "labels", "weights", "rows", "message"),
    [
        ([], [{"a": 1}, {"a": "x"}], [1, 0], None, (1,), "expected numbers in the field 'a', as in the first row that"),
        ([], [{"a": "x"}, {"a": 1}], [1, 0], None, (1,), "expected texts in the field 'a', .*given a number"),
        ([{"a": 1}], [{"a": "x"}, {"a": 2}], [1, 0], None, (0,), "expected numbers in the field 'a'"),
        ([{"a": "x"}], [{"a": "x"}, {"a": 2}], [1, 0], None, (1,), "expected texts in the field 'a'"),
        ([], [{"a": 1}, {"a": [2]}], [1, 0], None, (1,), r"expected a number, a text or None in .*'a', given \[2\]"),
        ([], [{"a": 1}, {"a": 10**400}], [1, 0], None, (1,), "numbers that fit a float in the field 'a'"),
        ([], [{"a": 1}, 5], [1, 0], None, (1,), "expected records with named fields, given 5"),
        ([{}], [{}, {}], [1, 2], None, (1,), 'label that is 0, 1 or a truth value, .*task="regression"'),
        ([{}], [{}, {}], [1, "x"], None, (1,), "label that is 0, 1 or a truth value, like the first label, given 'x'"),
        ([{}], [{}, {}], [1, None], None, (1,), "expected a label that is 0, 1 or a truth value, .* given None"),
        ([], [{}, {}], [None, math.nan], None, (0, 1), "label that is a number, a truth value or a text, given None"),
        ([], [{}, {}], [3.5, 1e101], None, (1,), r"label that is a number of at most 1e\+100 in size, given 1e\+101"),
        ([], [{}, {}], ["x", None], None, (1,), "label that is a text, a number or a truth value, given None"),
        ([], [{}, {}], [1, 0], [1, -1], (1,), "expected finite sample weights of 0 or more, given -1.0"),
        ([], [{}, {}], [1, 0], [1e31, 1], (0,), r"expected sample weights of at most 1e\+30, given 1e\+31"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_rows_are_named_and_nothing_is_learned(
    first: Any, records: Any, labels: Any, weights: Any, rows: Any, message: str
) -> None:
    """One bad record must not change the model, and must not refuse the good records of its batch later."""
    model, other = AdaptiveLinearModel(bits=BITS), AdaptiveLinearModel(bits=BITS)
    for learner in (model, other):
        if first:
            learner.learn(first, [1])
    with pytest.raises(BadRows, match=message) as caught:
        model.learn(records, labels, weights)
    assert caught.value.rows == rows
    assert model.records == len(first)
    good = [row for row in range(len(records)) if row not in rows]
    for learner in (model, other):
        if good:
            learner.learn([records[row] for row in good], [labels[row] for row in good])
    assert learned(model) == learned(other)


def test_a_refused_row_does_not_change_what_its_field_is() -> None:
    """A text in a field of numbers was refused, and then all numbers of the field were refused, for ever."""
    model = AdaptiveLinearModel(bits=BITS)
    rows = FieldReader(bits=BITS, refuse=BadRows).rows([{"a": 1.0}, {"a": "x"}, {"a": 3.0}])
    with pytest.raises(BadRows) as caught:
        model.learn(rows, [1, 0, 1])
    assert caught.value.rows == (1,)
    good = AdaptiveLinearModel(bits=BITS)
    for records, learner in ((rows[[0, 2]], model), ([{"a": 1.0}, {"a": 3.0}], good)):
        learner.learn(records, [1, 1])
        learner.learn([{"a": 5.0}], [0])
    assert learned(model) == learned(good)
    other = AdaptiveLinearModel(bits=BITS)
    other.learn([{"t": math.nan}, {"t": "Rome"}], [1, 0])
    other.learn([{"t": "Rome"}], [1])
    assert other.parameters()["fields"] == []


SPARSE = SparseRows.from_rows([([0], [1.0]), ([9], [1.0])], 10)


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        ([{"a": 1.0}] * 2, SPARSE, "expected records with fields, as in the first rows, given sparse rows of width 10"),
        (SPARSE, [{"a": 1.0}] * 2, "expected sparse rows of width 10, as in the first rows, given records with"),
        (SPARSE, [{"a": "Rome"}] * 2, "expected sparse rows of width 10"),
        (SPARSE, SparseRows.from_rows([([20], [1.0])] * 2, 30), "width 10, as in the first rows, given .*width 30"),
    ],
    ids=["sparse", "named", "texts", "width"],
)  # fmt: skip
def test_rows_of_another_kind_or_width_are_refused(first: Any, later: Any, message: str) -> None:
    """Compiled code checks no bounds: a wider row read and wrote the memory of other objects."""
    model = AdaptiveLinearModel(bits=BITS)
    model.learn(first, [0, 1])
    before = frozen(model.state())
    with pytest.raises(ModelError, match=message):
        model.learn(later, [0, 1])
    with pytest.raises(ModelError, match=message):
        model.predict(later)
    assert frozen(model.state()) == before
    own = model.rows(first)
    with pytest.raises(ModelError, match=r"expected rows of .* hashed and .* numeric columns, given column 4000"):
        model.step(own._replace(indices=own.indices + 4_000_000), RowSteps.one_each(2, learns=True), [0, 1])


def test_fields_of_a_refused_batch_can_be_predicted() -> None:
    """A new field of a batch that was refused had no column, and its prediction read foreign memory."""
    model = AdaptiveLinearModel(bits=1)
    model.learn([{"a": 1.0}], [1])
    with pytest.raises(BadRows):
        model.learn([{f"new {n}": 1.0 for n in range(1_000)}], ["no label"])
    assert model.predict([{"a": 1.0, "new 999": 3.0}]).tolist() == model.predict([{"a": 1.0}]).tolist()
    restored = AdaptiveLinearModel(bits=1)
    restored.restore(model.state())
    assert len(restored.parameters()["fields"]) == len(restored.parameters()["center"]) == 1_001


def test_wrong_settings_states_and_uses_are_refused() -> None:
    """An error that comes with the first record of the second day is found too late."""
    for options, message in (
        ({"task": "ranking"}, r'\(task=\): expected "classification" or "regression", given \'ranking\''),
        ({"classes": ["a"]}, r"\(classes=\): expected two different classes or more"),
        ({"classes": ["a", "b"], "task": "regression"}, r"\(classes=\): expected .* and task='regression'"),
        *(
            ({"rates": rates}, r"\(rates=\): expected one to three numbers")
            for rates in (0.5, [], [0.0], [1e9], [1] * 4, "12")
        ),
        ({"bits": 0}, r"\(bits=\): expected .*1.*28.* given 0"),
    ):
        with pytest.raises(ConfigurationError, match=f"^AdaptiveLinearModel{message}"):
            AdaptiveLinearModel(**options)
    model = AdaptiveLinearModel()
    for use in (lambda: model.predict([{}]), model.parameters, model.to_update):
        with pytest.raises(ModelError, match="expected to have learned from a row first, given none so far"):
            use()
    model.learn([{}], [1])
    with pytest.raises(ModelError, match="expected 1 labels, one for each row, given 2"):
        model.learn([{}], [1, 0])
    with pytest.raises(ModelError, match="expected features as a matrix"):
        model.learn([[[1.0]]], [1])
    other = AdaptiveLinearModel(bits=4)
    with pytest.raises(ModelError, match=r"restore: expected a state with bits=4 and rates=None, given bits=18"):
        other.restore(model.state())
    with pytest.raises(ModelError, match=r"restore: .* rates=\(0.5, 1.0\), given bits=18 and rates=None"):
        AdaptiveLinearModel(rates=(0.5, 1)).restore(model.state())
    with pytest.raises(ModelError, match=r"start_from: expected parameters with bits=4, given 18; make the .*bits=18"):
        other.start_from(model.parameters())
    with pytest.raises(ModelError, match=r"start_from: expected the parameters of a published .*given \['weights'\]"):
        other.start_from({"weights": [1.0]})
    with pytest.raises(ModelError, match="start_from: expected a new model, given one that has learned already"):
        model.start_from(model.parameters())


def test_numba_is_imported_with_the_first_label_only() -> None:
    """``import streamiter.learn`` took a second longer, in programs that make no such model."""
    program = (
        "import sys\nfrom streamiter.learn import AdaptiveLinearModel\nmodel = AdaptiveLinearModel()\n"
        "assert 'numba' not in sys.modules\nassert 'streamiter.learn.row_steps' not in sys.modules\n"
        "model.learn([[1.0]], [True])\nassert 'streamiter.learn.row_steps' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)


def test_many_classes_take_memory_only_for_texts_that_came() -> None:
    """A model of 300 classes took gigabytes for places of texts that no row had, and copied them for each class."""
    rows = [{"city": f"city {n % 50}"} for n in range(600)]
    model = AdaptiveLinearModel()
    model.learn(rows[:2], ["class 0", "class 1"])
    tracemalloc.start()
    try:
        model.learn(rows, [f"class {n % 300}" for n in range(600)])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50e6


def test_classes_that_were_only_asked_for_get_their_scores_in_time() -> None:
    """Labels that became classes before they were learned from wrote beyond the arrays, and the process crashed."""
    model = AdaptiveLinearModel()
    model.learn([[0.0], [1.0]], ["a", "b"])
    model.targets([f"c{n}" for n in range(90)])
    model.learn([[0.0], [1.0]], ["c89", "a"])
    predictions = model.predict([[0.5]])
    assert predictions.shape == (1, 93)
    assert np.isfinite(predictions).all()
