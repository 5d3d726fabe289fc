"""A flow in several processes, or on a Ray cluster, of which some are killed has the outputs of one never killed."""

import asyncio
import contextlib
import importlib
import operator
import os
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import orjson
import pytest
from crash.cases import PIECE_EVENTS, Case, kafka_case, trainer, training_pieces
from crash.feed import Feed
from crash.lives import KilledFollowers
from crash.outcome import check_counted_once
from crash.places import KAFKA_COMMIT, Place
from crash.programs import running
from crash.test_kill_9 import models_in, seed
from crash.training import MODEL
from support.ray_fixtures import TESTS, children, raylet_of
from support.soak import in_soak
from support.waiting import PATIENCE_S
from topics.topic_case import content

from streamiter.topics import OutgoingBatch

_CHECKPOINTING: Final = "streamiter.engine.checkpointing"
_FOLLOWER: Final = f"{_CHECKPOINTING}.checkpoint_follower:CheckpointFollower"
_CHECKPOINTER: Final = "streamiter.engine.job.checkpointer:Checkpointer"
OTHER_STARTS: Final = Place("before", "streamiter.engine.plan.placement:PlacedStep.check_operator")
OTHER_RESTORES: Final = Place("before", "streamiter.engine.job.follower:JobFollower._tell_report")
OTHER_TAKES: Final = Place("before", f"{_FOLLOWER}._save")
OTHER_HAS_SAVED: Final = Place("after", f"{_FOLLOWER}._save")
FIRST_CHOOSES: Final = Place("after", f"{_CHECKPOINTER}.open")
FIRST_RESTORES: Final = Place("before", f"{_CHECKPOINTER}.restored")
FIRST_TAKES: Final = Place("after", f"{_CHECKPOINTER}._seal_sinks")
FIRST_HAS_SAVED: Final = Place("before", f"{_CHECKPOINTER}._commit")
READS_ON: Final = Place("before", "streamiter.topics.source_and_sink:TopicSource.read_on")
EXPIRES: Final = Place("before", f"{_CHECKPOINTING}.commit:JobTransaction.commit")
FIRST_HAS_COMMITTED: Final = Place("after", f"{_CHECKPOINTER}._commit")

EVENTS: Final = 1_000
PARTITIONS: Final = 2
_POLL_S: Final = 0.05
# The supervisor gives up after three losses in ten minutes.
_STRIKES_MAX: Final = 3


@pytest.fixture
async def kafka(kafka_broker: Any, topic_prefix: str, tmp_path: Path) -> Case:
    """Return a case with topics on a broker."""
    case = kafka_case(kafka_broker.bootstrap, topic_prefix, tmp_path / "checkpoints")
    await case.topic("events").create(partitions=PARTITIONS)
    for name in ("updates-killed", "read-killed", "updates-whole", "read-whole"):
        await case.topic(name).create()
    return case


class Life(NamedTuple):
    """A run of the program, in which processes kill themselves one after the other, each at a place."""

    strikes: Sequence[tuple[Place, int]]
    processes: int = 2
    kills_program: bool = False
    """Whether the program is killed at the end; otherwise it is suspended."""


async def killed(case: Case, lives: Sequence[Life], *, partitions: int = PARTITIONS, **options: Any) -> None:
    """Run a flow in several processes that are killed, then to its end in another number of processes."""
    feed = Feed(case.topic("events"), training_pieces(EVENTS, partitions))
    given = {"mode": "asynchronous", "parallelism": 3, **options}
    for number, life in enumerate(lives):
        markers = [case.folder / f"life {number}, strike {strike}" for strike in range(len(life.strikes))]
        strikes = [
            (*place, call, 0 if place is EXPIRES else signal.SIGKILL, str(marker))
            for (place, call), marker in zip(life.strikes, markers, strict=True)
        ]
        # Only before the first checkpoint it changes nothing that the source begins where a new one does.
        changed = [] if number else ["events"]
        settings = {**given, "processes": life.processes, "strikes": strikes, "changed_steps": changed}
        program = trainer(case, "killed", **settings)
        before = program.record().committed_run
        async with running(program) as process:
            feeding = asyncio.create_task(feed.during(lambda process=process: process.is_over, len(lives) - number))
            for marker in markers:
                await process.reaches(marker.exists)
            await feeding
            if program.folder.exists():  # The flow has state.
                # The life before may have ended with as many strikes, and this one has not committed anything yet.
                last = f"-{len(strikes)}"
                await process.reaches(
                    lambda program=program, before=before, last=last: (
                        (committed_run := program.record().committed_run or "") != before
                        and committed_run.endswith(last)
                    )
                )
            else:
                await feed.rest()
                async with asyncio.timeout(PATIENCE_S):
                    while len(await content(case.topic("read-killed"))) < EVENTS:
                        await asyncio.sleep(_POLL_S)
            process.send(signal.SIGKILL if life.kills_program else signal.SIGTERM)
            code, printed = await process.ends()
        assert code == (-signal.SIGKILL if life.kills_program else 0), printed
        again = [line for line in printed.splitlines() if line.endswith(" from the last checkpoint")]
        assert len(again) == len(strikes), printed
    await feed.rest()
    async with running(trainer(case, "killed", **given, processes=5 - lives[-1].processes, stop="latest")) as process:
        code, printed = await process.ends()
    assert code == 0, printed


