"""A service with a challenger: on a real broker, in answers, on the page's documents, and promoted by a command."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from cli.program import streamiter
from service.test_service import answers, running, until
from service.test_service_restarts import Place, rows
from support.kafka_server import KafkaServer

from streamiter.errors import CheckpointError, JobFailed
from streamiter.learn.challengers import ComparedRows
from streamiter.models import model_updates, promote, roll_back
from streamiter.service import OnlineLearningService, ServiceReplica, read_settings
from streamiter.service.service import remedy_of
from streamiter.service.surfaces import ServiceSurfaces
from streamiter.topics import topic

NETWORK = {"learner": "network", "settings": {"kind": "fm", "factors": 2}}


class Duel(Place):
    """A place of a service, and of its challenger, which has embeddings."""

    def __init__(self, folder: Path, prefix: str = "", bootstrap: str | None = None) -> None:
        super().__init__(folder)
        self.bootstrap, self.prefix = bootstrap, prefix
        self.name, self.other = f"{prefix}late", f"{prefix}late-b"

    def url(self, name: str) -> str:
        return super().url(name) if self.bootstrap is None else f"kafka://{self.bootstrap}/{self.prefix}{name}"

    def settings(self, **changes: Any) -> dict[str, Any]:
        return super().settings(**{"service": {"name": self.name}, **changes})

    def with_challenger(self, learn: dict[str, Any] = NETWORK, **challenger: Any) -> dict[str, Any]:
        """Return the settings of the service with a challenger."""
        second = self.settings(service={"name": self.other}, learn=learn)
        return {**self.settings(), "challenger": {"file": second, "after": 200, **challenger}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a service look at its job more often than once a second."""
    monkeypatch.setattr("streamiter.service.surfaces.SAMPLE_S", 0.05)


def told(service: Any) -> ComparedRows | None:
    """Return the comparison that the challenger's last version tells, once the service follows it."""
    challenger = service.observations.challenger
    return None if challenger is None else challenger.compared


def learner(service: Any) -> str | None:
    model = service.observations.model
    return None if model is None else model.parameters.get("learner", "")


async def test_a_challenger_is_compared_promoted_and_rolled_back(
    kafka_broker: KafkaServer, topic_prefix: str, tmp_path: Path
) -> None:
    """The champion lost its state with the challenger, or published its own versions over a promoted challenger."""
    place = Duel(tmp_path, topic_prefix, kafka_broker.bootstrap)
    await place.create("flights", "updates")
    updates = topic(place.url("updates"))
    await place.write(rows(1_000))
    alone = OnlineLearningService(read_settings(place.settings()))
    async with running(alone):
        await until(lambda: alone.observations.model and alone.observations.model.records == 1_000)
    await place.write(rows(150, 2))
    given = place.with_challenger(share=0.5, key="user")
    service = OnlineLearningService(read_settings(given))
    async with running(service):
        await until(lambda: service.observations.challenger and service.observations.challenger.served.update)
        await place.write(rows(1_350, 7))
        # The champion kept its state, and 1,500 rows came, of which the first 200 only teach the challenger.
        await until(lambda: service.observations.model and service.observations.model.records == 2_500)
        await until(lambda: (found := told(service)) and found.compared_rows == 1_300)
        assert told(service).verdict == "better"  # type: ignore[union-attr]
        await _answers_name_their_model(service, place)
        replica = ServiceReplica(read_settings(given))
        async with running(replica):
            await until(lambda: replica.address and told(replica) == told(service))
            await _answers_name_their_model(replica, place)
        # Its first version was published before anything was compared.
        command = ["models", "promote", place.url("updates"), place.other, "--model", place.name]
        refused = await asyncio.to_thread(streamiter, *command, "--version", "1.1", cwd=tmp_path)
        assert refused.returncode == 1
        assert "given version 1.1, one that tells no comparison; wait for more rows" in " ".join(refused.stderr.split())
        promoted = await asyncio.to_thread(streamiter, *command, cwd=tmp_path)
        assert f"is now {place.name} 2.1, the newest version" in promoted.stdout
        await until(lambda: learner(service) == place.other)
        await place.write(rows(500, 3))
        await until(lambda: service.observations.model and service.observations.model.records == 2_000)
        assert learner(service) == place.other
        state = orjson.loads((await answers(service, "/api/state"))[1])
        assert state["challenger"]["is_served"]
    again = OnlineLearningService(read_settings(given))
    await place.write(rows(500, 4))
    async with running(again):
        await until(lambda: again.observations.model and again.observations.model.records == 2_500)
        assert learner(again) == place.other
        await until(lambda: (found := told(again)) and found.compared_rows == 2_300)
        await roll_back(updates, place.name, "1")
        await place.write(rows(500, 5))
        await until(lambda: learner(again) == "" and again.observations.model.records == 3_000)  # type: ignore[union-attr]
        again_promoted = await promote(updates, place.name, place.other)
        await place.write(rows(500, 6))
        await until(lambda: learner(again) == place.other and again.observations.model.records == 3_500)  # type: ignore[union-attr]
    # With [learn] of the second file, the service goes on from the challenger, and has room for another one.
    await place.write(rows(500, 7))
    after = OnlineLearningService(read_settings(place.settings(learn=NETWORK)))
    async with running(after):
        await until(lambda: after.observations.model and after.observations.model.records == 4_000)
        assert learner(after) == ""
    ranks = []
    async with model_updates(updates, place.name, start="earliest") as every:
        async for update in every:
            ranks.append((update.rank, update.parameters.get("learner", ""), update.parameters.get("promoted")))
            if update.records == 4_000:
                break
    generations = {rank[0]: who for rank, who, _ in ranks}
    assert generations == {1: "", 2: place.other, 3: "", 4: ""}
    for generation in generations:
        versions = [version for (each, version), _, _ in ranks if each == generation]
        assert versions == list(range(1, len(versions) + 1))
    assert [rank for rank, _, version in ranks if version is not None] == [(2, 1), again_promoted.rank]


