"""A whole service on a real broker: health while the topic is idle and while the broker is away, and exit codes."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from runtime.probe import Valve
from support.kafka_server import KafkaServer, free_ports
from support.waiting import PATIENCE_S

from streamiter import Operator
from streamiter.models import LinearPredictor, ModelUpdate, last_update, roll_back
from streamiter.operators import Output
from streamiter.service.service import ABORTED, FAILED, STALLED, SUCCEEDED, TAKEN_OVER, OnlineLearningService
from streamiter.service.settings.tables import (
    CheckpointSettings,
    HealthSettings,
    HttpSettings,
    InputSettings,
    LabelSettings,
    LearnSettings,
    PublishSettings,
    ServiceSettings,
)
from streamiter.topics import OutgoingBatch, source_and_sink, topic
from streamiter_kafka import cluster

ROWS = [{"km": float(n % 7), "late": n % 7 > 3} for n in range(500)]


class Setting:
    """Two topics on a broker, and the folder of the checkpoints of a service between them."""

    def __init__(self, bootstrap: str, prefix: str, folder: Path, options: str = "") -> None:
        self.flights = f"kafka://{bootstrap}/{prefix}flights{options}"
        self.updates = f"kafka://{bootstrap}/{prefix}updates{options}"
        self.name = f"{prefix}late-flights"
        self.folder = folder
        self.changes = False

    def service(self, **health: Any) -> OnlineLearningService:
        settings = ServiceSettings(
            self.name,
            InputSettings(self.flights),
            LearnSettings("classification", LabelSettings("late")),
            PublishSettings(self.updates, every_s=0.1, changes=self.changes),
            checkpoints=CheckpointSettings(str(self.folder), interval_s=0.2),
            http=HttpSettings("127.0.0.1:0"),
            health=HealthSettings(**health),
        )
        return OnlineLearningService(settings)

    async def create(self) -> None:
        for url in (self.flights, self.updates):
            await topic(url).create()

    async def write(self, rows: list[Any]) -> None:
        writer = await topic(self.flights).open_writer()
        await writer.write(OutgoingBatch([row if isinstance(row, bytes) else orjson.dumps(row) for row in rows]))
        await writer.flush()
        await writer.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a service look at its job and its stop more often than once a second."""
    monkeypatch.setattr("streamiter.service.surfaces.SAMPLE_S", 0.05)


def close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait for a broker that is away when it is closed; that takes up to 8 s."""
    monkeypatch.setattr(cluster, "_CLOSING_S", 0.3)
    monkeypatch.setattr(source_and_sink, "_CLOSE_UNFLUSHED_S", 0.3)


@pytest.fixture
async def setting(kafka_broker: KafkaServer, topic_prefix: str, tmp_path: Path) -> Setting:
    made = Setting(kafka_broker.bootstrap, topic_prefix, tmp_path)
    await made.create()
    return made


@pytest.fixture
async def in_memory(tmp_path: Path) -> Setting:
    made = Setting("", f"{tmp_path.name}-", tmp_path)
    made.flights, made.updates = f"memory://{made.name}-in", f"memory://{made.name}-out"
    await made.create()
    return made


@asynccontextmanager
async def running(service: OnlineLearningService) -> AsyncIterator[asyncio.Task[int]]:
    """Run the service, and end it with the block."""
    task = asyncio.create_task(service.serve())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], Any]) -> None:
    """Wait for the condition; a service that hangs fails the test by its time limit."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def answers(service: OnlineLearningService, path: str) -> tuple[int, str]:
    # The authorities of HTTPS would take 40 ms of processor time to load.
    async with httpx.AsyncClient(base_url=service.address or "", verify=False) as client:
        answer = await client.get(path)
        return answer.status_code, answer.text


async def until_ready(service: OnlineLearningService) -> None:
    await until(lambda: service.address)
    async with asyncio.timeout(PATIENCE_S):
        while (await answers(service, "/readyz"))[0] != 200:
            await asyncio.sleep(0.05)


