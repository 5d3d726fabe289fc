"""The training of a service reads columns where it can, and learns the same as from dicts, to the last bit."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from support.soak import in_soak

from streamiter import Columns, Flow
from streamiter.errors import DecodeError
from streamiter.models import ModelSnapshot
from streamiter.operators.output import DeadLetter
from streamiter.operators.timed.in_order import RecordOrder
from streamiter.service.learning import ServiceLearning, decoder_for
from streamiter.service.service import OnlineLearningService
from streamiter.service.settings.file import read_settings
from streamiter.service.settings.tables import ChallengerSettings, ServiceSettings
from streamiter.testing import VirtualClock
from streamiter.topics import Json, OutgoingBatch, ReadRequest
from streamiter.topics.json_objects import JsonObjects
from streamiter.topics.memory import MemoryBroker, MemoryReader, MemoryTopic
from streamiter.topics.topic import Decoder, TopicBatch
from streamiter.values.helpers.compiled import is_compiling
from streamiter.values.plain_data import PlainData
from streamiter.values.records import TimedBatch, take
from streamiter.values.times import MAX_TIME

# Columns need Numba, which another step has loaded.
pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(not is_compiling(), reason="columns of JSON objects need a compiler that is on")

START_MS = 1_700_000_000_000


class CutTopic(MemoryTopic):
    """A topic whose readers bring so many records at once."""

    cut = 8192

    async def open_reader(self, request: ReadRequest) -> MemoryReader:
        return await super().open_reader(replace(request, max_records=self.cut))


def settings_of(label: Any, **learn: Any) -> ServiceSettings:
    tables: dict[str, Any] = {
        "service": {"name": "flights"},
        "input": {"topic": "memory://flights", "on_error": "skip"},
        "learn": {"kind": "classification", "label": label, **learn},
        "publish": {"topic": "memory://updates", "records": 500},
    }
    tables["learn"].setdefault("settings", {})["mini_batch"] = 200
    tables["learn"].setdefault("features", {"km": "number", "town": "category", "title": "words", "crew": "number"})
    return read_settings(tables)


AT_ONCE = settings_of({"field": "late"})
NUMBERS = settings_of({"field": "delay"}, kind="regression")
FIELDS = {"km": "number", "title": "words", "hour": "category"}
CLASSES = settings_of({"field": "town"}, kind="multiclass", features=FIELDS)
LATER = {"event": "arrival", "key": "flight", "value": "delay > 15", "time": "time", "within": "600s"}
LATE = settings_of(LATER)
TRUTHS = {name: value for name, value in LATER.items() if name != "value"}
LATE_TRUTHS = settings_of({**TRUTHS, "field": "late", "otherwise": False, "schedule": "end"})
WEIGHTED = settings_of({**LATER, "otherwise": False, "schedule": "weighted"}, features={"km": "number", "at": "time"})
OF_TOPIC = settings_of({name: value for name, value in LATER.items() if name != "time"})


def events(seed: int, count: int, *, is_plain: bool = False) -> list[bytes]:
    """Return departures and arrivals; unless they are plain, some are odd, or have other fields than those before."""
    draw = random.Random(seed)
    made: list[bytes] = []
    for number in range(count):
        at = START_MS + number * 1000
        time = np.datetime_as_string(np.datetime64(at, "ms").astype("M8[s]")) + "Z"
        flight = f"f{draw.randrange(max(0, number - 20), number + 1)}"
        event: dict[str, Any] = {"event": "departure", "flight": f"f{number}", "time": time, "at": at, "hour": at % 24}
        event |= {"km": draw.randrange(3000), "town": draw.choice("abcd"), "title": draw.choice(["Heavy rain", "fog"])}
        if draw.random() < 0.5 and made:
            event = {"event": "arrival", "flight": flight, "time": time, "delay": draw.randrange(40)}
        else:
            event["delay"] = draw.randrange(40)
        event["late"] = event["delay"] > 15
        value = orjson.dumps(event)
        if not is_plain:
            if number > count // 3 and "km" in event:
                event |= {"crew": draw.choice([3, 4.5]), "more": {"x": [1, None]}}
            if number > 2 * count // 3 and draw.random() < 0.003:
                event["km"] = draw.choice([None, "12", 2**70, [1], True, 1e300, -0.0])
            value = (
                orjson.dumps(event) if type(event.get("km")) is not int or event["km"] < 2**63 else b'{"km": 1e9999}'
            )
            if number > count // 2 and draw.random() < 0.002:
                other = [b"{", b"null", b"[7]", b"{}", b'{"flight": null}', value[:-1] + b',"km":1,"km":2}']
                value = draw.choice([*other, value[:-1] + b',"t\\u006fwn":"e"}', b'{"event":"departure","town":"b"}'])
        made.append(value)
    return made


async def written(values: list[bytes], cut: int) -> CutTopic:
    topic = CutTopic(MemoryBroker()._store, "flights")
    topic.cut = cut
    await topic.create(partitions=1)
    writer = await topic.open_writer()
    times = [START_MS + 1000 * number for number in range(len(values))]
    await writer.write(OutgoingBatch(values, timestamps_ms=times, partition=0))
    await writer.close()
    return topic


def dicts(_settings: ServiceSettings, _topic: MemoryTopic) -> Decoder:
    return Json()


async def learned(
    settings: ServiceSettings,
    values: list[bytes],
    cut: int,
    decoder: Callable[[ServiceSettings, MemoryTopic], Decoder | None],
) -> dict[str, Any]:
    """Return all that a training publishes, predicts, reports and refuses."""
    topic = await written(values, cut)
    flow, refused = Flow("flights"), list[DeadLetter]()
    read = flow.source(topic, decode=decoder(settings, topic), stop="latest", on_error="skip", name="events")
    training = ServiceLearning(settings).train(read)
    told = {name: getattr(training, name).collect() for name in ("models", "predictions", "validation", "fields")}
    # No mini-batch is cut by the clock.
    job = await flow.start(clock=VirtualClock(), on_rejected=refused.append)
    await job.wait()
    found: dict[str, Any] = {name: streamed.items for name, streamed in told.items()}
    return found | {"refused": [(each.step, each.record, each.error, each.origin) for each in refused]}


def same(one: Any, other: Any) -> bool:
    """Whether two results have the same values of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, ModelSnapshot):
        return same([one.parameters, one.records, one.metrics], [other.parameters, other.records, other.metrics])
    return repr(one) == repr(other)


