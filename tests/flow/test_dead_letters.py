"""Dead letters take any record, fit into their topic, and name the place where the record was read."""

import asyncio
import json
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, strategies
from processes.linked_jobs import joined_jobs
from topics.topic_case import read_to_end, write

from streamiter import Flow, IterationBodyResult, Operator, Stream, iterate_unbounded_streams, tumbling
from streamiter.errors import GraphError, JobFailed, RejectRecords
from streamiter.operators import DeadLetter, MiniBatch, Origin, Output
from streamiter.operators.operator import EngineOperator
from streamiter.topics import MemoryBroker, OutgoingBatch, SizeLimit, Topic, TopicRecord, topic
from streamiter.topics.dead_letters import DeadLetterEncoder
from streamiter.values.records import Columns


def refuse(record: Any) -> NoReturn:
    raise ValueError("no")


async def refused_later(record: Any) -> NoReturn:
    refuse(record)


def seven(record: Any) -> int:
    """Return a seven, and refuse every other record."""
    if type(record) is int and record == 7:
        return 7
    refuse(record)


def nested(levels: int) -> list[Any]:
    """Return lists within lists, with this many levels."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def containing_itself() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("unprintable")


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("speechless")


class BrokenZone(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta:
        raise ValueError("no offset")


async def letters_of(flow: Flow, dead: Topic) -> list[TopicRecord]:
    """Run the flow to its end, and return the records in the topic of its dead letters."""
    await (await flow.start()).wait()
    return await read_to_end(dead)


async def empty_topic(name: str = "dead", **settings: str) -> Topic:
    made = MemoryBroker().topic(name)
    await made.create(settings=settings)
    return made


# ---- values


@pytest.mark.parametrize(
    ("record", "written"),
    [
        (nested(254), b"[" * 254 + b"]" * 254),
        (nested(255), b"[" * 101 + '"…"'.encode() + b"]" * 101),
        (nested(50_000), b"[" * 101 + '"…"'.encode() + b"]" * 101),
        ({"n": 2**64}, b'{"n":18446744073709551616}'),
        (-(2**63) - 1, b"-9223372036854775809"),
        (16**5000, b'"0x1' + b"0" * 5000 + b'"'),
        (
            {"x": [2**64, float("nan"), 1.5, True, None, "é", b"raw"]},
            '{"x":[18446744073709551616,null,1.5,true,null,"é","b\'raw\'"]}'.encode(),
        ),
        ("\ud800", rb'"\\ud800"'),
        ({"\ud800": {1}}, rb'{"\\ud800":"{1}"}'),
        ({(1, 2): 2**70, None: 1, 2**70: 2}, b'{"(1, 2)":%d,"null":1,"%d":2}' % (2**70, 2**70)),
        (containing_itself(), '[1,"…"]'.encode()),
        ([Unprintable()], b'["<Unprintable without a repr>"]'),
        (Origin("t", 2**64, 0), b'{"topic":"t","partition":18446744073709551616,"offset":0}'),
        (np.bytes_(b"numpy's"), b"numpy's"),
        (bytearray(b"\xff"), b"\xff"),
        (np.array([2**64, "a"], dtype=object), b'[18446744073709551616,"a"]'),
        (datetime(2020, 1, 1, tzinfo=UTC), b'"2020-01-01T00:00:00+00:00"'),
    ],
    ids=lambda given: type(given).__name__,  # some values have no text
)
async def test_a_value_that_is_no_json_is_written_too(record: Any, written: bytes) -> None:
    """The policy was to continue without the record, but `TypeError: Recursion limit reached` ended the job."""
    dead = await empty_topic()
    flow = Flow("f")
    made_here = flow.from_items([1]).flat_map(lambda _: [record, 7], name="make")
    kept = made_here.map(seven, name="check", parallelism=2, dead_letter=dead).collect()
    [letter] = await letters_of(flow, dead)
    assert kept.items == [7]
    assert letter.value == written
    assert dict(letter.headers) == {"error": b"ValueError: no", "step": b"check"}


def test_a_time_zone_that_raises_does_not_end_the_process() -> None:
    """`orjson` called a time zone that raises, and the process ended with a segmentation fault."""
    record = datetime(2020, 1, 1, tzinfo=BrokenZone())
    [value] = DeadLetterEncoder().encode([DeadLetter(record, "step", "error")]).values
    assert value is not None
    assert "datetime.datetime(2020, 1, 1, 0, 0, tzinfo=" in json.loads(value)


_ANY_TEXT = strategies.text(strategies.characters(codec=None), max_size=5)  # also halves of characters
_SCALARS = strategies.one_of(
    strategies.none(),
    strategies.booleans(),
    strategies.integers(-(2**70), 2**70),
    strategies.floats(),
    _ANY_TEXT,
    strategies.binary(max_size=5),
    strategies.datetimes(),
    strategies.builds(Unprintable),
    strategies.builds(Origin, _ANY_TEXT, strategies.integers(), strategies.integers()),
    strategies.builds(np.float32, strategies.floats(width=32)),
    strategies.builds(np.array, strategies.lists(strategies.integers(0, 9), max_size=3)),
    strategies.frozensets(strategies.integers(0, 9), max_size=2),
)
_KEYS = strategies.one_of(_ANY_TEXT, strategies.integers(), strategies.none(), strategies.tuples(strategies.booleans()))


@given(
    strategies.recursive(
        _SCALARS,
        lambda inner: strategies.one_of(
            strategies.lists(inner, max_size=4),
            strategies.tuples(inner, inner),
            strategies.dictionaries(_KEYS, inner, max_size=4),
        ),
        max_leaves=12,
    )
)
def test_any_refused_record_is_written_as_json(record: Any) -> None:
    """A program that reads the letters failed at a value that was no JSON."""
    [value] = DeadLetterEncoder().encode([DeadLetter(record, "step", "error")]).values
    if isinstance(record, bytes) or record is None:
        assert value == record
    else:
        assert value is not None
        json.loads(value, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize(
    ("error", "text"),
    [(Speechless(), b"Speechless"), (ValueError("half \ud800 a character"), rb"ValueError: half \ud800 a character")],
    ids=["no text", "half a character"],
)
async def test_an_error_without_a_proper_text_makes_a_letter_too(error: Exception, text: bytes) -> None:
    """The error of a user's code had no valid text, and its letter could not be written."""
    dead = await empty_topic()

    def fail(record: int) -> NoReturn:
        raise error

    flow = Flow("f")
    flow.from_items([1]).map(fail, name="fail", dead_letter=dead)
    [letter] = await letters_of(flow, dead)
    assert dict(letter.headers)["error"] == text


