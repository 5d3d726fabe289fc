"""Candidates that are ranked for many rows: the same to the bit as without a catalogue, by each version."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.embedding_cases import FACTORS, embedded
from models.folder_cases import caught_up, learner_versions
from models.model_case import encoder, memory_topic, write
from models.shape_cases import shaped
from models.test_ranking import CANDIDATES, TOWNS, USER

from streamiter.errors import ConfigurationError, ModelError
from streamiter.learn import AdaptiveLinearModel
from streamiter.models import LinearPredictor, NoModel, ServedModel, roll_back
from streamiter.models.vector_index import VectorIndex
from streamiter.values.hashes import hash_of

ROWS: list[dict[str, Any]] = [USER, {}, {"km": 3.5, "at": "2024-02-29T01:00"}, {"other": None, "load": 1e9}]
MODELS: dict[str, Any] = {
    "products of probabilities": lambda: embedded("logit", "fm", 1),
    "products of numbers": lambda: embedded("clipped", "fm", 3),
    "products with tables": lambda: embedded("logit", "fm", 2),
    "networks": lambda: embedded("logit", "deepfm", 1),
    "networks with tables": lambda: embedded("clipped", "wide and deep", 2),
    "no embeddings": lambda: shaped("logit", 1),
}


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("name", list(CANDIDATES))
def test_a_catalogue_ranks_to_the_bit_as_the_predictor_does(model: str, name: str) -> None:
    """A page that took its items from a catalogue showed other ones than the answer over HTTP."""
    predict, candidates = LinearPredictor(MODELS[model]()), CANDIDATES[name]
    catalogue = predict.catalogue(candidates)
    for row in ROWS:
        for k in (1, 3, 10_000):
            # NaN equals no other NaN; the text of a float has all of its bits.
            assert repr(catalogue.top_k(row, k)) == repr(predict.top_k(row, candidates, k))


def shop(seed: int = 1, items: int = 5_000, link: str = "logit", **changed: Any) -> dict[str, Any]:
    """Return a model of users and items with products, of which a tenth of the items has no vector."""
    random = np.random.default_rng(seed)

    def key(number: int, name: str, text: str) -> int:
        return number << 52 | hash_of(name.encode() + b"\xff" + text.encode()) & (1 << 52) - 1

    known = [key(2, "item", f"i{n}") for n in range(items)] + [key(1, "user", f"u{n}") for n in range(20)]
    keys = np.sort(np.array(known))
    admitted = keys[random.random(len(keys)) > 0.1]

    def expert() -> dict[str, Any]:
        def normal(*shape: int) -> Any:
            return random.normal(size=shape).astype(np.float32)

        return {
            "weights": normal(len(keys)) / 2,
            "vectors": normal(len(admitted), FACTORS) / 2,
            "commons": normal(3, FACTORS) / 5,
            "numbers": normal(4, 1 + FACTORS) / 5,
            "products": True,
            "layers": [],
            "early_steps": normal(16) / 5,
            "intercept": -1.0,
            "share": 0.4,
        }

    embeddings = {"kind": "fm", "factors": FACTORS, "text_fields": ["user", "item"], "keys": keys, "admitted": admitted}
    embeddings |= {"early": random.integers(0, 256, (len(keys), FACTORS)).astype(np.uint8), "scale": 1.0}
    embeddings |= {"experts": [expert(), expert()]}
    places = np.unique(keys & 1023)
    limit = np.concatenate([np.full(4, 3.0), np.ones(len(places))])
    model = {"fields": ["a", "b", "c", "d"], "text_fields": ["user", "item"], "places": places, "bits": 10}
    model |= {"link": link, "limit": limit, "center": np.zeros(len(limit)), "weights": random.normal(size=len(limit))}
    model |= {
        "intercept": 0.1,
        "embeddings": embeddings,
        **({} if link == "logit" else {"lowest": 0.0, "highest": 9.0}),
    }
    return model | changed


def goods(count: int = 5_000, seed: int = 1) -> dict[str, Any]:
    """Return items with four numbers, of which some are missing in the model."""
    random = np.random.default_rng(seed)
    numbers = {name: random.normal(size=count) for name in "abcd"}
    return {"item": [f"i{n}" for n in random.integers(0, count + 100, count)], **numbers}


@pytest.mark.parametrize("link", ["logit", "clipped", "log"])
@pytest.mark.parametrize("factor", [1e-4, 1.0, 30.0, 1e30])
def test_estimates_in_32_bits_lose_none_of_the_best(link: str, factor: float) -> None:
    """Of probabilities that only differ in the last digits, or overflow 32 bits, the wrong ones were the best."""
    model = shop(link=link)
    for expert in model["embeddings"]["experts"]:
        expert["weights"] = expert["weights"] * np.float32(factor)
        expert["vectors"] = expert["vectors"] * np.float32(factor)
    predict, items = LinearPredictor(model), goods()
    catalogue = predict.catalogue(items)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(10):
            row = {"user": f"u{number}"}
            assert catalogue.top_k(row) == predict.top_k(row, items)
            assert catalogue.top_k(row, 1) == predict.top_k(row, items, 1)


def test_equal_predictions_come_in_the_order_of_the_candidates() -> None:
    """A catalogue of the same items twice had the later ones first."""
    predict = LinearPredictor(shop())
    items = {"item": [f"i{n}" for n in range(300)] * 3}
    catalogue = predict.catalogue(items)
    assert len(catalogue) == 900
    assert catalogue.top_k({"user": "u1"}, 50) == predict.top_k({"user": "u1"}, items, 50)
    assert predict.catalogue({"item": []}).top_k({"user": "u1"}) == []


def histories(predict: LinearPredictor, items: Any) -> list[Any]:
    return [predict.top_k({"user": f"u{number}"}, items) for number in range(0, 80, 8)]


@pytest.mark.parametrize("on_disk", [False, True])
async def test_a_catalogue_follows_each_version_and_a_roll_back(tmp_path: Path, on_disk: bool) -> None:
    """A shop showed items by vectors of yesterday: features came and left, and a version was rolled back."""
    if on_disk:
        pytest.importorskip("rocksdict")
    one, made = encoder(changes=True, record_bytes_max=3000), learner_versions()
    items = {"item": [f"i{number}" for number in range(9)], "user": [f"u{number}" for number in range(0, 270, 30)]}
    history: dict[tuple[int, int], Any] = {}
    topic = await memory_topic()
    async with ServedModel(topic, "ctr", folder=tmp_path if on_disk else None) as served:
        catalogue = served.catalogue(items)
        with pytest.raises(NoModel):
            catalogue.top_k({})
        for version in range(1, 7):
            parameters = next(made)
            await write(topic, one.encode([parameters]))
            await caught_up(served, (1, version))
            history[1, version] = LinearPredictor(parameters).top_k({}, items)
            assert catalogue.top_k({}) == history[1, version] == served.top_k({}, items)
        await roll_back(topic, "ctr", "1.2")
        assert served.update is not None
        await caught_up(served, (2, 1))
        assert catalogue.top_k({}) == history[1, 2] == served.top_k({}, items)
        assert served.statistics().failed == 0


def test_a_version_that_is_found_meanwhile_changes_no_answer() -> None:
    """An answer had vectors of two versions: those of the next one were found while the version before answered."""
    versions = [LinearPredictor(shop(seed)) for seed in (1, 2)]
    items, now = goods(), versions[0]
    catalogue = LinearPredictor(shop(1)).catalogue(items)
    catalogue._predictor = lambda: now
    catalogue.find(versions[1])
    for now in [*versions, *versions]:
        assert catalogue.top_k({"user": "u1"}) == now.top_k({"user": "u1"}, items)


def test_fields_that_become_known_are_read() -> None:
    """Items were read once, by the first version; its next one knew one more of their fields, and nobody saw it."""
    items = {"item": [f"i{n % 5}" for n in range(20)], "price": [float(n) for n in range(20)]}
    model = AdaptiveLinearModel(shapes=False)
    model.learn([{"item": f"i{n % 5}"} for n in range(50)], [n % 5 == 0 for n in range(50)])
    now = LinearPredictor(model.parameters())
    catalogue = now.catalogue(items)
    catalogue._predictor = lambda: now
    model.learn([{"item": "i1", "price": n} for n in range(200)], [n % 20 > 15 for n in range(200)])
    now = LinearPredictor(model.parameters())
    assert catalogue.top_k({}) == now.top_k({}, items)
    assert catalogue.top_k({})[0].candidate["price"] >= 15


async def test_models_and_candidates_that_cannot_be_ranked_are_refused_as_by_top_k() -> None:
    """The error of the first answer was that of an array without the method."""
    with pytest.raises(ModelError, match="expected candidates as columns of one length by field"):
        LinearPredictor(shop()).catalogue({"item": ["a"], "price": []})
    catalogue = LinearPredictor(shop()).catalogue({"item": ["i1"]})
    with pytest.raises(ModelError, match=r"top_k\(k=\): expected a whole number"):
        catalogue.top_k({}, 0)
    with pytest.raises(ModelError, match="given weights without names"):
        LinearPredictor({"weights": np.ones(2)}).catalogue({"x": [1]}).top_k({})
    topic = await memory_topic(encoder(1).encode([embedded()]))
    async with ServedModel(topic, "ctr", predict=lambda parameters, x: 0.0) as served:
        catalogue = served.catalogue({"town": TOWNS})
        await served.ready(timeout_s=10)
        with pytest.raises(ModelError, match="catalogue: expected a LinearPredictor, given a predictor of your own"):
            catalogue.top_k(USER)


def test_an_approximate_catalogue_names_its_extra_and_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a missing package was an ImportError of a module that nobody knew."""
    monkeypatch.setattr("streamiter.values.helpers.importing.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"catalogue\(approximate='faiss'\).*'streamiter\[faiss\]'"):
        LinearPredictor(shop()).catalogue({"item": ["i1"]}, approximate="faiss")
    with pytest.raises(ConfigurationError, match=r'expected "faiss" or None, given \'annoy\''):
        LinearPredictor(shop()).catalogue({"item": ["i1"]}, approximate="annoy")  # type: ignore[arg-type]


def questions() -> Iterator[dict[str, Any]]:
    return ({"user": f"u{number}", "a": number / 10} for number in range(20))


def test_an_approximate_catalogue_finds_most_of_the_best_of_each_version() -> None:
    """After some versions the index had the vectors of the first one, and found half of the best."""
    pytest.importorskip("faiss", reason="faiss-cpu is not installed: pip install 'streamiter[faiss]'")
    model, items = shop(items=20_000), {"item": [f"i{n}" for n in range(20_000)]}
    random, experts = np.random.default_rng(1), model["embeddings"]["experts"]
    for name in ("weights", "vectors"):  # Experts that learn the same are alike.
        experts[1][name] = experts[0][name] + 0.1 * random.normal(size=experts[0][name].shape).astype(np.float32)
    now = LinearPredictor(model)
    catalogue = now.catalogue(items, approximate="faiss")
    catalogue._predictor = lambda: now
    for part in (0.0, 0.01, 0.01, 0.3, 0.9):
        changed = random.random(len(experts[0]["vectors"])) < part
        for expert in experts:
            expert["vectors"] = np.where(changed[:, None], -expert["vectors"], expert["vectors"])
        now, found = LinearPredictor(model), 0
        for row in questions():
            best = {each.position: each for each in now.top_k(row, items)}
            answer = catalogue.top_k(row)
            assert [each.value for each in answer] == sorted((each.value for each in answer), reverse=True)
            assert all(best[each.position] == each for each in answer if each.position in best)
            found += sum(each.position in best for each in answer)
        assert found >= 165, part


def test_an_approximate_catalogue_refuses_scores_that_are_no_products() -> None:
    """The index ranked a model with a network by its vectors alone."""
    pytest.importorskip("faiss", reason="faiss-cpu is not installed: pip install 'streamiter[faiss]'")
    for parameters, candidates in ((embedded(), {"town": TOWNS}), (shop(), [{"item": None}])):
        catalogue = LinearPredictor(parameters).catalogue(candidates, approximate="faiss")
        with pytest.raises(ModelError, match="expected a model of numbers and embeddings without networks"):
            catalogue.top_k({})
    few = LinearPredictor(shop())
    items = {"item": ["i3", "i1", "new"]}
    assert few.catalogue(items, approximate="faiss").top_k({}) == few.top_k({}, items)


def test_the_vectors_of_an_index_are_those_that_it_was_given_last() -> None:
    """A vector that was replaced was found at its old place, too."""
    pytest.importorskip("faiss", reason="faiss-cpu is not installed: pip install 'streamiter[faiss]'")
    random = np.random.default_rng(2)
    numbers = random.normal(size=(4, 3_000)).astype(np.float32)
    index = VectorIndex(numbers, np.ones(4, np.float32))
    for _ in range(5):
        numbers = numbers.copy()
        changed = random.choice(3_000, 200, replace=False)
        numbers[:, changed] = random.normal(size=(4, 200))
        index.update(numbers)
        for question in random.normal(size=(20, 4)).astype(np.float32):
            products, at = question @ numbers, index.nearest(question, 200).tolist()
            assert len(set(at)) == len(at)
            assert len(set(at) & set(np.argsort(-products)[:10].tolist())) >= 7