SETTINGS = {
    "at once": AT_ONCE,
    "numbers": NUMBERS,
    "classes": CLASSES,
    "late": LATE,
    "late truths": LATE_TRUTHS,
    "weighted": WEIGHTED,
    "times of the topic": OF_TOPIC,
}


@pytest.mark.parametrize(("cut", "is_plain"), [(70, False), (300, False), (300, True), *in_soak((70, True))])
@pytest.mark.parametrize("name", SETTINGS)
async def test_columns_teach_what_dicts_teach(name: str, cut: int, is_plain: bool) -> None:
    """A column with other values than the dicts would let the weights depend on how the events are read."""
    values = events(cut if is_plain else cut + 1, 1_800, is_plain=is_plain)
    expected = await learned(SETTINGS[name], values, cut, dicts)
    given = await learned(SETTINGS[name], values, cut, decoder_for)
    for what, items in expected.items():
        assert same(given[what], items), what
    assert expected["predictions"]
    assert is_plain or expected["refused"]


@pytest.mark.parametrize("name", SETTINGS)
def test_most_batches_of_these_tests_are_columns(name: str) -> None:
    """The columns of all other tests were dicts, so these compared dicts with dicts."""
    decoder = decoder_for(SETTINGS[name], MemoryBroker().topic("flights"))
    assert isinstance(decoder, JsonObjects)
    values = events(1, 3_000, is_plain=True)
    batches = [decoder.decode(TopicBatch(values=values[start : start + 300])) for start in range(0, 3_000, 300)]
    assert [isinstance(batch, Columns) for batch in batches] == [False, *[True] * 9]


async def test_a_challenger_reads_the_same_columns() -> None:
    """A field that only the challenger reads was no column, and counted as missing in each row."""
    challenger = replace(settings_of(LATER, features={"at": "number", "town": "category"}), name="b")
    settings = replace(LATE, challenger=ChallengerSettings(challenger))
    values = events(5, 900)
    told = []
    for decoder in (dicts, decoder_for):
        topic = await written(values, 300)
        flow = Flow("flights")
        read = flow.source(topic, decode=decoder(settings, topic), stop="latest", on_error="skip", name="events")
        training = ServiceLearning(settings).train(read)
        second = ServiceLearning(challenger).train(read, beside=training)
        models, predictions = second.models.collect(), second.predictions.collect()
        job = await flow.start(clock=VirtualClock())
        await job.wait()
        told.append([models.items, predictions.items])
    assert told[0][1]
    assert same(*told)


def test_a_step_of_the_user_gets_dicts() -> None:
    """A function of ``service.events.map_batch`` got columns, whose values are numpy's."""
    service = OnlineLearningService(LATE)
    assert service.events is service.events is not service._events
    # All fields are features, so the training reads dicts, and no step is added.
    others = OnlineLearningService(settings_of(LATER, features="all"))
    assert others.events is others._events


