"""Replicas of a service: processes that predict with its published versions, and learn nothing."""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from models.model_case import write
from service.service_models import learned
from service.test_service import answers, running, until
from service.test_service_restarts import NAME, Place
from support.kafka_server import free_ports
from support.processes import async_process
from support.waiting import PATIENCE_S

from streamiter.models import ModelSnapshot, ModelUpdateEncoder
from streamiter.service import ServiceReplica, read_settings
from streamiter.topics import topic
from streamiter.values.helpers.clock import SystemClock

ROW = {"km": 640.0, "sky": "rain", "night": True}


async def publish(place: Place, encoder: ModelUpdateEncoder, count: int) -> float:
    """Publish a model of this many rows; return its prediction of ``ROW``."""
    model = learned(count=count)
    await write(topic(place.url("updates")), encoder.encode([ModelSnapshot(model.parameters(), count)]))
    return float(model.predict([ROW])[0])


async def predicted(client: httpx.AsyncClient, version: int) -> float:
    """Return the prediction of ``ROW`` as soon as the process answers with this version."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                answer = await client.post("/predict", json=ROW)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == 200 and answer.json()["version"] >= version:
                return float(answer.json()["predictions"][0]["probability"])
            await asyncio.sleep(0.01)


async def test_replicas_answer_as_the_service_would_while_it_is_away(tmp_path: Path) -> None:
    """One process answered all requests, and none while it was started again."""
    place = Place(tmp_path)
    await place.create("updates")  # There is no input: a replica reads none.
    encoder = ModelUpdateEncoder(NAME, 1, clock=SystemClock())
    first = await publish(place, encoder, 200)
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        replicas, clients = [], []
        for port in ports:
            file = tmp_path / f"{port}.toml"
            file.write_text(toml(place, port))
            command = [sys.executable, "-m", "streamiter", "serve", str(file), "--follow"]
            replicas.append(await stack.enter_async_context(async_process(command, cwd=tmp_path)))
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, trust_env=False)
            clients.append(await stack.enter_async_context(client))
        assert [await predicted(client, 1) for client in clients] == pytest.approx([first, first])
        assert [(await client.get("/readyz")).status_code for client in clients] == [200, 200]
        second = await publish(place, encoder, 300)
        assert second != first
        assert [await predicted(client, 2) for client in clients] == pytest.approx([second, second])
        replicas[0].kill()
        assert await predicted(clients[1], 2) == pytest.approx(second)
        replicas[1].send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await replicas[1].wait() == 0
    assert not (tmp_path / "checkpoints").exists()


def toml(place: Place, port: int) -> str:
    return f"""
[service]
name = "{NAME}"
[input]
topic = "{place.url("flights")}"
[learn]
kind = "classification"
label = {{ field = "late" }}
[publish]
topic = "{place.url("updates")}"
[checkpoints]
store = "{place.folder / "checkpoints"}"
[http]
address = "127.0.0.1:{port}"
"""


async def test_a_replica_is_ready_with_its_first_version_and_says_what_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page without a flow told forever that the flow would start, and readiness that no job ran."""
    monkeypatch.setattr("streamiter.service.surfaces.SAMPLE_S", 0.05)
    place = Place(tmp_path)
    await place.create("updates")
    replica = ServiceReplica(read_settings(place.settings()))
    async with running(replica):
        await until(lambda: replica.address)
        await until(lambda: replica.observations.phase.phase == "following")
        status, text = await answers(replica, "/readyz")
        assert status == 503
        assert "no model to predict with" in text
        assert (await answers(replica, "/livez"))[0] == 200
        encoder = ModelUpdateEncoder(NAME, 1, clock=SystemClock())
        await publish(place, encoder, 200)
        await until(lambda: replica.observations.versions)
        assert (await answers(replica, "/readyz"))[0] == 200
        state: dict[str, Any] = orjson.loads((await answers(replica, "/api/state"))[1])
        assert (state["level"], state["phase"], state["steps"]) == ("well", "following", [])
        assert "this replica predicts with the newest version" in state["sentence"]
        status, text = await answers(replica, "/flow")
        assert (status, "given a replica, which follows its model only" in text) == (404, True)
        assert "streamiter_model_version" in (await answers(replica, "/metrics"))[1]


async def test_a_replica_takes_over_what_concerns_it_and_says_what_needs_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A level of the log that was changed in the file needed a restart of each replica."""
    place = Place(tmp_path)
    await place.create("updates")
    replica = ServiceReplica(read_settings(place.settings()))
    async with running(replica):
        await until(lambda: replica.observations.phase.phase == "following")
        settings = {**place.settings(publish={"every": "5s"}), "health": {"loop_limit": "7s"}}
        changes, again = (replica.apply(read_settings(settings)) for _ in range(2))
    assert "health.loop_limit has changed" in caplog.text
    assert {each.key for each in changes} >= {"health.loop_limit", "publish.every"}
    assert not [each.key for each in again if each.needs is None]
    assert replica.observations.limits.loop_limit_s == 7.0
