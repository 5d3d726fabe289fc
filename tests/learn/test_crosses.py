"""Crosses of fields: what two fields say together, learned and served."""

from random import Random
from typing import Any

import numpy as np
import pytest
from learn.frozen_states import frozen
from learn.online_support import trained
from learn.row_streams import linear_learner
from support.examples import random_examples

from streamiter.errors import ConfigurationError
from streamiter.models import LinearPredictor
from streamiter.values.crossed_rows import crossed, crossed_fields, matrix_of_fields
from streamiter.values.named_rows import ABSENT, FieldReader
from streamiter.values.numbers import standardized

Record = dict[str, Any]


def records_of(count: int) -> tuple[list[Record], dict[str, Any]]:
    """Return records far from 0, and labels that no sum of effects of single fields explains."""
    draw = np.random.default_rng(1)
    a, b, noise = draw.normal(size=(3, count))
    towns, skies = draw.choice(["x", "y", "z"], count), draw.choice(["p", "q"], count)
    columns = (1e9 + 1e5 * a, 12 + 5 * b, towns, skies)
    names = ("epoch", "hour", "town", "sky")
    records = [dict(zip(names, values, strict=True)) for values in zip(*(c.tolist() for c in columns), strict=True)]
    labels = {
        "two numbers": a * b + 0.3 * noise > 0,
        "two texts": (towns == "x") ^ (skies == "p") ^ (noise > 1.7),
        "text and number": np.where(towns == "x", a, -a) + 0.3 * noise > 0,
        "square": b * b + 0.3 * noise > 0.5,
    }
    return records, labels


CROSSES = {
    "two numbers": ("epoch", "hour"),
    "two texts": ("town", "sky"),
    "text and number": ("town", "epoch"),
    "square": ("hour", "hour"),
}


@pytest.mark.parametrize("kind", CROSSES)
def test_a_cross_explains_what_single_fields_cannot(kind: str) -> None:
    """The product of columns far from 0 is nearly their sum, and the model was no better than without it."""
    records, labels = records_of(6_000)
    losses = {}
    for crosses in ([], [CROSSES[kind]]):
        model = linear_learner(crosses=crosses)
        found = model.learn_each(records, labels[kind].tolist())
        chances = np.where(labels[kind], found, 1 - found)[2_000:]
        losses[len(crosses)] = -np.log(np.maximum(chances, 1e-15)).mean()
    assert losses[1] < 0.62 * losses[0]


def test_training_with_crosses_in_a_flow_equals_a_plain_loop() -> None:
    """Each reader centred its own rows, so the model depended on the number of workers."""
    records, labels = records_of(400)
    crosses = list(CROSSES.values())
    model = linear_learner(crosses=crosses)
    model.learn(records, labels["two texts"].tolist())
    rows = [record | {"label": bool(label)} for record, label in zip(records, labels["two texts"], strict=True)]
    for workers, mini_batch in ((1, 7), (3, 50)):
        options: Record = {"mode": "synchronous", "workers": workers, "mini_batch": mini_batch, "shapes": False}
        result = trained(rows, seed=workers, label="label", crosses=crosses, **options)
        assert result.last == frozen(model.parameters(state=False))
    predict = LinearPredictor(model.parameters())
    assert predict(records[0]) == pytest.approx(model.predict(records[:1])[0], rel=1e-12)


# ---- the crosses of single rows


def random_rows(random: Random) -> tuple[list[Record], list[tuple[str, str]]]:
    """Return rows of two fields of numbers and two of texts with missing values, and pairs of them."""

    def row() -> Record:
        values = {
            "a": random.choice([None, -3.0, 0.0, 1e300, random.gauss(0, 50)]),
            "b": random.choice([2, True, float("nan")]),
            "s": random.choice(["x", "ä", None, ""]),
            "t": random.choice(["x", "y"]),
        }
        return {name: value for name, value in values.items() if random.random() < 0.8}

    pairs = [(first, second) for first in "abst" for second in "abst" if first <= second]
    return [row() for _ in range(random.randint(1, 6))], random.sample(pairs, random.randint(1, 4))


MEAN = {"a": 10.0, "b": 0.5}
DEVIATION = {"a": 4.0, "b": 0.0}


@random_examples(random_rows)
def test_each_cross_is_that_of_the_row_alone(example: tuple[list[Record], list[tuple[str, str]]]) -> None:
    """In a batch a missing value was crossed with that of another row, or a hashed pair depended on the batch."""
    rows, crosses = example
    together = features_of(rows, crosses)
    assert together == [features_of([row], crosses)[0] for row in rows]
    for row, found in zip(rows, together, strict=True):
        assert found == {" × ".join(cross): value for cross in crosses if (value := expected(row, cross))}


