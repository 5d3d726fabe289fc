"""A service that was killed, or whose checkpoint does not fit any more, goes on with what it has learned."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from service.test_service import running, until, until_ready
from support.kafka_server import free_ports
from support.processes import async_process
from support.waiting import PATIENCE_S

from streamiter.models import ModelUpdate, last_update
from streamiter.service import OnlineLearningService, read_settings
from streamiter.service.service import FAILED
from streamiter.topics import OutgoingBatch, topic

NAME = "late-flights"


def rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return events whose label depends on a number, a town, and both together."""
    random = np.random.default_rng(seed)
    made = []
    for km, hour, town in zip(
        random.normal(5.0, 2.0, count),
        random.normal(size=count),
        random.choice(["Rome", "Oslo", "Kyiv"], count),
        strict=True,
    ):
        late = bool(km > 5.0 if town == "Rome" else km * hour > 0.0)
        made.append({"km": float(km), "hour": float(hour), "town": str(town), "late": late})
    return made


class Place:
    """A folder with a SQLite file of topics, and checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def url(self, name: str) -> str:
        return f"sqlite:///{self.folder}/topics.db?topic={name}"

    async def create(self, *names: str, **settings: str) -> None:
        for name in names:
            await topic(self.url(name)).create(settings=settings)

    async def write(self, records: list[dict[str, Any]], name: str = "flights") -> None:
        writer = await topic(self.url(name)).open_writer()
        await writer.write(OutgoingBatch([orjson.dumps(record) for record in records]))
        await writer.close()

    def settings(self, **changes: Any) -> dict[str, Any]:
        given: dict[str, Any] = {
            "service": {"name": NAME},
            "input": {"topic": self.url("flights")},
            "learn": {"kind": "classification", "label": {"field": "late"}},
            "publish": {"topic": self.url("updates"), "every": "100ms"},
            "checkpoints": {"store": str(self.folder / "checkpoints"), "interval": "100ms"},
            "http": {"address": "127.0.0.1:0"},
        }
        return {table: value | changes.get(table, {}) for table, value in given.items()}

    def service(self, *, without_checkpoint: bool = False, **changes: Any) -> OnlineLearningService:
        return OnlineLearningService(read_settings(self.settings(**changes)), without_checkpoint=without_checkpoint)

    async def newest(self) -> ModelUpdate:
        update = await last_update(topic(self.url("updates")), NAME)
        assert update is not None
        return update

    async def learned(self, service: OnlineLearningService, records: int) -> ModelUpdate:
        """Run a service until it has published a version that has learned from this many records."""
        async with running(service) as task:
            async with asyncio.timeout(PATIENCE_S):
                while (
                    update := await last_update(topic(self.url("updates")), NAME)
                ) is None or update.records != records:
                    assert not task.done(), service.observations.phase
                    await asyncio.sleep(0.02)
        return update


async def test_after_a_kill_the_first_request_is_answered_by_the_last_version(tmp_path: Path) -> None:
    """Each restart refused predictions for some moments, and readiness said that no version was ever published."""
    place = Place(tmp_path)
    await place.create("flights", "updates")
    await place.write(rows(500))
    [port] = free_ports(1)
    base, request = f"http://127.0.0.1:{port}", {"km": 7.0, "hour": 1.0, "town": "Rome"}
    settings = place.settings(http={"address": f"127.0.0.1:{port}"})
    (tmp_path / "service.json").write_bytes(orjson.dumps(settings))
    program = (
        "import json; from streamiter.service import OnlineLearningService, read_settings; "
        "raise SystemExit(OnlineLearningService(read_settings(json.load(open('service.json')))).run())"
    )

    command = [sys.executable, "-c", program]

    async def first(path: str, is_it: Callable[[httpx.Response], bool]) -> httpx.Response:
        """Ask until the process listens, and the answer is the awaited one."""
        async with httpx.AsyncClient(base_url=base, verify=False) as client, asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    given = await (client.get(path) if path == "/readyz" else client.post(path, json=request))
                except httpx.TransportError:
                    given = None
                if given is not None and is_it(given):
                    return given
                await asyncio.sleep(0.002)

    async def killed(process: Any) -> ModelUpdate:
        while (await place.newest()).records != 500:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        return await place.newest()

    async with async_process(command, cwd=tmp_path, is_forked=True) as process:
        before = (await first("/predict", lambda answer: answer.status_code == 200)).json()
        update = await killed(process)
    async with async_process(command, cwd=tmp_path, is_forked=True) as process:
        predicted, ready = await asyncio.gather(first("/predict", bool_of), first("/readyz", bool_of))
        answer = predicted.json()
        assert (predicted.status_code, answer["generation"], answer["version"]) == (200, *update.rank)
        # The job is not running yet, and this alone is why the service is not ready.
        conditions = {problem["condition"] for problem in ready.json()["problems"]}
        assert conditions <= {"job"}
        await first("/readyz", lambda answer: answer.status_code == 200)
        await killed(process)
    assert before["predictions"][0].keys() == answer["predictions"][0].keys()


def bool_of(answer: httpx.Response) -> bool:
    """Take the first answer, whatever it is."""
    return True


async def test_a_service_keeps_its_model_when_crosses_bits_or_the_topic_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A service with one more cross, or another input, had to learn from the beginning under another name."""
    place = Place(tmp_path)
    await place.create("flights", "elsewhere", "updates")
    await place.write(rows(3_000))
    first = await place.learned(place.service(), 3_000)
    # One more cross: all that was learned is kept, and what the cross shows is learned in addition.
    await place.write(rows(3_000, seed=2))
    crossed = {"learn": {"settings": {"crosses": [["km", "hour"], ["km", "town"]]}}}
    second = await place.learned(place.service(**crossed), 6_000)
    assert "kept 2 fields and 3 of 3 weights of texts; lost nothing" in caplog.text
    assert {"km × hour", "km", "hour"} <= set(second.parameters["fields"])  # type: ignore[call-overload]
    assert second.metrics["loss"] < 0.8 * first.metrics["loss"]
    # Other bits: texts are lost, numbers and crosses of numbers are kept.
    caplog.clear()
    await place.write(rows(10, seed=3))
    narrow = {"learn": {"settings": {"crosses": [["km", "hour"]], "bits": 10}}}
    third = await place.learned(place.service(**narrow), 6_010)
    assert "the weights of texts, which are hashed to 10 bits now, and were to 18" in caplog.text
    assert third.parameters["bits"] == 10  # type: ignore[call-overload]
    at = list(second.parameters["fields"]).index("km × hour")  # type: ignore[call-overload]
    moved = abs(third.parameters["weights"][2] - second.parameters["weights"][at])  # type: ignore[call-overload]
    assert third.parameters["fields"] == ["km", "hour", "km × hour"]  # type: ignore[call-overload]
    assert moved < 0.5 * abs(second.parameters["weights"][at])  # type: ignore[call-overload]
    # Another kind of a field: only this field starts anew.
    await place.write(rows(10, seed=5))
    narrow["learn"]["kinds"] = {"town": "words"}
    worded = await place.learned(place.service(**narrow), 6_020)
    assert "so what it has learned of them is not used, or does not fit: 'town'" in caplog.text
    assert worded.parameters["kinds"] == {"town": "words"}  # type: ignore[call-overload]
    # Another topic: an error that says what to do, then the model goes on with the records there.
    await place.write(rows(20, seed=4), "elsewhere")
    moved_to = narrow | {"input": {"topic": place.url("elsewhere")}}
    assert await asyncio.wait_for(place.service(**moved_to).serve(), PATIENCE_S) == FAILED
    assert 'keep the model and read on, write on_lost = "skip" in [input]' in caplog.text
    moved_to["input"]["on_lost"] = "skip"
    await place.learned(place.service(**moved_to), 6_040)
    assert "the topic is read from start='earliest'" in caplog.text
    await place.learned(place.service(**moved_to), 6_040)  # Resumes there.
    # Another kind of label is another model.
    changed = moved_to | {"learn": {"kind": "regression"}}
    assert await asyncio.wait_for(place.service(**changed).serve(), PATIENCE_S) == FAILED
    assert "a changed step 'learn' (task was binary, now regression)" in caplog.text
    assert "give it another name in [service]" in caplog.text