async def check_sums(case: Case) -> None:
    """Check the running sums: one for each event, in order, and the last of all events."""
    sums = defaultdict(list)
    for record in await content(case.topic("read-killed")):
        key, count, total = orjson.loads(record.value or b"")
        sums[key].append((count, total))
    for key in range(7):
        numbers = range(key, EVENTS, 7)
        assert [count for count, _ in sums[key]] == list(range(1, len(numbers) + 1))
        assert sums[key][-1][1] == sum(numbers)


async def read_numbers(case: Case) -> list[int]:
    return [int(record.value or b"") for record in await content(case.topic("read-killed"))]


async def check_order(case: Case) -> None:
    """Check that each event is there once, and those of each partition in order."""
    read = await read_numbers(case)
    for partition in range(PARTITIONS):
        events = [number for number in range(EVENTS) if number // PIECE_EVENTS % PARTITIONS == partition]
        assert [number for number in read if number // PIECE_EVENTS % PARTITIONS == partition] == events


async def check_none_is_lost(case: Case) -> None:
    assert set(await read_numbers(case)) == set(range(EVENTS))


async def check_training(case: Case) -> None:
    await check_counted_once(case.topic("updates-killed"), "model", EVENTS)
    assert sorted(await read_numbers(case)) == list(range(EVENTS))


async def check_embeddings(case: Case) -> None:
    """Check that no version is missing, and that all have the bits of a run in one process without kills, also those
    that killed followers have seen.
    """
    async with running(trainer(case, "whole", **EMBEDDINGS_OF_ONE, stop="latest")) as process:
        code, printed = await process.ends()
    assert code == 0, printed
    expected = await models_in(case.topic("updates-whole"))
    assert list(expected)[-1] == EVENTS
    assert await models_in(case.topic("updates-killed")) == expected
    assert set(expected.values()).issuperset(notes_of(case).read_text(encoding="ascii").splitlines(keepends=True))


def notes_of(case: Case) -> Path:
    return case.folder.with_name("versions")


async def check_counts(case: Case) -> None:
    read = [orjson.loads(record.value or b"") for record in await content(case.topic("read-killed"))]
    assert sorted(number for number, _ in read) == list(range(EVENTS))
    assert max(count for _, count in read) == EVENTS


@pytest.mark.parametrize("on_disk", [True, *in_soak(False)], ids=["on disk", "in memory"])
async def test_sums_survive_the_loss_of_each_process(kafka: Case, on_disk: bool) -> None:
    """A process was lost between its file and the commit, and the sums of its keys had records twice."""
    strikes = [(OTHER_TAKES, 1), (FIRST_HAS_SAVED, 2), (OTHER_RESTORES, 1)]
    await killed(kafka, [Life(strikes, kills_program=True)], kind="sums", on_disk=on_disk)
    await check_sums(kafka)


async def test_online_training_survives_the_loss_of_a_process(kafka: Case) -> None:
    """Feedback that was between two processes at the loss was learned twice, or not at all."""
    await killed(kafka, [Life([(FIRST_HAS_COMMITTED, 1), (OTHER_HAS_SAVED, 2)], processes=3)])
    await check_training(kafka)


async def test_a_parameter_server_survives_the_loss_of_a_process(kafka: Case) -> None:
    """The shards of the lost process restored older values than the workers of the others; or an expired transaction
    ended the run, which resumes in one process.
    """
    await killed(kafka, [Life([(OTHER_HAS_SAVED, 2), (EXPIRES, 1)])], kind="counts")
    await check_counts(kafka)


async def test_a_join_that_waits_for_an_endless_table_survives_the_loss_of_a_process(kafka: Case) -> None:
    """A process was lost before the table was read to its end, and the others joined with what they had."""
    changes = [orjson.dumps({"key": n % 7, "value": n}) for n in range(30_000)]
    writer = await kafka.topic("updates-killed").open_writer()
    await writer.write(OutgoingBatch(changes))
    await writer.close()
    await killed(kafka, [Life([(OTHER_TAKES, 1), (READS_ON, 1)], kills_program=True)], kind="table")
    found = [orjson.loads(record.value or b"") for record in await content(kafka.topic("read-killed"))]
    last = {n % 7: n for n in range(30_000)}
    assert sorted(found) == [[n, last[n % 7]] for n in range(EVENTS)]


# A link of a process gets some hundred pieces in a second.
ANY_MOMENT: Final = Place("before", "streamiter.engine.processes.link:ProcessLink.buffer_updated")
AT_START: Final = [OTHER_STARTS, OTHER_RESTORES, FIRST_CHOOSES, FIRST_RESTORES]
AT_CHECKPOINT: Final = [
    *[OTHER_TAKES, OTHER_HAS_SAVED, FIRST_TAKES, FIRST_HAS_SAVED, FIRST_HAS_COMMITTED, EXPIRES],
    *KAFKA_COMMIT,
]


def test_each_place_of_a_process_is_in_the_engine() -> None:
    """A function was renamed, and the soak test failed only in its fifth hour."""
    for place in (ANY_MOMENT, *AT_START, *AT_CHECKPOINT):
        module, _, path = place.function.partition(":")
        assert callable(operator.attrgetter(path)(importlib.import_module(module)))


def random_strike(random: Random) -> tuple[Place, int]:
    return random.choice(
        [
            (random.choice(AT_START), 1),
            (random.choice(AT_CHECKPOINT), random.randint(1, 3)),
            (ANY_MOMENT, random.randint(1, 500)),
        ]
    )


def random_lives(random: Random) -> list[Life]:
    """Return lives with as many strikes as STREAMITER_CRASH_KILLS says, else one to six; without it, seeds had none."""
    left, lives = int(os.environ.get("STREAMITER_CRASH_KILLS", random.randint(1, 6))), list[Life]()
    while left:
        strikes = [random_strike(random) for _ in range(random.randint(0, min(left, _STRIKES_MAX)))]
        lives.append(Life(strikes, random.randint(2, 3), kills_program=random.random() < 0.5))
        left -= len(strikes)
    return lives


EMBEDDINGS_OF_ONE: Final[dict[str, Any]] = {"kind": "embeddings", "mode": "synchronous", "parallelism": 1}
# One partition: the order in which two are read is another one after a kill. Rows are read in each process.
EMBEDDINGS: Final[dict[str, Any]] = {**EMBEDDINGS_OF_ONE, "parallelism": 3, "partitions": 1}
NUMBERS: Final = {"kind": "numbers"}
NUMBERS_AT_LEAST_ONCE: Final = {"kind": "numbers", "delivery": "at_least_once"}


@pytest.mark.parametrize(
    ("options", "check"),
    [(NUMBERS, check_order), (NUMBERS_AT_LEAST_ONCE, check_none_is_lost)],
    ids=["exactly once", "at least once"],
)
async def test_a_flow_without_a_store_survives_the_loss_of_a_process(
    kafka: Case, options: dict[str, Any], check: Callable[[Case], Awaitable[None]]
) -> None:
    """A flow with start="committed" ended at the first loss, or wrote the records since the last commit twice."""
    random = Random(f"{seed()} {options}")
    lives = [Life([(random.choice(KAFKA_COMMIT), random.randint(1, 3)), random_strike(random)], kills_program=True)]
    await killed(kafka, lives, **options)
    await check(kafka)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "check"),
    [
        (NUMBERS, check_order),
        (NUMBERS_AT_LEAST_ONCE, check_none_is_lost),
        ({"kind": "sums"}, check_sums),
        ({"kind": "sums", "on_disk": True}, check_sums),
        ({"kind": "counts"}, check_counts),
        ({"mode": "synchronous"}, check_training),
        ({"mode": "asynchronous"}, check_training),
        (EMBEDDINGS, check_embeddings),
    ],
    ids=[
        "no store",
        "no store, at least once",
        "sums",
        "sums on disk",
        "parameter server",
        "synchronous loop",
        "asynchronous loop",
        "embeddings",
    ],
)
async def test_processes_survive_any_kills(
    kafka: Case, options: dict[str, Any], check: Callable[[Case], Awaitable[None]]
) -> None:
    """A kill at a rare moment, one of a thousand, lost or doubled records."""
    lives = random_lives(Random(seed()))
    try:
        async with contextlib.AsyncExitStack() as stack:
            if options is EMBEDDINGS:
                followers = KilledFollowers(f"{kafka.prefix}updates-killed", MODEL, notes_of(kafka))
                await stack.enter_async_context(followers)
            await killed(kafka, lives, **options)
            if options is EMBEDDINGS:
                await followers.versions(sum(len(life.strikes) for life in lives))
        await check(kafka)
    except BaseException as error:
        error.add_note(f"again: make soak SEED={seed()}; {lives}")
        raise