def test_the_rows_of_the_columns_are_the_objects() -> None:
    """A dead letter had numpy's numbers, and zeros for fields that its record never had."""
    values = events(3, 600, is_plain=True)
    decoder = JsonObjects(["km", "town", "late", "never"])
    expected = Json().decode(TopicBatch(values=values))
    first = TopicBatch(values=values[:300])
    if (load := decoder.ahead(first)) is not None:
        load()
    assert decoder.ahead(first) is None
    assert decoder.decode(first) == expected[:300]
    rows = decoder.decode(TopicBatch(values=values[300:]))
    assert isinstance(rows, Columns)
    assert list(rows) == expected[300:]
    assert rows[-1] == expected[-1]
    assert list(take(rows, [7, 2])) == [expected[307], expected[302]]
    assert list(map(type, rows[0].values())) == list(map(type, expected[300].values()))
    stored = PlainData().decode_batch(PlainData().encode_batch(rows))
    assert list(stored) == expected[300:]


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b"7",
        b"{}",
        b'{"km": null}',
        b'{"km": "3"}',
        b'{"km": 3.0}',
        b'{"km": true}',
        b'{"km": 9223372036854775808}',
        b'{"km": 1, "km": 2}',
        b'{"k\\u006d": 1}',
        b'{"never": 1}',
        b'{"town": "\\ud83d\\ude00"}',
        b'{"other": 99999999999999999999999}',
        b'{"other": "' + b"x" * 600 + b'"}',
        b'{"km":\n1}',
        None,
    ],
)
def test_a_batch_with_an_odd_value_is_dicts(value: bytes | None) -> None:
    """A whole number beyond 64 bits became a float, because the columns did not need its field."""
    values: list[bytes | None] = list(events(3, 600, is_plain=True))
    decoder, json = JsonObjects(["km", "town", "never"]), Json()
    decoder.decode(TopicBatch(values=values[:300]))
    given = TopicBatch(values=[*values[300:], value])

    def decoded(by: Decoder) -> Any:
        try:
            return by.decode(given)
        except DecodeError as error:
            return error.failures

    found = decoded(decoder)
    assert not isinstance(found, Columns)
    assert same(found, decoded(json))
    # One odd batch does not end the columns for good.
    later = [decoder.decode(TopicBatch(values=values[:300])) for _ in range(20)]
    assert isinstance(later[-1], Columns)


@pytest.mark.parametrize("name", ["town", "other"])
def test_a_long_record_takes_no_room_in_other_records(name: str) -> None:
    """One text of 3 MB ended the service, which asked for 90 GB; one of 300 KB blocked it for a minute."""
    values = [orjson.dumps({"town": "a", "number": number}) for number in range(300)]
    decoder = JsonObjects(["town"])
    decoder.decode(TopicBatch(values=values))
    assert isinstance(decoder.decode(TopicBatch(values=values)), Columns)
    long = orjson.dumps({name: "x" * 100_000})
    tracemalloc.start()
    found = decoder.decode(TopicBatch(values=[*values, long]))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, list)
    assert peak_bytes < 50 * len(long)


def test_events_that_wait_for_a_partition_take_as_much_of_a_checkpoint_as_dicts() -> None:
    """While a partition was behind, each checkpoint was several times as large as with dicts."""
    values = events(4, 600, is_plain=True)
    decoder = JsonObjects(["km", "title", "time", "flight"])
    batches = [decoder.decode(TopicBatch(values=values[start : start + 300])) for start in (0, 300)]
    assert isinstance(batches[1], Columns)
    plain, sizes = PlainData(), []
    for rows in (batches[1], list(batches[1])):
        order, restored = RecordOrder(), RecordOrder()
        order.add(TimedBatch(rows, np.arange(300)))
        stored = plain.encode(order.state())
        restored.restore(plain.decode(stored))
        released, expected = restored.release(MAX_TIME), order.release(MAX_TIME)
        assert released is not None
        assert expected is not None
        assert same(list(released), list(expected))
        assert same(released.order, expected.order)
        sizes.append(len(stored))
    assert sizes[0] < 1.3 * sizes[1]


def test_columns_are_not_many_times_as_large_as_their_json() -> None:
    """A few records, each with another long text, made batches of hundreds of megabytes."""
    names = [f"text{number}" for number in range(20)]
    values = [orjson.dumps(dict.fromkeys(names, "a")) for _ in range(300)]
    decoder = JsonObjects(names)
    decoder.decode(TopicBatch(values=values))
    assert isinstance(decoder.decode(TopicBatch(values=values)), Columns)
    longer = [orjson.dumps({name: "x" * 400}) for name in names]
    assert isinstance(decoder.decode(TopicBatch(values=[*values, *longer])), list)


@pytest.mark.parametrize("more", [{"weight": "km"}, {"features": "all"}, {"learner": "ftrl"}])
def test_settings_that_read_dicts(more: dict[str, Any]) -> None:
    """Weights were read row by row from columns, which takes longer than dicts."""
    settings = settings_of({"field": "late"}, **{"features": {"hour": "number"}} | more)
    assert not isinstance(decoder_for(settings, MemoryBroker().topic("flights")), JsonObjects)
