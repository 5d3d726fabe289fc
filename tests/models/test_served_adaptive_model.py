"""A published ``AdaptiveLinearModel`` is served: it predicts as the learner itself, without Numba."""

import contextlib
import datetime as dt
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas
import pytest
from models.model_case import encoder, memory_topic, write
from support.costs import calls_of
from support.examples import random_examples
from support.waiting import PATIENCE_S, until

from streamiter import Columns
from streamiter.errors import ModelError
from streamiter.learn import BadRows
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.models import LinearPredictor, ModelUpdate, ServedModel, exported
from streamiter.values.sparse_rows import SparseRows

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}

# Tables are published as float32: each number has an error of at most 6e-8 of its size.
TOLERANCES = {False: TOLERANCE, True: {"rtol": 1e-6, "atol": 1e-7}}

linear_and_shapes = pytest.mark.parametrize("shapes", [False, True], ids=["linear", "shapes"])

LABELS: dict[str, Any] = {
    "truth values": lambda n: n % 3 == 0,
    "two labels": lambda n: "on time" if n % 3 else "late",
    "numbers": lambda n: 2.5 * n - 1.0,
    "classes": lambda n: ("red", "green", "blue")[n % 3],
    "quantiles": lambda n: 2.5 * (n % 17) - 1.0,
    "counts": lambda n: n % 3,
}

LOSSES: dict[str, Any] = {"quantiles": {"loss": "quantile", "quantile": 0.9}, "counts": {"loss": "poisson"}}


def trips(count: int, *, seed: int = 1) -> list[dict[str, Any]]:
    """Return rows with texts, truth values, missing values and outliers."""
    draw = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for n in range(count):
        row: dict[str, Any] = {
            "km": float(draw.normal(500.0, 90.0)) * (1e6 if n % 50 == 49 else 1.0),
            "sky": ("rain", "sun", "snow")[draw.integers(3)] if n % 7 else None,
            "night": bool(draw.integers(2)),
            "epoch": 1_700_000_000 + n,
            "wind": (math.nan, math.inf, 3.0, 4.5)[draw.integers(4)],
        }
        if n % 5 == 0:
            del row["km"]
        rows.append(row)
    return rows


async def served(model: AdaptiveLinearModel, form: str = "safetensors") -> ServedModel:
    """Publish the model to a topic, and return what serves it."""
    topic = await memory_topic(encoder(1, 1, format=form).encode([model.parameters()]))
    return ServedModel(topic, "ctr")


def trained(labels: str, rows: Any, bits: int = 12, crosses: Any = (), *, shapes: bool = False) -> AdaptiveLinearModel:
    model = AdaptiveLinearModel(bits=bits, crosses=crosses, shapes=shapes, **LOSSES.get(labels, {}))
    model.learn(rows, list(map(LABELS[labels], range(len(rows)))))
    return model


CROSSES = [("km", "epoch"), ("sky", "night"), ("wind", "sky"), ("sky", "nowhere")]


@linear_and_shapes
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(("form", "crosses", "bits"), [("json", CROSSES, 12), ("safetensors", [], 1)])
async def test_it_predicts_as_the_learner_itself(labels: str, form: str, crosses: Any, bits: int, shapes: bool) -> None:
    """A service predicted other numbers than the training reported, for rows with texts and missing values.

    Two texts of one place counted once.
    """
    rows, new = (
        [row | {"from": "abc"[n % 3], "to": "abcde"[n % 5]} for n, row in enumerate(trips(count, seed=seed))]
        for count, seed in ((400, 1), (60, 2))
    )
    model = trained(labels, rows, bits, crosses, shapes=shapes)
    # Texts in three fields, at two places with one bit: one row has a place two times at least.
    [places] = model.rows(rows[1:2]).indices[None, :]
    assert bits > 1 or len(set(places.tolist())) < len(places)
    new += [
        {},
        {"km": None},
        {"km": 10**200, "epoch": new[0]["epoch"]},
        {"km": True},
        {"sky": "hail", "colour": "red", "when": None},
    ]
    expected = model.predict(new)
    async with await served(model, form) as following:
        await following.ready()
        prediction = following.predict(new)
        np.testing.assert_allclose(prediction.value, expected, **TOLERANCES[shapes])
        assert prediction.classes == (["red", "green", "blue"] if labels == "classes" else None)
        assert prediction.positive == ("on time" if labels == "two labels" else None)
        for row, value in zip(new, expected, strict=True):
            one = following.predict(row).value
            assert isinstance(one, np.ndarray if labels == "classes" else float)
            np.testing.assert_allclose(one, value, **TOLERANCES[shapes])
        assert len(following.predict([]).value) == 0