__all__ = ["kafka"]

# The supervisor gives up after three losses in ten minutes. The end of a node may be two, since Ray notes it late.
_KILLS_MAX: Final = 2
_LIVES_FOR_S_MAX: Final = 4.0
_NODE: Final = {"num_cpus": 2, "object_store_memory": 80 << 20}


class Victims:
    """The processes of a cluster of two nodes that may be killed; the first node must survive."""

    def __init__(self, cluster: Any, random: Random) -> None:
        self._cluster = cluster
        self._random = random
        self._second = cluster.add_node(**_NODE)

    def kill(self) -> tuple[str, bool]:
        """Kill a process of the flow, the supervisor, or the second node; return what, and if the flow was on it."""
        what = self._random.choice(["process", "process", "supervisor", "node"])
        word = "ray::_SupervisorActor" if what == "supervisor" else "ray::_RayProcess"
        raylets = [raylet_of(self._cluster.head_node), raylet_of(self._second)]
        names = children(raylets[1]) if what == "node" else children(raylets[0]) | children(raylets[1])
        found = sorted(number for number, name in names.items() if name.startswith(word))
        chosen = [raylets[1], *names] if what == "node" else self._random.sample(found, min(len(found), 1))
        for number in chosen:
            os.kill(number, signal.SIGKILL)
        if what == "node":
            self._second = self._cluster.add_node(**_NODE)
        return f"{what} {chosen}", bool(found)


