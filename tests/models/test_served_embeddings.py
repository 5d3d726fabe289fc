"""Tests of predictions with the embeddings of a published model."""

from random import Random
from typing import Any

import numpy as np
import pytest
from models.embedding_cases import EMBEDDED_ROWS, embedded, scores_by_hand
from models.model_case import memory_topic
from models.test_served_shapes import linked

from streamiter import Flow
from streamiter.errors import ModelError
from streamiter.learn import AdaptiveLinearModel, Embeddings, train_online
from streamiter.models import LinearPredictor, ServedModel
from streamiter.models.published_embeddings import EmbeddingKind
from streamiter.values.records import Columns

KINDS: list[EmbeddingKind] = ["fm", "deepfm", "wide and deep"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("link", ["logit", "clipped", "log", "softmax"])
def test_one_row_gets_the_prediction_that_it_gets_among_many(link: str, kind: EmbeddingKind) -> None:
    """A list of texts counted once for each text alone, and once for all among many."""
    for seed in range(4):
        predict = LinearPredictor(embedded(link, kind, seed))
        rows = [*EMBEDDED_ROWS, {"km": np.float64(3), "load": np.int64(3), "at": np.datetime64("NaT")}]
        together, alone = predict(rows), [predict(row) for row in rows]
        np.testing.assert_allclose(alone, together, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("link", ["logit", "clipped", "log", "softmax"])
def test_the_prediction_is_the_sum_that_the_format_says(link: str, kind: EmbeddingKind) -> None:
    """Numbers were not in the products, although the page said so."""
    for seed in range(4):
        parameters = embedded(link, kind, seed, scale=1.0 if link in ("logit", "softmax") else 2.5)
        others = LinearPredictor({name: value for name, value in parameters.items() if name != "embeddings"})
        predict = LinearPredictor(parameters)
        for row in EMBEDDED_ROWS:
            first, second = (linked(link, np.array(each), parameters) for each in scores_by_hand(parameters, row))
            np.testing.assert_allclose(predict(row), 0.3 * others(row) + 0.5 * first + 0.2 * second, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("link", ["logit", "clipped", "log", "softmax"])
def test_the_parts_of_a_row_add_up_to_its_prediction(link: str, kind: EmbeddingKind) -> None:
    """The parts of a row were those of the linear member, which had a share of a tenth."""
    for seed in range(4):
        parameters = embedded(link, kind, seed)
        predict = LinearPredictor(parameters)
        explained, alone = predict.explain(EMBEDDED_ROWS), [predict.explain(row) for row in EMBEDDED_ROWS]
        score = np.asarray(explained.score).reshape(len(EMBEDDED_ROWS), -1)
        given = np.array([linked(link, each, parameters) for each in score])
        expected = np.asarray(predict(EMBEDDED_ROWS))
        inside = np.asarray(explained.score) > -700.0
        np.testing.assert_allclose(given[inside], expected[inside], rtol=1e-9)
        np.testing.assert_allclose([each.score for each in alone], explained.score, rtol=1e-9)
        assert ("(embeddings)" in explained.contributions) == (kind != "fm")
        assert any(" × " in name for name in explained.contributions)


def test_a_table_of_more_rows_than_a_block_is_predicted_as_row_by_row() -> None:
    """The linear scores of the first block were added to those of the second."""
    predict = LinearPredictor(embedded("logit", "deepfm", 1))
    count = 9_000
    towns = np.array(["Kyjiw", "Roma", "𝄞", "new"])[np.arange(count) % 4]
    table = Columns({"km": np.arange(count) % 17.0, "load": np.full(count, 0.5), "town": towns})
    found = predict(table)
    for row in (0, 4_095, 4_096, 8_999):
        one = {"km": float(row % 17), "load": 0.5, "town": str(towns[row])}
        assert found[row] == pytest.approx(predict(one), rel=1e-12)
    explained = predict.explain(table)
    np.testing.assert_allclose(linked("logit", np.asarray(explained.score)[None], {}), found, rtol=1e-9)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "transformer"}, "'kind' as one of fm, deepfm, wide and deep, given 'transformer'; the model is of"),
    ({"factors": 0}, "'factors' as a whole number above 0, given 0"),
    ({"text_fields": ["a"] * 1023}, "'text_fields' as at most 1022 names, given"),
    ({"keys": np.array([2, 1])}, "'keys' in ascending order, of the fields 0 to 4, given"),
    ({"keys": np.array([1, 9 << 52])}, "'keys' in ascending order, of the fields 0 to 4, given"),
    ({"keys": np.array([0.5])}, r"'keys' as whole numbers of shape \(any\), given shape \(1,\) of float64"),
    ({"admitted": np.zeros((3, 1), int)}, r"'admitted' as whole numbers of shape \(any\), given shape \(3, 1\)"),
    ({"admitted": np.array([2, 2])}, "'admitted' in ascending order, of the fields 0 to 4, given"),
    ({"early": 7}, r"'early' as whole numbers of shape \(7, 3\), given shape \(\) of int64"),
    ({"early": np.zeros((6, 3), int)}, r"'early' as whole numbers of shape \(7, 3\), given shape \(6, 3\)"),
    ({"scale": None}, "'scale' as a number, given None"),
    ({"experts": []}, r"'experts' as a list of experts, given \[\]"),
]
REFUSED_OF_EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"weights": np.zeros(6)}, r"'weights' as numbers of shape \(7\), given shape \(6,\) of float64"),
    ({"vectors": np.zeros((2, 3))}, r"'vectors' as numbers of shape \(5, 3\), given shape \(2, 3\) of float64"),
    ({"commons": np.zeros((5, 4))}, r"'commons' as numbers of shape \(5, 3\)"),
    ({"numbers": np.zeros((2, 4))}, r"'numbers' as numbers of shape \(3, 4\)"),
    ({"early_steps": np.zeros(15)}, r"'early_steps' as numbers of shape \(16\), given shape \(15,\) of float64"),
    ({"products": 1}, "'products' as true or false, given 1"),
    ({"layers": [7]}, "layer 0: expected weights and a bias, given 7"),
    (
        {"layers": [{"weights": np.zeros((18, 2)), "bias": np.zeros(2)}]},
        r"layer 0: expected 'weights' as numbers of shape \(18, 1\), given shape \(18, 2\)",
    ),
    ({"intercept": "0"}, "'intercept' as a number, given '0'"),
    ({"share": 1.5}, "'share' as a number from 0 to 1, given 1.5"),
]


