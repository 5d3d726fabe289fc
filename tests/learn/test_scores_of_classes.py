"""``training.predictions`` of a model of classes: the probability of each class, beside that of the true one."""

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from learn.online_support import delayed

from streamiter import Flow
from streamiter.learn import AdaptiveLinearModel, ForeignModel, train_online
from streamiter.learn.quality.validation import PredictedRows

COLORS = ["red", "blue", "green", "black"]


def rows_of(count: int) -> list[dict[str, Any]]:
    """Return rows of classes that come one after the other."""
    draw = Random(3)
    rows = []
    for n in range(count):
        x = draw.random()
        known = COLORS[: 2 + n * 3 // count]
        rows.append({"id": n, "x": x, "color": known[min(int(x * len(known)), len(known) - 1)]})
    return rows


ROWS = rows_of(400)


def predicted(events: list[dict[str, Any]], model: Any = None, **options: Any) -> list[PredictedRows]:
    flow = Flow("colors")
    found = train_online(flow.from_items(events), model, publish_every=500, **options).predictions.collect()
    flow.run()
    return found.items


def scores(found: list[PredictedRows]) -> dict[int, dict[str, float]]:
    """Return the probabilities above 0 by class, of each row; None is a class that had not come yet."""
    return {
        number: {
            name: probability
            for name, probability in zip([*rows["labels"], None], probabilities, strict=False)
            if probability
        }
        for rows in found
        for number, probabilities in zip(rows["numbers"].tolist(), rows["probabilities"].tolist(), strict=True)
    }


def check_rows(found: list[PredictedRows], colors: dict[int, str]) -> None:
    """The matrix must agree with the columns beside it."""
    for rows in found:
        matrix, classes = rows["probabilities"], rows["classes"]
        at = np.arange(len(classes))
        assert len(rows["labels"]) <= matrix.shape[1] <= len(rows["labels"]) + 1
        assert [rows["labels"][number] for number in classes] == [colors[n] for n in rows["numbers"].tolist()]
        own = matrix[at, classes]
        assert np.where(own > 0, own, matrix[:, -1]).tolist() == rows["predictions"].tolist()
        assert ((own > 0) & (own == matrix.max(axis=1))).tolist() == (rows["targets"] == 1.0).tolist()


@pytest.mark.parametrize("classes", [None, COLORS])
def test_each_row_has_the_probability_of_each_class(classes: Any) -> None:
    """Only the probability of the true class could be seen, so no threshold and no metric of one's own was possible."""
    model = AdaptiveLinearModel(classes=classes, task="multiclass")
    expected = {}
    for row in ROWS:
        [probabilities] = model.learn_each([{"x": row["x"]}], [row["color"]])
        names = [*(model.classes or []), None]
        expected[row["id"]] = {name: float(p) for name, p in zip(names, probabilities, strict=False) if p}
    for mini_batch in (1, 7, 1_000):
        found = predicted(
            ROWS,
            lambda: AdaptiveLinearModel(classes=classes, task="multiclass"),
            label="color",
            features=["x"],
            mini_batch=mini_batch,
            mode="synchronous",
        )
        check_rows(found, {row["id"]: row["color"] for row in ROWS})
        assert scores(found) == expected


def test_late_labels_have_the_probabilities_of_the_question() -> None:
    """A class that came between a question and its answer took the place of the class that had not come yet."""
    late = 25
    events: list[dict[str, Any]] = []
    for n in range(len(ROWS) + late):
        events += [{"id": row["id"], "x": row["x"]} for row in ROWS[n : n + 1]]
        if n >= late:
            events.append({"id": ROWS[n - late]["id"], "color": ROWS[n - late]["color"]})
    labels = delayed(["x"], "color")
    color_of = {n: event["color"] for n, event in enumerate(events) if "color" in event}
    first = None
    for mini_batch in (1, 13, 1_000):
        found = predicted(events, labels=labels, task="multiclass", mini_batch=mini_batch, mode="synchronous")
        check_rows(found, color_of)
        first = first or scores(found)
        assert {n: each for n, each in scores(found).items() if n in first} == first
        # Before the first label all classes are unknown.
        assert {round(sum(each.values()), 9) for each in first.values()} == {0.5, 1.0}


@pytest.mark.parametrize("by", ["row", "mini-batch"])
def test_models_of_other_libraries_have_them_too(by: Any) -> None:
    """Shares of the classes so far, as the plainest model of another library."""

    def learn(model: dict[str, int], features: Any, color: Any) -> None:
        for one in [color] if isinstance(color, str) else color:
            model[one] = model.get(one, 0) + 1

    def predict(model: dict[str, int], features: Any) -> Any:
        shares = {name: count / sum(model.values()) for name, count in model.items()}
        return [shares] * len(features) if by == "mini-batch" else shares

    shares: ForeignModel[dict[str, int]] = ForeignModel(
        make=dict,
        learn=learn,
        predict=predict,
        save=lambda model: json.dumps(model).encode(),
        load=json.loads,
        task="classification",
        by=by,
    )
    found = predicted(ROWS, shares, label="color", features=["x"], mini_batch=50)
    for rows in found:
        assert rows["probabilities"].shape == (len(rows["classes"]), len(rows["labels"]))
        assert rows["probabilities"].sum(axis=1) == pytest.approx(1.0)
        of_true = rows["probabilities"][np.arange(len(rows["classes"])), rows["classes"]]
        assert of_true.tolist() == rows["predictions"].tolist()
    assert set(found[-1]["labels"]) == set(COLORS)