async def killed_on_ray(case: Case, cluster: Any, random: Random, done: list[str], **options: Any) -> None:
    """Run a flow on a cluster whose processes are killed, then to its end here; ``done`` gets what was killed."""
    feed = Feed(case.topic("events"), training_pieces(EVENTS, PARTITIONS))
    victims = Victims(cluster, random)
    given = {"mode": "asynchronous", "parallelism": 3, **options}
    # One process on each node: a node is replaced, or the flow goes on with one process.
    on_ray = {"ray": cluster.address, "min_processes": random.choice([1, 2])}
    ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    program = trainer(case, "killed", **given, processes=2, **on_ray, changed_steps=["events"])
    async with running(program.given(PYTHONPATH=str(TESTS), **ray)) as process:
        feeding = asyncio.create_task(feed.during(lambda: process.is_over, 1))
        await process.reaches(process.has_committed)
        for _ in range(random.randint(1, _KILLS_MAX)):
            await process.lives_for(random.random() * _LIVES_FOR_S_MAX)
            before = program.record().committed_run
            what, is_lost = victims.kill()
            done.append(what)
            if not is_lost:  # The flow was between two attempts, or not on that node.
                continue
            await process.reaches(lambda before=before: program.record().committed_run != before, 2 * PATIENCE_S)
        await feeding
        process.send(signal.SIGTERM)
        code, printed = await process.ends()
    assert code == 0, printed
    await feed.rest()
    async with running(trainer(case, "killed", **given, processes=3, stop="latest")) as process:
        code, printed = await process.ends()
    assert code == 0, printed


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "check"),
    [({"kind": "sums"}, check_sums), ({"kind": "counts"}, check_counts), ({"mode": "synchronous"}, check_training)],
    ids=["sums", "parameter server", "synchronous loop"],
)
async def test_a_flow_on_a_cluster_survives_any_kills(
    cluster: Any, kafka: Case, options: dict[str, Any], check: Callable[[Case], Awaitable[None]]
) -> None:
    """Only one loss of a node was tested, at one moment, and no output was compared after it."""
    random, done = Random(f"{seed()} {options}"), list[str]()
    try:
        await killed_on_ray(kafka, cluster, random, done, **options)
        await check(kafka)
    except BaseException as error:
        error.add_note(f"again: make soak SEED={seed()}; killed: {done}")
        raise