Example = tuple[str, list[tuple[str, ...]], list[dict[str, Any]], list[dict[str, Any]]]


def random_trips(random: Random) -> Example:
    """Return a kind of labels, crosses, rows to learn from, and rows to predict."""
    kinds: dict[str, list[Any]] = {
        name: random.choice(
            [[None], ["a", "b", "ä", ""], ["a", None], [0, 1, None], [True, False], [1e9, 1e9 + 1, math.nan], [5.0]]
        )
        for name in "pqrs"
    }

    def row() -> dict[str, Any]:
        return {name: random.choice(values) for name, values in kinds.items() if random.random() < 0.8}

    learned = [row() for _ in range(random.randint(1, 30))]
    new = [row() for _ in range(random.randint(1, 5))]
    new.append({"p": random.choice([1e300, -1e99, None]), "never seen": random.choice(["a", 3, None])})
    crosses = random.choice([[], [("p", "q")], [("r", "r"), ("s", "p")]])
    return random.choice(list(LABELS)), crosses, learned, new


@random_examples(random_trips)
def test_any_rows_are_predicted_as_by_the_learner_itself(example: Example) -> None:
    """A field with only missing values, or two texts at one place, moved the served predictions."""
    labels, crosses, learned, new = example
    shapes = len(learned) % 2 == 0
    model = trained(labels, learned, bits=5, crosses=crosses, shapes=shapes)
    predict = LinearPredictor(model.parameters())
    if any(isinstance(row.get("p"), str) for row in learned):
        new = new[:-1]
    expected = model.predict(new)
    np.testing.assert_allclose(predict(new), expected, **TOLERANCES[shapes])
    np.testing.assert_allclose([predict(row) for row in new], predict(new), **TOLERANCE)


RAW: list[Any] = [
    "1.5", "-2", "7", "007", "1,5", "", "NA", "Gift Card", "gift",
    "2024-05-01", "2024-05-01T23:30", "2024-05-01 23:30Z", "2024-03-31T02:30:00.5+05:45", ["gift", "card"], [],
    None, 4.0, 7, True, 1e101, 10**101, 10**400, 1_700_000_000, 1_700_000_000_123,
    math.nan, dt.datetime(2024, 5, 2, 3), dt.datetime(2024, 5, 2, 23, tzinfo=dt.UTC), dt.date(2024, 12, 31),
    np.datetime64("2024-05-01T22:15"), pandas.NaT, b"x", {"a": 1}, [1.0],
]  # fmt: skip
Raw = tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]


def raw_records(random: Random) -> Raw:
    """Return options of a model, records to learn from, and records to predict, of which many do not fit."""
    fields = "abcd"
    kinds = {name: random.choice(["number", "category", "words", "time"]) for name in random.sample(fields, 2)}
    of_field = {name: random.sample(RAW, random.randint(1, 4)) for name in fields}

    def record(wild: float) -> dict[str, Any]:
        names = [name for name in fields if random.random() < 0.8]
        return {name: random.choice(RAW if random.random() < wild else of_field[name]) for name in names}

    options = {
        "kinds": kinds,
        "time_zone": random.choice([None, "Europe/Berlin", "Asia/Kathmandu"]),
        "crosses": random.choice([[], [("a", "b"), ("c", "c")], [("a[hour]", "d"), ("b[trend]", "c")]]),
    }
    learned = [record(0.1) for _ in range(random.randint(1, 12))]
    return (
        options,
        learned,
        [record(0.4) for _ in range(4)] + [{name: value} for name in fields for value in RAW[:20:3]],
    )


