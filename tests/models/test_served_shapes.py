"""Tests of predictions with the tables of a published model."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from models.shape_cases import BITS, ROWS, linear_part, of_reference, random_shapes, shaped
from support.tables_reference import tables_reference

from streamiter import Flow
from streamiter.learn import AdaptiveLinearModel, train_online
from streamiter.models import LinearPredictor
from streamiter.values.hashes import place_of_text

# The tables are published as float32, of which each has an error of at most 6e-8 of its size.
NEAR = 2e-6


@pytest.mark.parametrize(("link", "scores"), [("logit", 1), ("clipped", 1), ("log", 1), ("softmax", 3)])
def test_one_row_gets_the_prediction_that_it_gets_among_many(link: str, scores: int) -> None:
    """A row was served alone with another number than in the table of a report."""
    for seed in range(5):
        parameters = shaped(link, seed, scores)
        predict = LinearPredictor(parameters)
        rows = [*ROWS, {"km": float("nan"), "load": np.int64(3), "at": np.datetime64("NaT")}]
        together, alone = predict(rows), [predict(row) for row in rows]
        np.testing.assert_allclose(alone, together, rtol=1e-14)


@pytest.mark.parametrize(("link", "scores"), [("logit", 1), ("clipped", 1), ("softmax", 3)])
def test_the_prediction_is_the_sum_that_the_format_says(link: str, scores: int) -> None:
    """The code had the order of a tree's comparisons from its highest bit, and the page from its lowest."""
    parameters = shaped(link, 7, scores)
    predict = LinearPredictor(parameters)
    for row in ROWS:
        expected = by_hand(parameters, row)
        np.testing.assert_allclose(predict(row), expected, rtol=1e-12)


