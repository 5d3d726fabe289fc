"""The log of predictions: ids in answers, records in a topic, what is lost and what is not, and replays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from cli.program import streamiter
from models.model_case import write
from service.service_models import learned, trips
from service.test_service import running, until
from service.test_service_restarts import NAME, Place
from support.waiting import PATIENCE_S

from streamiter.errors import DecodeError
from streamiter.models import ModelSnapshot, ModelUpdateEncoder, last_update
from streamiter.service import OnlineLearningService, ServiceReplica, read_settings
from streamiter.service.observing.prediction_log import LoggedPredictions
from streamiter.service.replay import replay_of
from streamiter.topics import OutgoingBatch, ReadRequest, TopicBatch, topic
from streamiter.values.helpers.clock import SystemClock


class Served(Place):
    """A place with a published model, and a replica of its service, which logs predictions."""

    async def publish(self, *counts: int) -> None:
        encoder = ModelUpdateEncoder(NAME, 1, clock=SystemClock())
        for count in counts:
            snapshot = ModelSnapshot(learned(count=count).parameters(), count)
            await write(topic(self.url("updates")), encoder.encode([snapshot]))

    def settings_with_log(self, **predictions: Any) -> dict[str, Any]:
        return {**self.settings(), "predictions": {"log": self.url("predictions"), **predictions}}

    async def logged(self) -> list[dict[str, Any]]:
        """Return the documents in the log."""
        reader = await topic(self.url("predictions")).open_reader(ReadRequest(start="earliest", stop="latest"))
        found = []
        while (batch := await reader.read()) is not None:
            for key, value in zip(batch.keys or (), batch.values, strict=True):
                found.append(orjson.loads(value or b""))
                assert (key or b"").decode() == found[-1]["id"]
        await reader.close()
        return found


@pytest.fixture
async def place(tmp_path: Path) -> Served:
    made = Served(tmp_path)
    await made.create("updates", "predictions", "flights", "answers")
    return made


@pytest.fixture
async def without_log(tmp_path: Path) -> Served:
    """Return a place whose log does not exist yet."""
    made = Served(tmp_path)
    await made.create("updates", "flights")
    return made


@asynccontextmanager
async def replica_of(place: Served, **predictions: Any) -> AsyncIterator[tuple[ServiceReplica, httpx.AsyncClient]]:
    """Run a replica; yield it with a client, once it has a version."""
    replica = ServiceReplica(read_settings(place.settings_with_log(**predictions)))
    async with running(replica):
        await until(lambda: replica.address and replica.observations.model)
        async with httpx.AsyncClient(base_url=replica.address or "", verify=False, timeout=PATIENCE_S) as client:
            yield replica, client


async def predictions_of(client: httpx.AsyncClient, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answer = await client.post("/predict", json={"rows": rows})
    assert answer.status_code == 200, answer.text
    predictions: list[dict[str, Any]] = answer.json()["predictions"]
    return predictions


@pytest.mark.parametrize("waits", [False, True])
async def test_each_prediction_is_in_the_log_with_the_row_as_it_was_served(place: Served, waits: bool) -> None:
    """Nobody knew any more what had been answered, so a label could not be joined with the features it was for."""
    await place.publish(300)
    rows = [{**row, "note": None} for row in trips(7)]
    async with replica_of(place, wait=waits) as (replica, client):
        answered = await predictions_of(client, rows)
        if waits:
            assert len(await place.logged()) == len(rows)  # Stored before it was answered.
        # The second request with one head is answered without a task of its own.
        single = [(await client.post("/predict", json=rows[0])).json()["predictions"][0] for _ in range(3)]
        answered += single
        rows += [rows[0]] * 3
        refused = await client.post("/predict?partial=true", json={"rows": [{"km": "far"}, rows[0]]})
        assert ["id" in each for each in refused.json()["predictions"]] == [False, True]
    logged = await place.logged()
    assert [each["id"] for each in logged[:-1]] == [each["id"] for each in answered]
    assert len({each["id"] for each in logged}) == 11
    assert [each["row"] for each in logged] == [*rows, rows[0]]
    for document, prediction in zip(logged, answered, strict=False):
        assert document["prediction"] == {name: value for name, value in prediction.items() if name != "id"}
        assert (document["model"], document["generation"], document["version"]) == (NAME, 1, 1)
    log = replica.observations.prediction_log
    assert log is not None
    assert (log.counts["written"], log.counts["dropped"], log.counts["mismatched"]) == (11, 0, 0)
    assert log.counts["checked"] >= 1


async def test_a_sample_is_chosen_by_id_and_the_others_have_none(place: Served) -> None:
    """With a log of each prediction of a busy service, the log cost more than the service."""
    await place.publish(300)
    async with replica_of(place, sample=0.25) as (_, client):
        answered = await predictions_of(client, trips(400))
    with_id = [each["id"] for each in answered if "id" in each]
    assert 50 < len(with_id) < 150
    assert [each["id"] for each in await place.logged()] == with_id


async def test_requests_are_answered_while_the_log_is_away_and_what_is_lost_is_counted(
    without_log: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that did not answer held all requests, and afterwards nobody knew what was missing."""
    place = without_log
    await place.publish(300)
    monkeypatch.setattr("streamiter.service.observing.prediction_log._QUEUE_BYTES_MAX", 1_000)
    monkeypatch.setattr("streamiter.service.observing.prediction_log._TRY_AGAIN_S", 0.01)
    async with replica_of(place) as (replica, client):
        answered = await predictions_of(client, trips(20))
        log = replica.observations.prediction_log
        assert log is not None
        with_id = [each["id"] for each in answered if "id" in each]
        assert 0 < len(with_id) < 20
        assert log.counts["dropped"] == 20 - len(with_id)
        await place.create("predictions")
        await until(lambda: log.counts["written"] == len(with_id))
        metrics = (await client.get("/metrics")).text
        assert f'streamiter_prediction_log_total{{model="{NAME}",outcome="dropped"}} {log.counts["dropped"]}' in metrics
    assert [each["id"] for each in await place.logged()] == with_id