# ---- sizes; the contract of topics tests the limits of each kind of topic


async def test_records_too_large_for_a_sink_s_topic_follow_its_policy() -> None:
    """The topic of the results refused the whole batch, which ended the job with any policy."""
    out, dead = await empty_topic("out", max_record_bytes="10"), await empty_topic()
    flow = Flow("f")
    items = ["a", "b" * 20, "c" * 7, "d" * 8]
    flow.from_items(items).sink(out, key=lambda text: text[:1], dead_letter=dead, name="write")
    letters = await letters_of(flow, dead)
    assert [(record.key, record.value) for record in await read_to_end(out)] == [(b"a", b'"a"'), (b"c", b'"ccccccc"')]
    assert [letter.value for letter in letters] == [b'"%s"' % (b"b" * 20), b'"dddddddd"']
    error = b"it takes 23 bytes in topic 'out', which takes 10"
    assert dict(letters[0].headers) == {"step": b"write", "error": error}


async def test_a_topic_too_small_for_letters_is_refused_when_the_job_starts() -> None:
    """The topic was too small for letters, and the job failed only with its first letter, hours later."""
    dead = await empty_topic(max_record_bytes="100")
    flow = Flow("f")
    flow.from_items([1]).map(refuse, dead_letter=dead)
    with pytest.raises(JobFailed, match=r"take records of 1024 bytes, given one that takes 100"):
        await flow.start()