def outcome(predict: Callable[[Any], Any], x: Any) -> Any:
    """Return the prediction, or None for a row that is refused."""
    try:
        return predict(x)
    except ModelError:
        return None


@random_examples(raw_records, fewest=20)
def test_raw_records_are_prepared_as_by_the_learner_itself(example: Raw) -> None:
    """A text was learned as words, and the same record got another answer from each consumer, without an error."""
    options, learned, new = example
    shapes = len(learned) % 2 == 0
    model = AdaptiveLinearModel(bits=6, shapes=shapes, **options)
    model.learn([{}], [1])
    for number, record in enumerate(learned):
        with contextlib.suppress(BadRows):
            model.learn([record], [number % 2])
    parameters = model.parameters()
    predict = LinearPredictor(parameters)
    taken = []
    for given in new:
        # A field that the model does not know may have any value, which its learner would refuse.
        record = {name: value for name, value in given.items() if name in predict.fields or value not in RAW[-3:]}
        expected = outcome(model.predict, [record])
        many = outcome(predict, [record])
        one = outcome(predict, record)
        assert (one is None, many is None) == (expected is None, expected is None), (record, expected, many, one)
        if expected is not None:
            taken.append(record)
            np.testing.assert_allclose([one, many[0]], [expected[0]] * 2, **TOLERANCES[shapes])
            score = predict.explain(record).score
            np.testing.assert_allclose(1 / (1 + math.exp(-score)), one, **TOLERANCE)
    np.testing.assert_allclose(predict(taken), model.predict(taken), **TOLERANCES[shapes])


@pytest.mark.parametrize("form", ["json", "safetensors"])
async def test_a_published_version_says_how_its_fields_are_read(form: str, caplog: Any) -> None:
    """A field that was learned as words was predicted as one text by all programs but the trainer."""
    kinds: Any = {"note": "words", "mcc": "category"}
    model = AdaptiveLinearModel(kinds=kinds, time_zone="Europe/Berlin", shapes=False)
    at = dt.datetime(2024, 3, 1, tzinfo=dt.UTC)
    rows = [
        {
            "note": "Gift card urgent" if n % 3 else "weekly shopping",
            "mcc": 7995 if n % 5 else "5411",
            "amount": f"{n % 80}.5",
            "at": (at + dt.timedelta(hours=5 * n)).isoformat(),
        }
        for n in range(300)
    ]
    model.learn(rows, [n % 3 == 1 for n in range(300)])
    topic = await memory_topic(encoder(1, 1, format=form).encode([model.parameters()]))
    async with ServedModel(topic, "ctr") as following:
        await following.ready()
        update = following.update
        assert update is not None
        assert update.parameters["kinds"] == {**kinds, "amount": "number", "at": "time"}
        assert update.parameters["time_zone"] == "Europe/Berlin"
        same = [rows[1], rows[1] | {"note": ["gift", "card", "urgent"], "mcc": "7995", "amount": 1.5}]
        for row in same:
            assert following.predict(row).value == pytest.approx(model.predict(rows[1:2])[0], rel=1e-12)
        with pytest.raises(ModelError, match=r"expected a number in the field 'amount'.* given 'many'"):
            following.predict(rows[1] | {"amount": "many"})
        assert following.predict({"at": "2024-03-01T10:00Z"}).value > 0  # A wrong row ends nothing.
        newer = model.parameters() | {"kinds": {"note": "bigrams"}}
        await write(topic, encoder(1, 2, format=form).encode([newer]))
        await until(lambda: following.statistics().failed == 1)
        statistics = following.statistics()
        assert statistics.version == 1
        assert "given {'note': 'bigrams'}; the model is of a newer version of streamiter" in str(statistics.last_error)