async def test_a_record_that_is_refused_when_it_is_predicted_again_is_a_mismatch_and_ends_nothing(
    place: Served,
) -> None:
    """The check of a record raised in the task of the log, and with it the service ended."""
    await place.publish(300)
    async with replica_of(place) as (replica, client):
        log = replica.observations.prediction_log
        assert log is not None
        assert replica.observations.served is not None
        log.add([replica.observations.served.version_now()], [{"km": "far"}], [{"probability": 0.5}])
        await until(lambda: log.counts["checked"] == 1)
        assert log.counts["mismatched"] == 1
        await predictions_of(client, trips(3))
        await until(lambda: log.counts["written"] == 4)


async def test_a_service_learns_from_its_log_with_labels_that_name_the_ids(place: Served) -> None:
    """Training saw other features than serving: those of a table that had changed since."""
    await place.publish(300)
    settings = place.settings_with_log()
    settings["input"] = {"topic": place.url("predictions"), "answers": place.url("answers"), "decoder": "predictions"}
    label = {"field": "far", "key": "prediction_id", "within": "1h"}
    settings["learn"] = {"kind": "classification", "label": label, "settings": {"bits": 12}}
    service = OnlineLearningService(read_settings(settings), without_checkpoint=True)
    async with running(service):
        await until(lambda: service.address and service.observations.phase.phase == "running")
        await until(lambda: service.observations.model)
        async with httpx.AsyncClient(base_url=service.address or "", verify=False, timeout=PATIENCE_S) as client:
            rows = trips(50, seed=2)
            answered = await predictions_of(client, rows)
            answers = [
                {"prediction_id": each["id"], "far": row["km"] > 500.0}
                for each, row in zip(answered, rows, strict=True)
            ]
            await place.write(answers, "answers")
            async with asyncio.timeout(PATIENCE_S):
                while (await newest(place)) != 350:
                    await asyncio.sleep(0.05)


async def newest(place: Served) -> int | None:
    update = await last_update(topic(place.url("updates")), NAME)
    return None if update is None else update.records


async def test_a_replay_compares_any_version_with_what_was_served(place: Served, tmp_path: Path) -> None:
    """Whether another version would have decided in the same way was a guess, and skew in serving was not seen."""
    await place.publish(20)
    settings = place.settings_with_log()
    async with replica_of(place) as (_, client):
        await predictions_of(client, trips(60, seed=3))
    await place.publish(20, 300)
    same = await replay_of(read_settings(settings), "1.1")
    assert (same.rows, same.of_same_version, same.mismatched, same.changed_decisions) == (60, 60, 0, 0)
    assert same.largest_difference < 1e-9
    other = await replay_of(read_settings(settings))
    assert (other.version, other.rows, other.of_same_version, other.mismatched) == ("1.2", 60, 0, 0)
    assert other.changed_decisions > 0
    assert other.mean_difference is not None
    assert other.mean_difference > 0.01
    # A record whose prediction is not that of its row, one with a row that is refused, and one of another program.
    [first, *_] = await place.logged()
    wrong = {**first, "prediction": {"probability": 0.999}}
    writer = await topic(place.url("predictions")).open_writer()
    refused = {**first, "row": {"km": "far"}}
    other = {**first, "model": "other"}
    await writer.write(OutgoingBatch([orjson.dumps(wrong), orjson.dumps(refused), orjson.dumps(other), b"[]"]))
    await writer.close()
    found = await replay_of(read_settings(settings), "1.1")
    assert (found.mismatched, found.refused, found.of_other_models, found.unreadable) == (1, 1, 1, 1)
    file = tmp_path / "service.toml"
    file.write_text(
        f'service.name = "{NAME}"\n[input]\ntopic = "{place.url("flights")}"\n[learn]\nkind = "classification"\n'
        f'label = {{ field = "late" }}\n[publish]\ntopic = "{place.url("updates")}"\n'
        f'[predictions]\nlog = "{place.url("predictions")}"\n'
    )
    ended = await asyncio.to_thread(streamiter, "replay", str(file), "--version", "1.1", cwd=tmp_path)
    assert (ended.returncode, "mismatches" in ended.stdout) == (1, True), ended.stderr


def test_records_of_others_are_errors_of_the_decoder() -> None:
    """A topic that is no log was read as rows without features."""
    record = {"id": "a-1", "time": 7, "model": "m", "generation": 1, "version": 1, "prediction": {"value": 1.0}}
    taken = orjson.dumps({**record, "row": {"prediction_id": "mine"}})
    batch = TopicBatch(partition=0, values=[b'{"id": 1}', None, b"3", taken])
    with pytest.raises(DecodeError, match="expected a record of a log of predictions") as raised:
        LoggedPredictions().decode(batch)
    assert list(raised.value.failures) == [0, 1, 2, 3]
    assert "expected a row without the field 'prediction_id'" in raised.value.failures[3]
