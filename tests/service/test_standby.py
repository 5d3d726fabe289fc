"""Standbys: processes of a service that predict, and learn when the process that learns is gone."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from service.test_service import ROWS, Setting, answers, running, until, until_ready
from service.test_service_restarts import NAME, Place, rows
from support.kafka_server import KafkaServer, free_ports
from support.processes import async_process
from support.waiting import PATIENCE_S

from streamiter.engine.storage.flow_record import checkpoint_of
from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.errors import StoreUnavailable
from streamiter.models import last_update
from streamiter.models.update import Rank, UpdateHeaders
from streamiter.service import OnlineLearningService, read_settings
from streamiter.service.leadership import LEADERS, Leadership
from streamiter.service.learning import ServiceLearning
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, topic
from streamiter.topics.memory import MemoryReader
from streamiter.values.helpers.files import is_free
from streamiter.values.settings import SettingsError


class Processes:
    """Processes of a service, of which one leads, in virtual time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.topic = MemoryBroker(clock=self.clock).topic("updates")
        self.tasks: dict[str, list[asyncio.Task[Any]]] = {}
        self.led: list[tuple[str, str]] = []
        """Each process that has led so far, and why."""

    def start(self, *names: str) -> None:
        for name in names:
            made = Leadership(self.topic, "clicks", name, 5.0, self.clock)
            self.tasks[name] = [asyncio.create_task(self._lead(name, made)), asyncio.create_task(made.tell())]

    async def _lead(self, name: str, leadership: Leadership) -> None:
        self.led.append((name, await leadership.win()))

    async def kill(self, name: str) -> None:
        for task in self.tasks.pop(name):
            task.cancel()
            await asyncio.wait([task])

    async def led_after(self, seconds: float) -> list[str]:
        """Let time pass; return the processes that have led until then."""
        for _ in range(round(seconds * 5)):
            await self.clock.advance(0.2)
        return [name for name, _ in self.led]


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes()
    yield made
    for name in [*made.tasks]:
        await made.kill(name)


async def test_one_of_several_standbys_leads_when_the_leader_is_silent(processes: Processes) -> None:
    """Two standbys took over from each other for ever; or none did, since each of them heard the others."""
    processes.start("a")
    assert await processes.led_after(0.2) == ["a"], "no process has led before, so none is waited for"
    processes.start(*"bcd")
    assert await processes.led_after(20) == ["a"]
    for number in (2, 3):
        await processes.kill(processes.led[-1][0])
        assert len(await processes.led_after(3.8)) == number - 1
        assert len(await processes.led_after(1.5)) == number
        assert len(await processes.led_after(12)) == number
    assert processes.led[0][1] == "no other process has led before"
    assert processes.led[1][1].startswith("the leader has been silent for 5.")
    # What another program writes there is no sign of life.
    writer = await processes.topic.beside(LEADERS).open_writer()
    await writer.write(OutgoingBatch([b"{", None, b"1"], keys=[b"clicks"] * 3))
    await processes.kill(processes.led[-1][0])
    assert len(await processes.led_after(5.6)) == 4


