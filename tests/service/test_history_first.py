"""A service that reads a history before its topic: what it says meanwhile, and what it has learned at the end."""

import asyncio
import logging
import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pytest
from pyarrow import Table, csv, parquet
from service.test_service import answers, running, until, until_ready
from service.test_service_restarts import NAME, Place
from support.waiting import PATIENCE_S

from streamiter import Operator
from streamiter.models import LinearPredictor, last_update
from streamiter.operators import Output
from streamiter.service import OnlineLearningService, read_settings
from streamiter.service.observing.logs import log_figures
from streamiter.service.observing.metrics import MetricsNow, exposition
from streamiter.service.observing.page_documents import page_state
from streamiter.topics import topic
from streamiter.values.records import Batch

LABEL: Final = {"event": "click", "key": "id", "within": "60s", "otherwise": False, "time": "at"}
VIEWS: Final = 4_000
HISTORY: Final = 120_000


class Gate(Operator):
    """Wants only a part of the history until it is opened; barriers pass meanwhile."""

    def __init__(self, opened: asyncio.Event) -> None:
        self._opened, self._taken = opened, 0

    def wanted_inputs(self) -> tuple[()] | None:
        return None if self._opened.is_set() or self._taken < HISTORY // 6 else ()

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._taken += len(batch)


def chance(x: float) -> float:
    """Return the probability of a click."""
    return 1 / (1 + math.exp(1 - 2 * x))


def events() -> list[dict[str, Any]]:
    """Return views and their clicks in the order of time, and at the end events that end all waits."""
    random = np.random.default_rng(3)
    made = []
    for number, x in enumerate(random.normal(size=VIEWS).tolist()):
        made.append({"event": "view", "id": number, "at": 1_700_000_000 + number, "x": x})
        if random.random() < chance(x):
            made.append({"event": "click", "id": number, "at": made[-1]["at"] + float(random.uniform(0, 50))})
    made.sort(key=lambda event: event["at"])
    last = made[-1]["at"]
    return [*made, *({"event": "click", "id": -1, "at": last + more} for more in (1000, 2000))]


def service_of(place: Place, given: dict[str, Any], **changes: Any) -> OnlineLearningService:
    """Return a service with this table ``[input]``."""
    return OnlineLearningService(read_settings(place.settings(**changes) | {"input": given}))


async def model_of(place: Place, given: dict[str, Any], label: Any = LABEL) -> Callable[[float], float]:
    """Return the predictions of the version that has learned from all views."""
    update = await place.learned(service_of(place, given, learn={"label": label}), VIEWS)
    predict = LinearPredictor(update.parameters)
    return lambda x: float(predict({"x": x}))


async def test_late_labels_of_a_history_and_its_topic_are_learned_as_those_of_one_topic(tmp_path: Path) -> None:
    """At the switch the questions that waited lost their answers, or the topic's records made the history's late."""
    rows = events()
    half = len(rows) // 2
    whole, split = Place(tmp_path / "whole"), Place(tmp_path / "split")
    for place in (whole, split):
        place.folder.mkdir()
        await place.create("updates", "events")
    await whole.write(rows, "events")
    expected = await model_of(whole, {"topic": whole.url("events")})
    for number, begin in enumerate(range(0, half, 1_000)):
        lines = b"\n".join(orjson.dumps(row) for row in rows[begin : min(half, begin + 1_000)])
        (split.folder / f"day-{number}.jsonl").write_bytes(lines + b"\n")
    # The topic has the end of the history, too; it is read from offset 40 on.
    await split.write(rows[half - 40 :], "events")
    given = {"history": f"{split.folder}/day-*.jsonl?in_order=true", "then": split.url("events"), "at": 40}
    found = await model_of(split, given)
    for x in (-2.0, 0.0, 2.0):
        assert found(x) == pytest.approx(expected(x), rel=1e-9)
        assert found(x) == pytest.approx(chance(x), abs=0.1)


