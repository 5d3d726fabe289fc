"""A service with the learner ``network``: it learns which items a user clicks on, resumes, and ranks items."""

import itertools
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
from service.test_service import running, until
from service.test_service_restarts import Place

from streamiter.models import LinearPredictor, last_update, roll_back
from streamiter.service import OnlineLearningService, read_settings
from streamiter.topics import topic
from streamiter.values.settings import SettingsError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recommendations"
sys.path.append(str(EXAMPLE))
import clicks  # noqa: E402

VIEWS = 45_000
random = Random(5)


def expected_loss(predicted: Any, chances: Any) -> float:
    """Return the expected log loss of predictions."""
    return -float(np.mean(chances * np.log(predicted) + (1 - chances) * np.log(1 - predicted)))


class ClickPlace(Place):
    """A folder with the topics of the example, and its service file."""

    file = "service.toml"

    def settings(self, **changes: Any) -> dict[str, Any]:
        given = tomllib.loads((EXAMPLE / self.file).read_text())
        given["input"]["topic"], given["publish"]["topic"] = self.url("clicks"), self.url("models")
        given["checkpoints"] = {"store": str(self.folder / "checkpoints"), "interval": "100ms"}
        given["http"] = {"address": "127.0.0.1:0", "rows_max": 10_000}
        given["learn"]["settings"]["at_most"] = "20 MB"
        given["publish"]["every"] = "200ms"
        return {table: value | changes.get(table, {}) for table, value in given.items()}

    def service(self, **changes: Any) -> OnlineLearningService:  # type: ignore[override]
        return OnlineLearningService(read_settings(self.settings(**changes)))


@pytest.fixture
async def place(tmp_path: Path) -> ClickPlace:
    made = ClickPlace(tmp_path)
    await made.create("clicks", "models")
    return made


def test_the_file_of_the_example_is_valid() -> None:
    """The example named a key that no service knows."""
    settings = read_settings(EXAMPLE / "service.toml")
    assert (settings.learn.learner, settings.learn.label.schedule) == ("network", None)
    assert "examples/recommendations/service.toml" in (EXAMPLE / "compose.yml").read_text()


def test_the_events_of_a_seed_are_always_the_same() -> None:
    """A figure of the page could not be repeated."""
    first, again = (list(itertools.islice(clicks.Shop(3).events(), 2_000)) for _ in range(2))
    assert first == again
    assert first != list(itertools.islice(clicks.Shop(4).events(), 2_000))
    times = [event["at"] for event in first]
    assert times == sorted(times)


async def test_a_service_learns_clicks_and_ranks_items(place: ClickPlace) -> None:
    """The share of clicks alone was as good as the model, and the ten best items were those of any user."""
    shop = clicks.Shop(1)
    events = shop.events()
    await clicks.write(events, topic(place.url("clicks")), views=VIEWS)
    service = place.service()
    async with running(service):
        seen = service.observations
        await until(lambda: seen.model is not None and (seen.model.records or 0) > VIEWS - 5_000)
        await until(lambda: service.address)
        async with httpx.AsyncClient(base_url=service.address or "", trust_env=False, verify=False) as client:
            user = shop.users[0]
            candidates = [{"item": item} for item in shop.items]
            body = {"row": {"user": user, "hour": "20"}, "candidates": candidates, "top": 20}
            answer = (await client.post("/predict", json=body)).json()
            best = [shop.items[each["candidate"]] for each in answer["predictions"]]
            chance = sum(shop.chance(user, item, 20) for item in best) / len(best)
            average = sum(shop.chance(user, item, 20) for item in shop.items) / len(shop.items)
            assert chance > 1.5 * average
            rows = [{"user": random.choice(shop.users), "item": random.choice(shop.items)} for _ in range(5_000)]
            chances = np.array([shop.chance(row["user"], row["item"], 0) for row in rows])
            answer = (await client.post("/predict", json={"rows": rows})).json()
            predicted = np.array([row["probability"] for row in answer["predictions"]])
            assert expected_loss(predicted, chances) < 0.92 * expected_loss(np.full(5_000, chances.mean()), chances)
            metrics = (await client.get("/metrics")).text
            details = (await client.get("/api/details")).json()
        figures = details["embeddings"]
        assert figures["kind"] == "fm"
        assert figures["features"] >= figures["admitted"] > 250
        assert 0.5 < figures["share"] <= 1.0
        assert 'streamiter_model_features{admitted="true",model="clicks"}' in metrics
        assert 'streamiter_model_features_left_total{model="clicks",reason="expired"} 0.0' in metrics


