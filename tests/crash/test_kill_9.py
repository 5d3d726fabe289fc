"""Training that is killed at random moments has the same results as training that was never killed.

``STREAMITER_SOAK_SEED`` chooses the moments, and ``STREAMITER_CRASH_KILLS`` is the number of kills in a soak test.
"""

import importlib
import operator
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from crash.cases import (
    MINI_BATCH,
    Case,
    example_trainer,
    flight_pieces,
    kafka_case,
    service_pieces,
    sqlite_case,
    trainer,
    training_pieces,
)
from crash.feed import Feed
from crash.follower import noted
from crash.lives import KilledFollowers, KilledProgram
from crash.outcome import check_counted_once, updates_in
from crash.places import CHECKPOINT, KAFKA_COMMIT, RESTORE, SHUTDOWN, SQLITE_COMMIT, STORE_COMMIT, Place
from crash.programs import Program, running
from crash.training import KEYS, MODEL, PAIR_MS, SERVED, WINDOW_MS
from learn.frozen_states import learned
from topics.topic_case import content

from streamiter.learn import AdaptiveLinearModel
from streamiter.models import last_update, model_updates
from streamiter.models.documents import without_state
from streamiter.topics import Topic
from streamiter.values.helpers.compiled import is_compiling

KILLS: Final = 6
FEWER_KILLS: Final = 3
# A process works for at most half a second, in which a piece of ten events arrives each hundredth of a second.
EVENTS_PER_LIFE: Final = 400
PARTITIONS: Final = 3
ALL_PLACES: Final = [*RESTORE, *CHECKPOINT, *KAFKA_COMMIT, *SQLITE_COMMIT, *STORE_COMMIT, *SHUTDOWN]


Check = Callable[[Case, int], Awaitable[None]]


def seed() -> int:
    return int(os.environ.get("STREAMITER_SOAK_SEED", "0"))


def soak_kills() -> int:
    return int(os.environ.get("STREAMITER_CRASH_KILLS", "100"))


@pytest.fixture
def sqlite(tmp_path: Path) -> Case:
    """Return a case with topics in a file."""
    return sqlite_case(tmp_path)


@pytest.fixture
def kafka(kafka_broker: Any, topic_prefix: str, tmp_path: Path) -> Case:
    """Return a case with topics on a broker."""
    return kafka_case(kafka_broker.bootstrap, topic_prefix, tmp_path)


async def ended(program: Program) -> None:
    async with running(program) as process:
        code, printed = await process.ends()
    assert code == 0, printed


async def create(case: Case, *names: str, partitions: int = 1) -> None:
    for name in names:
        await case.topic(name).create(partitions=partitions)


# ---- the example


async def check_synchronous_example(case: Case, kills: int) -> None:
    """Check that the example's updates equal, byte for byte, those of a run that was never killed."""
    await create(case, "events", "dead-letters", "updates-killed", "updates-whole")
    flights = EVENTS_PER_LIFE * kills // 2
    program = KilledProgram(
        example_trainer(case, "killed", MODE="synchronous"),
        example_trainer(case, "killed", MODE="synchronous", STOP="latest"),
        Feed(case.topic("events"), flight_pieces(flights)),
        seed(),
        case.commit,
    )
    await program.kill_and_finish(kills)
    await ended(example_trainer(case, "whole", MODE="synchronous", STOP="latest"))
    expected = await updates_in(case.topic("updates-whole"))
    assert len(expected) > flights // MINI_BATCH
    assert await updates_in(case.topic("updates-killed")) == expected


async def check_asynchronous_example(case: Case, kills: int) -> None:
    """Check that the example counts the arrival of each flight once, in any partition."""
    await create(case, "events", partitions=PARTITIONS)
    await create(case, "dead-letters", "updates-killed")
    flights = EVENTS_PER_LIFE * kills // 2
    program = KilledProgram(
        example_trainer(case, "killed", MODE="asynchronous"),
        example_trainer(case, "killed", MODE="asynchronous", STOP="latest"),
        Feed(case.topic("events"), flight_pieces(flights)),
        seed(),
        case.commit,
    )
    await program.kill_and_finish(kills)
    await check_counted_once(case.topic("updates-killed"), "late-flights", flights)