async def test_answers_in_a_topic_of_their_own_have_a_history_of_their_own(tmp_path: Path) -> None:
    """The history of answers came before all questions, and each question of it was learned without its answer."""
    views = [row for row in events() if row["event"] == "view"]
    clicks = [row for row in events() if row["event"] == "click"]
    # Events of both kinds end all waits.
    views += [{"event": "view", "id": -2 - more, "at": clicks[-1]["at"] + more} for more in range(2)]
    label = {key: value for key, value in LABEL.items() if key != "event"}
    found = []
    for share in (0.0, 0.5):
        place = Place(tmp_path / str(share))
        place.folder.mkdir()
        await place.create("updates", "views", "clicks")
        for name, rows in (("views", views), ("clicks", clicks)):
            end = views[0]["at"] + share * VIEWS  # Both histories end at the same time.
            in_file = sum(row["at"] < end for row in rows)
            (place.folder / f"{name}.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows[:in_file])) + b"\n")
            await place.write(rows[in_file:], name)
        given = {"answers": place.url("clicks")}
        if share:
            given |= {"history": f"{place.folder}/views.jsonl", "then": place.url("views"), "at": "earliest"}
            given |= {"answers_history": f"{place.folder}/clicks.jsonl", "answers_at": "earliest"}
        else:
            given["topic"] = place.url("views")
        found.append((await model_of(place, given, label))(0.5))
    assert found[1] == pytest.approx(found[0], rel=1e-9)


async def test_a_history_of_tables_is_learned_as_the_same_events_of_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each row of a Parquet file became a dead letter, since its time was one of numpy; no line of the log told it.

    Of CSV the labels were texts, so all events of the topic were refused behind it.
    """
    rows = [row | {"at": datetime.fromtimestamp(row["at"], UTC), "done": True} for row in events()[:2_000]]
    views = sum(row["event"] == "view" for row in rows)
    found = []
    for name in ("lines", "tables", "texts"):
        place = Place(tmp_path / name)
        place.folder.mkdir()
        await place.create("updates", "events", "dead")
        # The topic has the end, which ends all waits, and a record that is refused.
        ending = [event | {"done": True} for event in events()[-2:]]
        await place.write([*ending, {"event": "view", "at": "soon", "id": -3}], "events")
        if name == "lines":
            (place.folder / "h.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)) + b"\n")
        elif name == "tables":
            parquet.write_table(Table.from_pylist(rows), place.folder / "h.parquet")
        else:
            csv.write_csv(Table.from_pylist(rows), place.folder / "h.csv")
        given = {"history": f"{place.folder}/h.*", "then": place.url("events"), "at": "earliest"}
        given["dead_letter"] = place.url("dead")
        label = {**LABEL, "field": "done"}
        service = service_of(place, given, learn={"label": label, "features": {"x": "number"}})
        found.append((await place.learned(service, views)).parameters["weights"].tolist())
        [refusal] = [text for text in caplog.messages if "refuses records" in text]
        assert refusal.startswith("the step 'times' refuses records; the first one: ValueError: Invalid isoformat")
        caplog.clear()
    assert found[0] == found[1] == found[2]


async def test_a_service_serves_while_it_catches_up_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For the hours in which it read the history, the service looked idle, and nobody knew how long it would take."""
    place, opened = Place(tmp_path), asyncio.Event()
    await place.create("updates", "flights")
    rows = [orjson.dumps({"km": number % 7, "late": number % 7 > 3}) for number in range(HISTORY)]
    for part in range(3):
        (tmp_path / f"part-{part}.jsonl").write_bytes(b"\n".join(rows[part::3]) + b"\n")
    await place.write([{"km": 1, "late": False}])
    given = {"history": f"{tmp_path}/part-*.jsonl", "then": place.url("flights"), "at": "earliest"}
    service = service_of(place, given)
    assert service.history is not None
    service.history.process(lambda: Gate(opened), name="gate")
    observations = service.observations

    def share() -> float:
        return 0.0 if observations.catching_up is None else observations.catching_up.share or 0.0

    async with running(service) as task:
        await until(lambda: share() > 0.05 and service.observations.model is not None)
        # A checkpoint may be late on a busy machine, and the service is not ready until it is complete.
        await until(lambda: "is catching up: " in page_state(observations).sentence)
        await until_ready(service)
        assert "catching up: " in orjson.loads((await answers(service, "/readyz"))[1])["catching_up"]
        assert b"streamiter_history_share" in exposition(MetricsNow(observations), "")[0]
        with caplog.at_level(logging.INFO, logger="streamiter.service"):
            log_figures(observations, 1.0)
        assert "% of the history" in caplog.text
        opened.set()
        await until(lambda: observations.catching_up is None)
        async with asyncio.timeout(PATIENCE_S):
            while (
                update := await last_update(topic(place.url("updates")), NAME)
            ) is None or update.records != HISTORY + 1:
                assert not task.done()
                await asyncio.sleep(0.02)
        assert "catching_up" not in orjson.loads((await answers(service, "/readyz"))[1])


@pytest.mark.parametrize("as_texts", [False, True])
async def test_keys_and_classes_of_csv_agree_with_those_of_the_topic_whatever_their_form(
    tmp_path: Path, as_texts: bool
) -> None:
    """The key 17 of the topic was not the key "17" of the file, so questions lost their answers; a class was two."""
    questions = [
        {"event": "view", "id": number, "at": 1_700_000_000 + number, "x": number % 5} for number in range(400)
    ]
    replies = [{"event": "click", "id": each["id"], "at": each["at"] + 10.5, "grade": each["x"]} for each in questions]
    rows = sorted([*questions, *replies], key=lambda event: event["at"])
    # Two more events end all waits.
    rows += [{"event": "click", "id": -1, "at": rows[-1]["at"] + more, "grade": 0} for more in (1000, 2000)]
    place = Place(tmp_path)
    await place.create("updates", "events")
    csv.write_csv(
        Table.from_pylist([dict.fromkeys(("event", "id", "at", "x", "grade")) | row for row in rows[:400]]),
        tmp_path / "h.csv",
    )
    form = str if as_texts else int
    texts = [row | {name: form(row[name]) for name in ("id", "grade") if name in row} for row in rows[400:]]
    await place.write(texts, "events")
    given = {"history": f"{tmp_path}/h.csv", "then": place.url("events"), "at": "earliest"}
    label = {"event": "click", "key": "id", "within": "60s", "time": "at", "field": "grade"}
    learn = {"kind": "multiclass", "label": label, "features": {"x": "number"}}
    update = await place.learned(service_of(place, given, learn=learn), 400)
    assert LinearPredictor(update.parameters).classes == ["0", "1", "2", "3", "4"]