def test_a_version_without_kinds_is_read_by_the_types_of_its_values() -> None:
    """An older version was refused, or its numbers and texts were read in another way."""
    model = trained("truth values", trips(200))
    parameters = model.parameters()
    assert "kinds" not in parameters
    predict = LinearPredictor(parameters)
    row = {"km": 480.0, "sky": "rain"}
    np.testing.assert_allclose(predict(row), model.predict([row])[0], **TOLERANCE)
    for wrong in ({"km": "480"}, {"sky": 3}, {"km": dt.date(2024, 5, 1)}):
        for x in (wrong, [wrong]):
            with pytest.raises(ModelError, match="as in the rows that were learned from"):
                predict(x)


@pytest.mark.parametrize("labels", LABELS)
def test_an_explanation_costs_about_as_much_as_a_prediction(labels: str) -> None:
    """An explained prediction took 50 times as long: the row was read again for each cross."""
    model = trained(labels, trips(400), crosses=CROSSES)
    predict = LinearPredictor(model.parameters())
    for row in trips(10, seed=2):
        if row["sky"] is not None:
            with_list = row | {"sky": [row["sky"]]}  # It is explained as many rows are.
            np.testing.assert_allclose(predict.explain(row).score, predict.explain(with_list).score, **TOLERANCE)
        predict(row)  # It fills the cache of texts.
        assert calls_of(predict.explain, row) < 3 * calls_of(predict, row)


@linear_and_shapes
@pytest.mark.parametrize("crosses", [[], [("0", "2"), ("1", "1")]], ids=str)
@pytest.mark.parametrize("labels", LABELS)
def test_a_matrix_and_its_rows_are_predicted(labels: str, crosses: Any, shapes: bool) -> None:
    """A model of a matrix could be asked only with dicts of the fields "0" and "1"."""
    x = np.random.default_rng(1).normal(size=(200, 3))
    x[7, 1] = np.nan
    model = trained(labels, x, crosses=crosses, shapes=shapes)
    predict, expected = LinearPredictor(model.parameters()), model.predict(x)
    np.testing.assert_allclose(predict(x), expected, **TOLERANCES[shapes])
    np.testing.assert_allclose(
        predict(pandas.DataFrame(x[8:], columns=["x", "y", "z"])), expected[8:], **TOLERANCES[shapes]
    )
    turned = pandas.DataFrame({name: x[8:, int(name)] for name in "201"})
    np.testing.assert_allclose(predict(turned), expected[8:], **TOLERANCES[shapes])
    np.testing.assert_allclose(predict(x[3].tolist()), expected[3], **TOLERANCES[shapes])
    np.testing.assert_allclose(predict({"0": x[7, 0], "2": x[7, 2]}), expected[7], **TOLERANCES[shapes])
    np.testing.assert_allclose(predict(SparseRows.from_dense(x[8:])), expected[8:], **TOLERANCES[shapes])


@pytest.mark.parametrize("labels", LABELS)
def test_sparse_rows_are_predicted(labels: str) -> None:
    """A place that no row had had was predicted with the weight of its neighbour."""
    x = np.random.default_rng(1).poisson(0.4, size=(200, 9)).astype(float)
    x[:150, 4] = 0.0
    rows = SparseRows.from_dense(x)
    model = trained(labels, rows[:150])
    predict, expected = LinearPredictor(model.parameters()), model.predict(rows)
    np.testing.assert_allclose(predict(rows), expected, **TOLERANCE)
    np.testing.assert_allclose(predict(x), expected, **TOLERANCE)
    np.testing.assert_allclose(predict(list(rows)), expected, **TOLERANCE)
    np.testing.assert_allclose(predict(rows[3]), expected[3], **TOLERANCE)
    with pytest.raises(ModelError, match="expected sparse rows of width 9, given width 8"):
        predict(SparseRows.from_dense(x[:, :8]))