async def test_a_service_behind_retention_or_without_its_checkpoint_starts_from_its_last_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a long outage, and after the loss of a disk, a service learned from the beginning under another name."""
    place = Place(tmp_path)
    await place.create("updates")
    await place.create("flights", retention_records="100")
    await place.write(rows(90))
    await place.learned(place.service(), 90)
    for seed in range(4):
        await place.write(rows(90, seed=seed))
    ends = (await topic(place.url("flights")).describe()).offsets[0]
    left = ends[1] - ends[0]
    assert 90 <= left < 360
    assert await asyncio.wait_for(place.service().serve(), PATIENCE_S) == FAILED
    assert "fell out of retention" in caplog.text
    assert 'keep the model and read on, write on_lost = "skip" in [input]' in caplog.text
    skipping = {"input": {"on_lost": "skip"}}
    update = await place.learned(place.service(**skipping), 90 + left)
    assert f"{ends[0] - 90:,} deleted records are left out" in caplog.text
    # The folder of the checkpoints is gone: the error says how to go on, and the state comes from the last version.
    (tmp_path / "checkpoints").rename(tmp_path / "lost")
    caplog.clear()
    assert await asyncio.wait_for(place.service(**skipping).serve(), PATIENCE_S) == FAILED
    assert "streamiter serve --without-checkpoint" in caplog.text
    latest = {"input": {"start": "latest"}}
    service = place.service(without_checkpoint=True, **latest)
    async with running(service):
        await until(lambda: service.observations.phase.phase == "running")
        await until_ready(service)
        await place.write(rows(10, seed=9))
        await until(lambda: service.observations.model.records == 100 + left)  # type: ignore[union-attr]
    assert (await place.newest()).generation == update.generation + 1
    # Without the option the next run resumes from the new checkpoint.
    await place.write(rows(10, seed=10))
    last = await place.learned(place.service(**latest), 110 + left)
    assert last.generation == update.generation + 1
    # What it has learned is what one run would have learned, to the last bit: the version carried the state.
    assert last.has_state
    without = await place.learned(place.service(publish={"state": False}), 110 + left)
    assert without.records == 110 + left


async def test_questions_that_wait_are_learned_after_a_change_of_the_crosses(tmp_path: Path) -> None:
    """With another cross the row of a question had the columns of the old model, as rows of other fields."""
    place = Place(tmp_path)
    await place.create("flights", "updates")
    learn = {"label": {"event": "arrival", "key": "id", "field": "late"}}
    events = [row | {"id": number} for number, row in enumerate(rows(60))]
    asked = [{name: value for name, value in event.items() if name != "late"} for event in events]
    answered = [{"event": "arrival", "id": event["id"], "late": event["late"]} for event in events]
    await place.write([*asked, *answered[:40]])
    await place.learned(place.service(learn=learn), 40)
    await place.write(answered[40:])
    crossed = {"learn": learn | {"settings": {"crosses": [["km", "hour"]]}}}
    update = await place.learned(place.service(**crossed), 60)
    assert update.parameters["fields"] == ["km", "hour"]  # type: ignore[call-overload]
    assert update.metrics["missing_values"] == 0
