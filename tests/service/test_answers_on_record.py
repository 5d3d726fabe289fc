"""The log with each answer exactly once: the file, the flow that empties it, kills, full disks, and what is refused."""

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import orjson
import pytest
from service.service_models import trips
from service.test_prediction_log import Served, predictions_of
from service.test_service import running, until
from service.test_service_restarts import NAME
from support.kafka_server import KafkaServer, free_ports
from support.processes import async_process
from support.waiting import PATIENCE_S

from streamiter.errors import ConfigurationError, TopicError
from streamiter.service import OnlineLearningService, ServiceReplica, read_settings
from streamiter.service.observing.prediction_log import PredictionLog, file_of_predictions
from streamiter.topics import ReadRequest, Topic, topic
from streamiter.values.helpers.closing import closed_after

CHILD = (
    "import json; from streamiter.service import OnlineLearningService, read_settings; "
    "raise SystemExit(OnlineLearningService(read_settings(json.load(open('service.json')))).run())"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a service count its waiting predictions more often than once a second."""
    monkeypatch.setattr("streamiter.service.surfaces.SAMPLE_S", 0.05)


@pytest.fixture
async def place(tmp_path: Path) -> Served:
    made = Served(tmp_path)
    await made.create("updates", "predictions", "flights")
    await made.publish(300)
    return made


def with_file(place: Served, **predictions: Any) -> dict[str, Any]:
    return place.settings_with_log(exactly_once=str(place.folder / "answers.db"), **predictions)


@asynccontextmanager
async def serving(settings: dict[str, Any]) -> AsyncIterator[tuple[OnlineLearningService, httpx.AsyncClient]]:
    """Run a service; yield it with a client, once the job runs and it has a version."""
    service = OnlineLearningService(read_settings(settings))
    async with running(service) as task:
        await until(lambda: task.done() or (service.observations.phase.phase == "running" and service.address))
        assert not task.done(), task
        await until(lambda: service.observations.model)
        async with httpx.AsyncClient(base_url=service.address or "", verify=False, timeout=PATIENCE_S) as client:
            yield service, client


def log_of(service: OnlineLearningService) -> PredictionLog:
    log = service.observations.prediction_log
    assert log is not None
    return log


async def test_an_answer_is_in_the_file_before_it_is_sent_then_once_in_the_log(place: Served) -> None:
    """After a kill nobody could say whether what a client had acted on is in the log, or is in it twice."""
    settings = with_file(place)
    file = file_of_predictions(read_settings(settings))
    assert file is not None
    async with serving(settings) as (service, client):
        samples = service.observations.samples
        await until(lambda: any(samples) and samples[-1].events_per_s == 0.0)
        found, before = asyncio.create_task(first_of(file)), len(samples)
        answered = await predictions_of(client, trips(7))
        assert await found == [each["id"] for each in answered]
        for row in trips(5, seed=2):  # From the second on, other services answer such requests in a short way.
            answered += (await client.post("/predict", json=row)).json()["predictions"]
        while len(await place.logged()) < 12:
            await asyncio.sleep(0.02)
        await until(lambda: log_of(service).waiting == 0)
        metrics = (await client.get("/metrics")).text
        assert f'streamiter_prediction_log_waiting{{model="{NAME}"}} 0.0' in metrics
        assert f'streamiter_prediction_log_total{{model="{NAME}",outcome="written"}} 12.0' in metrics
        assert f'streamiter_prediction_log_total{{model="{NAME}",outcome="refused"}} 0.0' in metrics
        after = [*samples][before:]
        assert after
        assert not any(sample.lag_records or sample.events_per_s for sample in after), "answers are no events"
    logged = await place.logged()
    assert [each["id"] for each in logged] == [each["id"] for each in answered]
    assert [each["row"] for each in logged] == [*trips(7), *trips(5, seed=2)]


async def first_of(file: Topic) -> list[str]:
    """Return the keys of the first records that come into the file."""
    reader = await file.open_reader(ReadRequest(start="earliest"))
    async with closed_after(reader.close):
        batch = await reader.read()
        assert batch is not None
        return [(key or b"").decode() for key in batch.keys]


async def delivered(place: Served, ids: list[str]) -> None:
    """Wait until the log has these answers."""
    async with asyncio.timeout(PATIENCE_S):
        while not {each["id"] for each in await place.logged()}.issuperset(ids):
            await asyncio.sleep(0.02)


async def test_restarts_with_and_without_the_file_keep_the_model_and_log_nothing_twice(place: Served) -> None:
    """A service that had learned something could not begin with the file, or end with it."""
    answered, generations = [], set()
    for seed, settings in enumerate([place.settings(), with_file(place), with_file(place), place.settings()]):
        async with serving(settings) as (service, client):
            await place.write([{**row, "late": row["km"] > 500.0} for row in trips(50, seed=seed)])
            checkpoints = len(service.observations.checkpoints)
            await until(lambda: len(service.observations.checkpoints) > checkpoints + 1)  # noqa: B023
            given = await predictions_of(client, trips(20, seed=seed))
            answered += [each["id"] for each in given if "id" in each]
            await delivered(place, answered)
            assert service.observations.model is not None
            generations.add(service.observations.model.generation)
    assert [each["id"] for each in await place.logged()] == answered
    assert (len(answered), len(generations)) == (40, 1)


async def test_answers_are_refused_while_the_disk_is_full(
    place: Served, small_disk: tuple[Path, Callable[[], bool]], caplog: pytest.LogCaptureFixture
) -> None:
    """Clients acted on answers that no log has, and nobody knew."""
    folder, enlarge = small_disk
    settings = place.settings_with_log(exactly_once=str(folder / "answers.db"))
    rows = [{**row, "note": "x" * 2_000} for row in trips(100)]
    ids, refused = [], None
    async with serving(settings) as (service, client):
        async with asyncio.timeout(PATIENCE_S):
            while refused is None:
                answer = await client.post("/predict", json={"rows": rows})
                if answer.status_code != 200:
                    refused = answer
                else:
                    ids += [each["id"] for each in answer.json()["predictions"]]
        problem = refused.json()
        assert (refused.status_code, problem["type"]) == (503, "urn:streamiter:problem:not-on-record")
        assert "it cannot be written; ask again" in problem["detail"]
        assert refused.headers["retry-after"] == "1"
        assert str(folder) not in refused.text, "clients need not know places"
        assert "predictions are refused, since they are not on record" in caplog.text
        assert "no room left to write" in caplog.text
        assert service.observations.predictions["not_on_record"] == 100
        assert log_of(service).counts["refused"] >= 100
        enlarge()
        ids += [each["id"] for each in await predictions_of(client, rows)]
        await delivered(place, ids)
    logged = Counter(each["id"] for each in await place.logged())
    assert all(logged[each] == 1 for each in ids)
    assert max(logged.values()) == 1


async def test_a_row_that_the_log_does_not_take_is_refused(place: Served) -> None:
    """A row that was answered, and did not fit into the log, ended the job again and again."""
    await topic(place.url("small")).create(settings={"max_record_bytes": "2000"})
    settings = place.settings_with_log(log=place.url("small"), exactly_once=str(place.folder / "answers.db"))
    async with serving(settings) as (_, client):
        [small, large] = [{**row, "note": "x" * size} for row, size in zip(trips(2), (10, 3_000), strict=True)]
        [answered] = await predictions_of(client, [small])
        refused = await client.post("/predict", json=large)
        assert (refused.status_code, refused.json()["type"]) == (413, "urn:streamiter:problem:not-on-record")
        [again] = await predictions_of(client, [small])
        while (await topic(place.url("small")).describe()).records < 2:
            await asyncio.sleep(0.02)
    assert answered["id"] != again["id"]


def test_a_replica_has_no_log_with_each_answer_exactly_once(tmp_path: Path) -> None:
    """Answers of a replica waited in a file that no flow ever read."""
    place = Served(tmp_path)
    with pytest.raises(ConfigurationError, match="which needs the flow of the service; give replicas a file"):
        ServiceReplica(read_settings(with_file(place)))


async def test_a_service_does_not_start_without_the_folder_of_its_file(place: Served) -> None:
    """A service ran, and refused each prediction."""
    settings = place.settings_with_log(exactly_once=str(place.folder / "nowhere" / "answers.db"))
    with pytest.raises(TopicError, match="nowhere does not exist; create it first"):
        await OnlineLearningService(read_settings(settings)).serve()


async def test_each_id_that_a_client_has_got_is_in_the_log_once_whenever_the_service_is_killed(
    kafka_broker: KafkaServer, topic_prefix: str, tmp_path: Path
) -> None:
    """Answers of the moments before a kill were lost, and those that a new run sent again were there twice."""
    place = KafkaPlace(tmp_path, kafka_broker.bootstrap, topic_prefix)
    await place.create("updates", "predictions", "flights")
    await place.write([{**row, "late": row["km"] > 500.0} for row in trips(200)])
    [port] = free_ports(1)
    settings = with_file(place)
    settings["service"]["name"] = f"{topic_prefix}{NAME}"  # The tests share a broker.
    settings["http"]["address"] = f"127.0.0.1:{port}"
    (tmp_path / "service.json").write_bytes(orjson.dumps(settings))
    draw = random.Random(int(os.environ.get("STREAMITER_SOAK_SEED", "0")))
    received: list[str] = []
    for number in range(ROUNDS):
        async with async_process([sys.executable, "-c", CHILD], cwd=tmp_path, is_forked=True) as process:
            clients = [asyncio.create_task(ask_for_ever(port, received, seed)) for seed in range(8)]
            before = len(received)
            # Some kills come while the job restores its checkpoint, others while it delivers.
            wanted, delivered = before + draw.choice([1, 20, 100, 300]), len(await place.logged())
            async with asyncio.timeout(PATIENCE_S):
                while len(received) < wanted:
                    await asyncio.sleep(0.002)
                while number % 2 and len(await place.logged()) == delivered:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(draw.random() * 0.3)
            process.kill()
            await process.wait()
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
    async with async_process([sys.executable, "-c", CHILD], cwd=tmp_path, is_forked=True) as process:
        file = file_of_predictions(read_settings(settings))
        assert file is not None
        async with asyncio.timeout(PATIENCE_S):
            while (await file.describe()).records:
                await asyncio.sleep(0.05)
            # A kill might leave a transaction open, and for 300 s no other flow on this broker could start.
            process.terminate()
            assert await process.wait() == 0
    logged = Counter(each["id"] for each in await place.logged())
    assert len(received) == len(set(received)) > 100
    assert [each for each in received if logged[each] != 1] == []
    assert max(logged.values()) == 1


ROUNDS: Final = 6


class KafkaPlace(Served):
    """The same on a broker."""

    def __init__(self, folder: Path, bootstrap: str, prefix: str) -> None:
        super().__init__(folder)
        self._place = f"kafka://{bootstrap}/{prefix}"

    def url(self, name: str) -> str:
        return self._place + name


async def ask_for_ever(port: int, received: list[str], seed: int) -> None:
    """Ask one time after the other, and note the ids of all answers; a refused connection is tried again."""
    rows = trips(50, seed)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=PATIENCE_S) as client:
        for number in range(1_000_000):
            try:
                answer = await client.post("/predict", json=rows[number % 50])
            except httpx.TransportError:
                await asyncio.sleep(0.01)
                continue
            if answer.status_code == 200:
                received += [each["id"] for each in answer.json()["predictions"]]
            else:  # There is no version yet.
                await asyncio.sleep(0.01)