def features_of(rows: list[Record], crosses: list[tuple[str, str]]) -> list[Record]:
    """Return for each row the values of its crosses that are not 0; hashed ones are found by their place."""
    named = FieldReader(bits=20).rows(rows)
    fields = crossed_fields(crosses)
    moments = [np.array([each.get(field, 0.0) for field in fields]) for each in (MEAN, DEVIATION)]
    result = crossed(named, crosses, standardized(matrix_of_fields(named, fields), *moments), bits=20)
    assert result.numbers[:, : len(named.fields)].tobytes() == named.numbers.tobytes()
    assert result.place_values is not None
    assert (result.place_values[:, : named.places.shape[1]] == 1.0).all()
    by_row: list[Record] = []
    for at in range(len(rows)):
        numbers = dict(zip(result.fields, result.numbers[at], strict=True))
        found = {name: value for name, value in numbers.items() if "×" in name and value == value and value}
        places = dict(zip(result.places[at].tolist(), result.place_values[at].tolist(), strict=True))
        for cross in crosses:
            place = place_of(rows[at], cross)
            if place is not None and place in places and places[place]:
                found[" × ".join(cross)] = places.pop(place)
        extra = result.places[at, named.places.shape[1] :]
        assert not {int(place) for place in extra if place != ABSENT and places.get(int(place))}
        by_row.append(found)
    return by_row


def place_of(row: Record, cross: tuple[str, str]) -> int | None:
    """Return the place of the cross of a row alone."""
    alone = FieldReader(bits=20).rows([{name: row[name] for name in cross if name in row}])
    fields = crossed_fields([cross])
    found = crossed(alone, [cross], matrix_of_fields(alone, fields), bits=20).places[0, alone.places.shape[1] :]
    return int(found[0]) if len(found) and found[0] != ABSENT else None


def expected(row: Record, cross: tuple[str, str]) -> float | None:
    """Return the value of a cross, by the definition."""
    value = 1.0
    for name in cross:
        given = row.get(name)
        if given is None or given != given or (name in "ab" and abs(given) > 1e100):
            return None
        if name in "ab":
            scaled = (given - MEAN[name]) / DEVIATION[name] if DEVIATION[name] else 0.0
            value *= min(max(scaled, -10.0), 10.0)
    return value


# ---- wrong uses


def test_a_field_with_the_name_of_a_cross_is_refused() -> None:
    """The product and the field were one column, which was learned twice from each row."""
    rows = [{"a": 1.0, "b": 2.0, "a × b": 3.0}] * 2
    with pytest.raises(ConfigurationError, match="expected no field 'a × b', which is the name of a cross, given one"):
        linear_learner(crosses=[("a", "b")]).learn(rows, [0, 1])
    linear_learner(crosses=[("b", "a")]).learn(rows, [0, 1])
    model = linear_learner(crosses=[("a", "b")])
    model.learn([{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}], [0, 1])
    for given in (rows, rows[0]):
        with pytest.raises(ConfigurationError, match="expected no field 'a × b'"):
            LinearPredictor(model.parameters())(given)


def test_a_list_of_texts_is_crossed_with_each_of_its_texts() -> None:
    """Only the last text of a list was crossed, and which one that was depended on the other rows."""
    draw = Random(5)
    records = [
        {
            "words": draw.sample(["a", "b", "c", "d"], draw.randint(0, 3)),
            "km": draw.gauss(9, 3),
            "sky": draw.choice("pq"),
        }
        for _ in range(400)
    ]
    labels = ["a" in row["words"] and (row["km"] > 9 or row["sky"] == "p") for row in records]
    crosses = [("words", "km"), ("words", "sky")]
    together, cut = linear_learner(crosses=crosses), linear_learner(crosses=crosses)
    found = together.learn_each(records, labels)
    parts = [cut.learn_each(records[at : at + 7], labels[at : at + 7]) for at in range(0, 400, 7)]
    assert np.array_equal(np.concatenate(parts), found)
    served = LinearPredictor(together.parameters())
    alone = [served(record) for record in records]
    assert alone == pytest.approx(served(records), rel=1e-12)
    assert 1 / (1 + np.exp(-served.explain(records[0]).score)) == pytest.approx(alone[0], rel=1e-12)
