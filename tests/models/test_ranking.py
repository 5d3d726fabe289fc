"""The best of many candidates for a row."""

from typing import Any, get_args

import numpy as np
import pytest
from models.embedding_cases import embedded
from models.model_case import encoder, memory_topic, write
from models.shape_cases import shaped

from streamiter.errors import ModelError
from streamiter.learn import AdaptiveLinearModel
from streamiter.models import LinearPredictor, ServedModel
from streamiter.models.published_embeddings import EmbeddingKind
from streamiter.values.records import Columns
from streamiter.values.sparse_rows import SparseRows

TOWNS: list[Any] = ["Kyjiw", "never seen", "Roma", "𝄞", "Ἀθῆναι", "Kyjiw"]
USER = {"km": 7.25, "at": "2024-05-01T23:30", "load": None, "other": None, "town": "Roma"}
CANDIDATES: dict[str, Any] = {
    "one text": {"town": TOWNS},
    "an array of texts": {"town": np.array(TOWNS * 20)},
    "a number, too": {"town": TOWNS, "km": [1.0, -1e9, 3.0, 4.0, float("nan"), 1e101]},
    "a table": Columns({"km": np.arange(9_000) % 31.0, "town": np.array(TOWNS)[np.arange(9_000) % 6]}),
    "dicts": [{"town": None}, {"town": ["Roma", "𝄞"]}, {}, {"town": "x", "load": 0.5}, {"at": "2024-05-02"}],
    "a time": {"at": ["2024-05-01", "1969-12-31T01:00", None]},
}


def rows_of(candidates: Any) -> list[dict[str, Any]]:
    if isinstance(candidates, list):
        return candidates
    columns = candidates.arrays if isinstance(candidates, Columns) else candidates
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("name", list(CANDIDATES))
@pytest.mark.parametrize(
    ("link", "kind"), list(zip(["logit", "clipped"] * 2, [*get_args(EmbeddingKind), None], strict=True))
)
def test_each_candidate_has_the_prediction_of_its_whole_row(link: str, kind: EmbeddingKind | None, name: str) -> None:
    """Missing values of the user and of the item are of one field, and their mean was that of the item alone."""
    parameters = shaped(link, 1) if kind is None else embedded(link, kind, 1)
    predict, candidates = LinearPredictor(parameters), CANDIDATES[name]
    rows = rows_of(candidates)
    expected = predict([USER | each for each in rows])
    found = predict.top_k(USER, candidates, k=len(rows))
    assert sorted(each.position for each in found) == list(range(len(rows)))
    values = [each.value for each in found]
    assert values == sorted(values, reverse=True)
    np.testing.assert_allclose(values, expected[[each.position for each in found]], rtol=1e-9, atol=1e-12)
    assert [each.candidate.keys() for each in found] == [rows[each.position].keys() for each in found]


def test_the_best_are_those_of_a_sort_and_of_equal_ones_the_first() -> None:
    """Two pages of results had the same item, since equal predictions were in any order."""
    predict = LinearPredictor(embedded("logit", "fm", 1))
    found = predict.top_k(USER, {"town": TOWNS * 3}, k=5)
    everything = predict.top_k(USER, {"town": TOWNS * 3}, k=100)
    assert found == everything[:5]
    assert len(everything) == 18
    pairs = [(-each.value, each.position) for each in everything]
    assert pairs == sorted(pairs)
    assert predict.top_k(USER, {"town": []}) == []


def test_candidates_of_a_model_with_crosses_are_ranked_with_them() -> None:
    """A cross of user and item was left out, and it was all that the model had learned."""
    model = AdaptiveLinearModel(crosses=[("user", "item")], shapes=False)
    rows = [{"user": f"u{n % 3}", "item": f"i{n % 5}"} for n in range(600)]
    model.learn(rows, [(n % 3 + n % 5) % 2 == 0 for n in range(600)])
    predict = LinearPredictor(model.parameters())
    items = [f"i{n}" for n in range(5)]
    found = predict.top_k({"user": "u1"}, {"item": items}, k=5)
    expected = predict([{"user": "u1", "item": item} for item in items])
    np.testing.assert_allclose([each.value for each in found], np.sort(expected)[::-1], rtol=1e-12)
    assert {each.candidate["item"] for each in found[:2]} == {"i1", "i3"}
    assert model.top_k({"user": "u1"}, {"item": items}, k=5) == found


def test_models_that_cannot_rank_say_so() -> None:
    """The error was of an array without the method."""
    learned = AdaptiveLinearModel()
    learned.learn(SparseRows.from_dense(np.eye(3)), [True, False, True])
    with pytest.raises(ModelError, match="expected a model of named fields with one score, given sparse rows"):
        LinearPredictor(learned.parameters()).top_k({}, {"x": [1]})


async def test_a_served_model_ranks_by_its_newest_version() -> None:
    """A list was ranked by two versions."""
    topic = await memory_topic()
    parameters = embedded("logit")
    await write(topic, encoder(1).encode([parameters]))
    async with ServedModel(topic, "ctr") as served:
        await served.ready(timeout_s=10)
        assert served.top_k(USER, {"town": TOWNS}, k=2) == LinearPredictor(parameters).top_k(USER, {"town": TOWNS}, k=2)
    async with ServedModel(topic, "ctr", predict=lambda parameters, x: 0.0) as served:
        await served.ready(timeout_s=10)
        with pytest.raises(ModelError, match="top_k: expected a LinearPredictor"):
            served.top_k(USER, {"town": TOWNS})