async def test_a_service_on_an_idle_topic_is_ready(setting: Setting) -> None:
    """A readiness probe failed at night, when no events came, and the service was taken out of use."""
    await setting.write(ROWS)
    service = setting.service(source_limit_s=1.0)
    async with running(service) as task:
        await until_ready(service)

        def taken() -> int:
            return service.observations.statistics().checkpoints.taken  # type: ignore[union-attr]

        # Longer than the limit of sources, and than five intervals, without an event.
        before = taken()
        await until(lambda: taken() >= before + 6)
        await until_ready(service)  # A busy machine may be slower than the limit, but not for ever.
        assert (await answers(service, "/livez"))[0] == 200

        def unanswered_s() -> float:
            tasks = service.observations.statistics().tasks  # type: ignore[union-attr]
            [source] = [each.source for each in tasks if each.source and each.source.topic]
            return float(source.unanswered_s)

        await until(lambda: unanswered_s() < 1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == SUCCEEDED
    assert service.observations.phase.phase == "suspended"


@pytest.mark.parametrize("changes", [False, True])
async def test_a_service_resumes_from_a_rollback(changes: bool, setting: Setting) -> None:
    """The service continued to learn with the bad model, and its versions were never served again."""
    setting.changes = changes
    updates = topic(setting.updates)

    async def version(is_it: Callable[[ModelUpdate], bool]) -> ModelUpdate:
        async with asyncio.timeout(PATIENCE_S):
            while (update := await last_update(updates, setting.name)) is None or not is_it(update):
                await asyncio.sleep(0.05)
        return update

    service = setting.service()
    async with running(service):
        await until_ready_to_learn(service)
        await setting.write(ROWS)
        good = await version(lambda update: update.records == 500)
        await setting.write([row | {"late": not row["late"]} for row in ROWS * 3])
        bad = await version(lambda update: update.records == 2000)
        await roll_back(updates, setting.name, f"{good.generation}.{good.version}")
        rolled_back = await version(lambda update: update.rollback_to is not None)
        async with asyncio.timeout(PATIENCE_S):
            while (newest := await last_update(updates, setting.name)) is None or newest.rank == rolled_back.rank:
                await setting.write(ROWS[:5])  # Until the service has heard of it.
                await asyncio.sleep(0.2)
        assert (newest.generation, newest.since_rollback) == (rolled_back.generation, rolled_back.rank)
        late = [LinearPredictor(update.parameters)({"km": 6.0}) for update in (good, bad, newest)]
        assert late[0] > 0.9 > 0.1 > late[1]
        assert late[2] > 0.9


async def until_ready_to_learn(service: OnlineLearningService) -> None:
    await until(lambda: service.observations.phase.phase == "running")


async def test_a_broker_that_is_away_makes_the_service_not_ready_but_alive(
    breakable_broker: KafkaServer, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A liveness probe restarted healthy processes again and again, because the broker was being updated."""
    close_at_once(monkeypatch)
    monkeypatch.setattr("streamiter.service.service._WAITS_S", (0.2,))
    setting = Setting(breakable_broker.bootstrap, topic_prefix, tmp_path, "?give_up_after_s=2&request_timeout_s=0.5")
    await setting.create()
    await setting.write(ROWS)
    service = setting.service(source_limit_s=1.0, stall_limit_s=0.5)
    async with running(service) as task:
        await until_ready(service)
        breakable_broker.stop()
        phases, seen = [], []
        async with asyncio.timeout(PATIENCE_S):
            while "waiting" not in phases:  # Until the connector gives up, and the job has failed.
                assert (await answers(service, "/livez"))[0] == 200, await answers(service, "/livez")
                seen.append(await answers(service, "/readyz"))
                phases.append(service.observations.phase.phase)
                await asyncio.sleep(0.1)
        assert seen[-1][0] == 503
        assert any("no answer of the topic" in text for code, text in seen if code == 503)
        assert (await answers(service, "/livez"))[0] == 200
        breakable_broker.start()
        await until_ready(service)
        records = service.observations.model.records  # type: ignore[union-attr]
        assert records == len(ROWS)
        await setting.write(ROWS)
        await until(lambda: service.observations.model.records == 2 * len(ROWS))  # type: ignore[union-attr]
        assert not task.done()


async def test_a_stop_while_the_broker_is_away_ends_in_time_and_loses_nothing(
    breakable_broker: KafkaServer,
    topic_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SIGTERM while the broker did not answer: the service tried for a minute to commit, and was killed."""
    monkeypatch.setattr("streamiter.service.service._STOP_S", 1.0)
    monkeypatch.setattr("streamiter.service.service._ANSWER_S", 0.5)
    close_at_once(monkeypatch)
    setting = Setting(breakable_broker.bootstrap, topic_prefix, tmp_path, "?request_timeout_s=0.5")
    await setting.create()
    await setting.write(ROWS)
    service = setting.service()
    async with running(service) as task:
        await until_ready(service)
        breakable_broker.pause()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await task == ABORTED
    assert re.search(r"no last checkpoint after \d s: the next run resumes from the one before", caplog.text)
    breakable_broker.resume()
    await setting.write(ROWS)
    service = setting.service()
    async with running(service):
        await until(lambda: service.observations.model and service.observations.model.records == 2 * len(ROWS))


@pytest.mark.parametrize(("longest_s", "code", "state"), [(60.0, SUCCEEDED, "suspended"), (0.5, ABORTED, "aborted")])
async def test_a_slow_last_checkpoint_has_more_time_while_the_topics_answer(
    in_memory: Setting, monkeypatch: pytest.MonkeyPatch, longest_s: float, code: int, state: str
) -> None:
    """A broker that was only slow took 16 s for the last checkpoint, which was cut at 15; the exit code was 0."""
    for name, seconds in (("_STOP_S", 0.1), ("_STOP_ANSWERED_S", longest_s)):
        monkeypatch.setattr(f"streamiter.service.service.{name}", seconds)
    opened = asyncio.Event()
    await in_memory.write(ROWS)
    service = in_memory.service()
    service.events.process(lambda: Valve(opened), name="valve")
    async with running(service) as task:
        await until(lambda: service.observations.phase.phase == "running")
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: service.observations.phase.phase == "stopping")
        if code == SUCCEEDED:
            await until(lambda: service.observations.seconds_in_phase > 0.5)
            opened.set()
        assert await asyncio.wait_for(task, PATIENCE_S) == code
    assert service.observations.phase.phase == state


async def test_a_record_that_cannot_be_read_ends_the_service_with_code_1(setting: Setting) -> None:
    """A process that had failed ended with code 0, so its supervisor did not start it again."""
    await setting.write([*ROWS, b"not JSON"])
    service = setting.service()
    async with running(service) as task:
        assert await task == FAILED
    assert service.observations.phase.phase == "failed"
    assert "not JSON" in (service.observations.phase.reason or "")


async def test_a_service_whose_broker_never_answers_waits_and_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure of power the service came back before its broker, gave up, and was never started again."""
    monkeypatch.setattr("streamiter.service.surfaces._SEARCH_S", 0.2)
    [port] = free_ports(1)
    setting = Setting(f"127.0.0.1:{port}", "away-", tmp_path, "?give_up_after_s=0.5&request_timeout_s=0.2")
    service = setting.service()
    async with running(service) as task:
        await until(lambda: service.observations.phase.phase == "waiting")
        code, text = await answers(service, "/readyz")
        assert (code, "waiting, " in text) == (503, True)
        assert (await answers(service, "/livez"))[0] == 200
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(task, PATIENCE_S) == SUCCEEDED


async def test_a_surface_that_breaks_suspends_the_job(setting: Setting) -> None:
    """The samples had ended by an error, and the page showed the figures of last week."""
    await setting.write(ROWS)
    service = setting.service()
    async with running(service) as task:
        await until_ready(service)
        service.observations.samples = None  # type: ignore[assignment]
        assert await asyncio.wait_for(task, PATIENCE_S) == FAILED
    statistics = service.observations.statistics()
    assert statistics is not None
    assert statistics.state == "suspended"


@pytest.mark.parametrize("ending", ["cancelled", "a surface breaks"])
async def test_the_end_of_a_service_whose_step_hangs_has_a_limit(
    ending: str, in_memory: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service inside another program was cancelled, and the program never ended: a step did not return."""
    monkeypatch.setattr("streamiter.service.service._STOP_S", 0.2)
    await in_memory.write(ROWS)
    service = in_memory.service()
    service.events.process(Hang, name="hang")
    async with running(service) as task:
        await until(lambda: (known := service.observations.statistics()) and known.step("hang").batches_in)
        if ending == "cancelled":
            task.cancel()
        else:
            service.observations.samples = None  # type: ignore[assignment]
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.cancelled() if ending == "cancelled" else task.result() == FAILED
    assert service.observations.statistics().state != "running"  # type: ignore[union-attr]


async def test_a_second_run_takes_over_and_the_first_ends_with_code_4(setting: Setting) -> None:
    """Two replicas took the flow from each other forever, because each was started again when it lost."""
    await setting.write(ROWS)
    first, second = setting.service(), setting.service()
    async with running(first) as ending:
        await until_ready(first)
        async with running(second) as staying:
            assert await asyncio.wait_for(ending, PATIENCE_S) == TAKEN_OVER
            await until_ready(second)
            job = second.observations.job
            assert job is not None
            await job.stop()
            assert await staying == SUCCEEDED


class Hang(Operator):
    """Handles no record, and cannot be closed."""

    def close(self) -> None:
        raise OSError("this connection is closed already")

    async def process(self, record: Any, out: Output) -> None:
        await asyncio.Event().wait()


async def test_a_step_that_hangs_is_not_alive_and_ends_the_service_with_code_3(in_memory: Setting) -> None:
    """A consumer was stuck for twenty days while every check was green; then an error at the end hid the code."""
    await in_memory.write(ROWS)
    service = in_memory.service(stall_limit_s=0.5, exit_when_stalled=False)
    service.events.process(Hang, name="hang")
    async with running(service) as task:
        await until(lambda: (statistics := service.observations.statistics()) and statistics.stalled)
        code, text = await answers(service, "/livez")
        assert (code, "hang[0] is at work on a batch" in text) == (503, True)
        service.apply(replace(service.settings, health=replace(service.settings.health, exit_when_stalled=True)))
        assert await asyncio.wait_for(task, PATIENCE_S) == STALLED