@pytest.mark.parametrize("key", [b"k", b"k" * 600, b"k" * 5000])
@pytest.mark.parametrize("url", ["memory://c", "memory://" + "c" * 600, "memory://" + "c" * 5000])
def test_long_keys_and_origins_are_left_out_of_letters_that_would_be_too_large(key: bytes, url: str) -> None:
    """A letter had half a key, which is another key, or half a URL, which may be that of another topic."""
    encoder, limit = DeadLetterEncoder(), SizeLimit(1024)
    encoder.cut_to(limit, "dead")
    letter = DeadLetter(b"v" * 5000, "s" * 5000, "ü" * 5000, Origin(url, 3, 2**60), key)
    written = encoder.encode([letter])
    assert limit.exceeded_by(written) == {}
    assert (written.values[0] or b"").startswith(b"v" * 10)
    headers = dict((written.headers or [()])[0])
    assert written.keys == [key if len(key) == 1 else None]
    assert headers.get("key_bytes") == (None if len(key) == 1 else b"%d" % len(key))
    assert headers.get("topic") == (url.encode() if len(url) < 20 else None)
    assert ("offset" in headers) == ("topic" in headers)
    assert headers["error_bytes"] == b"10000"


def test_a_topic_without_headers_is_refused_for_dead_letters(tmp_path: Path) -> None:
    """The first letter ended the job, because the topic has no headers, which contain the reason."""
    lines = topic(f"file:{tmp_path}/dead.jsonl")
    with pytest.raises(GraphError, match=r"step 'parse': expected a dead-letter topic whose records have headers"):
        Flow("f").from_items([1]).map(str, name="parse", dead_letter=lines)


# ---- origins


class Refusing(Operator):
    def process(self, record: Any, out: Output) -> None:
        raise RejectRecords([0], "no")


class RefusingBatches(Operator):
    def process_batch(self, batch: Any, out: Output) -> None:
        raise RejectRecords(range(len(batch)), "no")


class AwaitedRefusing(Operator):
    async def process(self, record: Any, out: Output) -> None:
        raise RejectRecords([0], "no")


class RefusingInThread(Refusing):
    runs_in_thread = True


class RefusingOneByOne(Refusing):
    """Gives back the rest of each batch after each record, because the engine asks which input it wants."""

    def wanted_inputs(self) -> list[str]:
        return ["input"]


class Late(Operator):
    """Emits each record when the next one arrives, and the last one at the end."""

    def open(self, context: Any) -> None:
        self.kept: list[Any] = []

    def process(self, record: Any, out: Output) -> None:
        self.finish(out)
        self.kept = [record]

    def finish(self, out: Output) -> None:
        for record in self.kept:
            out.emit(record)


class RefusingLate(Late):
    """Refuses each record itself when the next one arrives."""

    def finish(self, out: Output) -> None:
        for record in self.kept:
            out.reject(record, "no")


class Renaming(EngineOperator):
    """Emits another object for each record."""

    is_stateless = True

    def process(self, record: Any, out: Output) -> None:
        out.emit(f"{record} "[:-1])


def timed(read: Stream) -> Stream:
    """Return the stream with the offset of each record as its time."""
    return read.event_time(lambda text: int(text.split(":")[1]), unit="ms", check_unit=False)


def in_columns(batch: Any) -> Columns:
    return Columns({"place": np.array(batch)})


def refuse_with_state(state: Any, record: Any) -> NoReturn:
    raise ValueError("no")