def refused(changed: dict[str, Any], message: str) -> None:
    parameters = embedded(seed=1)
    parameters |= {"embeddings": parameters["embeddings"] | changed}
    with pytest.raises(ModelError, match=message):
        LinearPredictor(parameters, "ctr")


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_damaged_embeddings_are_refused_with_the_reason(changed: dict[str, Any], message: str) -> None:
    """A version with the vectors of another field answered with wrong numbers."""
    refused(changed, rf"^ctr: embeddings: expected {message}")


@pytest.mark.parametrize(("changed", "message"), REFUSED_OF_EXPERTS)
def test_damaged_experts_are_refused_with_the_reason(changed: dict[str, Any], message: str) -> None:
    """The reason did not say which of both experts was damaged."""
    experts = embedded(seed=1)["embeddings"]["experts"]
    changed = {"experts": [experts[0], experts[1] | changed]}
    refused(changed, rf"^ctr: embeddings: expert 1: (expected )?{message}")


def test_shares_of_more_than_all_are_refused() -> None:
    """The other members had a share below 0."""
    experts = embedded(seed=1)["embeddings"]["experts"]
    refused({"experts": [experts[0], experts[1] | {"share": 0.75}]}, "shares of at most 1 in all, given 1.25")


@pytest.mark.parametrize(
    "changed", [{"scores": 2}, {"experts": embedded("softmax")["embeddings"]["experts"][1:]}], ids=str
)
def test_embeddings_of_other_classes_are_refused(changed: dict[str, Any]) -> None:
    """The scores of one expert were those of another class."""
    parameters = embedded("softmax", seed=1)
    with pytest.raises(ModelError, match="expected experts for 3 scores, as many as the model has, given"):
        LinearPredictor(parameters | {"embeddings": parameters["embeddings"] | changed})