async def _answers_name_their_model(service: ServiceSurfaces, place: Duel) -> None:
    users = [{"user": f"u{number}", "km": 7.0, "hour": 1.0, "town": "Rome"} for number in range(60)]
    async with httpx.AsyncClient(base_url=service.address or "", verify=False, trust_env=False) as client:
        whole = (await client.post("/predict", json={"rows": users})).json()
        assert whole["model"] == place.name
        chosen = [each.get("model", place.name) for each in whole["predictions"]]
        assert 15 < chosen.count(place.other) < 45
        for _ in range(2):  # The second time by a head that is known.
            for user, name, predicted in zip(users[:8], chosen, whole["predictions"], strict=False):
                answer = (await client.post("/predict", json=user)).json()
                assert answer["model"] == name
                assert answer["predictions"][0]["probability"] == pytest.approx(predicted["probability"])
        best = (await client.post("/predict", json={"row": users[0], "candidates": [{"hour": 2.0}]})).json()
        assert best["model"] == chosen[0]
        # By its name, the challenger answers for all.
        named = (await client.post(f"/models/{place.other}/predict", json={"rows": users})).json()
        assert {named["model"]} | {each.get("model") for each in named["predictions"]} == {place.other, None}
        listed = (await client.get(f"/models/{place.other}/versions")).json()
        assert (listed["model"], listed["versions"][0]["model"]) == (place.other, place.other)
        found = told(service)
        assert found is not None
        shown = (await client.get("/api/state")).json()["challenger"]
        assert (shown["name"], shown["verdict"], shown["is_served"]) == (place.other, "better", False)
        assert shown["compared"] == pytest.approx(asdict(found))
        text = (await client.get("/metrics")).text
        assert f'streamiter_challenger_rows_total{{model="{place.other}"}} 1300.0' in text
        assert f'streamiter_challenger_loss_difference{{bound="most",model="{place.other}"}} -0.' in text


def test_what_to_do_is_told_when_a_challenger_fails() -> None:
    """The service ended with an error of a step that its file did not name, and people took the whole model away."""
    changed = CheckpointError("the steps are others")
    changed.changes = {"challenger late-b: learn": ["task was 'binary', now 'number'"]}
    assert "give its file another service.name" in (remedy_of(changed) or "")
    failed = JobFailed("it failed", step="challenger late-b: learn")
    assert "without [challenger] in its file" in (remedy_of(failed) or "")
    assert remedy_of(JobFailed("it failed", step="learn")) is None