async def refused(
    build: Callable[[Stream, Topic], Any],
    *,
    partitions: int = 1,
    records: int = 12,
    read_by: int = 1,
    processes: int = 1,
) -> list[tuple[str, str, dict[str, str]]]:
    """Return the partition and offset of each letter's record, and the letter's headers."""
    broker = MemoryBroker()
    clicks, dead = broker.topic("clicks"), broker.topic("dead")
    await clicks.create(partitions=partitions)
    await dead.create()
    for number in range(records):
        place = b"%d:%d" % (number % partitions, number // partitions)
        await write(clicks, outgoing(place, number % partitions))
    flows = [Flow("f") for _ in range(processes)]
    for flow in flows:
        build(flow.source(clicks, stop="latest", name="read", parallelism=read_by), dead)
    jobs = joined_jobs(flows).jobs
    await asyncio.gather(*(job.start() for job in jobs))
    await asyncio.gather(*(job.wait() for job in jobs))
    found = []
    for letter in await read_to_end(dead):
        value = json.loads(letter.value or b"")
        partition, offset = (value["place"] if isinstance(value, dict) else value).split(":")
        headers = dict(letter.headers)
        if letter.key is not None:
            original = outgoing(f"{partition}:{offset}".encode(), int(partition))
            assert ([letter.key], [letter.headers[:2]], [letter.timestamp_ms]) == (
                original.keys,
                original.headers,
                original.timestamps_ms,
            )
            del headers["trace"], headers["nothing"]
        assert ("offset" in headers) <= (letter.key is not None)
        found.append((partition, offset, {name: (text or b"").decode() for name, text in headers.items()}))
    return found


def outgoing(place: bytes, partition: int) -> OutgoingBatch:
    """Return the record of a place, with a key, headers and a time stamp of its own."""
    headers = (("trace", place), ("nothing", None))
    timestamp_ms = 1_600_000_000_000 + zlib.crc32(place)
    return OutgoingBatch([b'"%s"' % place], [place], [headers], [timestamp_ms], partition)


def check_right(partition: str, offset: str, headers: dict[str, str]) -> None:
    """Check that all that a letter says of its origin is right; it may say little."""
    origin = {name: headers[name] for name in headers if name not in ("step", "error")}
    if origin:
        assert origin["topic"] == "memory://clicks"
    if "partition" in origin:
        assert origin["partition"] == partition
        first, last = (
            origin.get("first_offset", origin.get("offset")),
            origin.get("last_offset", origin.get("offset")),
        )
        assert first is not None
        assert last is not None
        assert int(first) <= int(offset) <= int(last)


BEHIND_THE_SOURCE: dict[str, Callable[[Stream, Topic], Any]] = {
    "at once": lambda read, dead: read.map(refuse, dead_letter=dead),
    "behind steps without state": lambda read, dead: (
        read.map(str).filter(bool).flat_map(lambda text: [text]).map(refuse, dead_letter=dead)
    ),
    "behind a service": lambda read, dead: read.map_async(refused_later, dead_letter=dead),
    "batches": lambda read, dead: read.map_batch(list).process(RefusingBatches, name="p", dead_letter=dead),
    "in several subtasks": lambda read, dead: read.map(str).map(refuse, parallelism=3, dead_letter=dead),
    "by key": lambda read, dead: read.key_by(str).process(Refusing, dead_letter=dead, name="p"),
    "partitioned": lambda read, dead: read.partition_by(len).process(
        RefusingBatches, dead_letter=dead, name="p", parallelism=2
    ),
    "awaited": lambda read, dead: read.process(AwaitedRefusing, dead_letter=dead, name="p"),
    "in a thread": lambda read, dead: read.process(RefusingInThread, dead_letter=dead, name="p"),
    "asked after each": lambda read, dead: read.process(RefusingOneByOne, dead_letter=dead, name="p"),
    "in a union": lambda read, dead: read.union(read.filter(lambda text: False)).map(refuse, dead_letter=dead),
    "at a sink": lambda read, dead: read.sink(dead, key=refuse, dead_letter=dead),
    "at event time": lambda read, dead: read.event_time(refuse, dead_letter=dead),
    "behind event time": lambda read, dead: timed(read).map(refuse, dead_letter=dead),
    "behind steps with event time": lambda read, dead: (
        timed(read)
        .filter(bool)
        .flat_map(lambda text: [f"{text} twice"[:-6]])
        .map(str, parallelism=2)
        .rebalance()
        .process(RefusingBatches, name="p", dead_letter=dead, parallelism=3)
    ),
    "in a window": lambda read, dead: (
        timed(read).key_by(len).window(tumbling(1), dead_letter=dead).aggregate(("max", refuse))
    ),
    "in columns": lambda read, dead: read.map_batch(in_columns).map(refuse, dead_letter=dead),
    "in batches of columns": lambda read, dead: (
        read.map_batch(in_columns)
        .filter_batch(lambda batch: batch["place"] != "0:-1")
        .filter(bool)
        .process(RefusingBatches, name="p", parallelism=2, dead_letter=dead)
    ),
    "in columns with event time": lambda read, dead: (
        timed(read).map_batch(in_columns).key_by("place").process(Refusing, name="p", dead_letter=dead)
    ),
    "in arrays": lambda read, dead: read.map_batch(lambda batch: np.array(batch)).process(
        Refusing, name="p", dead_letter=dead
    ),
    "by a state of columns": lambda read, dead: (
        read.map_batch(in_columns).key_by("place").stateful_map(refuse_with_state, 0, dead_letter=dead)
    ),
    "emitted anew": lambda read, dead: read.process(Renaming, name="new").map(refuse, dead_letter=dead),
}

BEHIND_STATE: dict[str, Callable[[Stream, Topic], Any]] = {
    "behind a step that keeps records": lambda read, dead: read.process(Late, name="late").map(
        refuse, dead_letter=dead
    ),
    "and behind a channel": lambda read, dead: (
        read.process(Late, name="late").map(str).map(refuse, parallelism=2, dead_letter=dead)
    ),
    "kept by the step itself": lambda read, dead: read.process(RefusingLate, name="p", dead_letter=dead),
    "out of mini-batches": lambda read, dead: (
        read.process(lambda: MiniBatch(5), name="mini").flat_map(list).map(refuse, dead_letter=dead)
    ),
    "at the end": lambda read, dead: read.sort(str).map(refuse, dead_letter=dead),
}


@pytest.mark.parametrize("build", BEHIND_THE_SOURCE.values(), ids=BEHIND_THE_SOURCE)
async def test_a_letter_has_the_offset_key_headers_and_time_of_its_original(
    build: Callable[[Stream, Topic], Any],
) -> None:
    """A record that was refused behind the source could not be traced: it had lost its trace id, key and time."""
    letters = await refused(build)
    assert len(letters) == 12
    for partition, offset, headers in letters:
        check_right(partition, offset, headers)
        assert headers["partition"] == "0"
        assert headers.keys() - {"error", "step", "topic", "partition"} == {"offset"}


@pytest.mark.parametrize("build", BEHIND_STATE.values(), ids=BEHIND_STATE)
async def test_a_letter_of_a_kept_record_has_no_origin(build: Callable[[Stream, Topic], Any]) -> None:
    """A letter named the offsets of the current batch, although its record came with an earlier one."""
    letters = await refused(build)
    assert len(letters) == 12
    assert all(headers.keys() == {"error", "step"} for _, _, headers in letters)


async def test_a_letter_from_a_loop_has_no_wrong_origin() -> None:
    """A record returned through the loop with batches of later offsets, and its letter named those offsets."""

    def build(read: Stream, dead: Topic) -> None:
        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            passed = data[0].map(refuse, name="x", dead_letter=dead)
            return IterationBodyResult([variables[0].filter(lambda text: False)], [passed])

        iterate_unbounded_streams([read.filter(lambda text: False)], [read], body)[0].collect()

    letters = await refused(build)
    assert len(letters) == 12
    for letter in letters:
        check_right(*letter)


@pytest.mark.parametrize("build", BEHIND_THE_SOURCE.values(), ids=BEHIND_THE_SOURCE)
async def test_a_letter_has_the_same_original_where_the_flow_has_several_processes(
    build: Callable[[Stream, Topic], Any],
) -> None:
    """A record that was refused in another process than its source had a range of offsets, and no trace id."""
    found = []
    for processes in (1, 3):

        def in_all(read: Stream, dead: Topic) -> None:
            build(read.rebalance().map(str, name="in all", parallelism=3), dead)

        letters = await refused(in_all, partitions=4, read_by=3, processes=processes)
        for letter in letters:
            check_right(*letter)
            assert "offset" in letter[2]
        found.append(sorted((partition, offset) for partition, offset, _ in letters))
    assert found[0] == found[1] == sorted((str(number % 4), str(number // 4)) for number in range(12))


class SecondOfEach(Operator):
    """Refuses each record of which an equal one has come before."""

    def open(self, context: Any) -> None:
        self.seen: set[Any] = set()

    def process(self, record: Any, out: Output) -> None:
        if record in self.seen:
            out.reject(record, "again", origin=out.batch_origin)
        self.seen.add(record)


SHARED: dict[str, Callable[[Stream, Topic], Any]] = {
    "record by record": lambda read, dead: read.process(SecondOfEach, name="p", dead_letter=dead),
    "behind event time": lambda read, dead: read.event_time(lambda _: 7, unit="ms", check_unit=False).process(
        SecondOfEach, name="p", dead_letter=dead
    ),
    "by key": lambda read, dead: read.key_by(abs).process(SecondOfEach, name="p", dead_letter=dead),
    "in one of two branches": lambda read, dead: (
        read.map(seven, name="other", dead_letter=dead),
        read.map(abs).filter(bool).process(SecondOfEach, name="p", dead_letter=dead),
    ),
    "behind a flat map": lambda read, dead: (
        read.flat_map(lambda n: [n]).rebalance().process(SecondOfEach, name="p", dead_letter=dead)
    ),
}


@pytest.mark.parametrize("build", SHARED.values(), ids=SHARED)
async def test_a_letter_of_a_small_number_has_its_own_original(build: Callable[[Stream, Topic], Any]) -> None:
    """Python has one object for equal small numbers, and a letter had the key of another row with the same number."""
    broker = MemoryBroker()
    numbers, dead = broker.topic("numbers"), broker.topic("dead")
    await numbers.create()
    await dead.create()
    await write(numbers, OutgoingBatch([b"7"] * 3, [b"first", b"second", b"third"]))
    flow = Flow("f")
    build(flow.source(numbers, stop="latest", name="read"), dead)
    letters = await letters_of(flow, dead)
    assert [letter.key for letter in letters] == [b"second", b"third"]
    assert [dict(letter.headers)["offset"] for letter in letters] == [b"1", b"2"]


_STEPS: dict[str, Callable[[Stream, int], Stream]] = {
    "map": lambda stream, parallelism: stream.map(str, parallelism=parallelism),
    "flat_map": lambda stream, parallelism: stream.flat_map(lambda text: [text, text], parallelism=parallelism),
    "filter": lambda stream, parallelism: stream.filter(lambda text: int(text[-1]) % 3 > 0),
    "map_batch": lambda stream, parallelism: stream.map_batch(list, parallelism=parallelism),
    "rebalance": lambda stream, parallelism: stream.rebalance().map(str, parallelism=parallelism),
    "union": lambda stream, parallelism: stream.union(stream.map(str)),
    "late": lambda stream, parallelism: stream.process(
        Late, parallelism=parallelism, name=f"late behind {stream.name}"
    ),
    "mini-batches": lambda stream, parallelism: stream.process(
        lambda: MiniBatch(3), name=f"mini behind {stream.name}"
    ).flat_map(list),
}


@given(
    steps=strategies.lists(strategies.sampled_from(sorted(_STEPS)), max_size=4),
    partitions=strategies.integers(1, 3),
    parallelism=strategies.integers(1, 3),
    read_by=strategies.integers(1, 3),
)
def test_a_letter_behind_any_steps_has_no_wrong_origin(
    steps: list[str], partitions: int, parallelism: int, read_by: int
) -> None:
    """A letter named a wrong range of offsets, and the engineer looked for the record at another place."""

    def build(read: Stream, dead: Topic) -> None:
        stream = read.map(str, parallelism=read_by)
        for step in steps:
            stream = _STEPS[step](stream, parallelism)
        stream.process(Refusing, name="refuse", dead_letter=dead)

    letters = asyncio.run(refused(build, partitions=partitions))
    assert letters
    for partition, offset, headers in letters:
        check_right(partition, offset, headers)
        if not {"late", "mini-batches"} & set(steps):
            assert headers["topic"] == "memory://clicks"
