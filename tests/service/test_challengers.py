"""A service with a challenger: on a real broker, in answers, on the page's documents, and promoted by a command."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import orjson
import pytest
from cli.program import streamiter
from service.test_service import Hang, answers, running, until, until_ready
from service.test_service_restarts import Place, rows
from support.kafka_server import KafkaServer
from support.waiting import PATIENCE_S

from streamiter.errors import CheckpointError, JobFailed, ModelError, ProducerFenced
from streamiter.learn import AdaptiveLinearModel
from streamiter.learn.online.challengers import ComparedRows
from streamiter.models import (
    ModelUpdate,
    NoSuchVersion,
    RollbackWatch,
    ServedModel,
    find_update,
    import_model,
    initial_model,
    last_update,
    model_updates,
    promote,
    roll_back,
)
from streamiter.operators import Context, Operator, Output
from streamiter.service import OnlineLearningService, ServiceReplica, read_settings
from streamiter.service.observing.challenger import Challenger
from streamiter.service.service import remedy_of
from streamiter.service.surfaces import ServiceSurfaces
from streamiter.topics import MemoryBroker, topic

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


class LastNumber(Operator):
    """Keeps the number of the last row that was learned in this run of the flow."""

    def __init__(self, last: list[int]) -> None:
        self._last = last

    def open(self, context: Context) -> None:
        self._last.clear()

    async def process(self, record: dict[str, Any], out: Output) -> None:
        self._last[:] = [int(record["numbers"][-1])]


@pytest.fixture
def heard_of_rollback(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[None]]:
    """Return what waits until the trainer has heard of a rollback, so that it learns all later rows after it."""
    heard, keep = asyncio.Event(), RollbackWatch._keep

    def kept(watch: RollbackWatch, update: ModelUpdate) -> None:
        keep(watch, update)
        if update.rollback_to is not None:
            heard.set()

    async def is_heard() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await heard.wait()
        heard.clear()

    monkeypatch.setattr(RollbackWatch, "_keep", kept)
    return is_heard


def told(service: Any) -> ComparedRows | None:
    """Return the comparison that the challenger's last version tells, once the service follows it."""
    challenger = service.observations.challenger
    return None if challenger is None else challenger.compared


def learner(service: Any) -> str | None:
    model = service.observations.model
    return None if model is None else model.parameters.get("learner", "")


