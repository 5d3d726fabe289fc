"""A flow that reads a history and then a topic is killed around the switch: nothing is missing, doubled, reordered."""

import signal
from pathlib import Path
from random import Random
from typing import Any, Final

import orjson
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from crash.cases import Case, kafka_case, trainer
from crash.places import CHECKPOINT, KAFKA_COMMIT, Place
from crash.programs import running
from crash.test_kill_9 import create, ended, seed, soak_kills
from crash.training import BEFORE, KEYS, PARTITIONS, WINDOW_MS

from streamiter.topics import OutgoingBatch

HISTORY: Final = 2_000
EVENTS: Final = 2_600
_PROGRESS: Final = "streamiter.engine.inbox.port_progress:PortProgress"
SWITCH: Final = [
    Place("before", f"{_PROGRESS}._let_follow"),
    Place("after", f"{_PROGRESS}._let_follow"),
    Place("before", f"{_PROGRESS}._open_intakes"),
    Place("after", f"{_PROGRESS}._open_intakes"),
    Place("after", f"{_PROGRESS}.barrier_passed"),
    Place("after", "streamiter.operators.steps:Then.process_following_batch"),
]
# A run that does not reach its place any more is killed so long after its first commit, at most.
_AFTER_COMMIT_S: Final = 0.3


def row(n: int) -> bytes:
    return orjson.dumps({"n": n, "x": [], "y": 0})


async def write(case: Case, folder: Path) -> None:
    """Write the history into files, and the topic, which has other rows before its first offset."""
    for part in range(2):
        rows = [row(n) for n in range(HISTORY) if n % KEYS % 2 == part]
        (folder / f"part-{part}.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    writer = await case.topic("events").open_writer()
    for partition in range(PARTITIONS):
        rows = [row(HISTORY - 1)] * BEFORE
        rows += [row(n) for n in range(HISTORY, EVENTS) if n % KEYS % PARTITIONS == partition]
        await writer.write(OutgoingBatch(rows, partition=partition))
    await writer.close()


async def read_by_kafka(bootstrap: str, name: str) -> list[Any]:
    """Return the committed records of a topic as another client of Kafka reads them."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False)
    await consumer.start()
    try:
        partition = TopicPartition(name, 0)
        consumer.assign([partition])
        [end] = (await consumer.end_offsets([partition])).values()
        consumer.seek(partition, 0)
        records: list[Any] = []
        while await consumer.position(partition) < end:
            for batch in (await consumer.getmany(timeout_ms=100)).values():
                records += [orjson.loads(record.value) for record in batch]
        return records
    finally:
        await consumer.stop()


async def check_history(kafka_broker: Any, prefix: str, folder: Path, kills: int, random: Random) -> None:
    case = kafka_case(kafka_broker.bootstrap, prefix, folder / "checkpoints")
    await create(case, "events", partitions=PARTITIONS)
    await create(case, "updates-killed", "read-killed")
    await write(case, folder)
    options: dict[str, Any] = {"mode": "asynchronous", "parallelism": 2, "kind": "history"}
    options["history"] = f"file:{folder}/part-*.jsonl"
    program = trainer(case, "killed", **options)
    told = []
    for _ in range(kills):
        place, number = random.choice(random.choice([SWITCH, CHECKPOINT, KAFKA_COMMIT])), random.randint(1, 4)
        told.append(f"{place}, call {number}")
        async with running(program, place, number) as process:
            if await process.until(process.has_committed):
                await process.lives_for(_AFTER_COMMIT_S * random.random())
            process.send(signal.SIGKILL)
            code, printed = await process.ends()
        assert code == -signal.SIGKILL, printed
    await ended(trainer(case, "killed", **options, stop="latest"))
    counted = await read_by_kafka(kafka_broker.bootstrap, f"{prefix}read-killed")
    for key in range(KEYS):
        expected = [[key, count, n] for count, n in enumerate(range(key, EVENTS, KEYS))]
        assert [each for each in counted if each[0] == key] == expected, told
    windows = sorted(await read_by_kafka(kafka_broker.bootstrap, f"{prefix}updates-killed"))
    starts = range(0, EVENTS, WINDOW_MS)
    inside = {
        (key, start): len([n for n in range(start, start + WINDOW_MS) if n % KEYS == key])
        for key in range(KEYS)
        for start in starts
    }
    assert windows == [[*window, count] for window, count in sorted(inside.items())], told


async def test_a_switch_from_a_history_to_its_topic_survives_kill_9(
    kafka_broker: Any, topic_prefix: str, tmp_path: Path
) -> None:
    """A restart at the switch read the first rows of the topic twice, or before the last ones of the history."""
    await check_history(kafka_broker, topic_prefix, tmp_path, 3, Random(seed()))


@pytest.mark.soak
async def test_a_switch_survives_any_number_of_kills(kafka_broker: Any, topic_prefix: str, tmp_path: Path) -> None:
    """A kill at a rare moment lost or doubled records."""
    random = Random(seed())
    for number in range(soak_kills() // 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        await check_history(kafka_broker, f"{topic_prefix}{number}-", folder, 3, random)