# ---- the training of `training.py`, a flow with two outputs


def killed_training(
    case: Case, events: int, options: Mapping[str, Any], *, partitions: int = 1, commit: Sequence[Place] | None = None
) -> KilledProgram:
    """Return the training that is killed while this many events arrive; ``commit`` replaces the places of the case."""
    return KilledProgram(
        trainer(case, "killed", **options),
        trainer(case, "killed", **options, stop="latest"),
        Feed(case.topic("events"), training_pieces(events, partitions)),
        seed(),
        case.commit if commit is None else commit,
    )


async def check_synchronous(case: Case, kills: int) -> None:
    """Check that the updates of a single partition equal, byte for byte, those of a run that was never killed."""
    await create(case, "events", *(f"{name}-{run}" for name in ("updates", "read") for run in ("killed", "whole")))
    events = EVENTS_PER_LIFE * kills
    options = {"mode": "synchronous", "parallelism": 1}
    await killed_training(case, events, options).kill_and_finish(kills)
    await ended(trainer(case, "whole", **options, stop="latest"))
    expected = await updates_in(case.topic("updates-whole"))
    assert len(expected) == events // MINI_BATCH
    assert await updates_in(case.topic("updates-killed")) == expected
    read = [record.value for record in await content(case.topic("read-killed"))]
    assert read == [str(number).encode() for number in range(events)]


async def check_asynchronous(case: Case, kills: int) -> None:
    """Check that each event of several partitions, which are read in parallel, is counted once."""
    await create(case, "events", partitions=PARTITIONS)
    await create(case, "updates-killed", "read-killed")
    events = EVENTS_PER_LIFE * kills
    options = {"mode": "asynchronous", "parallelism": 2}
    await killed_training(case, events, options, partitions=PARTITIONS).kill_and_finish(kills)
    await check_counted_once(case.topic("updates-killed"), "model", events)
    read = sorted(int(record.value or b"") for record in await content(case.topic("read-killed")))
    assert read == list(range(events))