async def test_a_challenger_is_compared_promoted_and_rolled_back(
    kafka_broker: KafkaServer, topic_prefix: str, tmp_path: Path, heard_of_rollback: Callable[[], Awaitable[None]]
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
        await heard_of_rollback()
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


async def test_another_idea_under_the_same_name_is_compared_from_its_own_rows(tmp_path: Path) -> None:
    """An idea was promoted that was worse: most of the rows that it was better in were of the idea before it."""
    place, events = Duel(tmp_path), rows(2_000)
    await place.create("flights", "updates")
    compared = {}
    again = {**NETWORK, "settings": {"factors": 2, "kind": "fm"}}  # The same, in another order.
    for end, learn in ((500, NETWORK), (1_000, again), (1_500, {})):
        await place.write(events[end - 500 : end])
        service = OnlineLearningService(read_settings(place.with_challenger(learn)))
        async with running(service):
            async with asyncio.timeout(PATIENCE_S):
                while (update := await last_update(topic(place.url("updates")), place.other)) is None or (
                    update.records != end or "compared_rows" not in update.metrics
                ):
                    await asyncio.sleep(0.02)
            compared[end] = update.metrics["compared_rows"]
    # Of the first 500 rows of an idea, 200 only teach it.
    assert compared == {500: 300, 1_000: 800, 1_500: 300}


def test_a_leader_that_is_fenced_tries_its_challenger_again(tmp_path: Path) -> None:
    """After a take-over and back, a process left out a challenger that had learned elsewhere meanwhile."""
    place = Duel(tmp_path)
    given = place.with_challenger()
    service = OnlineLearningService(read_settings({**given, "service": {"name": place.name, "standby": "7d"}}))
    served = ServedModel(topic(place.url("updates")), place.other)
    service.observations.challenger = Challenger(
        place.other, served, service.settings.challenger, failure="it has diverged"
    )
    assert service._is_standby_again(ProducerFenced("a newer run has claimed the flow"))
    assert service.observations.challenger.stopped is None


async def test_a_start_whose_last_version_is_of_the_challenger_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A champion that lost its checkpoint began from nothing behind a promotion, and no line of the log told it."""
    updates = MemoryBroker().topic("updates")
    await updates.create()
    parameters = {"learner": "late-b", "weights": np.ones(1)}
    await import_model(updates, "late", ModelUpdate("late", 1, 1, None, 0, 300, {}, parameters))
    source = initial_model(updates, model="late", default=None, learner="")()
    source.open(cast(Any, SimpleNamespace(subtask_index=0)), None)
    batch: Any = await source.read()
    assert batch.records == [None]
    # A misspelt name was promoted to a model that no service has, and the service itself to its own challenger.
    with pytest.raises(NoSuchVersion, match="expected updates of model 'lat', given only of late"):
        await promote(updates, "lat", "late")
    with pytest.raises(ModelError, match="expected another model as its challenger"):
        await promote(updates, "late", "late")
    assert "model 'late': the last version, 1.1, is of late-b: the service itself starts without" in caplog.text


def test_what_to_do_is_told_when_the_settings_of_a_challenger_change() -> None:
    """The service ended with an error of a step that its file did not name, and people took the whole model away."""
    changed = CheckpointError("the steps are others")
    changed.changes = {"challenger late-b: learn": ["task was 'binary', now 'number'"]}
    assert "give its file another service.name" in (remedy_of(changed) or "")
    assert remedy_of(JobFailed("it failed", step="learn")) is None


async def test_a_challenger_that_fails_stops_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard_of_rollback: Callable[[], Awaitable[None]]
) -> None:
    """An error of the idea under trial ended the service, again and again, until somebody took it out of the file."""
    place, is_broken, step = Duel(tmp_path), asyncio.Event(), AdaptiveLinearModel.step

    def breakable(model: AdaptiveLinearModel, *given: Any, **options: Any) -> Any:
        if is_broken.is_set() and model.get_params()["embeddings"] is not None:
            raise ModelError("the vectors have diverged")
        return step(model, *given, **options)

    monkeypatch.setattr(AdaptiveLinearModel, "step", breakable)
    await place.create("flights", "updates")
    given, updates, events = place.with_challenger(share=1.0, key="user"), topic(place.url("updates")), rows(3_000)

    def service() -> OnlineLearningService:
        made = OnlineLearningService(read_settings(given))
        assert made.challenger is not None
        seen = made.challenger.predictions.union(made.training.predictions)
        seen.process(lambda: LastNumber(last), name="a step of one's own")
        return made

    last: list[int] = []

    async def learned(service: OnlineLearningService, end: int, who: str = "") -> None:
        await place.write(events[end - 500 : end])
        await until(lambda: learner(service) == who and service.observations.model.records == end)  # type: ignore[union-attr]

    first = service()
    async with running(first):
        await learned(first, 500)
        await until(lambda: told(first))
        is_broken.set()
        await learned(first, 1_000)
        await until_ready(first)
        state = orjson.loads((await answers(first, "/api/state"))[1])
        assert "the vectors have diverged" in state["challenger"]["stopped"]
        assert "its challenger has stopped" in state["sentence"]
        metrics = (await answers(first, "/metrics"))[1]
        assert f'streamiter_challenger_stopped{{model="{place.other}"}} 1.0' in metrics
        challenger = first.observations.challenger
        assert challenger is not None
        assert challenger.version_for({"user": "u1"}) is None, "its share is predicted by the champion"
    is_broken.clear()
    again = service()
    async with running(again):
        await learned(again, 1_500)
        # It has learned what it had published, and is compared from the beginning.
        await until(lambda: (found := told(again)) and found.compared_rows == 300)
        await promote(updates, place.name, place.other)
        await place.write(events[1_500:1_510])
        await until(lambda: learner(again) == place.other)
        is_broken.set()
        await place.write(events[1_510:2_000])
        await until(lambda: again.observations.challenger and again.observations.challenger.stopped)
        await until(lambda: again.observations.phase.phase == "running")
        assert learner(again) == place.other, "what is served never changes by itself"
        replica = ServiceReplica(read_settings(given))
        async with running(replica):
            await until(lambda: replica.address and replica.observations.model)
            async with asyncio.timeout(PATIENCE_S):
                while "was promoted, and has stopped" not in (await answers(replica, "/readyz"))[1]:
                    await asyncio.sleep(0.05)
        status, text = await answers(again, "/readyz")
        assert (status, "was promoted, and has stopped; roll back" in text) == (503, True)
        await until(lambda: last == [1_999])
        newest = await find_update(updates, place.name, "1")
        await roll_back(updates, place.name, "1")
        await heard_of_rollback()
        assert newest.records is not None
        await place.write(events[2_000:2_500])
        await until(lambda: learner(again) == "" and again.observations.model.records == newest.records + 500)  # type: ignore[union-attr]
        await until_ready(again)
    expected = AdaptiveLinearModel(shapes=False)
    for row in [*events[: newest.records], *events[2_000:2_500]]:
        expected.learn([{name: value for name, value in row.items() if name != "late"}], [row["late"]])
    published = await last_update(updates, place.name)
    assert published is not None
    np.testing.assert_array_equal(published.parameters["weights"], expected.parameters()["weights"])


async def test_a_challenger_that_hangs_stops_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the idea under trial hung: the champion waited behind it, and then the whole service was ended."""
    place, events = Duel(tmp_path), rows(1_000)
    await place.create("flights", "updates")
    # Where a busy machine delays a step for as long, the service itself stays.
    health = {"stall_limit": "500ms", "exit_when_stalled": False}
    service = OnlineLearningService(read_settings({**place.with_challenger(), "health": health}))
    assert service.challenger is not None
    monkeypatch.setattr(Hang, "close", Operator.close)
    service.challenger.predictions.process(Hang, name=f"challenger {place.other}: hang")
    async with running(service):
        await place.write(events[:500])
        await until(lambda: service.observations.challenger and service.observations.challenger.stopped)
        await place.write(events[500:])
        await until(lambda: learner(service) == "" and service.observations.model.records == 1_000)  # type: ignore[union-attr]
        await until_ready(service)
        state = orjson.loads((await answers(service, "/api/state"))[1])
        assert "no progress for" in state["challenger"]["stopped"]
        replica = ServiceReplica(read_settings(place.with_challenger(share=1.0, key="user")))
        async with running(replica):
            await until(lambda: replica.address and (found := replica.observations.challenger) and found.stopped)
            # Its last version is not served beside those of a champion that learns on.
            assert replica.observations.challenger.version_for({"user": "u1"}) is None  # type: ignore[union-attr]