VERDICTS: dict[str, Any] = {"kind": "multiclass", "label": {"field": "verdict", "otherwise": "nothing"}}


def with_verdicts(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events; a click is a purchase or a question."""
    for number, event in enumerate(events):
        yield event | ({"verdict": "bought" if number % 3 else "asked"} if event["event"] == "click" else {})


@pytest.mark.parametrize("learn", [{}, VERDICTS], ids=["clicks", "classes"])
async def test_a_service_with_embeddings_resumes_and_rolls_back(place: ClickPlace, learn: dict[str, Any]) -> None:
    """After a restart all vectors began anew, and a roll back changed the linear member only. A kind of several classes
    was refused.
    """
    shop = clicks.Shop(2)
    events = with_verdicts(shop.events())
    if learn:
        learn = learn | {"label": place.settings()["learn"]["label"] | learn["label"]}
    await clicks.write(events, topic(place.url("clicks")), views=9_000)
    service = place.service(learn=learn)
    async with running(service):
        await until(
            lambda: service.observations.model is not None and (service.observations.model.records or 0) > 2_000
        )
    before = await last_update(topic(place.url("models")), "clicks")
    await clicks.write(events, topic(place.url("clicks")), views=9_000)
    settings = {"kind": "fm", "admit": 2, "at_most": "30 MB", "expire": "20d"}
    again = place.service(learn=learn | {"settings": settings})
    async with running(again):
        seen = again.observations
        records = 0 if before is None else before.records or 0
        await until(lambda: seen.model is not None and (seen.model.records or 0) > records)
        known = len(seen.model.parameters["embeddings"]["keys"])  # type: ignore[union-attr, call-overload, index]
        assert before is not None
        assert known >= len(before.parameters["embeddings"]["keys"])  # type: ignore[call-overload]
        written = await roll_back(topic(place.url("models")), "clicks", f"{before.generation}.{before.version}")
        await until(lambda: seen.model is not None and seen.model.rank >= written.rank)
        async with httpx.AsyncClient(base_url=again.address or "", trust_env=False, verify=False) as client:
            row = {"user": shop.users[0], "item": shop.items[0], "hour": "20"}
            answer = (await client.post("/predict?explain=true", json={"rows": [row]})).json()["predictions"][0]
            details = (await client.get("/api/details")).json()
    assert (set(answer.get("probabilities", {})) >= {"nothing", "bought", "asked"}) == bool(learn)
    assert 0.0 < details["embeddings"]["share"] <= 1.0


async def test_a_service_learns_from_choices_alone_and_resumes(place: ClickPlace) -> None:
    """A topic of purchases has no items that users did not buy: the service had nothing to learn."""
    place.file = "choices.toml"
    shop = clicks.Shop(3)
    events = shop.choices()
    source = topic(place.url("clicks"))

    async def learn(choices: int) -> LinearPredictor:
        await clicks.write(itertools.islice(events, choices), source, views=choices)
        service = place.service()
        seen, rows = service.observations, 10 * (await source.describe()).records - 9
        async with running(service):
            await until(lambda: seen.model is not None and seen.model.records == rows)
        return LinearPredictor(seen.model.parameters)  # type: ignore[union-attr]

    await learn(1_000)
    model = await learn(6_000)
    chances = np.array([[shop.chance(user, item, 20) for item in shop.items] for user in shop.users])
    ranked = [model.top_k({"user": user, "hour": "20"}, {"item": shop.items}, k=10) for user in shop.users]
    found = np.mean([chances[row, each.position] for row, best in enumerate(ranked) for each in best])
    popular = np.sort(chances.mean(axis=0))[-10:].mean()
    assert found > 1.2 * popular
    with pytest.raises(SettingsError, match="expected the name of a new field with negatives, given labels of events"):
        place.service(learn={"label": {"value": "hour == '20'"}})