def by_hand(parameters: dict[str, Any], row: dict[str, Any]) -> Any:
    """Return the prediction as the page of the format describes it, one number after the other."""
    shapes, link = parameters["shapes"], parameters["link"]
    linear = LinearPredictor({name: value for name, value in parameters.items() if name != "shapes"})
    prepared = linear._standardized._prepared(row)  # type: ignore[union-attr]
    fine, distances = [0] * len(shapes["fields"]), []
    for at, field in enumerate(parameters["fields"]):
        value, moved = prepared.get(field), 0.0
        if isinstance(value, (int, float)) and abs(value) <= 1e100:
            limit = parameters["limit"][at]
            moved = float(np.clip(value - parameters["center"][at], -limit, limit))
            if field in shapes["fields"]:
                column = shapes["fields"].index(field)
                fine[column] = 1 + sum(edge < value for edge in shapes["edges"][column])
        distances.append(moved)
    places = parameters["places"].tolist()
    texts = prepared.get("town") or []
    own = {place_of_text("town", text, BITS) for text in ([texts] if isinstance(texts, str) else texts)}
    for place in sorted(own.intersection(places)):
        if cell := shapes["categories"][places.index(place)]:
            fine[cell // 61] = cell % 61
    total = shapes["mixture"][0] * np.asarray(linear(row))
    for weight, member in zip(shapes["mixture"][1:], shapes["members"], strict=True):
        total = total + weight * linked(link, score_by_hand(member, fine, distances), parameters)
    return total


def score_by_hand(member: dict[str, Any], fine: list[int], distance: list[float]) -> Any:
    score = member["intercept"] + sum(d * slope for d, slope in zip(distance, member["slopes"], strict=True))
    tables, at = member["tables"].astype(float), 0
    for bin_of_column in fine:
        score = score + tables[at + bin_of_column]
        at += 61
    for first, second in member["pairs"].tolist():
        score = score + tables[at + (fine[first] + 3) // 4 * 16 + (fine[second] + 3) // 4]
        at += 256
    for columns, bins in zip(member["tree_columns"].tolist(), member["tree_bins"].tolist(), strict=True):
        cell = 0
        for column, threshold in zip(columns, bins, strict=True):
            cell = 2 * cell + (fine[column] > threshold)
        score = score + tables[at + cell]
        at += 2 ** len(columns)
    return score


def linked(link: str, score: Any, parameters: dict[str, Any]) -> Any:
    if link == "softmax":
        return np.exp(score) / np.exp(score).sum()
    if link in ("clipped", "log"):
        return np.clip(np.exp(score[0]) if link == "log" else score[0], parameters["lowest"], parameters["highest"])
    return 1 / (1 + np.exp(-np.clip(score[0], -30, 30)))


@pytest.mark.parametrize(("kind", "link"), [("BINARY", "logit"), ("REGRESSION", "clipped"), ("SOFTMAX", "softmax")])
def test_what_is_served_is_the_prediction_of_the_reference(kind: str, link: str) -> None:
    """The served model had another number than the learner, by a bin of one column."""
    module = tables_reference()
    random = np.random.default_rng(17)
    v = random.normal(size=(3_000, 4))
    v[:, 3] = random.integers(0, 7, size=3_000)
    v[random.random(3_000) < 0.1, 1] = np.nan
    score = np.sin(2 * v[:, 0]) + np.where(np.nan_to_num(v[:, 1]) > 0.5, 1.0, -0.5) * v[:, 2] + 0.3 * (v[:, 3] == 2)
    y = {"logit": score > 0.2, "clipped": score, "softmax": np.digitize(score, [-0.7, 0.7])}[link].astype(float)
    learner = module.Tables(getattr(module, kind), np.array([False, False, False, True]), 3)
    learner.rows(v[:-50], y[:-50])
    fields = ["a", "b", "c", "d"]
    parameters = of_reference(learner, fields, link)
    if link == "clipped":
        parameters |= {"lowest": learner.s[4] - learner.s[6], "highest": learner.s[5] + learner.s[7]}
    predict = LinearPredictor(parameters)
    rows = [
        {name: str(int(value)) if name == "d" else value for name, value in zip(fields, row, strict=True)}
        for row in v[-50:].tolist()
    ]
    expected = np.array([module.Published(learner).predict(row) for row in v[-50:]])
    given = np.array([predict(row) for row in rows]).reshape(expected.shape)
    np.testing.assert_allclose(given, expected, atol=NEAR)
    np.testing.assert_allclose(predict(rows).reshape(expected.shape), given, rtol=1e-12)


@pytest.mark.parametrize(("link", "scores"), [("logit", 1), ("clipped", 1), ("log", 1), ("softmax", 3)])
def test_the_parts_of_a_row_add_up_to_its_prediction(link: str, scores: int) -> None:
    """The parts were those of one member, and their sum was the prediction of no model that was served."""
    for seed in range(5):
        parameters = shaped(link, seed, scores)
        predict = LinearPredictor(parameters)
        explained, alone = predict.explain(ROWS), [predict.explain(row) for row in ROWS]
        expected = predict(ROWS)
        if link == "softmax":
            given = np.exp(explained.score) / np.exp(explained.score).sum(axis=1, keepdims=True)
        else:
            given = linked(link, np.asarray(explained.score)[None], parameters)
        np.testing.assert_allclose(given, expected, rtol=1e-9)
        np.testing.assert_allclose([each.score for each in alone], explained.score, rtol=1e-9)


def test_the_effect_of_a_column_has_the_part_that_trees_and_pairs_have_of_it() -> None:
    """A column that only pairs and trees had learned looked as if it did not matter."""
    shapes = random_shapes(3)
    rows = np.zeros((4, 61), np.float32)
    rows[0, 1:], rows[1, [1, 5, 9]], rows[2, 0], rows[3, 1:13:4] = 1.0, 1.0, 1.0, 1.0
    tables = np.zeros_like(shapes.members[1].tables)
    member = replace(shapes.members[1], tables=tables, slopes=np.zeros((3, 1)))
    column, pair, tree = tables[:61, 0], tables[4 * 61 : 4 * 61 + 256, 0], tables[4 * 61 + 6 * 256 :, 0]
    column[33:] = 1.0
    pair[:] = np.repeat(np.arange(16) >= 8.5, 16)  # km alone, although with load
    tree[:128] = np.arange(128) >= 64
    member.tree_columns[0], member.tree_bins[0] = 0, 32
    linear = linear_part("clipped") | {"weights": np.zeros(7)}
    made = replace(shapes, rows=rows, members=[member], mixture=np.array([0.0, 1.0]))
    effects = LinearPredictor(linear | {"shapes": made.published()}).effects
    assert effects is not None
    strongest = effects.columns[0]
    assert (strongest.field, round(strongest.strength, 2)) == ("km", 1.5)
    assert [round(each.effect[0], 2) for each in strongest.bins] == [-1.4] * 32 + [1.6] * 28
    assert max(each.strength for each in [*effects.columns[1:], *effects.pairs]) < 1e-6
    bins = {column.field: [each.name for each in column.bins] for column in effects.columns}
    assert bins["load"][:3] == ["up to 0.25", "0.25 to 0.5", "above 0.5"]
    assert bins["unknown"] == ["missing"]


def trips(count: int, seed: int) -> list[dict[str, Any]]:
    """Return records with numbers, texts, lists of texts, times and truth values, some of them missing."""
    draw = np.random.default_rng(seed)
    made: list[dict[str, Any]] = []
    for _ in range(count):
        trip = {
            "km": float(draw.normal(500, 200)) if draw.random() > 0.1 else None,
            "stops": int(draw.integers(5)),
            "sky": str(draw.choice(["rain", "sun", "snow", ""])),
            "at": f"2024-0{draw.integers(1, 9)}-1{draw.integers(9)}T{draw.integers(24):02d}:30",
            "night": bool(draw.integers(2)),
            "tags": draw.choice(list("abcdef"), draw.integers(4)).tolist(),
        }
        made.append(trip if draw.random() > 0.1 else {name: trip[name] for name in ("km", "tags", "at")})
    return made


def test_effects_are_known_of_missing_values_and_of_the_texts_of_a_time() -> None:
    """A missing text was a category, and an hour was shown as "place 248754"."""
    rows = trips(3_000, 1)
    model = AdaptiveLinearModel(shapes=True)
    model.learn(rows, [np.sin((row["km"] or 0.0) / 100) > 0.5 for row in rows])
    effects = model.effects
    assert effects is not None
    assert effects.columns[0].field == "km"
    assert {each.name for each in effects.columns[0].bins} >= {"missing"}
    [hour] = [column for column in effects.columns if column.field == "at[hour]"]
    assert {each.name for each in hour.bins} <= {"missing", *map(str, range(24))}


def test_a_version_says_which_fields_matter() -> None:
    """To see that a field had lost its effect, somebody had to compare all tables of two versions."""
    flow = Flow("trips")
    records = [{**row, "late": (row["km"] or 0.0) > 500.0} for row in trips(1_000, 3)]
    trained = train_online(
        flow.from_items(records), label="late", model=lambda: AdaptiveLinearModel(shapes=True), publish_every_s=0.001
    )
    models = trained.models.collect()
    flow.run()
    metrics = models.items[-1].metrics
    assert metrics["effect of km"] > 3 * metrics["effect of at[month]"]
    assert len([name for name in metrics if name.startswith("effect of ") and " × " in name]) == 4