def test_columns_and_tables_are_predicted_as_their_records() -> None:
    """A vector in a single row was no field of the model, and was left out without an error."""
    draw = np.random.default_rng(1)
    columns = Columns({"x": draw.normal(size=(90, 2)), "sky": draw.choice(["rain", "sun"], 90), "id": np.arange(90)})
    learned = Columns({"x": columns["x"], "sky": columns["sky"]})
    model = trained("truth values", learned, shapes=True)
    predict = LinearPredictor(model.parameters())
    expected = predict(learned)
    np.testing.assert_allclose(expected, model.predict(learned), **TOLERANCES[True])
    np.testing.assert_allclose(predict(columns), expected, **TOLERANCE)
    for rows in (list(columns), [row | {"x": row["x"].tolist()} for row in columns]):
        np.testing.assert_allclose(predict(rows), expected, **TOLERANCE)
        np.testing.assert_allclose([predict(row) for row in rows], expected, **TOLERANCE)
    table = pandas.DataFrame({"sky": columns["sky"], "x[0]": columns["x"][:, 0], "x[1]": columns["x"][:, 1]})
    np.testing.assert_allclose(predict(table), expected, **TOLERANCE)
    assert predict(Columns({"id": np.arange(2)})) == pytest.approx(predict({}), rel=1e-12)


@pytest.mark.filterwarnings("error")
@linear_and_shapes
@pytest.mark.parametrize("number", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("narrow", [np.float16, np.float32, np.longdouble])
def test_a_narrow_float_is_predicted_as_the_number_that_it_is(narrow: Any, number: float, shapes: bool) -> None:
    """A missing number of 32 bits in a single row had the prediction NaN, and an infinite one the largest weight."""
    rows = [{"km": math.nan if n % 5 == 0 else n % 7 - 3.0, "id": n % 3} for n in range(300)]
    model = AdaptiveLinearModel(shapes=shapes, kinds={"id": "category"})
    model.learn(rows, [n % 7 > 2 for n in range(300)])
    predict = LinearPredictor(model.parameters())
    [expected] = predict([{"km": number, "id": number}])
    row = {"km": narrow(number), "id": narrow(number)}
    assert [predict(row), *predict([row]), *model.predict([row])] == pytest.approx([expected] * 3, rel=1e-6)


def test_a_field_that_the_model_does_not_know_may_have_any_value() -> None:
    """The text of an id that was never learned had the weight of another text by chance, or a list was refused."""
    rows = [{"town": f"town {n % 40}", "id": n} for n in range(400)]
    model = AdaptiveLinearModel(bits=6)
    model.learn([{"town": row["town"]} for row in rows], [n % 40 < 20 for n in range(400)])
    predict, plain = LinearPredictor(model.parameters()), {"town": "town 3"}
    expected = predict(plain)
    for value in ("a text", ["a", "list"], {"a": "dict"}, 7, object()):
        assert predict(plain | {"other": value}) == expected
        assert predict([plain | {"other": value}, plain]).tolist() == pytest.approx([expected] * 2, rel=1e-15)
    for n in range(40):
        assert model.predict([plain | {"other": f"text {n}"}]) == pytest.approx(expected, rel=1e-6)


def test_serving_imports_no_numba(tmp_path: Path) -> None:
    """A service without Numba could not predict, or waited a second for its import."""
    model = trained("truth values", trips(100), shapes=True)
    update = ModelUpdate("ctr", 1, 1, None, 0, 100, {}, model.parameters())
    (tmp_path / "model.json").write_bytes(exported(update, "json"))
    program = """
import sys
sys.modules["numba"] = None
from streamiter.models import LinearPredictor, read_model
predict = LinearPredictor(read_model("model.json").parameters)
print(predict({"km": 480.0, "sky": "rain"}), any("learn" in name for name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        cwd=tmp_path,
    )
    value, imports_learners = done.stdout.split()
    assert float(value) == pytest.approx(model.predict([{"km": 480.0, "sky": "rain"}])[0], rel=1e-6)
    assert imports_learners == "False"