async def documents_in(topic: Topic) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Return the ranks of the updates, and the updates without their generations and versions."""
    documents = [orjson.loads(update.value or b"") for update in await updates_in(topic)]
    ranks = [(document.pop("generation"), document.pop("version")) for document in documents]
    return ranks, [orjson.dumps(document) for document in documents]


async def check_at_least_once(case: Case, kills: int) -> None:
    """Check that records that are published twice are equal: the state is exactly once even if outputs are not.

    Only the generation may differ: a run that finds updates later than its checkpoint begins a new generation, so that
    versions never decrease for readers.
    """
    await create(case, "events", "updates-killed", "read-killed", "updates-whole", "read-whole")
    events = EVENTS_PER_LIFE * kills
    options = {"mode": "synchronous", "parallelism": 1, "delivery": "at_least_once"}
    await killed_training(case, events, options, commit=STORE_COMMIT).kill_and_finish(kills)
    await ended(trainer(case, "whole", **options, stop="latest"))
    _, expected = await documents_in(case.topic("updates-whole"))
    assert len(expected) == events // MINI_BATCH
    ranks, documents = await documents_in(case.topic("updates-killed"))
    assert list(dict.fromkeys(documents)) == expected
    assert ranks == sorted(set(ranks))


async def check_sums_on_disk(case: Case, kills: int) -> None:
    """Check that the running sums of a flow with states on disk equal those of a run that was never killed."""
    await create(case, "events", "read-killed", "read-whole")
    events = EVENTS_PER_LIFE * kills
    options = {"mode": "asynchronous", "parallelism": 1, "kind": "sums", "on_disk": True}
    await killed_training(case, events, options).kill_and_finish(kills)
    await ended(trainer(case, "whole", **{**options, "on_disk": False}, stop="latest"))
    expected = [record.value for record in await content(case.topic("read-whole"))]
    assert len(expected) == events
    assert [record.value for record in await content(case.topic("read-killed"))] == expected
    assert list((case.folder / "state").glob("*/run-*")) == []


async def check_windows(case: Case, kills: int, *, on_disk: bool = False) -> None:
    """Check that each window and each pair is there once, with the events that it must have."""
    await create(case, "events", "updates-killed", "read-killed")
    events = EVENTS_PER_LIFE * kills
    options = {"mode": "asynchronous", "parallelism": 1, "kind": "windows", "on_disk": on_disk}
    await killed_training(case, events, options).kill_and_finish(kills)
    expected: dict[tuple[int, int], list[int]] = {}
    for number in range(events):
        expected.setdefault((number % KEYS, number // WINDOW_MS * WINDOW_MS), []).append(number)
    windows = [orjson.loads(record.value or b"") for record in await content(case.topic("read-killed"))]
    assert sorted(windows) == sorted([*window, len(inside), sum(inside)] for window, inside in expected.items())
    pairs = [orjson.loads(record.value or b"") for record in await content(case.topic("updates-killed"))]
    later = range(0, PAIR_MS + 1, KEYS)
    assert sorted(pairs) == [[number, number + ms] for number in range(events) for ms in later if number + ms < events]


async def check_changes(case: Case, kills: int, kind: str = "changes") -> None:
    """Check that versions as changes have the bits of a run without kills, for followers that start at any of them."""
    await create(case, "events", "updates-killed", "updates-whole")
    events = EVENTS_PER_LIFE * kills
    options = {"mode": "synchronous", "parallelism": 1, "kind": kind}
    program = killed_training(case, events, options)
    async with KilledFollowers(f"{case.prefix}updates-killed", MODEL, case.folder.with_name("versions")) as followers:
        await program.kill_and_finish(kills)
        seen = await followers.versions(kills)
    await ended(trainer(case, "whole", **options, stop="latest"))
    expected = await models_in(case.topic("updates-whole"))
    assert list(expected) == list(range(MINI_BATCH, events + 1, MINI_BATCH))
    assert await models_in(case.topic("updates-killed")) == expected
    assert set(expected.values()).issuperset(seen)
    last = await last_update(case.topic("updates-killed"), MODEL)
    assert last is not None
    assert noted(last.records, last.parameters) == list(expected.values())[-1]
    headers = [dict(record.headers) for record in await content(case.topic("updates-killed"))]
    assert sum("follows" in each for each in headers) > events // MINI_BATCH // 2


async def check_embeddings(case: Case, kills: int) -> None:
    """As :func:`check_changes`, for vectors that ``train_online`` learns."""
    await check_changes(case, kills, "embeddings")


async def check_service(case: Case, kills: int) -> None:
    """Check that a service that reads columns predicts and learns the same, to the last bit, as without kills."""
    names = ("updates-{}", "read-{}", "read-{}-ways")
    await create(case, "events", *(name.format(run) for name in names for run in ("killed", "whole")))
    options = {"mode": "asynchronous", "parallelism": 1, "kind": "service"}
    program = killed_training(case, 0, options)
    pieces = service_pieces(EVENTS_PER_LIFE * kills * 10)
    await replace(program, feed=Feed(case.topic("events"), pieces)).kill_and_finish(kills)
    await ended(trainer(case, "whole", **options, stop="latest"))
    found = []
    for run in ("killed", "whole"):
        last = await last_update(case.topic(f"updates-{run}"), MODEL)
        predicted = [record.value for record in await content(case.topic(f"read-{run}"))]
        assert last is not None
        assert last.records == len(predicted)
        model = AdaptiveLinearModel(kinds=SERVED)
        model.start_from(last.parameters)
        found.append((predicted, noted(last.records, without_state(last.parameters)), learned(model)))
    assert found[0] == found[1]
    ways = [orjson.loads(record.value or b"") for record in await content(case.topic("read-killed-ways"))]
    events = [orjson.loads(value or b"") for piece in pieces for value in piece.values]
    assert [way[:2] for way in ways] == [[event["n"], event["event"]] for event in events]
    assert sum(way[2] for way in ways) > EVENTS_PER_LIFE or not is_compiling()


async def models_in(topic: Topic) -> dict[int, str]:
    """Return a line for each version, with a hash of its bits, by its records; check that no version is missing."""
    updates = [update async for update in model_updates(topic, MODEL, follow=False)]
    assert [update.rank for update in updates] == [(1, version) for version in range(1, len(updates) + 1)]
    return {update.records or 0: noted(update.records, update.parameters) for update in updates}


# ---- the tests


@pytest.mark.parametrize("place", ALL_PLACES, ids=str)
def test_each_place_is_in_the_engine(place: Place) -> None:
    """A function was renamed, and the soak test failed only in its fifth hour."""
    module, _, path = place.function.partition(":")
    assert callable(operator.attrgetter(path)(importlib.import_module(module)))


async def test_the_synchronous_example_on_kafka_survives_kill_9(kafka: Case) -> None:
    """The model of a service that was restarted several times differed from the model of a service without
    restarts.
    """
    await check_synchronous_example(kafka, FEWER_KILLS)


async def test_the_asynchronous_example_on_kafka_survives_kill_9(kafka: Case) -> None:
    """Each restart lost some of the events that were being handled, or learned from them twice."""
    await check_asynchronous_example(kafka, FEWER_KILLS)


async def test_parallel_training_on_kafka_survives_kill_9(kafka: Case) -> None:
    """Partitions that were ahead of others at a crash were read again, or were skipped."""
    await check_asynchronous(kafka, FEWER_KILLS)


async def test_synchronous_training_on_sqlite_survives_kill_9(sqlite: Case) -> None:
    """The power failed during a write to a file, and the file had half of a commit."""
    await check_synchronous(sqlite, KILLS)


async def test_parallel_training_on_sqlite_survives_kill_9(sqlite: Case) -> None:
    """Two outputs of one flow showed different numbers of events."""
    await check_asynchronous(sqlite, FEWER_KILLS)


async def test_state_survives_kill_9_without_transactions(sqlite: Case) -> None:
    """Only transactional outputs were tested, and sums in files were wrong after a crash."""
    await check_at_least_once(sqlite, FEWER_KILLS)


async def test_states_on_disk_survive_kill_9(sqlite: Case) -> None:
    """The next run went on with the files of the killed one, which were newer than its checkpoint."""
    await check_sums_on_disk(sqlite, FEWER_KILLS)


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
async def test_windows_and_joins_survive_kill_9(sqlite: Case, on_disk: bool) -> None:
    """A window lost the events from before the crash, or a pair left twice."""
    await check_windows(sqlite, FEWER_KILLS, on_disk=on_disk)


async def test_versions_as_changes_survive_kill_9(sqlite: Case) -> None:
    """After a crash the trainer continued a chain of changes that only the aborted transaction had."""
    await check_changes(sqlite, FEWER_KILLS)


async def test_embeddings_as_changes_on_kafka_survive_kill_9(kafka: Case) -> None:
    """After a crash the trainer continued a chain of changes that only the aborted transaction had."""
    await check_embeddings(kafka, FEWER_KILLS)


async def test_a_service_that_reads_columns_survives_kill_9(kafka: Case) -> None:
    """Only training that reads dicts was killed; a service reads its events as columns, from buffers of Kafka."""
    await check_service(kafka, FEWER_KILLS)


# ---- soak


@pytest.mark.soak
@pytest.mark.parametrize(
    "check",
    [
        check_synchronous,
        check_asynchronous,
        check_at_least_once,
        check_sums_on_disk,
        check_windows,
        check_changes,
        check_service,
    ],
)
async def test_training_on_sqlite_survives_any_number_of_kills(sqlite: Case, check: Check) -> None:
    """A kill at a rare moment, one of a thousand, lost or doubled records."""
    await check(sqlite, soak_kills())


@pytest.mark.soak
@pytest.mark.parametrize(
    "check",
    [
        check_synchronous_example,
        check_asynchronous_example,
        check_synchronous,
        check_asynchronous,
        check_changes,
        check_embeddings,
        check_service,
    ],
)
async def test_training_on_kafka_survives_any_number_of_kills(kafka: Case, check: Check) -> None:
    """A kill at a rare moment, one of a thousand, lost or doubled records."""
    await check(kafka, soak_kills())