def test_a_model_without_known_features_predicts_with_the_common_vectors() -> None:
    """The first version of a service had no feature yet, and could not be served."""
    parameters = embedded("logit", "fm", 1)
    given = parameters["embeddings"]
    nothing: dict[str, Any] = {name: np.zeros(0, np.int64) for name in ("keys", "admitted")}
    nothing["early"] = np.zeros((0, 3), np.uint8)
    empty = {"weights": np.zeros(0, np.float32), "vectors": np.zeros((0, 3), np.float32)}
    parameters |= {"embeddings": given | nothing | {"experts": [each | empty for each in given["experts"]]}}
    predict = LinearPredictor(parameters)
    for row in EMBEDDED_ROWS:
        others = LinearPredictor({name: value for name, value in parameters.items() if name != "embeddings"})(row)
        first, second = (1 / (1 + np.exp(-each)) for [each] in scores_by_hand(parameters, row))
        assert predict(row) == pytest.approx(0.3 * others + 0.5 * first + 0.2 * second, rel=1e-12)
    np.testing.assert_allclose(predict(EMBEDDED_ROWS), [predict(row) for row in EMBEDDED_ROWS], rtol=1e-12)
    assert predict([]).shape == (0,)


# ---- what is served is what was learned


def events(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of users and items with numbers, lists of texts, times, and missing values of all kinds."""
    random, made = Random(seed), []
    for _ in range(count):
        row: dict[str, Any] = {
            "user": f"u{random.randrange(120)}",
            "item": f"i{random.randrange(40)}",
            "km": random.gauss(5, 2),
            "tags": [f"t{random.randrange(9)}" for _ in range(random.randrange(4))],
            "at": f"2024-05-{random.randrange(1, 28):02}T{random.randrange(24):02}:00",
        }
        row |= random.choice(
            [{}, {}, {}, {"km": None}, {"user": None}, {"km": float("nan")}, {"item": "x", "late": 1.0}]
        )
        made.append(row)
    return made


UNSEEN: list[dict[str, Any]] = [
    *events(200, 9),
    {"user": "nobody", "item": "new", "strange": None, "other": float("nan")},
    {"user": ["u1", "u2", "new"], "tags": "t1", "late": -7.5},
    {"km": 1e101, "at": None},
    {},
]
"""Rows with texts and fields that no learned row had, and without fields."""


@pytest.mark.parametrize(
    ("kind", "task", "shapes"),
    [("fm", "b", False), ("deepfm", "n", True), ("deepfm", "b", False), ("wide and deep", "b", True)],
)
async def test_a_served_version_predicts_what_its_learner_predicts(kind: Any, task: str, shapes: bool) -> None:
    """A text that no row had was of no field for the learner, and a common vector for the service."""
    rows = [row | {"label": label_of(row, task)} for row in events(1_200, 3)]
    settings = Embeddings(kind=kind, admit=2, at_most="5 MB")
    topic = await memory_topic()
    flow = Flow("shop")
    training = train_online(
        flow.from_items(rows), label="label", embeddings=settings, shapes=shapes, mode="synchronous", mini_batch=100
    )
    training.models.publish_model(topic, model="shop")
    job = await flow.start()
    await job.wait()
    learner = AdaptiveLinearModel(embeddings=settings, shapes=shapes)
    learner.learn(
        [{name: value for name, value in row.items() if name != "label"} for row in rows], [r["label"] for r in rows]
    )
    async with ServedModel(topic, "shop") as served:
        await served.ready(timeout_s=10)
        expected = learner.predict(UNSEEN)
        alone = [served.predict(row).value for row in UNSEEN]
        np.testing.assert_allclose(alone, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(served.predict(UNSEEN).value, expected, rtol=1e-6, atol=1e-6)
        embeddings = served.update.parameters["embeddings"]  # type: ignore[union-attr, call-overload, index]
        assert sum(each["share"] for each in embeddings["experts"]) > 0.0
        assert 0 < len(embeddings["experts"][0]["vectors"]) < len(embeddings["keys"])


def label_of(row: dict[str, Any], task: str) -> Any:
    """Return a label that depends on user and item together."""
    likes = (len(row["user"] or "") + int(str(row["item"])[1:] or 7)) % 3
    return likes == 0 if task == "b" else 3.0 * likes + len(row["tags"])