async def test_a_standby_takes_no_outage_and_no_pause_of_its_own_for_silence(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each outage of the broker the standby took over, and so it did after its own machine had slept."""
    processes.start("a")
    await processes.led_after(1)
    processes.start("b")
    await processes.led_after(1)
    asked_s = processes.clock.monotonic_s()
    with monkeypatch.context() as away:
        away.setattr(MemoryReader, "unanswered_since_s", lambda _: asked_s)
        for task in processes.tasks["a"]:
            task.cancel()  # It cannot write either.
        assert await processes.led_after(20) == ["a"]
    assert await processes.led_after(3.8) == ["a"]
    assert await processes.led_after(2) == ["a", "b"]
    processes.start("c")
    await processes.led_after(1)
    await processes.clock.advance(600)  # Of both processes at once.
    assert await processes.led_after(10) == ["a", "b"]


async def test_a_leader_that_ends_in_order_is_followed_at_once(tmp_path: Path) -> None:
    """Each deployment left the service without a learner for as long as after a crash."""
    place = Place(tmp_path)
    await place.create("flights", "updates")
    await place.write(rows(500))
    with pytest.raises(SettingsError, match=r"service\.standby: expected a time of at least 2 s, given .1s."):
        place.service(service={"standby": "1s"})
    # A standby that waits for this time fails the test by its limit.
    first = place.service(service={"standby": "7d"})
    # It would begin without what the first one has learned since.
    second = place.service(service={"standby": "7d"}, without_checkpoint=True)
    async with AsyncExitStack() as stack:
        ended = await stack.enter_async_context(running(first))
        await until(lambda: first.observations.phase.phase == "running")
        await stack.enter_async_context(running(second))
        await until(lambda: second.observations.versions)
        assert first.observations.role == "leader"
        assert '"role":"leader"' in (await answers(first, "/readyz"))[1]
        await until_ready(second)  # On a busy machine its event loop may have been blocked for seconds.
        assert (await answers(second, "/readyz"))[1] == '{"status":"ok","role":"standby","problems":[]}'
        status, text = await answers(second, "/flow")
        assert (status, "given a standby, which follows its model only" in text) == (404, True)
        assert f'streamiter_learns{{model="{NAME}",role="standby"}} 0.0' in (await answers(second, "/metrics"))[1]
        assert "this standby predicts with the newest version" in (await answers(second, "/api/state"))[1]
        assert first.observations.job is not None
        await first.observations.job.stop("suspend")
        await until(ended.done)
        await until(lambda: second.observations.phase.phase == "running")
        assert second.observations.role == "leader"
        statistics = second.observations.statistics()
        assert statistics is not None
        assert statistics.checkpoints is not None
        assert statistics.checkpoints.restored is not None


async def test_a_leader_that_does_not_reach_its_checkpoints_lets_another_process_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader tried again and again to read a disk that was gone, and told that it lived; the standby waited."""
    place = Place(tmp_path)
    await place.create("flights", "updates")
    await place.write(rows(100))
    first, second = (place.service(service={"standby": "7d"}) for _ in range(2))

    async def fails(**_: Any) -> None:
        raise StoreUnavailable("the store does not answer")

    monkeypatch.setattr(first, "_start", fails)
    async with running(first):
        await until(lambda: first.observations.role == "leader")
        counts: Any = {"first_row": 0, "rows": 500, "sampled": 500, "reference_rows": 500, "left_out": 0}
        first.observations.quality.watched({**counts, "name": "", "fields": []})
        async with running(second):
            await until(lambda: second.observations.phase.phase == "running")
            await until(lambda: first.observations.phase.phase == "following")
            assert (first.observations.role, second.observations.role) == ("standby", "leader")
            assert first.observations.quality.window is None, "a standby watches no fields, and must not alert for ever"


async def test_a_standby_compiles_before_it_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby that had taken over imported Numba for seconds, in which the next one heard no sign of life."""
    order, make_ready = [], ServiceLearning.make_ready

    def ready(learning: ServiceLearning) -> None:
        make_ready(learning)
        order.append("ready")

    async def win(_: Leadership) -> str:
        order.append("leads")
        return "no other process has led before"

    monkeypatch.setattr(ServiceLearning, "make_ready", ready)
    monkeypatch.setattr(Leadership, "win", win)
    label = {"event": "arrival", "key": "flight", "value": "delay > 15", "within": "1h", "otherwise": False}
    settings = Place(tmp_path).settings(service={"standby": "7d"})
    learn = {"kind": "classification", "label": label}
    await OnlineLearningService(read_settings({**settings, "learn": learn}))._lead()
    assert order == ["ready", "leads"]


PROGRAM = (
    "import json, sys; from streamiter.service import OnlineLearningService, read_settings; "
    "raise SystemExit(OnlineLearningService(read_settings(json.load(open(sys.argv[1])))).run())"
)


class Pair:
    """Two processes of a service on a real broker, and the rows that are written for them."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder = setting, folder
        self.ports = free_ports(2)
        self.rows = 0

    @asynccontextmanager
    async def process(self, number: int) -> AsyncIterator[Any]:
        settings = {
            "service": {"name": self.setting.name, "standby": "2s"},
            "input": {"topic": self.setting.flights},
            "learn": {"kind": "classification", "label": {"field": "late"}},
            "publish": {"topic": self.setting.updates, "every": "100ms"},
            "checkpoints": {"store": str(self.folder / "checkpoints"), "interval": "200ms"},
            "http": {"address": f"127.0.0.1:{self.ports[number]}"},
        }
        file = self.folder / f"{number}.json"
        file.write_bytes(orjson.dumps(settings))
        async with async_process([sys.executable, "-c", PROGRAM, str(file)], cwd=self.folder, is_forked=True) as made:
            yield made

    async def until(self, number: int, role: str) -> None:
        """Wait until a process is ready, and has this role."""
        base = f"http://127.0.0.1:{self.ports[number]}"
        async with httpx.AsyncClient(base_url=base, verify=False) as client, asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.get("/readyz")
                    if answer.status_code == 200 and answer.json()["role"] == role:
                        return
                await asyncio.sleep(0.05)

    async def learned(self) -> None:
        """Write some rows, and wait until there is a version that has learned each row once."""
        await self.setting.write(ROWS)
        self.rows += len(ROWS)
        updates = topic(self.setting.updates)
        async with asyncio.timeout(PATIENCE_S):
            while (update := await last_update(updates, self.setting.name)) is None or update.records != self.rows:
                assert update is None or update.records is None or update.records < self.rows
                await asyncio.sleep(0.05)

    def snapshots(self) -> set[CheckpointId]:
        """Return the checkpoints in the folder."""
        names = [each.name for each in (self.folder / "checkpoints").glob("*/*")]
        return {checkpoint for name in names if (checkpoint := checkpoint_of(name)) is not None}

    async def pause(self, process: Any) -> set[CheckpointId]:
        """Stop a process, but not while it has locked the folder: the standby would wait for the folder then.

        Returns the checkpoints that it has taken until then.
        """
        [folder] = [each for each in (self.folder / "checkpoints").iterdir() if each.is_dir()]
        while True:
            process.send_signal(signal.SIGSTOP)
            while "State:\tT" not in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8"):  # noqa: ASYNC240
                await asyncio.sleep(0.01)
            if is_free(folder / "lock"):
                return self.snapshots()
            process.send_signal(signal.SIGCONT)

    async def ranks(self) -> list[Rank]:
        """Return the generation and the version of each version in the topic, in the order of the topic."""
        reader = await topic(self.setting.updates).open_reader(ReadRequest(stop="latest"))
        found = []
        while (batch := await reader.read()) is not None:
            found += [UpdateHeaders.parse(headers).rank for headers in batch.headers]
        await reader.close()
        return found


async def test_a_leader_that_is_paused_or_killed_is_replaced_and_commits_nothing_more(
    kafka_broker: KafkaServer, topic_prefix: str, tmp_path: Path
) -> None:
    """A machine that had slept published its old model over the new one; after a kill nobody learned until morning."""
    setting = Setting(kafka_broker.bootstrap, topic_prefix, tmp_path)
    await setting.create()
    pair = Pair(setting, tmp_path)
    async with pair.process(0) as first:
        await pair.learned()
        async with pair.process(1) as second:
            await pair.until(1, "standby")
            taken = await pair.pause(first)
            await pair.learned()
            await pair.until(1, "leader")
            first.send_signal(signal.SIGCONT)
            await pair.until(0, "standby")
            await pair.learned()
            [paused] = {each.run for each in taken}
            assert {each for each in pair.snapshots() if each.run == paused} <= taken
            second.send_signal(signal.SIGKILL)
            await pair.learned()
            await pair.until(0, "leader")
        first.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await first.wait() == 0
    ranks = await pair.ranks()
    assert ranks == sorted(set(ranks)), "an older run wrote behind a newer one"
