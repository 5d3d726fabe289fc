"""Settings that change while a service runs, and the traces of its checkpoints."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.waiting import PATIENCE_S

from streamiter.errors import ConfigurationError
from streamiter.service.service import SUCCEEDED, OnlineLearningService
from streamiter.service.settings.file import read_settings
from streamiter.service.tracing import Traces
from streamiter.topics import OutgoingBatch, topic

FILE = """
service.name = "{name}"
input.topic = "memory://{name}-flights"
learn = {{ kind = "classification", label = {{ field = "late" }} }}
publish = {{ topic = "memory://{name}-updates", every = "{every}", state = {state} }}
checkpoints = {{ store = "{store}", interval = "50ms" }}
http.address = "127.0.0.1:{port}"
health.stall_limit = "{stall}"
"""


async def until_running(service: OnlineLearningService) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while service.observations.phase.phase != "running" or service.observations.model is None:
            await asyncio.sleep(0.01)


async def test_sighup_applies_what_may_change_and_names_what_needs_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The interval of versions was changed in the file, and nothing told that it was not in effect."""
    caplog.set_level(logging.INFO, "streamiter.service")
    file, exporter = tmp_path / "service.toml", InMemorySpanExporter()

    def write(**changed: object) -> None:
        given = {
            "name": "reload",
            "every": "100ms",
            "store": tmp_path / "a",
            "port": 0,
            "stall": "60s",
            "state": "true",
        } | changed
        file.write_text(FILE.format(**given))

    write()
    for name in ("reload-flights", "reload-updates"):
        await topic(f"memory://{name}").create()
    writer = await topic("memory://reload-flights").open_writer()
    await writer.write(OutgoingBatch([b'{"km": 1, "late": true}', b'{"km": 2, "late": false}']))
    service = OnlineLearningService(read_settings(file))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    service._traces = Traces(provider)
    running = asyncio.create_task(service.serve())
    await until_running(service)

    write(every="5s", stall="30s", port=8123, state="false")
    os.kill(os.getpid(), signal.SIGHUP)
    async with asyncio.timeout(PATIENCE_S):
        while service.settings.publish.every_s != 5.0:
            await asyncio.sleep(0.01)
    messages = [record.getMessage() for record in caplog.records]
    assert "publish.every has changed" in messages
    assert "health.stall_limit has changed" in messages
    assert any(
        message.startswith("http.address has changed in the file only: it applies after") for message in messages
    )
    assert service.settings.http.address == "127.0.0.1:0"
    # A second SIGHUP tells again what is not in effect.
    assert {change.key for change in service.apply(read_settings(file))} == {"http.address", "publish.state"}
    assert service.observations.limits.stall_limit_s == 30.0

    file.write_text("service.name = 3")
    service.reload()
    assert caplog.records[-1].getMessage().startswith("the settings have not changed: ")
    assert service.settings.publish.every_s == 5.0

    async with asyncio.timeout(PATIENCE_S):  # On a busy machine there are spans of slow batches, too.
        while not (spans := [each for each in exporter.get_finished_spans() if each.name == "checkpoint"]):
            await asyncio.sleep(0.01)
    assert service.observations.job is not None
    await service.observations.job.stop()
    assert await running == SUCCEEDED
    span = spans[0]
    assert (span.attributes or {})["flow"] == "reload"
    assert 0 <= (span.end_time or 0) - (span.start_time or 0) < 60e9


async def test_a_port_in_use_is_told_before_the_job_starts(tmp_path: Path) -> None:
    """A second service took over the flow of the first, and ended because it could not listen."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    text = FILE.format(name="port", every="1s", store=tmp_path, port=port, stall="60s", state="true")
    service = OnlineLearningService(read_settings(text))
    with pytest.raises(ConfigurationError, match="free port"):
        await service.serve()
    assert service.observations.job is None
    server.close()


def test_traces_are_off_without_a_provider() -> None:
    """A service without OpenTelemetry failed at its first checkpoint."""
    Traces().slow_batch("flow", "train[0]", 1_700_000_000_000, 1.5)
